"""How a recording of any length meets a model that takes some lengths only.

In: a wave, numpy array or tensor, samples last. Out: pieces that the model can take, all of one
length. The PyTorch and the ONNX runtime share this rule, so an hour gives the same in both.
"""

import math
from typing import TypeVar

import numpy as np

Wave = TypeVar("Wave")  # numpy.ndarray or torch.Tensor


def cut_windows(wave: Wave, *, min_samples: int, max_samples: int) -> list[Wave]:
    """Pieces of (..., S): the plain mean of their embeddings is that of the recording.

    Longer than `max_samples`: windows of equal length, so that the mean weighs every frame alike
    (what a division leaves, less than a sample a window, is dropped). Shorter than `min_samples`:
    repeated until it is long enough. Raises ValueError where there are no samples.
    """
    num_samples: int = wave.shape[-1]  # pyright: ignore[reportAttributeAccessIssue]
    if num_samples == 0:
        raise ValueError("embedder: needs audio, got 0 samples; drop the recording")
    if num_samples < min_samples:
        rows = np.arange(min_samples) % num_samples
        return [wave[..., rows]]  # pyright: ignore[reportIndexIssue]
    if num_samples <= max_samples:
        return [wave]
    bounds = window_bounds(num_samples, max_samples=max_samples)
    return [wave[..., first:end] for first, end in bounds]  # pyright: ignore[reportIndexIssue]


def window_bounds(num_samples: int, *, max_samples: int) -> list[tuple[int, int]]:
    """(first sample, end) of each window, for those who read one after the other."""
    count = math.ceil(num_samples / max_samples)
    length, rest = divmod(num_samples, count)
    starts = [index * length + min(index, rest) for index in range(count)]
    return [(start, start + length) for start in starts]
