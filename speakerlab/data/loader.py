"""Training batches: cut the order of an epoch into micro-batches, read and stack their crops.

    EpochOrder -> micro_batches -> slots -> TrainCrops -> crops -> collate -> Batch

The order of an epoch is a list of rows of the manifest, one entry for an utterance to read; it may
have the same utterance in several entries. A slot is a crop to take: its epoch, its position in
the epoch, and its row. Positions count crops: an entry of which several crops are taken has several
positions. A crop is a range of an utterance with everything that was drawn for it.

Order and random draws depend only on (seed, attempt, epoch, position), so the number of workers and
ranks does not change them, and neither does a resume. An attempt ends with a roll-back, which
changes the random draws.

`Pieces`, at the end, reads parts of whole utterances, for validation and extraction.

Letters: B rows of the batch, S samples, K speeds (in `speech_KT`: speakers of a conversation),
N utterances (in `label_KN`: speakers), P entries of an epoch, T frames, F mel bins, D dimensions of
a teacher, C channels of its frames.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, get_worker_info

from speakerlab.core.batch import MISSING, Batch, Crop, Draw, Draws
from speakerlab.data.arrays import stable_hash
from speakerlab.data.codecs import reencode
from speakerlab.data.manifest import Manifest, Piece
from speakerlab.data.remote import read_ahead, warn_of_small_cache
from speakerlab.data.sampler import BLOCK_ROWS, WINDOW_BLOCKS, EpochOrder
from speakerlab.data.target_frames import TargetFrames
from speakerlab.data.workers import (
    MICRO_BATCHES_AHEAD,
    NO_ROW,
    POLL_SECONDS,
    Watch,
    start_worker,
    watched,
)

Slot = tuple[int, int, int]  # epoch, position, row
# Index of a piece, first sample in the piece, number of samples.
Span = tuple[int, int, int]
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

    Step k of an epoch takes the entries from k x global_batch to (k + 1) x global_batch of the
    order, and cuts them into consecutive micro-batches. Micro-batch m goes to rank m mod
    world_size.

    crops_each: number of crops of each entry. `global_batch` and `micro_batch` count entries, not
        crops. The slot of crop i of entry n has the position n x crops_each + i.
    """
    # `divide_global_batch` (training/batch_size.py) chooses the size of micro-batches such that
    # every rank has the same number of them: a rank with fewer would leave the others waiting.
    entries_at_once = micro_batch * world_size
    assert order.global_batch % entries_at_once == 0
    num_micro_batches = order.global_batch // micro_batch
    current_epoch = -1  # none yet
    rows_P = np.empty(0, dtype=np.int32)

    for step in range(start_step, stop_step):
        epoch, step_in_epoch = divmod(step, order.steps_per_epoch)
        if epoch != current_epoch:
            # Free the old order before the next one is made. Each rank holds one, of 4 bytes per
            # entry: 400 MB for an epoch of 100 million entries.
            del rows_P
            rows_P = order.rows(epoch)
            current_epoch = epoch

        for number in range(rank, num_micro_batches, world_size):
            first_entry = step_in_epoch * order.global_batch + number * micro_batch
            stop_entry = first_entry + micro_batch
            rows = rows_P[first_entry:stop_entry]
            # One row for each crop, so the crops of an entry are neighbours in the batch.
            crop_rows = rows.repeat(crops_each)
            first_position = first_entry * crops_each
            slots: list[Slot] = []
            for position, row in enumerate(crop_rows.tolist(), first_position):
                slots.append((epoch, position, row))
            yield slots


