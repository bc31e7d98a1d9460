"""Embedding recordings of any length with a model that takes a range of lengths.

Training, extraction, the Python API and the ONNX runtime share these functions, so an hour of audio
has the same embedding in all of them. Waves are numpy arrays or tensors, samples last.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

Array = TypeVar("Array")  # numpy.ndarray or torch.Tensor


def embed_in_windows(
    wave: Array, embed: Callable[[Array], Array], *, min_samples: int, max_samples: int
) -> Array:
    """Return the embedding of waves (..., S) of any length: the mean of `embed` over windows.

    A wave shorter than `min_samples` is repeated until it is long enough; one longer than
    `max_samples` is cut at `window_bounds`. Raises ValueError if there are no samples.
    """
    samples: Any = wave
    num_samples: int = samples.shape[-1]
    if num_samples == 0:
        raise ValueError("recording: is empty; remove it")
    if num_samples < min_samples:
        return embed(samples[..., np.arange(min_samples) % num_samples])
    bounds = window_bounds(num_samples, max_samples=max_samples)
    return mean_of_windows([embed(samples[..., first:end]) for first, end in bounds])


def mean_of_windows(embeddings: Sequence[Array]) -> Array:
    """Average the embeddings of windows, first to last, so that the bits depend on nothing else."""
    first, *others = embeddings
    return sum(others, start=first) / len(embeddings)  # pyright: ignore


def window_bounds(num_samples: int, *, max_samples: int) -> list[tuple[int, int]]:
    """Return (first sample, end) of each window.

    Windows have equal lengths, so that the mean weighs every frame alike; a remainder of less than
    one sample per window is dropped.
    """
    count = math.ceil(num_samples / max_samples)
    length, rest = divmod(num_samples, count)
    starts = [index * length + min(index, rest) for index in range(count)]
    return [(start, start + length) for start in starts]
