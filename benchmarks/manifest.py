"""A data directory of millions of utterances: time to load it, memory of the parent and of workers.

    python benchmarks/manifest.py [--utterances 10000 100000 1000000 5000000] [--json FILE]

In: tables of utterances that are made up, and an index of shards as packing would write it. Out: a
line and a row for each figure (rows.py), and a table with a column a size; there is no peer.
Seconds are those of the processor, so that other processes do not count. PSS is what a process
holds, memory that is shared divided by those that share it (Linux); of the workers, the most.
"""

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import Figure, growth_lines, lone_row, write_rows
from sides import ROOT, say

sys.path.insert(0, str(ROOT))  # a clone need not be installed

from speakerlab.bench.memory import PeakMemory
from speakerlab.data.columns import read_columns, store_columns
from speakerlab.data.manifest import Manifest, read_manifest, split_valid
from speakerlab.data.packed import Packed
from speakerlab.data.sampler import EpochOrder, MicroBatches
from speakerlab.data.shards import Layout

RATE = 16000
UTTERANCES_PER_SPEAKER = 100
WORKERS = 4
LOOKED_UP = 100_000  # utterances by each worker
MB = 1e6


def write_tables(folder: Path, num_utterances: int, *, each: int = UTTERANCES_PER_SPEAKER) -> None:
    """wav.scp, utt2spk and utt2dur as a corpus like 3D-Speaker's has them."""
    folder.mkdir(parents=True)
    names = [f"{i // each:06d}_dev01_{i:08d}" for i in range(num_utterances)]
    seconds = np.random.default_rng(0).uniform(1.5, 15.0, num_utterances)
    rows = zip(names, seconds)
    with (
        (folder / "wav.scp").open("w") as wavs,
        (folder / "utt2spk").open("w") as speakers,
        (folder / "utt2dur").open("w") as durations,
    ):
        for name, duration in rows:
            wavs.write(f"{name} /corpora/3dspeaker/train/{name[:6]}/{name}.wav\n")
            speakers.write(f"{name} {name[:6]}\n")
            durations.write(f"{name} {duration:.6f}\n")


