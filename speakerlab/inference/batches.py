"""Batched embedding extraction. In: pieces of recordings. Out: emb_ND.

Pieces of equal frame count share a batch, so that nothing is padded, and a row has the same
embedding in a batch as alone. With a VAD, each piece is embedded alone, because its length without
silence is known only after reading. A GPU computes several batches in one forward pass; their
embeddings are copied to the host while the GPU computes the next pass.
Letters: N pieces, B rows of a batch, S samples, D embedding dimensions.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from speakerlab.core.bars import progress_bar
from speakerlab.core.system import START_METHOD
from speakerlab.core.windows import group_rows, mean_of_windows, window_bounds
from speakerlab.data import levels
from speakerlab.data.audio import FULL_SCALE
from speakerlab.data.loader import Pieces, Span
from speakerlab.data.manifest import Piece
from speakerlab.data.workers import start_worker
from speakerlab.embedder import Embedder
from speakerlab.frontend.augment.base import without_autotuning
from speakerlab.frontend.vad import EnergyVad

MAX_BATCH_SECONDS = 64  # of audio, unless a single piece is longer
MAX_SECONDS_AT_ONCE = 256  # of audio in a forward pass: two windows of long audio


class ForwardPass(NamedTuple):
    """Embeddings of batches that were computed together; the copy to the CPU may be unfinished."""

    batches: Sequence[Tensor]  # emb_BD of each batch, on the CPU
    copied: Any  # on a GPU, the event that ends the copy; else None


class MeasuredPieces(Pieces):
    """Pieces that count, in a counter of several processes, what may be no speech."""

    def __init__(self, pieces: Sequence[Piece], num_doubtful: Any) -> None:
        super().__init__(pieces)
        self.num_doubtful = num_doubtful

    def __getitem__(self, span: Span) -> np.ndarray:
        wave_S = super().__getitem__(span)
        index, first, _ = span
        # The first window stands for the whole recording.
        if first == 0:
            sample_rate = self.pieces[index].manifest.sample_rate
            if levels.find_kind(wave_S, sample_rate=sample_rate) is not None:
                with self.num_doubtful.get_lock():
                    self.num_doubtful.value += 1
        return wave_S


def embed_pieces(
    embedder: Embedder,
    pieces: Sequence[Piece],
    *,
    device: torch.device,
    share: tuple[int, int] = (0, 1),
    stop: Callable[[], bool] = lambda: False,
    progress: bool = False,
    num_workers: int = 0,
    num_threads: int = 1,
) -> np.ndarray:
    """Return emb_ND, float32, in the order of `pieces`.

    share: (i, n) computes batches i, i + n, i + 2 n, ... and leaves the other rows zero, so that
    the sum of n shares equals the whole bit for bit.
    stop: called after each batch; once it returns True, the remaining rows stay zero.
    progress: show a bar on a terminal. num_workers, num_threads: see `embed_batches`.
    """
    was_training = embedder.training
    shape = (len(pieces), embedder.embed_dim)
    emb_ND = np.zeros(shape, dtype=np.float32)
    index, num_shares = share
    all_batches = list(group_pieces(embedder, pieces))
    batches = all_batches[index::num_shares]

    bar = progress_bar(total=len(pieces), unit="recordings", shown=progress)
    # Almost every batch has another length, so cuDNN would autotune for each of them.
    with bar, without_autotuning():
        embedded = embed_batches(
            embedder,
            pieces,
            batches,
            device=device,
            num_workers=num_workers,
            num_threads=num_threads,
        )
        for rows, emb_BD in embedded:
            emb_ND[rows] = emb_BD
            bar.update(len(rows))
            if stop():
                break
    # `embed_batches` has set eval mode, and training may continue.
    embedder.train(was_training)
    return emb_ND


def embed_batches(
    embedder: Embedder,
    pieces: Sequence[Piece],
    batches: Iterable[list[int]],
    *,
    device: torch.device,
    num_workers: int = 0,
    num_threads: int = 1,
    num_doubtful: Any = None,
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield (indices of pieces, emb_BD) of each batch, in order; sets the embedder to eval mode.

    batches: from `group_pieces`, read slightly ahead. A piece of several windows is read window by
    window, so that an hour needs no more memory than `max_seconds` (with a VAD it is read whole).
    num_threads: number of batches to compute and, without workers, to read at a time; the result
    does not depend on it, provided that torch always uses the same number of threads.
    num_doubtful: a `multiprocessing.Value` that counts the pieces whose levels no speech has.
    """
    embedder.eval().to(device)
    # The rows and the number of windows of each batch that is read or computed but not yet yielded.
    pending: deque[tuple[list[int], int]] = deque()

    # A generator, so that `pending` holds only the batches that the reader has asked for.
    def spans_of_windows() -> Iterator[list[Span]]:
        for rows in batches:
            windows = _windows_of(rows, embedder, pieces)
            pending.append((rows, len(windows)))
            yield from windows

    dataset = Pieces(pieces)
    if num_doubtful is not None:
        dataset = MeasuredPieces(pieces, num_doubtful)
    embeddings = _read_and_embed(
        embedder,
        dataset,
        spans_of_windows(),
        device=device,
        num_workers=num_workers,
        num_threads=num_threads,
    )

    # The windows of a batch follow each other, so a batch is complete once all have arrived.
    window_embeddings: list[Tensor] = []
    for window_BD in embeddings:
        window_embeddings.append(window_BD)
        rows, num_windows = pending[0]
        if len(window_embeddings) == num_windows:
            emb_BD = mean_of_windows(window_embeddings).float()
            yield rows, emb_BD.numpy()
            pending.popleft()
            window_embeddings.clear()


