"""The one waveform-to-embedding module. In: wave_BS in [-1, 1]. Out: emb_BD.

Training, extraction, the Python API and the ONNX export share it.
Letters: B rows, S samples, D embedding.
"""

import torch
from torch import Tensor, nn

from speakerlab.frontend.fbank import Fbank
from speakerlab.frontend.vad import EnergyVad
from speakerlab.models.folding import fold_batchnorm
from speakerlab.windows import cut_windows


class Embedder(nn.Module):
    """Front end and backbone as one.

    Input longer than `max_seconds` is cut in equal windows whose embeddings are averaged, so that
    memory is bounded; input too short for the backbone is repeated until it is long enough.
    `vad`, where there is one, is what leaves out silence before a whole recording is embedded; it
    works on one wave at a time and is not applied here, so that training crops keep their length.
    """

    def __init__(
        self,
        *,
        fbank: Fbank,
        backbone: nn.Module,
        max_seconds: float = 120.0,
        vad: EnergyVad | None = None,
    ) -> None:
        super().__init__()
        self.fbank, self.backbone, self.vad = fbank, backbone, vad
        self.sample_rate = fbank.sample_rate
        self.embed_dim: int = backbone.embed_dim  # pyright: ignore[reportAttributeAccessIssue]
        self.max_samples = round(max_seconds * self.sample_rate)
        min_frames: int = backbone.min_frames  # pyright: ignore[reportAssignmentType]
        self.min_samples = fbank.min_samples + (min_frames - 1) * fbank.frame_shift

    def forward(self, wave_BS: Tensor) -> Tensor:
        """emb_BD of waves of any length above 0."""
        windows = cut_windows(wave_BS, min_samples=self.min_samples, max_samples=self.max_samples)
        if len(windows) == 1:
            return self.embed_window(windows[0])
        return torch.stack([self.embed_window(window) for window in windows]).mean(dim=0)

    def embed_window(self, wave_BS: Tensor) -> Tensor:
        """emb_BD of waves of `min_samples` to `max_samples`; what an export holds."""
        return self.backbone(self.fbank(wave_BS))

    def folded(self) -> "Embedder":
        """The same for inference only, quicker: its backbone has fewer BatchNorms."""
        return Embedder(
            fbank=self.fbank,
            backbone=fold_batchnorm(self.backbone),
            max_seconds=self.max_samples / self.sample_rate,
            vad=self.vad,
        ).eval()

    def batch_key(self, num_samples: int) -> tuple[int, int]:
        """Inputs of one key may share a batch: trimming them to the shortest changes nothing."""
        is_whole = self.min_samples <= num_samples <= self.max_samples  # not repeated, not cut
        frames = self.fbank.num_frames(max(num_samples, self.min_samples))
        return frames, 0 if is_whole else num_samples