def write_index(folder: Path) -> None:
    """What packing leaves, but for the shards."""
    columns = read_columns(folder, sample_rate=RATE)
    (folder / "shards").mkdir()
    layout = Layout.of_waves("pcm", sample_rate=RATE)
    ends_N = np.cumsum(2 * columns.num_samples_N + 1024)
    blocks_N = -(-columns.num_samples_N // RATE)
    Packed(
        folder=folder / "shards",
        layout=layout,
        sha256=columns.sha256,
        facts={"codec": "pcm"},
        shards=tuple(f"shard-{i:05d}.tar" for i in range(int(ends_N[-1] >> 30) + 1)),
        ids=columns.ids,
        shard_N=(ends_N >> 30).astype(np.int32),
        start_N=ends_N % (1 << 30),
        num_units_N=columns.num_samples_N,
        block_N=np.concatenate([[0], np.cumsum(blocks_N)]),
        crc_K=np.zeros(int(blocks_N.sum()), dtype=np.uint32),
        block_start_K=np.empty(0, dtype=np.int64),
        block_size_K=np.empty(0, dtype=np.int32),
    ).write()


def memory() -> dict[str, float]:
    """MB of this process: resident, its share of it, and what only it holds."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {name.strip(":"): float(value) for name, value, *_ in map(str.split, rows)}
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return {
        "rss": kilobytes["Rss"] * 1024 / MB,
        "pss": kilobytes["Pss"] * 1024 / MB,
        "private": private * 1024 / MB,
    }


def measure(folder: Path) -> Iterator[Figure]:
    """(name, value, unit) of each figure."""
    gc.collect()
    before = memory()
    started_at = time.process_time()
    manifest = read_manifest([folder], sample_rate=RATE)
    yield "load", time.process_time() - started_at, "s"
    assert manifest.parts[0].waves is not None, "read from shards"
    train, _ = split_valid(manifest, len(manifest.speakers) // 100)
    train.sha256()
    yield "load_split_hash", time.process_time() - started_at, "s"
    del manifest
    started_at = time.process_time()
    order = EpochOrder(train.num_samples_N, crop_samples=3 * RATE, global_batch=256, seed=0)
    rows_P = order.rows(0)
    yield "epoch_order", time.process_time() - started_at, "s"
    middle = order.steps_per_epoch + order.steps_per_epoch // 2
    for name, step in (("first_batch", 0), ("resume_mid_epoch", middle)):
        started_at = time.process_time()
        slots = MicroBatches(order, start_step=step, stop_step=step + 1, micro_batch=64)
        assert len(next(iter(slots))) == 64
        yield f"{name}_slots", time.process_time() - started_at, "s"
    packed = train.parts[0].waves
    assert packed is not None
    started_at = time.process_time()
    assert len(list(packed.cut_short())) == len(packed.shards)  # there are none
    yield "look_at_shards", time.process_time() - started_at, "s"
    after = memory()
    for name in ("rss", "pss", "private"):
        yield f"parent_{name}", after[name] - before[name], "MB"
    held = fork_workers(train, rows_P)
    for name in ("private", "pss"):
        yield f"worker_{name}", max(told[name] for told in held), "MB"


def fork_workers(train: Manifest, rows_P: np.ndarray) -> list[dict[str, float]]:
    """What each of several processes came to hold, all of them alive, by looking up utterances."""
    context = multiprocessing.get_context("fork")
    all_done = context.Barrier(WORKERS)
    told = context.SimpleQueue()
    processes = [
        context.Process(target=worker, args=(train, rows_P[number::WORKERS], all_done, told))
        for number in range(WORKERS)
    ]
    for process in processes:
        process.start()
    held = [told.get() for _ in processes]
    for process in processes:
        process.join()
    return held


def worker(train: Manifest, rows: np.ndarray, all_done: Any, told: Any) -> None:
    """Look up what a loader's worker does, as many as an hour of training might."""
    before = memory()
    packed = train.parts[0].waves
    assert packed is not None
    for row in map(int, rows[:LOOKED_UP]):
        own = int(train.row_N[row])
        blocks = slice(int(packed.block_N[own]), int(packed.block_N[own + 1]))
        assert len(packed.crc_K[blocks]) == -(-int(train.num_samples_N[row]) // RATE)
        assert packed.shards[packed.shard_N[own]] and train.ids[row]
    all_done.wait()
    after = memory()
    all_done.wait()  # nobody leaves while another still measures
    told.put({name: after[name] - before[name] for name in after})


def make(folder: Path, num_utterances: int) -> tuple[float, float]:
    """(seconds, MB) that it took at most to compile the columns, in a process of its own."""
    write_tables(folder, num_utterances)
    made = folder.with_suffix(".made")
    if not (making := os.fork()):
        with PeakMemory(torch.device("cpu")) as peak:
            started_at = time.process_time()
            store_columns(folder, sample_rate=RATE)
            seconds = time.process_time() - started_at
        write_index(folder)
        made.write_text(f"{seconds} {(peak.bytes or 0) / MB}")
        os._exit(0)
    os.waitpid(making, 0)
    seconds, size = map(float, made.read_text().split())
    return seconds, size


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--utterances", type=int, nargs="+", default=[5_000_000])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    found: dict[int, list[Figure]] = {}
    for num_utterances in args.utterances:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "train"
            seconds, size = make(folder, num_utterances)
            made = [("compile", seconds, "s"), ("compile_peak", size, "MB")]
            found[num_utterances] = [*made, *measure(folder)]
        for name, value, unit in found[num_utterances]:
            rows.append(lone_row(f"manifest.{name}.{num_utterances}", value, unit))
            say(f"{rows[-1]['name']:40} {value:10.3f} {unit}")
        write_rows(args.json, rows)
    say("\n".join(["", *growth_lines("utterances", found)]))


if __name__ == "__main__":
    main()