def _read_and_embed(
    embedder: Embedder,
    dataset: Pieces,
    batches: Iterator[list[Span]],
    *,
    device: torch.device,
    num_workers: int,
    num_threads: int,
) -> Iterator[Tensor]:
    """Return the embeddings (B, D) of each batch of spans, in order, as they are computed.

    Worker processes read for a GPU, threads read and compute on a CPU.
    """
    on_gpu = device.type == "cuda"
    max_samples = MAX_SECONDS_AT_ONCE * embedder.sample_rate
    collate = partial(_stack, vad=embedder.vad)
    embed = partial(_embed_together, embedder, device)
    if not on_gpu and num_workers == 0:

        def read_and_embed(spans: list[Span]) -> ForwardPass:
            waves = [dataset[span] for span in spans]
            wave_BS = collate(waves)
            return embed([wave_BS])

        passes = _map_in_order(
            read_and_embed,
            batches,
            num_threads=num_threads,
            max_samples=max_samples,
        )
        return _as_computed(passes)

    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=collate,
        worker_init_fn=start_worker,
        multiprocessing_context=START_METHOD if num_workers else None,
        pin_memory=on_gpu,
    )
    if on_gpu:
        joined_waves = _join(loader, embedder, max_samples=max_samples)
        return _one_pass_late(map(embed, joined_waves))
    single_waves = ([wave_BS] for wave_BS in loader)
    return _as_computed(map(embed, single_waves))


def _windows_of(
    rows: Sequence[int], embedder: Embedder, pieces: Sequence[Piece]
) -> list[list[Span]]:
    """Return the spans of a batch, window by window; one window if the pieces are read whole."""
    num_samples = pieces[rows[0]].num_samples
    is_one_window = num_samples <= embedder.max_samples
    # With a VAD, windows are cut from the speech, which is known only after reading the piece.
    if embedder.vad is not None or is_one_window:
        whole_pieces = [(row, 0, pieces[row].num_samples) for row in rows]
        return [whole_pieces]

    # Pieces of several windows share a batch only if they have the same length.
    windows: list[list[Span]] = []
    bounds = window_bounds(num_samples, max_samples=embedder.max_samples)
    for first, end in bounds:
        spans = [(row, first, end - first) for row in rows]
        windows.append(spans)
    return windows


def _embed_together(
    embedder: Embedder, device: torch.device, waves: Sequence[Tensor]
) -> ForwardPass:
    """Embed batches of int16 waves, whose lengths differ by less than a frame, in one pass."""
    shortest = min(wave_BS.shape[1] for wave_BS in waves)
    trimmed: list[Tensor] = []
    for wave_BS in waves:
        # Trim on the device: a trimmed wave is not contiguous, so the host would copy it first.
        on_device_BS = wave_BS.to(device, non_blocking=True)
        trimmed.append(on_device_BS[:, :shortest])
    with torch.inference_mode():
        joined_BS = torch.cat(trimmed).float()
        emb_BD: Tensor = embedder(joined_BS.div_(FULL_SCALE))

    # Do not wait for the copy: the host launches the next forward pass meanwhile.
    on_cpu_BD = emb_BD.to("cpu", non_blocking=True)
    copied = None
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        copied = stream.record_event()
    batch_sizes = [len(wave_BS) for wave_BS in waves]
    return ForwardPass(on_cpu_BD.split(batch_sizes), copied)


