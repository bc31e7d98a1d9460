"""A published model driven with numpy: what the Python API asks of every runtime.

In: wave_BS, float32 in [-1, 1]. Out: emb_BD, float32. Letters: B rows, S samples, D embedding.
"""

import numpy as np
import torch

from speakerlab.checkpoints.published import Published
from speakerlab.training.precision import card_of, resolve_precision


class TorchModel:
    """The PyTorch runtime; `OnnxModel` is the other."""

    def __init__(
        self, published: Published, *, device: str = "auto", precision: str = "fp32"
    ) -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device: must be auto, cpu or cuda, got '{device}'; correct it")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: no GPU can be used, got 'cuda'; take cpu or auto")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        card = card_of(self.device)
        used = resolve_precision(precision, self.device, None if card is None else [card])
        self.precision = used.name
        self.embedder = published.embedder.eval().folded(used).to(self.device)
        self.sample_rate, self.embed_dim = self.embedder.sample_rate, self.embedder.embed_dim
        self.min_samples, self.max_samples = self.embedder.min_samples, self.embedder.max_samples
        self.vad = self.embedder.vad
        self.sha256, self.calibration = published.sha256, published.calibration

    def embed_window(self, wave_BS: np.ndarray) -> np.ndarray:
        """emb_BD of waves of `min_samples` to `max_samples`."""
        with torch.inference_mode():
            wave = torch.from_numpy(np.ascontiguousarray(wave_BS)).to(self.device)
            return self.embedder.embed_window(wave).float().cpu().numpy()
