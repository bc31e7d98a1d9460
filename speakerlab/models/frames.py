"""Frames of a backbone: the vectors that it computes at each time and then pools.

Letters: B rows, C channels of a frame (of a map: channels x bins), T frames.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from speakerlab.models.pooling import Pooling

# Only every second frame is used: neighbouring frames hardly differ, and half of them take half of
# the disk and of the time.
FRAME_STEP = 2


def find_pooling(backbone: nn.Module) -> Pooling | None:
    """Return the last pooling over time; None if the backbone has none."""
    poolings = [part for part in backbone.modules() if isinstance(part, Pooling)]
    return poolings[-1] if poolings else None


def pooling_of(backbone: nn.Module) -> Pooling:
    """Return the last pooling over time; ValueError if the backbone has none."""
    pooling = find_pooling(backbone)
    if pooling is None:
        raise ValueError(
            f"{type(backbone).__name__}: has no `Pooling`, whose input would be frames;"
            " set distil.frame_weight=0"
        )
    return pooling


def num_channels(backbone: nn.Module) -> int:
    """Return the channels of a frame; ValueError if the backbone has no pooling."""
    # Mean and deviation of each channel are pooled.
    return pooling_of(backbone).out_dim // 2


class NotedFrames(threading.local):
    """Frames (B, C, T) of the last pass that a thread made; each thread sees its own frames."""

    last_BCT: Tensor | None = None

    def take(self) -> Tensor:
        """Return the frames of the last pass, and forget them."""
        frames_BCT = self.last_BCT
        assert frames_BCT is not None  # a pass was made
        self.last_BCT = None
        return frames_BCT


@contextmanager
def noting_frames(
    backbone: nn.Module, step: int | None = None
) -> Iterator[NotedFrames]:
    """Note the frames of each pass within the block.

    step: the first of so many frames is noted; None: `FRAME_STEP`, as it is when this is called.
    """
    noted = NotedFrames()
    if step is None:
        step = FRAME_STEP

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        del module
        frames_BCT = inputs[0].flatten(1, -2)
        noted.last_BCT = frames_BCT[..., ::step]

    hook = pooling_of(backbone).register_forward_pre_hook(note)
    try:
        yield noted
    finally:
        hook.remove()