def group_pieces(embedder: Embedder, pieces: Sequence[Piece]) -> Iterator[list[int]]:
    """Yield batches: indices of pieces that may share a forward pass, longest first."""
    keys = [embedder.batch_key(piece.num_samples) for piece in pieces]
    groups = group_rows(keys)
    # Longest first: a lack of memory shows at the start, and the last batch to finish is short.
    groups.sort(key=lambda rows: keys[rows[0]], reverse=True)
    for rows in groups:
        # The pieces of a group differ by less than a frame.
        first_piece = pieces[rows[0]]
        seconds = first_piece.num_samples / embedder.sample_rate
        batch_size = max(int(MAX_BATCH_SECONDS / seconds), 1)
        if embedder.vad is not None:
            batch_size = 1  # the lengths without silence are not known yet
        for first in range(0, len(rows), batch_size):
            yield rows[first : first + batch_size]


def _join(
    batches: Iterable[Tensor], embedder: Embedder, *, max_samples: int
) -> Iterator[list[Tensor]]:
    """Yield lists of batches for one forward pass: at most `max_samples`, or a single batch."""

    def key(wave_BS: Tensor) -> tuple[int, int]:
        return embedder.batch_key(wave_BS.shape[1])

    # Only neighbours are joined, so that the batches keep their order.
    for _, batches_of_key in groupby(batches, key=key):
        waves: list[Tensor] = []
        num_samples = 0
        for wave_BS in batches_of_key:
            if waves and num_samples + wave_BS.numel() > max_samples:
                yield waves
                waves = []
                num_samples = 0
            waves.append(wave_BS)
            num_samples += wave_BS.numel()
        yield waves


def _as_computed(passes: Iterable[ForwardPass]) -> Iterator[Tensor]:
    """Yield the embeddings of each batch as soon as they are computed."""
    for forward_pass in passes:
        yield from forward_pass.batches


def _one_pass_late(passes: Iterable[ForwardPass]) -> Iterator[Tensor]:
    """Yield embeddings from a GPU one pass late, while it computes the next pass."""
    previous: ForwardPass | None = None
    for current in passes:
        # The loop has launched `current`, so the GPU is busy while the host waits here.
        if previous is not None:
            yield from _wait_for(previous)
        previous = current
    if previous is not None:
        yield from _wait_for(previous)


def _wait_for(forward_pass: ForwardPass) -> Sequence[Tensor]:
    """Wait for the copy to the CPU; return the embeddings."""
    if forward_pass.copied is not None:
        forward_pass.copied.synchronize()
    return forward_pass.batches


def _map_in_order(
    work: Callable[[list[Span]], ForwardPass],
    batches: Iterable[list[Span]],
    *,
    num_threads: int,
    max_samples: int,
) -> Iterator[ForwardPass]:
    """Yield work(spans) of each batch, in order, computed by threads.

    The batches in progress have at most `max_samples` together; a longer batch is alone.
    """
    if num_threads == 1:
        yield from map(work, batches)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        # Each batch in progress, and its number of samples.
        waiting: deque[tuple[Future[ForwardPass], int]] = deque()
        total_samples = 0  # of the batches in `waiting`
        for spans in batches:
            num_samples = sum(size for _, _, size in spans)
            while waiting:
                # One batch more than threads, so that no thread waits for the next batch.
                has_enough_batches = len(waiting) > num_threads
                fits = total_samples + num_samples <= max_samples
                if fits and not has_enough_batches:
                    break
                future, finished_samples = waiting.popleft()
                total_samples -= finished_samples
                yield future.result()
            future = pool.submit(work, spans)
            waiting.append((future, num_samples))
            total_samples += num_samples
        for future, _ in waiting:
            yield future.result()


def _stack(waves: Sequence[np.ndarray], vad: EnergyVad | None) -> Tensor:
    """Return wave_BS, cut to the shortest row: the rows differ by less than a frame."""
    if vad is not None:
        waves = [vad(wave_S) for wave_S in waves]
    shortest = min(len(wave_S) for wave_S in waves)
    trimmed = [wave_S[:shortest] for wave_S in waves]
    wave_BS = np.stack(trimmed)
    return torch.from_numpy(wave_BS)
