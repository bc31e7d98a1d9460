"""From a slot of the order to a crop and the draws of all that is to be done to it.

In: (epoch, position, row). Out: `batch.Crop`. The draws are a function of the slot's key alone, so
that workers, ranks and a resume change nothing. Letters: S samples, M masks, K speeds, N speakers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.utils.data import Dataset

from speakerlab.core.batch import CODECS, Crop
from speakerlab.data.banks import Bank
from speakerlab.data.manifest import Manifest
from speakerlab.data.sampler import Slot

UNREAD = np.zeros(0, dtype=np.int16)


@dataclass(frozen=True, kw_only=True)
class NoiseKind:
    """Noises that are drawn alike: music, say."""

    noises: Sequence[int]  # indices into the bank
    odds: float = 1.0  # against the other kinds
    snr_db: tuple[float, float] = (0.0, 15.0)
    num_summed: tuple[int, int] = (1, 1)  # how many make one noise: more than one for babble


@dataclass(frozen=True, kw_only=True)
class Draws:
    """What may be drawn for a crop, and how often.

    speeds: each beyond the first makes new speakers. noise_lengths: samples of each noise.
    crop_frames: how many frames of stored features are read, one a `frame_shift`; 0: the wave is.
    """

    crop_samples: int
    crop_frames: int = 0
    frame_shift: int = 1
    speeds: Sequence[float] = (1.0,)
    room_prob: float = 0.0
    num_rooms: int = 0
    noise_prob: float = 0.0
    noise_lengths: Sequence[int] = ()
    noise_kinds: Sequence[NoiseKind] = ()
    telephone_prob: float = 0.0
    codec_prob: float = 0.0
    num_masks: int = 0

    def read_samples(self, speed: int) -> int:
        """How many samples to read so that `crop_samples` are left after the speed change."""
        return round(self.crop_samples * self.speeds[speed])

    def pick_kind(self, u: float) -> tuple[NoiseKind, float]:
        """A kind by the odds, and what is left of the uniform, which is a uniform again."""
        total = sum(kind.odds for kind in self.noise_kinds)
        for kind in self.noise_kinds[:-1]:
            share = kind.odds / total
            if u < share:
                return kind, u / share
            u -= share
        kind = self.noise_kinds[-1]
        return kind, u * (total / kind.odds)


class TrainCrops(Dataset[Crop]):
    """Crops of the training set, keyed by slot; label_KN: the class of speaker n at speed k.

    noise_bank: the noises, where crops are to bring theirs along instead of its index.
    """

    def __init__(
        self,
        manifest: Manifest,
        draws: Draws,
        *,
        label_KN: np.ndarray,
        seed: int,
        attempt: int = 0,
        noise_bank: Bank | None = None,
    ) -> None:
        assert label_KN.shape == (len(draws.speeds), len(manifest.speakers))
        self.manifest, self.draws, self.label_KN = manifest, draws, label_KN
        self.key = (seed, attempt)
        self.noise_bank = noise_bank
        self.num_bins = manifest.num_bins if draws.crop_frames else 0
        most = max((kind.num_summed[1] for kind in draws.noise_kinds), default=1)
        self.has_second_block = most > 1 or draws.telephone_prob > 0 or draws.codec_prob > 0
        self.second_block_size = 4 + 2 * (most - 1)

    def __getitem__(self, slot: Slot) -> Crop:
        return self.read(self.draw(slot))

    def draw(self, slot: Slot) -> Crop:
        """All of a crop but its samples."""
        epoch, position, row = slot
        draws = self.draws
        rng = np.random.default_rng([*self.key, epoch, position])
        # One block of uniforms in a fixed order: what is switched off still uses up its draw.
        u = rng.random(8).tolist()
        mask_M2 = rng.random((draws.num_masks, 2), dtype=np.float32)
        v = self._second_block(epoch, position)
        speed = _index(u[0], len(draws.speeds))
        spare = max(int(self.manifest.num_samples_N[row]) - draws.read_samples(speed), 0)
        has_room = draws.num_rooms > 0 and u[2] < draws.room_prob
        noises, starts, snr_db = self._draw_noise(u[4:8], v[3:])
        return Crop(
            wave_S=UNREAD,
            feats_TF=None,
            first=int(u[1] * (spare + 1)),
            label=int(self.label_KN[speed, self.manifest.speaker_N[row]]),
            speed=speed,
            room=_index(u[3], draws.num_rooms) if has_room else -1,
            noises=noises,
            noise_starts=starts,
            noise_S=None,
            snr_db=snr_db,
            telephone=v[0] < draws.telephone_prob,
            codec=_index(v[2], len(CODECS)) if v[1] < draws.codec_prob else -1,
            mask_M2=mask_M2,
            position=position,
            row=row,
        )

    def read(self, crop: Crop) -> Crop:
        """The crop with its samples, or its stored frames.

        Where the device has no noises, those of its noise come along.
        """
        draws = self.draws
        if draws.crop_frames:
            first = crop.first // draws.frame_shift
            feats_TF = self.manifest.read_features(crop.row, first, draws.crop_frames)
            return replace(crop, feats_TF=feats_TF)
        num_samples = draws.read_samples(crop.speed)
        wave_S = self.manifest.read(crop.row, crop.first, num_samples)
        if self.noise_bank is None or not crop.noises:
            return replace(crop, wave_S=wave_S)
        noise_S = self.noise_bank.cut(crop.noises, crop.noise_starts, draws.crop_samples)
        return replace(crop, wave_S=wave_S, noise_S=noise_S)

    def _second_block(self, epoch: int, position: int) -> list[float]:
        """Uniforms from a key of their own, for what few runs draw: making them takes a while."""
        if not self.has_second_block:
            return [1.0] * self.second_block_size
        rng = np.random.default_rng([*self.key, epoch, position, 1])
        return rng.random(self.second_block_size).tolist()

    def _draw_noise(
        self, u: Sequence[float], v: Sequence[float]
    ) -> tuple[tuple[int, ...], tuple[int, ...], float]:
        """(noises, first sample taken of each, SNR); u: whether, which, where, how loud;
        v: how many, then which and where of each after the first."""
        draws = self.draws
        if not draws.noise_kinds:
            return (), (), 0.0
        kind, which = draws.pick_kind(u[1])
        low, high = kind.snr_db
        snr_db = low + (high - low) * u[3]
        if u[0] >= draws.noise_prob:
            return (), (), snr_db
        least, most = kind.num_summed
        count = least + _index(v[0], most - least + 1)
        picks, places = (which, *v[1::2])[:count], (u[2], *v[2::2])[:count]
        noises = _pick_each(kind.noises, picks)
        lengths = (draws.noise_lengths[noise] for noise in noises)
        return noises, tuple(_index(u, n) for u, n in zip(places, lengths)), snr_db


def _pick_each(noises: Sequence[int], picks: Sequence[float]) -> tuple[int, ...]:
    """One noise for each uniform, none twice while there are others."""
    picked, left = list[int](), list(noises)
    for u in picks:
        left = left or list(noises)
        picked.append(left.pop(_index(u, len(left))))
    return tuple(picked)


def _index(u: float, count: int) -> int:
    """One of `count`, by a uniform; a quotient of uniforms may be rounded up to 1."""
    return min(int(u * count), count - 1)


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