class TrainCrops(Dataset[Crop]):
    """Random crops of the training set, indexed by slot.

    draw_functions: name of an augmentation -> function that draws its values for one crop. Each
        gets its own generator, keyed by (seed, attempt, epoch, position, name), so adding an
        augmentation does not change the draws of the others. A draw has a group (crops of one group
        are changed together) and named values. Two draws are used here:
        - `speed`: its group is an index into `speeds`, and decides the label and the number of
          samples to read.
        - `reencode`: its value `codec` is an index into `codecs`; the crop is re-encoded here.
        The device changes the speed, and applies the other draws.
    crop_samples: length of a crop after its speed has been changed.
    label_KN: class of speaker n at speed k.
    crop_frames: 0 reads waves. Else so many frames are read from stored features, at their speed.
    frame_shift: samples from one stored frame to the next.
    crops_each: number of crops of one entry, at consecutive positions.
    shared_draws: names of the draws that these crops share, such as their speed, because a speaker
        at another speed is another class. With "crop", all of them begin at the same sample.
    clean_crops: number of these crops, from the first one on, that have only shared draws.
    target_KND: a teacher's embedding of each utterance at each speed. target_frames: its stored
        frames at each speed; none without stored ones.
    draws_of_parts: `draw_functions` of each part of the manifest, with the same names, where they
        differ.
    """

    def __init__(
        self,
        manifest: Manifest,
        draw_functions: DrawFunctions,
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
        shared_draws: Collection[str] = ("speed",),
        clean_crops: int = 0,
        target_KND: np.ndarray | None = None,
        target_frames: Sequence[TargetFrames] = (),
        draws_of_parts: Sequence[DrawFunctions] | None = None,
    ) -> None:
        num_speakers = len(manifest.speakers)
        assert label_KN.shape == (len(speeds), num_speakers)
        self.manifest = manifest
        self.draw_functions = draw_functions
        if draws_of_parts is None:
            draws_of_parts = [draw_functions] * len(manifest.parts)
        self.draws_of_parts = draws_of_parts
        self.label_KN = label_KN
        self.speeds = speeds
        self.codecs = codecs
        self.crop_frames = crop_frames
        self.frame_shift = frame_shift
        self.crops_each = crops_each
        self.shared_draws = shared_draws
        self.clean_crops = clean_crops
        self.target_KND = target_KND
        self.target_frames = target_frames

        # A crop at speed 1.1 becomes shorter by that factor, so more samples are read for it.
        self.read_samples = [round(crop_samples * speed) for speed in speeds]

        # One generator serves all crops and names: `_seek` moves it before each draw.
        self.name_hashes = {"crop": stable_hash("crop")}
        for name in draw_functions:
            self.name_hashes[name] = stable_hash(name)
        philox = np.random.Philox(key=[seed, attempt])
        self.generator = np.random.Generator(philox)
        # Philox makes four numbers at a time, and its state buffers those not used yet. This is a
        # copy of the state before the first draw, without buffered numbers. `_seek` starts from it:
        # a draw must not get numbers that were left over from the draw before it.
        self.seek_state = philox.state

    def __getitem__(self, slot: Slot) -> Crop:
        return self.read(self.draw(slot))

    def draw(self, slot: Slot) -> Crop:
        """Return a crop with all its draws, but without samples."""
        epoch, position, row = slot
        number = position % self.crops_each  # among the crops of this entry
        first_slot = (epoch, position - number, row)
        is_clean = number < self.clean_crops

        crop_draws: dict[str, Draw] = {}
        draw_functions = self.draws_of_parts[self.manifest.part_N[row]]
        for name, draw_values in draw_functions.items():
            is_shared = name in self.shared_draws
            if is_clean and not is_shared:
                continue
            # Shared values are drawn with the slot of the first crop, so every crop gets the same.
            draw_slot = first_slot if is_shared else slot
            draw = draw_values(self._seek(name, draw_slot))
            if draw is not None:
                crop_draws[name] = draw

        # The crop begins anywhere up to the last sample from which a whole crop fits. A shorter
        # utterance is read from its start; `Manifest.read` repeats it.
        speed_index = _speed_index(crop_draws)
        num_samples = int(self.manifest.num_samples_N[row])
        last_start = max(num_samples - self.read_samples[speed_index], 0)
        place_slot = first_slot if "crop" in self.shared_draws else slot
        fraction = self._seek("crop", place_slot).random()  # in [0, 1)
        first = int(fraction * (last_start + 1))

        speaker = self.manifest.speaker_N[row]
        label = int(self.label_KN[speed_index, speaker])
        target_D = None
        if self.target_KND is not None:
            target_D = self.target_KND[speed_index, row]
        return Crop(
            wave_S=np.zeros(0, dtype=np.int16),
            feats_TF=None,
            first=first,
            label=label,
            position=position,
            row=row,
            draws=crop_draws,
            target_D=target_D,
        )

    def read(self, crop: Crop) -> Crop:
        """Return the crop with its samples, or with its stored frames."""
        if self.crop_frames:
            return replace(crop, feats_TF=self.fetch(crop))

        target_CT = None
        if self.target_frames:
            frames_at_speed = self.target_frames[_speed_index(crop.draws)]
            target_CT = frames_at_speed.read(crop.row, crop.first)
        read = replace(crop, wave_S=self.fetch(crop), target_CT=target_CT)
        return self.reencoded(read)

    def reencoded(self, crop: Crop) -> Crop:
        """Return the crop as the codec that was drawn leaves it; without one, unchanged."""
        # The codecs run on the CPU, in libsndfile, so they are applied in the worker.
        codec_draw = crop.draws.get("reencode")
        if codec_draw is None:
            return crop
        codec_index = int(codec_draw.values["codec"])
        wave_S = reencode(
            crop.wave_S,
            self.codecs[codec_index],
            sample_rate=self.manifest.sample_rate,
        )
        return replace(crop, wave_S=wave_S)

    def fetch(self, crop: Crop) -> np.ndarray:
        """Return what `read` reads for a crop: wave_S, int16, or the stored feats_TF, float32."""
        if self.crop_frames:
            # `read_features`, like `read`, repeats a shorter utterance.
            first_frame = crop.first // self.frame_shift
            return self.manifest.read_features(crop.row, first_frame, self.crop_frames)
        speed_index = _speed_index(crop.draws)
        return self.manifest.read(
            crop.row,
            crop.first,
            self.read_samples[speed_index],
        )

    def _seek(self, name: str, slot: Slot) -> np.random.Generator:
        """Return the generator of a name and a slot.

        Philox computes its output from a key and a counter, without a history. The key is (seed,
        attempt) and the counter starts at (0, position, epoch, hash of the name). Setting the
        counter takes a sixth of the time of making a generator.
        """
        epoch, position, _ = slot
        # Philox counts up the first word. The other three differ between any two draws that are not
        # shared, so no two of them share a number. The counter is written into `seek_state`, whose
        # buffer stays empty, and the assignment copies the whole state into Philox.
        counter = self.seek_state["state"]["counter"]
        counter[:] = (0, position, epoch, self.name_hashes[name])
        self.generator.bit_generator.state = self.seek_state
        return self.generator


