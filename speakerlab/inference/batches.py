"""From recordings to embeddings. In: pieces. Out: emb_ND.

Pieces of equal frame count share a batch, so that nothing is padded and a batch equals its rows.
Where the model leaves out silence, what is left of a piece is embedded alone.
Letters: N pieces, B rows of a batch, S samples, D embedding.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from speakerlab.config.embedder import Embedder
from speakerlab.core.windows import window_bounds
from speakerlab.data.audio import FULL_SCALE
from speakerlab.data.loader import start_worker
from speakerlab.data.manifest import Manifest
from speakerlab.data.pieces import Piece, Pieces, Span, Stretch
from speakerlab.frontend.vad import EnergyVad

MAX_BATCH_SECONDS = 64  # of audio in one forward pass, unless a single piece is longer
MAX_SECONDS_AT_A_TIME = 256  # in the forward passes of all threads: an hour in windows takes two


def embed_pieces(
    embedder: Embedder,
    pieces: Sequence[Piece | Stretch],
    *,
    device: torch.device,
    num_workers: int = 0,
    progress: Callable[[int], None] = lambda done: None,
    share: tuple[int, int] = (0, 1),
    stop: Callable[[], bool] = lambda: False,
) -> np.ndarray:
    """emb_ND, float32, in the order of `pieces`; `progress` is told how many are done.

    stop: asked after each batch; where it says so, the rest stays zero.
    share: (i, n) computes the batches i, i + n, i + 2 n, ... and leaves the other rows zero, so
    that the sum of n shares is the same, bit for bit, as the whole.
    """
    was_training = embedder.training
    emb_ND = np.zeros((len(pieces), embedder.embed_dim), dtype=np.float32)
    batches = list(group_pieces(embedder, pieces))[share[0] :: share[1]]
    done = 0
    for rows, emb_BD in embed_batches(
        embedder, pieces, batches, device=device, num_workers=num_workers
    ):
        emb_ND[rows] = emb_BD
        done += len(rows)
        progress(done)
        if stop():
            break
    embedder.train(was_training)
    return emb_ND


def embed_batches(
    embedder: Embedder,
    pieces: Sequence[Piece | Stretch],
    batches: Iterable[list[int]],
    *,
    device: torch.device,
    num_workers: int = 0,
    num_threads: int = 1,
) -> Iterator[tuple[list[int], np.ndarray]]:
    """(indices of pieces, emb_BD) of each batch, in order; the embedder is left in eval mode.

    batches: of `group_pieces`, asked for a little ahead of what is done. A piece of several windows
    is read window by window, so that an hour takes no more memory than `max_seconds` (with a vad
    it is read whole). num_threads: batches computed at a time; changes no bit of the result as long
    as torch's own threads stay the same.
    """
    embedder.eval().to(device)
    ahead: deque[tuple[list[int], int]] = deque()  # batches being read, and their windows

    def list_spans() -> Iterator[list[Span]]:
        for rows in batches:
            bounds = _bounds(embedder, pieces[rows[0]].num_samples)
            ahead.append((rows, len(bounds) or 1))
            yield from ([(row, a, b - a) for row in rows] for a, b in bounds)
            if not bounds:
                yield [(row, 0, pieces[row].num_samples) for row in rows]

    loader = DataLoader(
        Pieces(pieces),
        batch_sampler=list_spans(),
        num_workers=num_workers,
        collate_fn=partial(_stack, vad=embedder.vad),
        worker_init_fn=start_worker,
    )
    windows: list[Tensor] = []
    for emb_BD in _in_order(
        partial(_embed, embedder, device),
        loader,
        num_threads=num_threads,
        max_samples=MAX_SECONDS_AT_A_TIME * embedder.sample_rate,
    ):
        windows.append(emb_BD)
        rows, num_windows = ahead[0]
        if len(windows) == num_windows:
            mean_BD = windows[0] if num_windows == 1 else torch.stack(windows).mean(dim=0)
            yield rows, mean_BD.float().cpu().numpy()
            ahead.popleft()
            windows.clear()


def _bounds(embedder: Embedder, num_samples: int) -> list[tuple[int, int]]:
    """Of the windows that a piece is read in; none where it is read whole."""
    if embedder.vad is not None or num_samples <= embedder.max_samples:
        return []
    return window_bounds(num_samples, max_samples=embedder.max_samples)


def _embed(embedder: Embedder, device: torch.device, wave_BS: Tensor) -> Tensor:
    with torch.inference_mode():
        return embedder(wave_BS.to(device, non_blocking=True).float().div_(FULL_SCALE))


def _in_order(
    work: Callable[[Tensor], Tensor],
    waves: Iterable[Tensor],
    *,
    num_threads: int,
    max_samples: int,
) -> Iterator[Tensor]:
    """work(wave) of each, several at a time: as many as have `max_samples` together, or one."""
    if num_threads == 1:
        yield from map(work, waves)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[tuple[Future[Tensor], int]] = deque()
        for wave_BS in waves:
            held = wave_BS.numel() + sum(size for _, size in waiting)
            while waiting and (len(waiting) > num_threads or held > max_samples):
                future, size = waiting.popleft()
                held -= size
                yield future.result()
            waiting.append((pool.submit(work, wave_BS), wave_BS.numel()))
        yield from (future.result() for future, _ in waiting)


def utterance_pieces(manifest: Manifest) -> list[Stretch]:
    """Every utterance of a manifest, whole."""
    return [
        Stretch(manifest, row, 0, int(num_samples))
        for row, num_samples in enumerate(manifest.num_samples_N)
    ]


def group_pieces(embedder: Embedder, pieces: Sequence[Piece | Stretch]) -> Iterator[list[int]]:
    """Batches: indices of pieces that may share a forward pass, longest first."""

    def key(index: int) -> tuple[int, int]:
        return embedder.batch_key(pieces[index].num_samples)

    order = sorted(range(len(pieces)), key=key, reverse=True)
    for _, group in groupby(order, key=key):
        rows = list(group)
        seconds = pieces[rows[0]].num_samples / embedder.sample_rate
        size = 1 if embedder.vad else max(int(MAX_BATCH_SECONDS / seconds), 1)
        yield from (rows[first : first + size] for first in range(0, len(rows), size))


def _stack(waves: Sequence[np.ndarray], vad: EnergyVad | None) -> Tensor:
    """wave_BS; the samples beyond the shortest row are less than a frame and reach no feature."""
    if vad is not None:
        waves = [vad(wave_S) for wave_S in waves]
    shortest = min(len(wave_S) for wave_S in waves)
    return torch.from_numpy(np.stack([wave_S[:shortest] for wave_S in waves]))
