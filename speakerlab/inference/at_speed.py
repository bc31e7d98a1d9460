"""An embedder that hears recordings at another speed.

Letters: B rows, S samples.
"""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from speakerlab.frontend.augment.speed import resampler


class AtSpeed(nn.Module):
    """Embeds waves as training plays them: `speed` times as fast, with the voice that this gives.

    In the place of an `Embedder`, for `embed_batches`. A VAD hears the original speed.
    """

    def __init__(self, embedder: Any, speed: float) -> None:
        super().__init__()
        self.embedder = embedder
        self.resample = resampler(speed)
        self.sample_rate: int = embedder.sample_rate
        self.embed_dim: int = embedder.embed_dim
        self.vad = embedder.vad
        # Samples of the recording; as it is played, it has at most as many as the embedder takes.
        self.max_samples = int(embedder.max_samples * speed)

    def forward(self, wave_BS: Tensor) -> Tensor:
        """Return emb_BD of waves in [-1, 1]."""
        return self.embedder(self.resample(wave_BS))

    def noting_frames(self) -> AbstractContextManager[Any]:
        return self.embedder.noting_frames()

    def batch_key(self, num_samples: int) -> tuple[int, int]:
        """Return a key; inputs with equal keys may share a batch: those of equal length.

        A trimmed wave would be played with another end.
        """
        return num_samples, num_samples


def at_speed(embedder: Any, speed: float) -> Any:
    """Return the embedder that hears recordings at a speed; at the original one, itself."""
    if speed == 1.0:
        return embedder
    return AtSpeed(embedder, speed)
