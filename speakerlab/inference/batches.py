"""From recordings to embeddings. In: pieces of recordings. Out: emb_ND.

Pieces of equal frame count share a batch, so that nothing is padded and a batch equals its rows.
With a VAD, each piece is embedded alone, as its length is known only once it is read.
A GPU computes several batches in one forward pass, and their embeddings are read while it computes
the next.
Letters: N pieces, B rows of a batch, S samples, D embedding dimensions.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from speakerlab.config.embedder import Embedder
from speakerlab.core.windows import mean_of_windows, window_bounds
from speakerlab.data.audio import FULL_SCALE
from speakerlab.data.loader import Pieces, Span
from speakerlab.data.manifest import Manifest, Piece
from speakerlab.data.workers import start_worker
from speakerlab.frontend.vad import EnergyVad
from speakerlab.training.precision import without_autotuning

MAX_BATCH_SECONDS = 64  # of audio, unless a single piece is longer
MAX_SECONDS_AT_ONCE = 256  # of batches computed together: an hour in windows takes two


def embed_pieces(
    embedder: Embedder,
    pieces: Sequence[Piece],
    *,
    device: torch.device,
    share: tuple[int, int] = (0, 1),
    stop: Callable[[], bool] = lambda: False,
    progress: bool = False,
    **speed: int,
) -> np.ndarray:
    """Return emb_ND, float32, in the order of `pieces`.

    share: (i, n) computes batches i, i + n, i + 2 n, ... and leaves the other rows zero, so that
    the sum of n shares equals the whole bit for bit.
    stop: called after each batch; once it returns True, the remaining rows stay zero.
    progress: show a bar on a terminal. speed: num_workers and num_threads of `embed_batches`.
    """
    was_training = embedder.training
    emb_ND = np.zeros((len(pieces), embedder.embed_dim), dtype=np.float32)
    batches = list(group_pieces(embedder, pieces))[share[0] :: share[1]]
    bar = tqdm(total=len(pieces), unit=" recordings", disable=None if progress else True)
    with bar, without_autotuning():  # almost every batch has a length of its own
        for rows, emb_BD in embed_batches(embedder, pieces, batches, device=device, **speed):
            emb_ND[rows] = emb_BD
            bar.update(len(rows))
            if stop():
                break
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
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield (indices of pieces, emb_BD) of each batch, in order; sets the embedder to eval mode.

    batches: of `group_pieces`, read slightly ahead. A piece of several windows is read window by
    window, so that an hour needs no more memory than `max_seconds` (with a VAD it is read whole).
    num_threads: batches computed and, without workers, read at a time; does not change the result
    as long as torch itself always uses the same number of threads.
    """
    embedder.eval().to(device)
    on_gpu = device.type == "cuda"
    ahead: deque[tuple[list[int], int]] = deque()  # batches being read, and their windows

    def list_spans() -> Iterator[list[Span]]:
        for rows in batches:
            num_samples = pieces[rows[0]].num_samples
            bounds = [(0, 0)]
            if embedder.vad is None and num_samples > embedder.max_samples:
                bounds = window_bounds(num_samples, max_samples=embedder.max_samples)
            ahead.append((rows, len(bounds)))
            for first, end in bounds:
                yield [(row, first, (end or pieces[row].num_samples) - first) for row in rows]

    dataset, collate = Pieces(pieces), partial(_stack, vad=embedder.vad)

    def embed(waves: list[Tensor]) -> tuple[list[Tensor], Any]:
        shortest = min(wave_BS.shape[1] for wave_BS in waves)
        parts = [wave_BS.to(device, non_blocking=True)[:, :shortest] for wave_BS in waves]
        with torch.inference_mode():
            emb_BD: Tensor = embedder(torch.cat(parts).float().div_(FULL_SCALE))
        each = emb_BD.to("cpu", non_blocking=True).split([len(wave_BS) for wave_BS in waves])
        return list(each), torch.cuda.current_stream(device).record_event() if on_gpu else None

    max_samples = MAX_SECONDS_AT_ONCE * embedder.sample_rate
    if on_gpu or num_workers:
        loader = DataLoader(
            dataset,
            batch_sampler=list_spans(),
            num_workers=num_workers,
            collate_fn=collate,
            worker_init_fn=start_worker,
            pin_memory=on_gpu,
        )
        joined = _join(loader, embedder, max_samples=max_samples)
        found = map(embed, joined if on_gpu else ([wave_BS] for wave_BS in loader))
    else:

        def read_and_embed(spans: list[Span]) -> tuple[list[Tensor], Any]:
            return embed([collate([dataset[span] for span in spans])])

        most = {"num_threads": num_threads, "max_samples": max_samples}
        found = _map_in_order(read_and_embed, list_spans(), **most)
    windows: list[Tensor] = []
    for emb_BD in _one_late(found) if on_gpu else chain.from_iterable(each for each, _ in found):
        windows.append(emb_BD)
        rows, num_windows = ahead[0]
        if len(windows) == num_windows:
            yield rows, mean_of_windows(windows).float().numpy()
            ahead.popleft()
            windows.clear()


