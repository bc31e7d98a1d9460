"""Embedding recordings of any length with a model that takes a range of lengths.

Training, extraction, the Python API and the ONNX runtime share these functions, so an hour of audio
has the same embedding in all of them. Waves are numpy arrays or tensors, samples last.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

Array = TypeVar("Array")  # numpy.ndarray or torch.Tensor


def embed_in_windows(
    wave: Array, embed: Callable[[Array], Array], *, min_samples: int, max_samples: int
) -> Array:
    """Return the embedding of waves of any length: the mean of `embed` over their windows."""
    windows = cut_windows(wave, min_samples=min_samples, max_samples=max_samples)
    return mean_of_windows([embed(window) for window in windows])


def mean_of_windows(embeddings: Sequence[Array]) -> Array:
    """Average the embeddings of windows, first to last, so that the bits depend on nothing else."""
    total = embeddings[0]
    for embedding in embeddings[1:]:
        total = total + embedding  # pyright: ignore[reportOperatorIssue]
    return total / len(embeddings) if len(embeddings) > 1 else total  # pyright: ignore


def cut_windows(wave: Array, *, min_samples: int, max_samples: int) -> list[Array]:
    """Cut a wave (..., S) into windows of equal length.

    A wave shorter than `min_samples` is repeated until it is long enough; one longer than
    `max_samples` is cut as `window_bounds` says. Raises ValueError if there are no samples.
    """
    num_samples: int = wave.shape[-1]  # pyright: ignore[reportAttributeAccessIssue]
    if num_samples == 0:
        raise ValueError("recording: is empty; remove it")
    if num_samples < min_samples:
        rows = np.arange(min_samples) % num_samples
        return [wave[..., rows]]  # pyright: ignore[reportIndexIssue]
    if num_samples <= max_samples:
        return [wave]
    bounds = window_bounds(num_samples, max_samples=max_samples)
    return [wave[..., first:end] for first, end in bounds]  # pyright: ignore[reportIndexIssue]


def window_bounds(num_samples: int, *, max_samples: int) -> list[tuple[int, int]]:
    """Return (first sample, end) of each window.

    Windows have equal lengths, so that the mean weighs every frame alike; a remainder of less than
    one sample per window is dropped.
    """
    count = math.ceil(num_samples / max_samples)
    length, rest = divmod(num_samples, count)
    starts = [index * length + min(index, rest) for index in range(count)]
    return [(start, start + length) for start in starts]
