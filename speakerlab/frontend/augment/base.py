"""Base class of augmentations, and the module that applies all of them to a batch in order.

In: a `Batch`: int16 rows and everything drawn for them. Out: wave_BS, float32, S samples each.
Letters: B rows of the batch, R rows that an augmentation changes, W samples of the longest row as
read, S samples of a crop, T frames, F mel bins.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_map_only

from speakerlab.core.batch import Batch, Draw, Draws
from speakerlab.core.full_precision import autocast_off

CPU_ROWS = 8  # rows at a time on a CPU: more exceed a core's cache
INT16_SCALE = 32768
# Arguments that the program supplies to an augmentation with such parameters; it supplies rooms and
# noises only if `room_prob` and `noise_prob` are not 0.
SUPPLIED = (
    "num_samples",
    "num_frames",
    "num_mel_bins",
    "sample_rate",
    "rooms",
    "noises",
    "noise_kinds",
    "noise_on_device",
)


class Augmentation(nn.Module):
    """One way to change training crops: `draw` runs in a data worker, `apply` on the device.

    The arguments of the constructor are keyword-only and named like keys of the configuration's
    section `augment` or entries of `SUPPLIED`. An augmentation is not built if `<name>_prob` is 0.
    Constants of the device are buffers that enter no state dict.
    """

    on_features = False  # True: `apply` takes feats_RTF instead of wave_RS
    # True: applied by the data worker, which reads the crop; has no `apply`.
    in_worker = False
    # True: who speaks sounds different, not only the place, the channel or the surroundings. A
    # teacher that hears clean crops hears these changes all the same.
    changes_voice = False

    def __init__(self) -> None:
        super().__init__()
        # The number of crops of each call that were too silent to change.
        self.num_silent: list[Tensor] = []

    def draw(self, rng: np.random.Generator) -> Draw | None:
        """Draw the parameters of one crop from its own generator; None: no change."""
        raise NotImplementedError

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the drawn rows after the change, float32, same shape; may write into them.

        Only Speed gets longer rows than it returns; it returns the `num_samples` of a crop.
        `apply` runs without gradients and must not wait for the device (`.item()`, masks as
        indices).
        """
        raise NotImplementedError


class Augment(nn.Module):
    """All augmentations of a training run, applied in the order of the mapping.

    `Task` names its buffers to DDP, which would otherwise broadcast the large banks at the start.
    """

    def __init__(
        self, augmentations: Mapping[str, Augmentation], *, num_samples: int
    ) -> None:
        super().__init__()
        self.augmentations = nn.ModuleDict(augmentations)
        self.num_samples = num_samples

        # Names of the augmentations that run on the device: over waves, over features.
        self.wave_names: list[str] = []
        self.feature_names: list[str] = []
        for name, augmentation in augmentations.items():
            if augmentation.in_worker:
                continue
            if augmentation.on_features:
                self.feature_names.append(name)
            else:
                self.wave_names.append(name)

        # The count of silent crops where no augmentation counts them; a buffer, so that it is on
        # the device.
        zero = torch.zeros((), dtype=torch.int64)
        self.register_buffer("none", zero, persistent=False)

    @property
    def draws(self) -> dict[str, Callable[[np.random.Generator], Draw | None]]:
        modules: dict[str, Any] = dict(self.augmentations.items())
        draws = {}
        for name, augmentation in modules.items():
            draws[name] = augmentation.draw
        return draws

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Return waves (B, S); rows without draws are their samples / 32768, bit for bit."""
        # The number of rows to resample varies from batch to batch, and cuDNN would time its
        # kernels again for each number.
        with autocast_off(batch.wave_BS), without_autotuning():
            wave_BS = self.scale(batch)
            for name in self.wave_names:
                wave_BS = self.run(name, wave_BS, batch)
            return wave_BS

    @torch.no_grad()
    def voices(self, batch: Batch) -> Tensor:
        """Return waves (B, S) changed only by the augmentations that change the voice."""
        with autocast_off(batch.wave_BS), without_autotuning():
            wave_BS = self.scale(batch)
            for name in self.wave_names:
                augmentation: Any = self.augmentations[name]
                if augmentation.changes_voice:
                    wave_BS = self.run(name, wave_BS, batch)
            return wave_BS

    @torch.no_grad()
    def features(self, feats_BTF: Tensor, batch: Batch) -> Tensor:
        """Return features (B, T, F), overwritten where something was drawn."""
        for name in self.feature_names:
            feats_BTF = self.run(name, feats_BTF, batch)
        return feats_BTF

    def scale(self, batch: Batch) -> Tensor:
        """Return waves in [-1, 1), at least as long as a crop."""
        wave_BW = batch.wave_BS / INT16_SCALE
        # A crop that is slowed down needs fewer samples than it will have.
        missing = self.num_samples - wave_BW.shape[1]
        if missing <= 0:
            return wave_BW
        return nn.functional.pad(wave_BW, (0, missing))

    def run(self, name: str, x_B: Tensor, batch: Batch) -> Tensor:
        """Apply one augmentation to the rows that have draws of it, in place."""
        augmentation: Any = self.augmentations[name]
        on_cpu = x_B.device.type == "cpu"
        with record_function(f"step/front end/{name}"):
            for group in batch.draws.get(name, ()):
                # A few rows at a time stay in the cache of a CPU.
                row_groups = split_draws(group, CPU_ROWS) if on_cpu else [group]
                for draws in row_groups:
                    x_B = self._change_rows(augmentation, x_B, draws)

        # Speed, the first, takes as many samples as were read for it; the others take one crop.
        if augmentation.on_features:
            return x_B
        return x_B[:, : self.num_samples]

    def _change_rows(self, augmentation: Any, x_B: Tensor, draws: Draws) -> Tensor:
        """Apply an augmentation to the rows of `draws`."""
        # Where all rows change, there is no need to copy them out and in.
        if len(draws.rows) == len(x_B):
            return augmentation.apply(x_B, draws)
        x_R = x_B.index_select(0, draws.rows)
        changed_R = augmentation.apply(x_R, draws)
        width = changed_R.shape[1]
        x_B[:, :width].index_copy_(0, draws.rows, changed_R)
        return x_B

    def take_silent(self) -> Tensor:
        """Return the number of crops since the last call that were too silent to be changed."""
        counts = list[Tensor]()
        for augmentation in self.augmentations.children():
            num_silent: Any = augmentation.num_silent
            counts += num_silent
            num_silent.clear()
        if not counts:
            return self.get_buffer("none")
        return functools.reduce(torch.add, counts)


def split_draws(draws: Draws, num_rows: int) -> list[Draws]:
    """Return the same draws, `num_rows` at a time."""
    pieces: list[Draws] = []
    for start in range(0, len(draws.rows), num_rows):
        rows = slice(start, start + num_rows)
        # Slice every tensor in the tuple: the rows and the values.
        pieces.append(tree_map_only(Tensor, itemgetter(rows), draws))
    return pieces


@contextmanager
def without_autotuning() -> Iterator[None]:
    """Choose cuDNN's kernels without timing them, which takes longer where shapes vary."""
    # Not `torch.backends.cudnn.flags`: it would reset the settings that are not passed to it.
    cudnn = torch.backends.cudnn
    was_autotuning = cudnn.benchmark
    cudnn.benchmark = False
    try:
        yield
    finally:
        cudnn.benchmark = was_autotuning