def _speed_index(draws: Mapping[str, Draw]) -> int:
    """Return the index of a crop's speed; 0, the original speed, if none was drawn."""
    if "speed" not in draws:
        return 0
    return draws["speed"].group


def collate(crops: Sequence[Crop]) -> Batch:
    """Stack crops into a batch: pad the waves with zeros, and stack the draws by group."""
    # Crops of one batch have several lengths: more samples are read for a higher speed.
    longest = max(len(crop.wave_S) for crop in crops)
    shape = (len(crops), longest)
    wave_BS = np.zeros(shape, dtype=np.int16)
    for padded_S, crop in zip(wave_BS, crops):
        num_samples = len(crop.wave_S)
        padded_S[:num_samples] = crop.wave_S

    # Empty where the features are computed from the waves.
    feats_BTF = _stack_stored(crop.feats_TF for crop in crops)
    if feats_BTF is None:
        feats_BTF = torch.empty((0, 0, 0), dtype=torch.float32)

    # Three rows of one tensor, not three tensors: a worker hands over each tensor's memory as an
    # open file, and a process may have only so many open files.
    numbers_3B = torch.tensor(
        [
            [crop.label for crop in crops],
            [crop.position for crop in crops],
            [crop.row for crop in crops],
        ]
    )
    label_B, position_B, row_B = numbers_3B

    return Batch(
        wave_BS=torch.from_numpy(wave_BS),
        feats_BTF=feats_BTF,
        label_B=label_B,
        position_B=position_B,
        row_B=row_B,
        draws=_stack_draws(crops),
        target_BD=_stack_stored(crop.target_D for crop in crops),
        target_BCT=_stack_stored(crop.target_CT for crop in crops),
        speech_BKT=_stack_stored(crop.speech_KT for crop in crops),
    )


def _stack_stored(arrays: Iterable[np.ndarray | None]) -> torch.Tensor | None:
    """Stack an array that each crop may have, all of one shape; None if no crop has it."""
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    return torch.from_numpy(np.stack(present))


def _stack_draws(crops: Sequence[Crop]) -> dict[str, list[Draws]]:
    """Return the draws of each augmentation: one `Draws` for each group, in rising order."""
    # Rows of a group are changed together, such as all crops of one speed.
    batch_rows_of: dict[tuple[str, int], list[int]] = {}
    for batch_row, crop in enumerate(crops):
        for name, draw in crop.draws.items():
            key = (name, draw.group)
            batch_rows_of.setdefault(key, []).append(batch_row)

    stacked: dict[str, list[Draws]] = {}
    for key in sorted(batch_rows_of):
        name, group = key
        batch_rows = batch_rows_of[key]
        values_of_rows: list[Mapping[str, Any]] = []
        for batch_row in batch_rows:
            draw = crops[batch_row].draws[name]
            values_of_rows.append(draw.values)
        # The crops of a group have values of the same names.
        values: dict[str, torch.Tensor] = {}
        for value_name in values_of_rows[0]:
            column = [row_values[value_name] for row_values in values_of_rows]
            values[value_name] = _stack_values(column)
        draws = Draws(
            rows=torch.tensor(batch_rows),
            values=values,
            group=group,
        )
        stacked.setdefault(name, []).append(draws)
    return stacked


