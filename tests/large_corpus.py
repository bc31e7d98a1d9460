"""A corpus of ten million utterances: how fast it opens, what its workers hold, how fast they read.

    python tests/large_corpus.py SCRATCH --utterances 10000 10000000

Writes synthetic tables, whose recordings are a hundred sparse files, in SCRATCH. Opens them from
text and from the arrays that `speakerlab pack` stores, each in a new process; draws an epoch of
crops of 3 s, and reads micro-batches. `private` is the memory of a data worker that it shares with
no other process, after 400 micro-batches; `PSS` counts shared pages in proportion.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.data.columns import STORED, store_columns
from speakerlab.data.loader import TrainCrops, micro_batches, train_loader
from speakerlab.data.manifest import read_manifest, split_valid
from speakerlab.data.sampler import EpochOrder

RATE = 16000
CROP = 3 * RATE
BATCH = 64
NUM_FILES = 100
LONGEST = 20  # s
UTTERANCES_PER_SPEAKER = 90  # as in VoxBlink2


def write_tables(folder: Path, num_utterances: int) -> None:
    """Write wav.scp, utt2spk and utt2dur as a check would leave them."""
    folder.mkdir(parents=True)
    for number in range(NUM_FILES):
        path = folder / f"{number}.wav"
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.setnframes(LONGEST * RATE)
            file.writeframes(bytes(2 * LONGEST * RATE))
    seconds = np.random.default_rng(0).uniform(3, LONGEST, num_utterances).round(2)
    with (
        (folder / "wav.scp").open("w") as wavs,
        (folder / "utt2spk").open("w") as speakers,
        (folder / "utt2dur").open("w") as durations,
    ):
        for number in range(num_utterances):
            speaker = f"id{number // UTTERANCES_PER_SPEAKER:06d}"
            utterance = f"{speaker}-video{number:08d}-00001"
            wavs.write(f"{utterance} {folder}/{number % NUM_FILES}.wav\n")
            speakers.write(f"{utterance} {speaker}\n")
            durations.write(f"{utterance} {seconds[number]}\n")


def memory_of(process: int | str) -> tuple[float, float]:
    """Return (private, PSS) of a process in MB."""
    counts: dict[str, int] = {}
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, _ = line.split()
        counts[name] = int(value)
    private = counts["Private_Clean:"] + counts["Private_Dirty:"]
    return private / 1e3, counts["Pss:"] / 1e3


def open_tables(folder: Path) -> dict[str, float]:
    began = time.perf_counter()
    read_manifest([folder], sample_rate=RATE)
    seconds = time.perf_counter() - began
    status = Path("/proc/self/status").read_text()
    _, _, peak = status.partition("VmHWM:")
    return {"open, s": seconds, "peak, MB": int(peak.split()[0]) / 1e3}


def read_batches(folder: Path) -> dict[str, float]:
    """Draw epochs and read batches from the stored columns, as a training does."""
    whole = read_manifest([folder], sample_rate=RATE)
    began = time.perf_counter()
    train, _ = split_valid(whole, min(500, len(whole.speakers) // 5))
    figures = {"split, s": time.perf_counter() - began}
    for name, balance in (("order, s", 0.0), ("balanced order, s", 1.0)):
        began = time.perf_counter()
        order = EpochOrder(
            train.num_samples_N,
            crop_samples=CROP,
            global_batch=BATCH,
            seed=0,
            speaker_N=train.speaker_N,
            speaker_balance=balance,
        )
        order.rows(epoch=7)
        figures[name] = time.perf_counter() - began

    speeds = (1.0, 0.9, 1.1)
    num_classes = len(speeds) * len(train.speakers)
    label_KN = np.arange(num_classes).reshape(len(speeds), -1)
    crops = TrainCrops(
        train, {}, crop_samples=CROP, label_KN=label_KN, seed=0, speeds=speeds
    )
    last_step = 7 * order.steps_per_epoch

    began = time.perf_counter()
    slots = micro_batches(
        order, start_step=last_step, stop_step=last_step + 400, micro_batch=BATCH
    )
    batch_slots = next(slots)
    figures["resume, s"] = time.perf_counter() - began
    seconds: list[float] = []
    for batch_slots in slots:
        began = time.perf_counter()
        for slot in batch_slots:
            crops[slot]
        seconds.append(time.perf_counter() - began)
    figures["batch of 64, ms"] = 1e3 * statistics.median(seconds)

    slots = micro_batches(order, start_step=0, stop_step=400, micro_batch=BATCH)
    loader = train_loader(crops, slots, num_workers=2, pin_memory=False)
    for number, _ in enumerate(loader):
        if number == 390:
            workers = multiprocessing.active_children()
            memories = [memory_of(worker.pid or "self") for worker in workers]
            figures["private of a worker, MB"] = max(memory[0] for memory in memories)
            total = sum(memory[1] for memory in memories) + memory_of("self")[1]
            figures["PSS of all, MB"] = total
    return figures


def in_new_process(task: Any, folder: Path) -> dict[str, float]:
    """Run a task in a process without the memory of this one."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        # Not a daemon's child: workers are its own children.
        return pool.apply(_run, (task.__name__, folder))


def _run(name: str, folder: Path) -> dict[str, float]:
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore
    return globals()[name](folder)


def show(title: str, figures: dict[str, float]) -> None:
    parts = [f"{name} {value:.2f}" for name, value in figures.items()]
    sys.stdout.write(f"{title}: {'; '.join(parts)}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="SCRATCH")
    parser.add_argument(
        "--utterances", type=int, nargs="+", default=[10_000, 1_000_000]
    )
    args = parser.parse_args()
    for num_utterances in args.utterances:
        folder = args.folder / str(num_utterances)
        if not folder.exists():
            write_tables(folder, num_utterances)
        show(f"{num_utterances:,} utterances", {})
        if not (folder / STORED).exists():
            text = in_new_process(open_tables, folder)
            show("  from text", text)
            store_columns(folder, sample_rate=RATE)
        for task in (open_tables, read_batches):
            figures = in_new_process(task, folder)
            show("  from arrays", figures)


if __name__ == "__main__":
    main()
