"""The processes of this host that compute chunks of an extraction.

Processes are forked before threads or a GPU are used, share the chunks evenly, and die with their
parent. On a CPU, a process computes as many batches at a time as it has threads, each batch with
one thread, so that the bits do not depend on the number of processes and threads.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from speakerlab.config.embedder import Embedder
from speakerlab.core import process
from speakerlab.data.workers import auto_workers, start_worker
from speakerlab.inference.batches import embed_batches
from speakerlab.inference.extraction import Extraction
from speakerlab.training.devices import count_gpus
from speakerlab.training.precision import Card, Precision, card_of, resolve_precision

MAX_THREADS = 8  # of a process; more would wait for Python's lock
SECONDS_PER_UPDATE = 0.5
FORKED = multiprocessing.get_context("fork")


def share_threads(nproc: int) -> int:
    """Set torch to one thread; return how many batches each process may compute at a time."""
    share = max(1, process.available_cpus() // nproc)
    num_threads = min(torch.get_num_threads(), share, MAX_THREADS)
    torch.set_num_threads(1)
    return num_threads


def precision_here(asked: str) -> Precision:
    """Resolve fp32, bf16 or auto on this host; the least capable of several GPUs decides.

    The GPUs are queried in a separate process, because a process that has used one cannot fork;
    one that has already used one queries them itself.
    """
    if asked == "fp32":
        return resolve_precision(asked, "cpu")  # the same on any device
    if torch.cuda.is_initialized():
        cards = _cards()
    else:
        with ProcessPoolExecutor(1, mp_context=FORKED) as pool:
            cards = pool.submit(_cards).result()
    kind = "cuda" if cards else "cpu"
    return resolve_precision(asked, kind, cards or [card_of(torch.device(kind))])


def _cards() -> list[Card | None]:
    return [card_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def embed_chunks(
    work: Extraction, embedder: Embedder, todo: Sequence[int], *, nproc: int, num_threads: int
) -> None:
    """Embed and save the chunks `todo`, in this process or in several, with a progress bar.

    Raises ValueError or OSError with one line if audio cannot be read or a process was killed.
    """
    if not todo:
        return
    count = min(nproc, len(todo))
    shares = [todo[index::count] for index in range(count)]
    total = sum(len(rows) for chunk in todo for rows in work.chunks[chunk])
    embed = partial(_embed_share, work, embedder, shares, num_threads, auto_workers(nproc))
    with tqdm(total=total, unit=" utterances", disable=None) as bar:
        if count == 1:
            for num_embedded in embed(0):
                bar.update(num_embedded)
        else:
            _embed_in_processes(embed, count, bar)


def _embed_in_processes(embed: "Share", count: int, bar: Any) -> None:
    done = FORKED.Value("q", 0)  # utterances
    # What is to do is inherited by the fork, not pickled.
    pool = ProcessPoolExecutor(count, FORKED, _start, (os.getpid(), embed, done))
    running = {pool.submit(_run_share, index) for index in range(count)}
    try:
        while running:
            ended, running = wait(running, SECONDS_PER_UPDATE, FIRST_EXCEPTION)
            bar.update(done.value - bar.n)
            for future in ended:
                future.result()
    except BaseException as error:
        for worker in multiprocessing.active_children():  # the first that fails ends the others
            worker.kill()
        if isinstance(error, BrokenProcessPool):
            raise ValueError(
                f"extract: one of {count} processes was killed, probably for lack of memory; use "
                "fewer processes (--nproc)"
            ) from None
        raise
    finally:
        pool.shutdown()


Share = Callable[[int], Iterator[int]]  # `_embed_share` of a process
_inherited: tuple[Share, Any]  # and the counter of utterances, in a forked process


def _start(parent: int, *inherited: Any) -> None:
    """Prepare a forked process, as a data worker is."""
    global _inherited
    start_worker(0)
    if os.getppid() != parent:  # it died before it was watched
        process.leave(process.EXIT_INPUT)
    _inherited = inherited


def _run_share(index: int) -> None:
    embed, done = _inherited
    for num_embedded in embed(index):
        with done.get_lock():
            done.value += num_embedded


def _embed_share(
    work: Extraction,
    embedder: Embedder,
    shares: Sequence[Sequence[int]],
    num_threads: int,
    num_workers: int,
    index: int,
) -> Iterator[int]:
    """Embed and save the chunks of process `index`; yield how many utterances, batch by batch."""
    batches = (rows for chunk in shares[index] for rows in work.chunks[chunk])
    embed = partial(embed_batches, embedder, work.pieces, batches)
    if num_gpus := count_gpus():
        device = torch.device("cuda", index % num_gpus)
        embedded = embed(device=device, num_workers=num_workers)
    else:  # no workers: each thread reads its own batches
        embedded = embed(device=torch.device("cpu"), num_threads=num_threads)
    for chunk in shares[index]:
        found: list[np.ndarray] = []
        for _, emb_BD in islice(embedded, len(work.chunks[chunk])):
            found.append(emb_BD)
            yield len(emb_BD)
        work.save_part(chunk, np.concatenate(found))