def _stack_values(column: Sequence[Any]) -> torch.Tensor:
    """Stack one value of several crops: numbers, or arrays padded with -1 to the longest."""
    is_array = isinstance(column[0], np.ndarray)
    if not is_array:
        return torch.tensor(column)  # floats become float32
    arrays = [torch.from_numpy(array) for array in column]
    return pad_sequence(arrays, batch_first=True, padding_value=MISSING)


class WatchedBatches(Dataset[Batch]):
    """Batches, indexed by lists of slots; a worker notes which row it is reading.

    `Watch` names that row in the log when a worker is stuck or dies.
    """

    def __init__(self, crops: TrainCrops, watch: Watch) -> None:
        self.crops = crops
        self.watch = watch

    def __getitem__(self, slots: list[Slot]) -> Batch:
        # Not None, because only worker processes use this class.
        worker_info: Any = get_worker_info()
        worker: int = worker_info.id
        crops: list[Crop] = []
        for slot in slots:
            _, _, row = slot
            self.watch.rows[worker] = row
            crops.append(self.crops[slot])
        self.watch.rows[worker] = NO_ROW
        return collate(crops)


def train_loader(
    crops: TrainCrops,
    slot_lists: Iterable[list[Slot]],
    *,
    num_workers: int,
    pin_memory: bool,
    stall_seconds: float = 60.0,
    num_ahead: int = 1000,
) -> Iterator[Batch]:
    """Yield a batch for each list of slots.

    num_workers: number of processes that read ahead; 0 reads in this process.
    stall_seconds: log a warning each time that no batch has arrived for so long.
    num_ahead: crops that are fetched from an object store in advance, if the shards are in one.
    """
    if remote_bytes(crops.manifest):
        warn_of_small_cache(bytes_in_use(crops.manifest))
        slot_lists = read_ahead(
            slot_lists, crops.draw, crops.fetch, num_ahead=num_ahead
        )
    if not num_workers:
        for slots in slot_lists:
            batch_crops = [crops[slot] for slot in slots]
            batch = collate(batch_crops)
            if pin_memory:
                batch = batch.pin_memory()
            yield batch
        return

    manifest = crops.manifest

    def name_row(row: int) -> str:
        return f"{manifest.ids[row]} ({manifest.paths[row]})"

    watch = Watch(num_workers, name_row)
    loader = DataLoader(
        WatchedBatches(crops, watch),
        sampler=slot_lists,  # each list is one index of the dataset
        batch_size=None,  # the dataset returns whole batches
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=MICRO_BATCHES_AHEAD,
        # Short: `watched` catches the time-out, looks whether a worker has died, and continues.
        timeout=min(POLL_SECONDS, stall_seconds),
        worker_init_fn=start_worker,
        # Forked, so that the columns of the manifest are shared and not copied.
        multiprocessing_context="fork",
    )
    yield from watched(loader, watch, stall_seconds=stall_seconds)


def remote_bytes(manifest: Manifest) -> int:
    """Return the bytes of a manifest's shards in object stores."""
    num_bytes = 0
    for part in manifest.parts:
        for packed in (part.waves, part.features):
            if packed is not None and packed.remote is not None:
                num_bytes += sum(packed.num_bytes_of_shards)
    return num_bytes


def bytes_in_use(manifest: Manifest) -> int:
    """Return the bytes of object stores that training reads from at a time.

    An epoch shuffles a window of rows at once. While crops of a window are read, those of the next
    one are read ahead.
    """
    num_rows = 2 * BLOCK_ROWS * WINDOW_BLOCKS
    num_bytes = remote_bytes(manifest)
    if len(manifest) <= num_rows:
        return num_bytes
    return num_bytes * num_rows // len(manifest)


class Pieces(Dataset[np.ndarray]):
    """Samples (wave_S, int16) of spans, for validation and extraction.

    A piece is a range of an utterance that is embedded as a whole; a span is a part of a piece.
    Only the span is read from disk.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces

    def __getitem__(self, span: Span) -> np.ndarray:
        index, first, num_samples = span
        piece = self.pieces[index]
        part = replace(
            piece,
            start=piece.start + first,
            num_samples=num_samples,
        )
        return part.read()
