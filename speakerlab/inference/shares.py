"""Chunks of an extraction computed on this host. In: a plan, chunk numbers. Out: a part of each.

A process computes as many batches at a time as it has threads, each batch by one thread, so that
the bits are the same for any number of processes and threads. Chunks are handed out one by one.
Letters: B rows of a batch, D embedding.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from speakerlab.config.embedder import Embedder
from speakerlab.core import process
from speakerlab.data.loader import auto_workers
from speakerlab.inference.batches import embed_batches
from speakerlab.inference.jobs import Extraction
from speakerlab.inference.processes import context, run_workers
from speakerlab.inference.progress import Progress
from speakerlab.training.precision import Card, Precision, card_of, resolve_precision

MAX_THREADS = 8  # of a process; more would wait for Python, not compute


def share_threads(nproc: int) -> int:
    """Take torch's own threads away; how many batches a process may compute at a time instead."""
    share = max(1, process.available_cpus() // nproc)
    num_threads = min(torch.get_num_threads(), share, MAX_THREADS)
    torch.set_num_threads(1)
    return num_threads


def precision_here(asked: str) -> Precision:
    """What fp32, bf16 or auto is on this host; several GPUs go by the least capable.

    A process of its own looks at the GPUs: one that has used a GPU cannot be forked.
    """
    if asked == "fp32":
        return resolve_precision(asked, "cpu")  # the same on any device
    with ProcessPoolExecutor(1, mp_context=context()) as looking:
        cards = looking.submit(_cards_here).result()
    return resolve_precision(asked, "cuda" if cards else "cpu", cards or None)


def _cards_here() -> list[Card]:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [card for device in devices if (card := card_of(device)) is not None]


def embed_left(
    work: Extraction, embedder: Embedder, left: Sequence[int], *, nproc: int, num_threads: int
) -> None:
    """Embed and save the chunks `left`, in this process or in several, and tell how far it is.

    Raises ValueError or OSError with one line where audio cannot be read or a process was ended.
    """
    taken, done = Counter(), Counter()
    bar = Progress(sum(work.num_utterances(number) for number in left), what="utterances")
    count = min(nproc, len(left))
    share = partial(
        embed_share,
        work=work,
        embedder=embedder,
        left=left,
        taken=taken,
        done=done,
        num_threads=num_threads,
        num_workers=auto_workers(nproc),
    )
    if count > 1:
        run_workers(share, count, what="extract: process", tick=lambda: bar.tell(done.value))
    elif count == 1:
        share(0, tick=lambda: bar.tell(done.value))


class Counter:
    """A number that processes count up together."""

    def __init__(self) -> None:
        self._shared: Any = context().Value("q", 0)

    @property
    def value(self) -> int:
        return self._shared.value

    def add(self, more: int) -> int:
        """Add; what it was before."""
        with self._shared.get_lock():
            before = self._shared.value
            self._shared.value = before + more
        return before


def embed_share(
    index: int,
    *,
    work: Extraction,
    embedder: Embedder,
    left: Sequence[int],
    taken: Counter,
    done: Counter,
    num_threads: int,
    num_workers: int,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """What process `index` of a host does: takes chunks until none is left."""

    def numbers() -> Iterator[int]:
        while (place := taken.add(1)) < len(left):
            yield left[place]

    def progress(more: int) -> None:
        done.add(more)
        tick()

    device = torch.device("cpu")
    # On a CPU nothing is read ahead by others: reading is the smallest part.
    how = {"num_threads": num_threads}
    if torch.cuda.is_available():
        device = torch.device("cuda", index % torch.cuda.device_count())
        how = {"num_workers": num_workers}
    embed_chunks(work, embedder, numbers(), device=device, progress=progress, **how)


def embed_chunks(
    work: Extraction,
    embedder: Embedder,
    numbers: Iterator[int],
    *,
    device: torch.device,
    num_workers: int = 0,
    num_threads: int = 1,
    progress: Callable[[int], None] = lambda more: None,
) -> None:
    """Embed and save chunks, asked for one by one; `progress` is told how many utterances more."""
    taken: deque[int] = deque()

    def batches() -> Iterator[list[int]]:
        for number in numbers:
            taken.append(number)
            yield from work.chunks[number]

    found: list[np.ndarray] = []
    for _, emb_BD in embed_batches(
        embedder,
        work.pieces,
        batches(),
        device=device,
        num_workers=num_workers,
        num_threads=num_threads,
    ):
        found.append(emb_BD)
        progress(len(emb_BD))
        if len(found) == len(work.chunks[taken[0]]):
            work.save_part(taken.popleft(), np.concatenate(found))
            found.clear()
