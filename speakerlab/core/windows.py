"""Embedding of recordings of any length with a model for a range of lengths.

Training, extraction, the Python API and the ONNX runtime share these functions, so an hour of audio
has the same embedding in all of them. Waves are numpy arrays or tensors, samples last.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
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
        repeated = np.arange(min_samples) % num_samples
        return embed(samples[..., repeated])
    embeddings: list[Array] = []
    bounds = window_bounds(num_samples, max_samples=max_samples)
    for first, end in bounds:
        window = samples[..., first:end]
        embeddings.append(embed(window))
    return mean_of_windows(embeddings)


def group_rows(keys: Iterable[Hashable]) -> list[list[int]]:
    """Return the row numbers of each key, in order of appearance; they may share a batch.

    Extraction and the Python API form batches with it: nothing is padded, so a batch does not
    change the embeddings of its rows.
    """
    rows_of: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        rows = rows_of.setdefault(key, [])
        rows.append(row)
    return list(rows_of.values())


def mean_of_windows(embeddings: Sequence[Array]) -> Array:
    """Average the embeddings of windows in order, so that the mean is the same bit for bit."""
    # Not `np.mean`, whose order of additions depends on the shape.
    first, *others = embeddings
    total: Any = sum(others, start=first)  # pyright: ignore
    return total / len(embeddings)


def window_bounds(num_samples: int, *, max_samples: int) -> list[tuple[int, int]]:
    """Return (first sample, end) of each window.

    Windows have equal lengths, so that the mean weighs every frame alike; a remainder of less than
    one sample per window is dropped.
    """
    count = math.ceil(num_samples / max_samples)
    length, num_dropped = divmod(num_samples, count)
    bounds: list[tuple[int, int]] = []
    for index in range(count):
        # One sample is dropped after each of the first `num_dropped` windows.
        num_dropped_before = min(index, num_dropped)
        start = index * length + num_dropped_before
        bounds.append((start, start + length))
    return bounds