def utterance_pieces(manifest: Manifest) -> list[Piece]:
    """Return every utterance of a manifest as one piece."""
    return [Piece(manifest, row, 0, int(size)) for row, size in enumerate(manifest.num_samples_N)]


def group_pieces(embedder: Embedder, pieces: Sequence[Piece]) -> Iterator[list[int]]:
    """Yield batches: indices of pieces that may share a forward pass, longest first."""

    def key(index: int) -> tuple[int, int]:
        return embedder.batch_key(pieces[index].num_samples)

    order = sorted(range(len(pieces)), key=key, reverse=True)
    for _, group in groupby(order, key=key):
        rows = list(group)
        seconds = pieces[rows[0]].num_samples / embedder.sample_rate
        size = 1 if embedder.vad else max(int(MAX_BATCH_SECONDS / seconds), 1)
        yield from (rows[first : first + size] for first in range(0, len(rows), size))


def _join(
    batches: Iterable[Tensor], embedder: Embedder, *, max_samples: int
) -> Iterator[list[Tensor]]:
    """Yield batches that may share a forward pass, of at most `max_samples`, or one batch."""
    for _, alike in groupby(batches, key=lambda wave_BS: embedder.batch_key(wave_BS.shape[1])):
        waves: list[Tensor] = []
        for wave_BS in alike:
            if waves and sum(map(Tensor.numel, (*waves, wave_BS))) > max_samples:
                yield waves
                waves = []
            waves.append(wave_BS)
        yield waves


def _one_late(found: Iterable[tuple[list[Tensor], Any]]) -> Iterator[Tensor]:
    """Yield embeddings on their way from a GPU when the next ones are being computed."""
    before: tuple[list[Tensor], Any] | None = None
    for now in chain(found, [None]):
        if before is not None:
            before[1].synchronize()
            yield from before[0]
        before = now


def _map_in_order(
    work: Callable[[list[Span]], Any],
    batches: Iterable[list[Span]],
    *,
    num_threads: int,
    max_samples: int,
) -> Iterator[Any]:
    """Yield work(spans) in order; the spans in work have at most `max_samples`, or are one's."""
    if num_threads == 1:
        yield from map(work, batches)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[tuple[Future[Any], int]] = deque()
        for spans in batches:
            num_samples = sum(size for _, _, size in spans)
            held = num_samples + sum(size for _, size in waiting)
            while waiting and (len(waiting) > num_threads or held > max_samples):
                future, size = waiting.popleft()
                held -= size
                yield future.result()
            waiting.append((pool.submit(work, spans), num_samples))
        yield from (future.result() for future, _ in waiting)


def _stack(waves: Sequence[np.ndarray], vad: EnergyVad | None) -> Tensor:
    """Return wave_BS, cut to the shortest row: the rows differ by less than a frame."""
    if vad is not None:
        waves = [vad(wave_S) for wave_S in waves]
    shortest = min(len(wave_S) for wave_S in waves)
    return torch.from_numpy(np.stack([wave_S[:shortest] for wave_S in waves]))
