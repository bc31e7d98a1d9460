"""Base class of augmentations, and the module that applies all of them to a batch in order.

In: a `Batch`: int16 rows and everything drawn for them. Out: wave_BS, float32, S samples each.
Letters: B rows of the batch, R rows that an augmentation changes, W samples of the longest row as
read, S samples of a crop, T frames, F mel bins.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from speakerlab.core.batch import Batch, Draw, Draws
from speakerlab.core.full_precision import fp32_island

CPU_ROWS = 8  # rows at a time on a CPU: more fall out of a core's cache
INT16_SCALE = 32768
# Arguments that the program gives to an augmentation that has them; rooms and noises are there if
# `room_prob` and `noise_prob` are not 0.
SUPPLIED = ("num_samples", "num_frames", "num_mel_bins", "sample_rate")
SUPPLIED += ("rooms", "noises", "noise_kinds", "noise_on_device")


class Augmentation(nn.Module):
    """One way to change training crops: `draw` runs in a data worker, `apply` on the device.

    The arguments of the constructor are keyword-only and named as the keys of the configuration's
    section `augment`, or as those of `SUPPLIED`. Where `<name>_prob` is 0 none is made. Constants
    of the device are buffers that enter no state dict.
    """

    on_features = False  # True: `apply` takes feats_RTF instead of wave_RS
    in_worker = False  # True: applied by the data worker, which reads the crop; has no `apply`

    def __init__(self) -> None:
        super().__init__()
        self.num_silent: list[Tensor] = []  # of each call, crops that were too silent to change

    def draw(self, rng: np.random.Generator) -> Draw | None:
        """Draw the parameters of one crop from its own generator; None: no change."""
        raise NotImplementedError

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the drawn rows after the change, float32, same shape; may write into them.

        Speed alone is given longer rows than it returns: `num_samples` of a crop.
        It runs without a gradient and must not wait for the device (`.item()`, masks as indices).
        """
        raise NotImplementedError


class Augment(nn.Module):
    """All augmentations of a training run, applied in the order of the mapping.

    Keep this module out of what DDP wraps, which would broadcast its banks.
    """

    def __init__(self, augmentations: Mapping[str, Augmentation], *, num_samples: int) -> None:
        super().__init__()
        self.augmentations, self.num_samples = nn.ModuleDict(augmentations), num_samples
        on_device = {name: a for name, a in augmentations.items() if not a.in_worker}
        self.wave_names = [name for name, a in on_device.items() if not a.on_features]
        self.feature_names = [name for name, a in on_device.items() if a.on_features]
        self.register_buffer("none", torch.zeros((), dtype=torch.int64), persistent=False)

    @property
    def draws(self) -> dict[str, Callable[[np.random.Generator], Draw | None]]:
        modules: dict[str, Any] = dict(self.augmentations.items())
        return {name: augmentation.draw for name, augmentation in modules.items()}

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Return waves (B, S); rows without draws are their samples / 32768, bit for bit."""
        with fp32_island(batch.wave_BS):
            wave_BS = self.scale(batch)
            for name in self.wave_names:
                wave_BS = self.run(name, wave_BS, batch)
            return wave_BS

    @torch.no_grad()
    def features(self, feats_BTF: Tensor, batch: Batch) -> Tensor:
        """Return features (B, T, F), overwritten where something was drawn."""
        for name in self.feature_names:
            feats_BTF = self.run(name, feats_BTF, batch)
        return feats_BTF

    def scale(self, batch: Batch) -> Tensor:
        """Return (B, W or S, the larger) in [-1, 1); where all rows are slowed down W is less."""
        wave_BW = batch.wave_BS / INT16_SCALE
        missing = self.num_samples - wave_BW.shape[1]
        return nn.functional.pad(wave_BW, (0, missing)) if missing > 0 else wave_BW

    def run(self, name: str, x_B: Tensor, batch: Batch) -> Tensor:
        """Apply one augmentation to the rows that have draws of it, in place."""
        augmentation: Any = self.augmentations[name]
        with record_function(f"step/front end/{name}"):
            for draws in batch.draws.get(name, ()):
                for part in draws.split(CPU_ROWS) if x_B.device.type == "cpu" else (draws,):
                    if len(part.rows) == len(x_B):  # without copies
                        x_B = augmentation.apply(x_B, part)
                    else:
                        changed = augmentation.apply(x_B.index_select(0, part.rows), part)
                        x_B[:, : changed.shape[1]].index_copy_(0, part.rows, changed)
        # The first, speed, takes as many samples as were read for it; the others those of a crop.
        return x_B if augmentation.on_features else x_B[:, : self.num_samples]

    def take_silent(self) -> Tensor:
        """Return the number of crops since the last call that were too silent to be changed."""
        counts = list[Tensor]()
        for augmentation in self.augmentations.children():
            own: Any = augmentation.num_silent
            counts += own
            own.clear()
        return functools.reduce(torch.add, counts or [self.get_buffer("none")])
