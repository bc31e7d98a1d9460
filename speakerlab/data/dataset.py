"""From a slot of the order to a crop and the draws of all that is to be done to it.

In: (epoch, position, row). Out: `batch.Crop`. The draws are a function of the slot's key alone, so
that workers, ranks and a resume change nothing. Letters: S samples, K speeds, N speakers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch.utils.data import Dataset

from speakerlab.core.batch import Crop, Draw
from speakerlab.data.arrays import stable_hash
from speakerlab.data.manifest import Manifest
from speakerlab.data.sampler import Slot

UNREAD = np.zeros(0, dtype=np.int16)
DrawFunctions = Mapping[str, Callable[[np.random.Generator], Draw | None]]


class TrainCrops(Dataset[Crop]):
    """Crops of the training set, keyed by slot; label_KN: the class of speaker n at speed k.

    draws: draw functions by name. Each gets its own generator, keyed by (seed, attempt, epoch,
    position, name), so that adding one does not change the draws of the others. The group of
    the draw named `speed` is an index into `speeds`; all other draws only travel with the crop.
    crop_frames: frames of stored features to read, one per `frame_shift`; 0: read the wave.
    """

    def __init__(
        self,
        manifest: Manifest,
        draws: DrawFunctions,
        *,
        crop_samples: int,
        label_KN: np.ndarray,
        seed: int,
        attempt: int = 0,
        speeds: Sequence[float] = (1.0,),
        crop_frames: int = 0,
        frame_shift: int = 1,
    ) -> None:
        assert label_KN.shape == (len(speeds), len(manifest.speakers))
        self.manifest, self.draws, self.label_KN = manifest, draws, label_KN
        self.crop_frames, self.frame_shift = crop_frames, frame_shift
        self.speeds = speeds
        self.read_samples = [round(crop_samples * speed) for speed in speeds]
        self.words = {name: stable_hash(name) for name in ("crop", *draws)}
        self.generator = np.random.Generator(np.random.Philox(key=[seed, attempt]))
        self.state = self.generator.bit_generator.state  # of a generator that has drawn nothing

    def __getitem__(self, slot: Slot) -> Crop:
        return self.read(self.draw(slot))

    def draw(self, slot: Slot) -> Crop:
        """Return all of a crop but its samples."""
        epoch, position, row = slot
        drawn: dict[str, Draw] = {}
        for name, function in self.draws.items():
            draw = function(self._seek(name, slot))
            if draw is not None:
                drawn[name] = draw
        speed = drawn["speed"].group if "speed" in drawn else 0
        spare = max(int(self.manifest.num_samples_N[row]) - self.read_samples[speed], 0)
        return Crop(
            wave_S=UNREAD,
            feats_TF=None,
            first=int(self._seek("crop", slot).random() * (spare + 1)),
            label=int(self.label_KN[speed, self.manifest.speaker_N[row]]),
            position=position,
            row=row,
            draws=drawn,
        )

    def read(self, crop: Crop) -> Crop:
        """Return the crop with its samples, or its stored frames."""
        if self.crop_frames:
            first = crop.first // self.frame_shift
            feats_TF = self.manifest.read_features(crop.row, first, self.crop_frames)
            return replace(crop, feats_TF=feats_TF)
        speed = crop.draws["speed"].group if "speed" in crop.draws else 0
        wave_S = self.manifest.read(crop.row, crop.first, self.read_samples[speed])
        return replace(crop, wave_S=wave_S)

    def _seek(self, name: str, slot: Slot) -> np.random.Generator:
        """Return the generator of this name and slot.

        Philox is a function of its key and its counter, which begins at (0, position, epoch, name).
        To set it takes a sixth of the time of making a generator.
        """
        epoch, position, _ = slot
        self.state["state"]["counter"][:] = (0, position, epoch, self.words[name])
        self.generator.bit_generator.state = self.state
        return self.generator


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
