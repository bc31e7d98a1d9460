"""Memory and time against speakers, and against what stage 1 checks and stage 6 scores.

    python benchmarks/growth.py [--what head start validation ...] [--sizes N ...] [--json FILE]

In: made-up tables, weights and scores. Out: a line and a row for each figure (rows.py),
and a table for each of --what; there is no peer. Each runs in a process of its own, whose peak is
told.

- head: a step of an AAM-softmax head of N classes alone, forward, backward and update, whole and
  by blocks as one of 1 or 8 ranks has it; --rows crops a rank, embeddings of 192, one thread.
- start: N speakers of 2 utterances at three speeds: split, names and labels of classes, the files
  of a published head, a checkpoint of it, validation's list; the head has a row for each speaker.
- validation: all pairs of 10 embeddings of each of N / 100 speakers, which are held out of N.
- check: `speakerlab check` of N recordings (all of them the same file).
- trials: N trials between 5,000 and 5,000 recordings read, scored, and their EER.

Seconds are those of the processor. Letters: B rows, D embedding, M embeddings, N trials.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from manifest import RATE, write_tables
from rows import Figure, growth_lines, lone_row, write_rows
from scaling_worker import Pretended
from sides import say

from speakerlab.bench.memory import PeakMemory
from speakerlab.checkpoints.published import write_tensors
from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.columns import store_columns
from speakerlab.data.dataset import class_names, labels_by_name
from speakerlab.data.manifest import read_manifest, split_valid
from speakerlab.losses.head import Head
from speakerlab.losses.margin import AAMSoftmax
from speakerlab.losses.sharded import ShardedHead
from speakerlab.scoring.backend import dot_scores, pairwise_eer
from speakerlab.scoring.metrics import eer
from speakerlab.scoring.trials import read_trials
from speakerlab.training import checkpoint
from speakerlab.training.optim import OPTIMIZERS
from speakerlab.training.update import make_momentum

SIZES = {
    "head": [1_000, 10_000, 100_000, 1_000_000],
    "start": [1_000, 10_000, 100_000, 1_000_000],
    "validation": [10_000, 30_000, 100_000],
    "check": [10_000, 100_000],
    "trials": [1_000_000, 10_000_000],
}
MB = 1e6
EMBED_DIM = 192
SPEEDS = (1.0, 0.9, 1.1)
SPLIT_OVER = (1, 8)
SIDE = 5_000  # recordings on either side of the trials
STEPS = 3


@contextmanager
def timed(name: str, figures: list[Figure]) -> Iterator[None]:
    """Add the seconds of what is within."""
    began = time.process_time()
    yield
    figures.append((name, time.process_time() - began, "s"))


def measure_head(num_classes: int, *, rows: int, folder: Path) -> list[Figure]:
    del folder
    torch.set_num_threads(1)
    figures: list[Figure] = []
    make = partial(AAMSoftmax, embed_dim=EMBED_DIM)
    run_head(make(num_classes=10), rows)  # what is loaded once is loaded
    whole = partial(make, num_classes=num_classes)
    builds: dict[str, Callable[[], Head]] = {
        "whole": whole,
        **{
            f"one_of_{world_size}": partial(ShardedHead, whole, shards=Pretended(world_size))
            for world_size in SPLIT_OVER
        },
    }
    for name, build in builds.items():
        with PeakMemory(torch.device("cpu")) as peak:
            seconds = run_head(build(), rows)
        figures.append((f"{name}_step", seconds, "s"))
        figures.append((f"{name}_peak", (peak.bytes or 0) / MB, "MB"))
    return figures


def run_head(head: Head, rows: int) -> float:
    """Seconds of the fastest of a few steps."""
    optimizer = OPTIMIZERS["sgd"](head.parameters(), lr=0.1, momentum=0.9)
    make_momentum(optimizer)
    emb_BD = torch.randn(rows, EMBED_DIM, requires_grad=True)
    label_B = torch.arange(rows) % len(head.weight_CD)
    seconds = []
    for _ in range(STEPS):
        began = time.process_time()
        head(emb_BD, label_B, 0.2)[0].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.process_time() - began)
    return min(seconds)


def measure_start(num_speakers: int, *, rows: int, folder: Path) -> list[Figure]:
    del rows
    figures: list[Figure] = []
    data = folder / "train"
    write_tables(data, 2 * num_speakers, each=2)
    store_columns(data, sample_rate=RATE)
    with timed("read_manifest", figures):
        whole = read_manifest([data], sample_rate=RATE)
    with timed("split_valid", figures):
        train, valid = split_valid(whole, num_speakers // 100)
    with timed("class_names_and_labels", figures):
        names = class_names(train.speakers, SPEEDS)
        label_KN = labels_by_name(names, train.speakers, SPEEDS)
    assert label_KN.max() == len(names) - 1
    with timed("rows_of_each_valid_speaker", figures):
        for speaker in range(len(valid.speakers)):
            np.flatnonzero(valid.speaker_N == speaker)
    weight_CD = torch.zeros(num_speakers, EMBED_DIM)
    with PeakMemory(torch.device("cpu")) as peak, timed("publish", figures):
        write_tensors(folder / "head.safetensors", {"weight_CD": weight_CD})
        (folder / "speakers.txt").write_text("".join(f"{name}\n" for name in names))
    figures.append(("publish_peak", (peak.bytes or 0) / MB, "MB"))
    for name in ("head.safetensors", "speakers.txt"):
        figures.append((name, (folder / name).stat().st_size / MB, "MB"))
    state = {"head": weight_CD, "momentum": weight_CD.clone(), "classes": names}
    with PeakMemory(torch.device("cpu")) as peak:
        with timed("checkpoint_copied", figures):  # the training waits for this
            copied = checkpoint.snapshot(state)
        with timed("checkpoint_written", figures):
            checkpoint.write_tensors(folder / "state.pt", copied)
    figures.append(("checkpoint_peak", (peak.bytes or 0) / MB, "MB"))
    figures.append(("checkpoint", (folder / "state.pt").stat().st_size / MB, "MB"))
    with timed("checkpoint_loaded", figures):
        checkpoint.load_state((folder / "state.pt").read_bytes())
    return figures


def measure_validation(num_speakers: int, *, rows: int, folder: Path) -> list[Figure]:
    del rows, folder
    figures = list[Figure]()
    speaker_M = np.repeat(np.arange(num_speakers // 100), 10)
    emb_MD = np.random.default_rng(0).standard_normal((len(speaker_M), EMBED_DIM), dtype=np.float32)
    with PeakMemory(torch.device("cpu")) as peak, timed("pairwise_eer", figures):
        pairwise_eer(emb_MD, speaker_M)
    return [*figures, ("pairwise_eer_peak", (peak.bytes or 0) / MB, "MB")]


def measure_check(num_recordings: int, *, rows: int, folder: Path) -> list[Figure]:
    del rows
    data, figures = folder / "train", list[Figure]()
    write_tables(data, num_recordings)
    (data / "utt2dur").unlink()
    audio.write(folder / "a.wav", np.zeros(RATE, dtype=np.int16), RATE)
    names = [line.split()[0] for line in (data / "wav.scp").open()]
    (data / "wav.scp").write_text("".join(f"{name} {folder}/a.wav\n" for name in names))
    with PeakMemory(torch.device("cpu")) as peak, timed("check", figures):
        check_data_dirs([data])
    return [*figures, ("check_peak", (peak.bytes or 0) / MB, "MB")]


def measure_trials(num_trials: int, *, rows: int, folder: Path) -> list[Figure]:
    del rows
    rng, figures = np.random.default_rng(0), list[Figure]()
    cells = rng.choice(SIDE**2, num_trials, replace=False)
    truth = ("nontarget", "target")
    with (folder / "trials").open("w") as file:
        for cell in cells.tolist():
            file.write(f"e{cell // SIDE:05d} t{cell % SIDE:05d} {truth[cell % 50 == 0]}\n")
    with PeakMemory(torch.device("cpu")) as peak, timed("read", figures):
        trials = read_trials(folder / "trials")
    figures.append(("read_peak", (peak.bytes or 0) / MB, "MB"))
    enrol_ED, test_TD = (
        rng.standard_normal((len(ids), EMBED_DIM), dtype=np.float32)
        for ids in (trials.enrol_ids, trials.test_ids)
    )
    with PeakMemory(torch.device("cpu")) as peak:
        with timed("score", figures):
            scores_N = dot_scores(enrol_ED, test_TD, trials)
        with timed("eer", figures):
            eer(scores_N, trials.is_target_N)
    return [*figures, ("score_and_eer_peak", (peak.bytes or 0) / MB, "MB")]


MEASURES: dict[str, Callable[..., list[Figure]]] = {
    "head": measure_head,
    "start": measure_start,
    "validation": measure_validation,
    "check": measure_check,
    "trials": measure_trials,
}


def alone(what: str, size: int, rows: int) -> list[Figure]:
    """The figures, made by a process of their own."""
    with tempfile.TemporaryDirectory() as scratch:
        told = Path(scratch) / "figures.json"
        if not (child := os.fork()):
            code = 1
            try:
                found = MEASURES[what](size, rows=rows, folder=Path(scratch))
                told.write_text(json.dumps(found))
                code = 0
            finally:
                os._exit(code)
        os.waitpid(child, 0)
        if not told.exists():
            raise SystemExit(f"growth: {what} of {size} did not end well; is there enough memory?")
        return [(name, value, unit) for name, value, unit in json.loads(told.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--what", nargs="+", default=list(MEASURES), choices=list(MEASURES))
    parser.add_argument("--sizes", nargs="+", type=int, help="the same for all of --what")
    parser.add_argument("--rows", type=int, default=16, help="crops of a rank")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    for what in options.what:
        found: dict[int, list[Figure]] = {}
        for size in options.sizes or SIZES[what]:
            found[size] = alone(what, size, options.rows)
            for name, value, unit in found[size]:
                rows.append(lone_row(f"growth.{what}.{size}.{name}", value, unit))
                say(f"{rows[-1]['name']:56s} {value:10.3f} {unit}")
            write_rows(options.json, rows)  # memory may end at the next size
        say("\n".join(["", *growth_lines(what, found), ""]))


if __name__ == "__main__":
    main()
