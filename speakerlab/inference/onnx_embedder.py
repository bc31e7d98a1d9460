"""An exported model in place of an `Embedder`, for code that passes tensors."""

import torch
from torch import Tensor, nn

from speakerlab.core.windows import embed_in_windows
from speakerlab.inference.onnx_model import OnnxModel
from speakerlab.training.precision import Precision


class OnnxEmbedder(nn.Module):
    """Embeds tensors with onnxruntime, on the CPU, in the precision of its export.

    Letters: B rows, S samples, D embedding.
    """

    def __init__(self, model: OnnxModel) -> None:
        super().__init__()
        self.model = model
        self.sample_rate = model.sample_rate
        self.embed_dim = model.embed_dim
        self.min_samples = model.min_samples
        self.max_samples = model.max_samples
        self.vad = model.vad

    def forward(self, wave_BS: Tensor) -> Tensor:
        """Return emb_BD on the device of waves in [-1, 1], of any length above 0."""
        # onnxruntime computes on the CPU, whatever the device of the training. Long waves are cut
        # into windows as by `Embedder`, so that both have the same embeddings.
        emb_BD = embed_in_windows(
            wave_BS.cpu().numpy(),
            self.model.embed_window,
            min_samples=self.min_samples,
            max_samples=self.max_samples,
        )
        return torch.from_numpy(emb_BD).to(wave_BS.device)

    def for_inference(
        self, precision: Precision | None = None, *, in_place: bool = False
    ) -> "OnnxEmbedder":
        """Return this embedder: its precision was decided by the export."""
        del precision, in_place
        return self

    def batch_key(self, num_samples: int) -> tuple[int, int]:
        """Return a key; inputs with equal keys may share a batch: those of equal length."""
        # The file does not tell how many samples a frame has, so nothing can be trimmed.
        return num_samples, num_samples
