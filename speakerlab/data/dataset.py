"""From a slot of the order to a crop and the draws of all that is to be done to it.

In: (epoch, position, row). Out: `batch.Crop`. The draws are a function of the slot's key alone, so
that workers, ranks and a resume change nothing. Letters: S samples, M masks, K speeds, N speakers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset

from speakerlab.batch import Crop
from speakerlab.data.manifest import Manifest
from speakerlab.data.sampler import Slot


@dataclass(frozen=True, kw_only=True)
class Draws:
    """What may be drawn for a crop, and how often.

    speeds: each beyond the first makes new speakers. noise_lengths: samples of each noise.
    """

    crop_samples: int
    speeds: Sequence[float] = (1.0,)
    room_prob: float = 0.0
    num_rooms: int = 0
    noise_prob: float = 0.0
    noise_lengths: Sequence[int] = ()
    snr_db: tuple[float, float] = (0.0, 15.0)
    num_masks: int = 0

    def read_samples(self, speed: int) -> int:
        """How many samples to read so that `crop_samples` are left after the speed change."""
        return round(self.crop_samples * self.speeds[speed])


class TrainCrops(Dataset[Crop]):
    """Crops of the training set, keyed by slot; label_KN: the class of speaker n at speed k."""

    def __init__(
        self,
        manifest: Manifest,
        draws: Draws,
        *,
        label_KN: np.ndarray,
        seed: int,
        attempt: int = 0,
    ) -> None:
        assert label_KN.shape == (len(draws.speeds), len(manifest.speakers))
        self.manifest, self.draws, self.label_KN = manifest, draws, label_KN
        self.key = (seed, attempt)

    def __getitem__(self, slot: Slot) -> Crop:
        epoch, position, row = slot
        manifest, draws = self.manifest, self.draws
        rng = np.random.default_rng([*self.key, epoch, position])
        # One block of uniforms in a fixed order: what is switched off still uses up its draw.
        u = rng.random(8)
        speed = int(u[0] * len(draws.speeds))
        wanted = draws.read_samples(speed)
        available = int(manifest.num_samples_N[row])
        first = int(u[1] * (max(available - wanted, 0) + 1))
        has_room = draws.num_rooms > 0 and u[2] < draws.room_prob
        has_noise = len(draws.noise_lengths) > 0 and u[4] < draws.noise_prob
        noise = int(u[5] * len(draws.noise_lengths)) if has_noise else -1
        low, high = draws.snr_db
        return Crop(
            wave_S=manifest.read(row, first, wanted),
            label=int(self.label_KN[speed, manifest.speaker_N[row]]),
            speed=speed,
            room=int(u[3] * draws.num_rooms) if has_room else -1,
            noise=noise,
            noise_start=int(u[6] * draws.noise_lengths[noise]) if has_noise else 0,
            snr_db=low + (high - low) * u[7],
            mask_M2=rng.random((draws.num_masks, 2), dtype=np.float32),
            position=position,
            row=row,
        )


def class_names(speakers: Sequence[str], speeds: Sequence[float]) -> list[str]:
    """`speakers.txt`: the speaker of each class, `id#0.9` for one made by a speed."""
    return [s if speed == 1.0 else f"{s}#{speed:g}" for speed in speeds for s in speakers]


def labels_by_name(
    classes: Sequence[str], speakers: Sequence[str], speeds: Sequence[float]
) -> np.ndarray:
    """label_KN: where `classes` (which may hold more) has each speaker at each speed."""
    index = {name: label for label, name in enumerate(classes)}
    names = class_names(speakers, speeds)
    return np.array([index[name] for name in names]).reshape(len(speeds), len(speakers))
