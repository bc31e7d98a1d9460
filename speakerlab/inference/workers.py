"""Worker processes of this host, which compute chunks of an extraction.

Processes are forked before threads or a GPU are used, share the chunks evenly, and die with their
parent. Elsewhere than on Linux, a single process does the work. On a CPU, a process computes as
many batches at a time as it has threads, each batch with one thread, so that the bits do not depend
on the number of processes and threads.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from speakerlab.core import ctrl_c, process, system
from speakerlab.core.bars import progress_bar
from speakerlab.data.workers import auto_workers, start_worker
from speakerlab.embedder import Embedder
from speakerlab.inference.batches import embed_batches
from speakerlab.inference.extraction import Extraction
from speakerlab.training.devices import check_kernels, count_gpus
from speakerlab.training.precision import (
    Card,
    Precision,
    card_of,
    resolve_precision,
)

MAX_THREADS = 8  # of a process; more threads would wait for the GIL
SECONDS_PER_UPDATE = 0.5
CONTEXT = multiprocessing.get_context(system.START_METHOD)


def share_threads(nproc: int, wanted: int | str = "auto") -> int:
    """Set torch to one thread; return how many batches each process may compute at a time.

    wanted: the model's runtime.num_threads; "auto" for as many threads as torch has.
    """
    cpu_share = max(1, system.available_cpus() // nproc)
    wanted_threads = torch.get_num_threads()
    if isinstance(wanted, int):
        wanted_threads = wanted
    num_threads = min(wanted_threads, cpu_share, MAX_THREADS)
    # torch itself uses one thread: with more, the order of its sums depends on their number.
    torch.set_num_threads(1)
    return num_threads


@contextmanager
def sharing_threads() -> Iterator[int]:
    """Within the block, torch has one thread; yield how many batches may be computed at a time."""
    num_threads_before = torch.get_num_threads()
    try:
        yield share_threads(nproc=1, wanted=num_threads_before)
    finally:
        torch.set_num_threads(num_threads_before)


def precision_here(precision: str) -> Precision:
    """Resolve fp32, bf16 or auto on this host; the least capable of several GPUs decides.

    The GPUs are queried in a separate process, because a process that has used a GPU cannot fork.
    If this process has already used a GPU, or never forks, it queries them itself.
    """
    if precision == "fp32":
        return resolve_precision(precision, "cpu")  # the same on any device
    if torch.cuda.is_initialized() or not system.IS_LINUX:
        cards = _cards()
    else:
        with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
            cards = pool.submit(_cards).result()
    if cards:
        return resolve_precision(precision, "cuda", cards)
    cpu = torch.device("cpu")
    return resolve_precision(precision, "cpu", [card_of(cpu)])


def _cards() -> list[Card | None]:
    cards: list[Card | None] = []
    for index in range(count_gpus()):
        gpu = torch.device("cuda", index)
        cards.append(card_of(gpu))
    return cards


def embed_chunks(
    work: Extraction,
    embedder: Embedder,
    todo: Sequence[int],
    *,
    nproc: int,
    num_threads: int,
) -> int:
    """Embed and save the chunks `todo`, in this process or in several, with a progress bar.

    Returns the number of their utterances whose levels no speech has.
    Raises ValueError or OSError with one line if audio cannot be read or a process was killed.
    """
    if not todo:
        return 0
    if nproc > 1 and not system.IS_LINUX:
        raise ValueError(
            f"--nproc: {nproc} processes, but extracting with more than one"
            f" {system.LINUX_ONLY}; leave --nproc out"
        )
    num_processes = min(nproc, len(todo))
    shares = [todo[index::num_processes] for index in range(num_processes)]
    num_utterances = 0
    for chunk in todo:
        for rows in work.chunks[chunk]:
            num_utterances += len(rows)
    num_doubtful = CONTEXT.Value("q", 0)
    embed_share = partial(
        _embed_share,
        work=work,
        embedder=embedder,
        shares=shares,
        num_threads=num_threads,
        num_workers=auto_workers(nproc),
        num_doubtful=num_doubtful,
    )
    with progress_bar(total=num_utterances, unit="utterances") as bar:
        if num_processes == 1:
            for num_embedded in embed_share(0):
                bar.update(num_embedded)
        else:
            _embed_in_processes(embed_share, num_processes, bar)
    return num_doubtful.value


# Embeds the share of the process with this index; yields the size of each finished batch.
EmbedShare = Callable[[int], Iterator[int]]


def _embed_in_processes(embed_share: EmbedShare, num_processes: int, bar: Any) -> None:
    """Embed each share in a process of its own; move the bar."""
    num_embedded = CONTEXT.Value("q", 0)  # utterances, of all processes
    # The fork inherits the model and the data; nothing is pickled.
    parent = os.getpid()
    pool = ProcessPoolExecutor(
        num_processes,
        mp_context=CONTEXT,
        initializer=_start,
        initargs=(parent, embed_share, num_embedded),
    )
    try:
        with ctrl_c.hold_ctrl_c():
            running = {pool.submit(_run_share, index) for index in range(num_processes)}
        while running:
            ended, running = wait(
                running,
                timeout=SECONDS_PER_UPDATE,
                return_when=FIRST_EXCEPTION,
            )
            # The workers count; only this process draws the bar.
            bar.update(num_embedded.value - bar.n)
            # `result` raises the error of a worker.
            for future in ended:
                future.result()
    except BaseException as error:
        # After the first failure, kill the other workers.
        for worker in multiprocessing.active_children():
            worker.kill()
        if isinstance(error, BrokenProcessPool):
            raise ValueError(
                f"extract: one of {num_processes} processes was killed, probably for lack of"
                " memory; use fewer processes (--nproc)"
            ) from None
        raise
    finally:
        pool.shutdown()


# In a forked process: the function, and the counter of utterances.
_inherited: tuple[EmbedShare, Any]


def _start(parent: int, embed_share: EmbedShare, num_embedded: Any) -> None:
    """Prepare a forked process in the same way as a data worker."""
    global _inherited
    start_worker(0)  # each process may warn, as the first data worker does
    if os.getppid() != parent:  # the parent died before `start_worker` watched it
        process.leave(process.EXIT_INPUT)
    _inherited = (embed_share, num_embedded)


def _run_share(index: int) -> None:
    """Embed the share of a forked process; count its utterances."""
    embed_share, num_embedded = _inherited
    for batch_size in embed_share(index):
        with num_embedded.get_lock():
            num_embedded.value += batch_size


def _embed_share(
    index: int,
    *,
    work: Extraction,
    embedder: Embedder,
    shares: Sequence[Sequence[int]],
    num_threads: int,
    num_workers: int,
    num_doubtful: Any,
) -> Iterator[int]:
    """Embed and save the chunks of process `index`; yield the size of each finished batch."""
    # All chunks in one stream of batches: reading continues from one chunk to the next.
    chunks = shares[index]
    batches = chain.from_iterable(work.chunks[chunk] for chunk in chunks)
    embed = partial(
        embed_batches,
        embedder,
        work.pieces,
        batches,
        num_doubtful=num_doubtful,
    )
    num_gpus = count_gpus()
    if num_gpus > 0:
        gpu_number = index % num_gpus
        check_kernels(gpu_number)
        device = torch.device("cuda", gpu_number)
        embedded = embed(device=device, num_workers=num_workers)
    else:
        # No workers: each thread reads its own batches.
        device = torch.device("cpu")
        embedded = embed(device=device, num_threads=num_threads)

    for chunk in chunks:
        embeddings: list[np.ndarray] = []
        num_batches = len(work.chunks[chunk])
        for _, emb_BD in islice(embedded, num_batches):
            embeddings.append(emb_BD)
            yield len(emb_BD)
        work.save_part(chunk, np.concatenate(embeddings))
