"""From the order of an epoch to batches: micro-batches of slots, crops, stacked crops.

Data order and draws are functions of (seed, attempt, epoch, position) alone, so that workers, ranks
and a resume change nothing.
Letters: B rows of the batch, S samples, K speeds, N speakers. G is the global batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, get_worker_info

from speakerlab.core.batch import MISSING, Batch, Crop, Draw, Draws
from speakerlab.data.arrays import stable_hash
from speakerlab.data.codecs import reencode
from speakerlab.data.manifest import Manifest, Piece
from speakerlab.data.sampler import EpochOrder
from speakerlab.data.workers import (
    MICRO_BATCHES_AHEAD,
    NO_ROW,
    POLL_SECONDS,
    Watch,
    start_worker,
    watched,
)

Slot = tuple[int, int, int]  # epoch, position, row
Span = tuple[int, int, int]  # index of a piece, first sample within it, number of samples
DrawFunctions = Mapping[str, Callable[[np.random.Generator], Draw | None]]


def micro_batches(
    order: EpochOrder,
    *,
    start_step: int,
    stop_step: int,
    micro_batch: int,
    rank: int = 0,
    world_size: int = 1,
    crops_each: int = 1,
) -> Iterator[list[Slot]]:
    """Yield the micro-batches of one rank from `start_step` to `stop_step`, over all epochs.

    Step k of an epoch takes positions [kG, (k + 1)G), cut into consecutive micro-batches;
    micro-batch m goes to rank m mod world size, at accumulation m div world size.
    crops_each: how many crops each position of the order stands for; G and micro-batches do not
    count them, and crop i of position p has the position p x crops_each + i.
    """
    assert order.global_batch % (micro_batch * world_size) == 0
    current, rows_P = -1, np.empty(0, dtype=np.int32)
    for step in range(start_step, stop_step):
        epoch, step_in_epoch = divmod(step, order.steps_per_epoch)
        if epoch != current:
            del rows_P  # not two epochs' at once
            current, rows_P = epoch, order.rows(epoch)
        for number in range(rank, order.global_batch // micro_batch, world_size):
            first = step_in_epoch * order.global_batch + number * micro_batch
            stop = first + micro_batch
            rows = rows_P[first:stop].repeat(crops_each).tolist()
            positions = range(first * crops_each, stop * crops_each)
            yield list(zip(repeat(epoch), positions, rows))


class TrainCrops(Dataset[Crop]):
    """Crops of the training set, keyed by slot; label_KN: the class of speaker n at speed k.

    draws: what draws for a crop, by name. Each gets a generator of its own, keyed by (seed,
    attempt, epoch, position, name), so that one more changes nothing for the others. The group of
    the draw named `speed` is an index into `speeds`, the value `codec` of the draw named `reencode`
    one into `codecs`, which are applied here; all other draws only travel with the crop.
    crop_frames: how many frames of stored features are read, one a `frame_shift`; 0: the wave is.
    crops_each: consecutive positions that are crops of one utterance; they have one speed, another
    would be another voice. clean_crops: the first of them, of which only the speed is drawn.
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
        codecs: Sequence[str] = (),
        crop_frames: int = 0,
        frame_shift: int = 1,
        crops_each: int = 1,
        clean_crops: int = 0,
    ) -> None:
        assert label_KN.shape == (len(speeds), len(manifest.speakers))
        self.manifest, self.draws, self.label_KN = manifest, draws, label_KN
        self.crop_frames, self.frame_shift = crop_frames, frame_shift
        self.speeds, self.codecs = speeds, codecs
        self.crops_each, self.clean_crops = crops_each, clean_crops
        self.read_samples = [round(crop_samples * speed) for speed in speeds]
        self.words = {name: stable_hash(name) for name in ("crop", *draws)}
        self.generator = np.random.Generator(np.random.Philox(key=[seed, attempt]))
        self.state = self.generator.bit_generator.state  # of a generator that has drawn nothing

    def __getitem__(self, slot: Slot) -> Crop:
        return self.read(self.draw(slot))

    def draw(self, slot: Slot) -> Crop:
        """Return all of a crop but its samples."""
        epoch, position, row = slot
        number = position % self.crops_each
        drawn: dict[str, Draw] = {}
        for name, function in self.draws.items():
            if name == "speed":
                draw = function(self._seek(name, (epoch, position - number, row)))
            else:
                draw = None if number < self.clean_crops else function(self._seek(name, slot))
            if draw is not None:
                drawn[name] = draw
        speed = drawn["speed"].group if "speed" in drawn else 0
        spare = max(int(self.manifest.num_samples_N[row]) - self.read_samples[speed], 0)
        return Crop(
            wave_S=np.zeros(0, dtype=np.int16),
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
        if draw := crop.draws.get("reencode"):
            codec = self.codecs[int(draw.values["codec"])]
            wave_S = reencode(wave_S, codec, sample_rate=self.manifest.sample_rate)
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


def collate(crops: Sequence[Crop]) -> Batch:
    """Stack crops; rows are padded to the longest, and the rows of each augmentation listed."""
    waves, feats, numbers = list[np.ndarray](), list[np.ndarray](), list[tuple[int, int, int]]()
    draws_of: dict[tuple[str, int], list[tuple[int, Draw]]] = {}
    for row, crop in enumerate(crops):
        waves.append(crop.wave_S)
        numbers.append((crop.label, crop.position, crop.row))
        feats += [] if crop.feats_TF is None else [crop.feats_TF]
        for name, draw in crop.draws.items():
            draws_of.setdefault((name, draw.group), []).append((row, draw))
    wave_BS = np.zeros((len(crops), max(map(len, waves))), dtype=np.int16)
    for padded_S, wave_S in zip(wave_BS, waves):
        padded_S[: len(wave_S)] = wave_S
    stacked: dict[str, list[Draws]] = {}
    for (name, group), drawn in sorted(draws_of.items(), key=itemgetter(0)):
        rows, draws = zip(*drawn)
        values: dict[str, torch.Tensor] = {}
        for key, value in draws[0].values.items():
            column = list(map(itemgetter(key), map(attrgetter("values"), draws)))
            if isinstance(value, np.ndarray):
                arrays = list(map(torch.from_numpy, column))
                values[key] = pad_sequence(arrays, batch_first=True, padding_value=MISSING)
            else:
                values[key] = torch.tensor(column)  # floats become float32
        stacked.setdefault(name, []).append(Draws(torch.tensor(rows), values, group))
    label_B, position_B, row_B = torch.tensor(numbers).T.contiguous()
    return Batch(
        wave_BS=torch.from_numpy(wave_BS),
        feats_BTF=torch.from_numpy(np.stack(feats) if feats else np.empty((0, 0, 0), "f4")),
        label_B=label_B,
        position_B=position_B,
        row_B=row_B,
        draws=stacked,
    )


class WatchedBatches(Dataset[Batch]):
    """Batches by their slots, made in a worker that notes which row it reads."""

    def __init__(self, crops: TrainCrops, watch: Watch) -> None:
        self.crops, self.watch = crops, watch

    def __getitem__(self, slots: list[Slot]) -> Batch:
        worker, crops = cast(Any, get_worker_info()).id, list[Crop]()
        for slot in slots:
            self.watch.rows[worker] = slot[2]
            crops.append(self.crops[slot])
        self.watch.rows[worker] = NO_ROW
        return collate(crops)


def train_loader(
    crops: TrainCrops,
    order: Iterable[list[Slot]],
    *,
    num_workers: int,
    pin_memory: bool,
    stall_seconds: float = 60.0,
) -> Iterator[Batch]:
    """Yield one pass over `order`, in order, read ahead by `num_workers` processes (0: none)."""
    if not num_workers:
        for slots in order:
            batch = collate(list(map(crops.__getitem__, slots)))
            yield batch.pin_memory() if pin_memory else batch
        return
    manifest = crops.manifest
    watch = Watch(num_workers, lambda row: f"{manifest.ids[row]} ({manifest.paths[row]})")
    loader = DataLoader(
        WatchedBatches(crops, watch),
        sampler=order,
        batch_size=None,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=MICRO_BATCHES_AHEAD,
        timeout=min(POLL_SECONDS, stall_seconds),
        worker_init_fn=start_worker,
        # Forked, so that the columns of the manifest are shared and not copied.
        multiprocessing_context="fork",
    )
    yield from watched(loader, watch, stall_seconds=stall_seconds)


class Pieces(Dataset[np.ndarray]):
    """wave_S, int16, of a span of a piece, which need not be read whole."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces

    def __getitem__(self, span: Span) -> np.ndarray:
        index, first, num_samples = span
        piece = self.pieces[index]
        return replace(piece, start=piece.start + first, num_samples=num_samples).read()
