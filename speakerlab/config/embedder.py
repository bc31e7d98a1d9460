"""The one waveform-to-embedding module. In: wave_BS in [-1, 1]. Out: emb_BD.

Training, extraction, the Python API and the ONNX export share it.
Letters: B rows, S samples, D embedding.
"""

import torch
from torch import Tensor, nn

from speakerlab.core.windows import embed_in_windows
from speakerlab.frontend.fbank import Fbank
from speakerlab.frontend.vad import EnergyVad
from speakerlab.models.folding import fold_batchnorm, narrow
from speakerlab.training.precision import Precision


class Embedder(nn.Module):
    """Front end and backbone as one.

    Input longer than `max_seconds` is cut in equal windows whose embeddings are averaged, so that
    memory is bounded; input too short for the backbone is repeated until it is long enough.
    `vad`, where there is one, is what leaves out silence before a whole recording is embedded; it
    works on one wave at a time and is not applied here, so that training crops keep their length.
    `precision`, where there is one, is the format of the backbone; embeddings are float32 anyway.
    """

    def __init__(
        self,
        *,
        fbank: Fbank,
        backbone: nn.Module,
        max_seconds: float = 120.0,
        vad: EnergyVad | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__()
        self.precision = precision
        self.fbank, self.backbone, self.vad = fbank, backbone, vad
        self.sample_rate = fbank.sample_rate
        self.embed_dim: int = backbone.embed_dim  # pyright: ignore[reportAttributeAccessIssue]
        self.max_samples = round(max_seconds * self.sample_rate)
        min_frames: int = backbone.min_frames  # pyright: ignore[reportAssignmentType]
        self.min_samples = fbank.min_samples + (min_frames - 1) * fbank.frame_shift

    def forward(self, wave_BS: Tensor) -> Tensor:
        """emb_BD of waves of any length above 0."""
        return embed_in_windows(
            wave_BS, self.embed_window, min_samples=self.min_samples, max_samples=self.max_samples
        )

    def embed_window(self, wave_BS: Tensor) -> Tensor:
        """emb_BD of waves of `min_samples` to `max_samples`; what an export holds."""
        feats_BTF = self.fbank(wave_BS)
        if self.precision is None:
            return self.backbone(feats_BTF)
        with self.precision.autocast():
            return self.backbone(feats_BTF).float()

    def folded(self, precision: Precision | None = None, *, in_place: bool = False) -> "Embedder":
        """The same for inference only, quicker: its backbone has fewer BatchNorms.

        precision: as `resolve_precision` gave it for the device of the work; fp32 without one. The
        front end, the pooling and the layers after it are fp32 all the same. in_place: this one is
        used up.
        """
        backbone = fold_batchnorm(self.backbone, in_place=in_place)
        if precision is not None and precision.name == "fp32":
            precision = None
        if precision is not None:
            backbone = narrow(backbone, precision.dtype)
        return Embedder(
            fbank=self.fbank,
            # What 2-D convolutions give has the order of their weights; on a CPU this is quicker.
            backbone=backbone.to(memory_format=torch.channels_last),  # pyright: ignore[reportCallIssue]
            max_seconds=self.max_samples / self.sample_rate,
            vad=self.vad,
            precision=precision,
        ).eval()

    def batch_key(self, num_samples: int) -> tuple[int, int]:
        """Inputs of one key may share a batch: trimming them to the shortest changes nothing."""
        is_whole = self.min_samples <= num_samples <= self.max_samples  # not repeated, not cut
        frames = self.fbank.num_frames(max(num_samples, self.min_samples))
        return frames, 0 if is_whole else num_samples
