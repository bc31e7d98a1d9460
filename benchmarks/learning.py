"""EER after the same minutes of training on unseen speakers, beside 3D-Speaker's own training.

    python benchmarks/learning.py --corpus DIR --peer DIR --json FILE   # DIR: a corpus, a checkout
    python benchmarks/learning.py --seeds 1 --json FILE                 # ours, on the mini corpus
    python benchmarks/learning.py --method simclr --json FILE           # ours, without labels
    python benchmarks/learning.py --teacher MODEL --json FILE           # ours, with a teacher

In: a corpus as egs/librispeech takes it, with folders `noise` and `rirs` beside it; a folder of
links to the subsets of several makes them one. Without --corpus, that of egs/mini. Out: a row for
each trial list, `learning.<corpus>[.<list>].<model>`: the median EER over the seeds, its 95 %
interval, the worst EER, the crops of a training and its minutes, those of stage 3 or of
3D-Speaker's train.py.

Ours is the recipe's run.sh, scored with cosine; its schedule is the recipe's and must end within
--minutes. 3D-Speaker's is its CAM++ recipe, fitted to the same minutes (learning_peer.py). Both
have the CPU, one after the other, the same training speakers, noise, rooms and trials; ours alone
may have a GPU. With --method, which trains without labels, and with --teacher, the model is
compared with its own initial weights: they are in the columns of the peer.

A seed that is finished stays in --work, under the commit, minutes and threads it was trained with;
the same command continues after an interruption, and more --seeds add to those that are there.

The intervals are of a bootstrap over speakers, the same in every training, and over seeds: in each
replicate, the median of as many EERs, drawn with replacement, over the drawn speakers' trials.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from sides import FINISHED, ROOT, Process, run_case, run_to_end, say, wants

sys.path.insert(0, str(ROOT))
from facts import version
from rows import Row

from speakerlab.checkpoints import provenance
from speakerlab.core.atomic import locked, write_json
from speakerlab.experiments.evaluate import score_untrained
from speakerlab.experiments.trial_list import TrialList, read_trial_list
from speakerlab.scoring.bootstrap import Replicates, bootstrap
from speakerlab.scoring.metrics import eer
from speakerlab.scoring.score_files import read_scores, write_scores

PEERS = ("3dspeaker",)
UNIT = "EER %"
Found = Mapping[str, Any]  # of a training: minutes, crops
Train = Callable[[Path, int], Found]  # folder, seed


@dataclass(frozen=True)
class Side:
    """A trainer, the folder of its seeds, and where its scores of a trial list are in a seed's."""

    folder: Path
    scores: str  # with {} for the list's name
    train: Train

    def learn(self, seed: int) -> Found:
        """Return what the training of a seed gave, training it if it has not been finished."""
        exp = self.folder / f"s{seed}"
        if not (exp / "learned.json").exists():
            shutil.rmtree(exp, ignore_errors=True)
            write_json(exp / "learned.json", self.train(exp, seed))
        return json.loads((exp / "learned.json").read_text(encoding="utf-8"))

    def draw(
        self, listed: TrialList, num_seeds: int, rng: np.random.Generator
    ) -> tuple[list[float], Replicates]:
        """Return the EER of each seed, in per cent, and replicates of their median."""
        eers, drawn = [], []
        for seed in range(num_seeds):
            path = self.folder / f"s{seed}" / self.scores.format(listed.path.name)
            scores_N = read_scores(path, listed.trials)
            eers.append(100 * eer(scores_N, listed.trials.is_target_N))
            truth = (listed.trials.is_target_N, *listed.speakers)
            drawn.append(bootstrap(scores_N, *truth, p_targets=()))
        eer_SR = 100 * np.stack(
            [seed_replicates.values["eer"] for seed_replicates in drawn]
        )
        eer_SR = np.take_along_axis(
            eer_SR, rng.integers(num_seeds, size=eer_SR.shape), axis=0
        )
        return eers, Replicates(
            {"eer": np.median(eer_SR, axis=0)}, drawn[0].num_speakers
        )


@dataclass(frozen=True, kw_only=True)
class Learned(Row):
    """A row; `ours` and `peer` are medians over the seeds."""

    seeds: int
    ci95: Sequence[float] | None
    worst: float
    minutes: float  # of the longest training
    crops: int
    peer_ci95: Sequence[float] | None = None
    peer_worst: float | None = None
    peer_minutes: float | None = None
    peer_crops: int | None = None
    difference_ci95: Sequence[float] | None = None  # of ours - peer


def compare(options: argparse.Namespace) -> Iterator[Learned]:
    """Train what is not there yet, one seed of each side after the other, and yield the rows."""
    if options.device != "cpu" and options.peers:
        raise SystemExit("--device: both sides train on the CPU; use --device cpu")
    if (options.method or options.teacher) and options.peers:
        raise SystemExit(
            "--method, --teacher: 3D-Speaker's side trains with labels; leave out --peer"
        )
    options.threads = options.threads or torch.get_num_threads()
    name = "mini" if options.corpus is None else options.corpus.absolute().name
    folder = options.work.resolve() / name
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        sides = [our_side(options, folder)]
        sides += [peer_side(options, folder, root) for root in options.peers.values()]
        if options.method or options.teacher:
            sides.append(untrained_side(sides[0], folder / "data/test"))
        results = learn(sides, options.seeds)
    lists = sorted((folder / "data/test").glob("trials*"))
    for path in lists:
        name_parts = ["learning", name]
        if len(lists) > 1:
            name_parts.append(path.name.removeprefix("trials_"))
        name_parts += label(options)
        name_parts += [f"peer:{setting}" for setting in options.peer_set]
        row = row_of(".".join(name_parts), read_trial_list(path), sides, results)
        if wants(options, row.name):
            say(row.line())
            yield row


def label(options: argparse.Namespace) -> list[str]:
    """Return our part of a row's name: model, method, and settings that are not the recipe's."""
    methods = [options.method] if options.method else []
    if options.teacher:
        methods = ["distil", Path(options.teacher).name]
    return [options.model, *methods, *options.set]


def learn(sides: Sequence[Side], num_seeds: int) -> list[list[Found]]:
    """Return what each side found with each seed."""
    results: list[list[Found]] = [[] for _ in sides]
    for seed in range(num_seeds):
        for side, side_results in zip(sides, results):
            side_results.append(side.learn(seed))
            say(
                f"{side.folder}, seed {seed}: {side_results[-1]['minutes']:.1f} minutes"
            )
    return results


def row_of(
    name: str,
    listed: TrialList,
    sides: Sequence[Side],
    results: Sequence[Sequence[Found]],
) -> Learned:
    """Return the row of a trial list."""
    values: dict[str, Any] = {}
    drawn = []
    rng = np.random.default_rng(0)
    for side, side_results, prefix in zip(sides, results, ("", "peer_")):
        eers, replicates = side.draw(listed, len(side_results), rng)
        drawn.append(replicates)
        values |= {
            prefix.rstrip("_") or "ours": float(np.median(eers)),
            f"{prefix}worst": max(eers),
            f"{prefix}ci95": replicates.interval("eer"),
            f"{prefix}minutes": max(result["minutes"] for result in side_results),
            f"{prefix}crops": side_results[0]["crops"],
        }
    if "peer" in values:
        values["difference_ci95"] = drawn[0].paired(drawn[1], "eer")[0]
        values["ratio"] = values["ours"] / values["peer"] if values["peer"] else None
    return Learned(name=name, unit=UNIT, seeds=len(results[0]), **values)


def folder_of(options: argparse.Namespace, folder: Path, *parts: str) -> Path:
    """Return the folder of a side's seeds, named by all that its result depends on."""
    where = f"{options.threads}threads" if options.device == "cpu" else options.device
    return folder.joinpath(*parts, f"{options.minutes:g}min-{where}")


def our_side(options: argparse.Namespace, folder: Path) -> Side:
    """Prepare the data directories; return the recipe's training."""
    recipe = "mini" if options.corpus is None else "librispeech"
    gpus = "" if options.device == "cpu" else "0"
    run_sh = ["bash", ROOT / f"egs/{recipe}/run.sh", "--data", folder / "data"]
    run_sh += ["--gpus", gpus, "--model", options.model]
    if options.method:
        run_sh += ["--task", "ssl", "--method", options.method]
    if options.teacher:
        run_sh += ["--task", "distil", "--teacher", options.teacher]

    prepare = [*run_sh, "--stop-stage", 2]
    if options.corpus is not None:
        corpus = options.corpus.absolute()
        noise, rirs = (corpus.parent / name for name in ("noise", "rirs"))
        for path in (noise, rirs):
            if not path.is_dir():
                raise SystemExit(
                    f"--corpus: no folder {path}; put noises and rooms beside it"
                )
        prepare += ["--corpus", corpus, "--noise", noise, "--rirs", rirs]
    run_recipe(prepare, folder / "data.log", options.threads)

    def train(exp: Path, seed: int) -> Found:
        log = exp.with_suffix(".log")
        stages = [*run_sh, "--exp", exp, "--seed", seed]
        if options.set:
            stages += ["--set", *options.set]

        # Only stage 3, the training, is timed; stage 5 scores.
        began = time.perf_counter()
        training = [*stages, "--stage", 3, "--stop-stage", 3]
        run_recipe(training, log, options.threads, minutes=options.minutes)
        minutes = (time.perf_counter() - began) / 60
        run_recipe([*stages, "--stage", 5], log, options.threads)

        card = json.loads((exp / "model/card.json").read_text(encoding="utf-8"))
        config = yaml.safe_load((exp / "config.yaml").read_text(encoding="utf-8"))
        crops = card["steps"] * config["training"]["global_batch"]
        return {"minutes": minutes, "crops": crops}

    parts = ("ours", provenance.commit(), *label(options))
    return Side(folder_of(options, folder, *parts), "scores/test_{}.txt", train)


def untrained_side(ours: Side, data_dir: Path) -> Side:
    """Return the initial weights of our trainings, which stage 5 embedded."""

    def train(exp: Path, seed: int) -> Found:
        for path in sorted(data_dir.glob("trials*")):
            listed = read_trial_list(path)
            scores_N = score_untrained(ours.folder / f"s{seed}", listed)
            assert scores_N is not None, path
            write_scores(exp / f"scores/{path.name}.score", listed.trials, scores_N)
        return {"minutes": 0.0, "crops": 0}

    return Side(ours.folder / "untrained", "scores/{}.score", train)


def run_recipe(
    command: Sequence[object], log: Path, threads: int, *, minutes: float | None = None
) -> None:
    """Run stages of a recipe, appending what they print to `log`."""
    seconds = minutes and 60 * minutes
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        ending = run_to_end(command, threads=threads, seconds=seconds, log=file)
    if ending != FINISHED:
        limit = f" (--minutes {minutes:g})" if minutes else ""
        raise SystemExit(f"run.sh: {ending}{limit}; see {log}")


def peer_side(options: argparse.Namespace, folder: Path, root: Path) -> Side:
    """Return 3D-Speaker's training, with a schedule that fits the minutes."""
    pairs = (setting.partition("=") for setting in options.peer_set)
    settings = {key: yaml.safe_load(value) for key, _, value in pairs}
    side_options = {"folder": str(folder / "data"), "settings": settings}
    trials = [str(path) for path in sorted((folder / "data/test").glob("trials*"))]
    seeds = folder_of(options, folder, "3dspeaker", version(root), *options.peer_set)

    def ask(method: str, /, **order: Any) -> Any:
        process = Process(
            "learning_peer", "3dspeaker", root, threads=options.threads, **side_options
        )
        try:
            return process.ask(method, **order)
        finally:
            process.close()

    def train(exp: Path, seed: int) -> Found:
        schedule = seeds / "schedule.json"
        if not schedule.exists():
            probe = seeds / "probe"
            shutil.rmtree(probe, ignore_errors=True)
            epochs = ask("probe", exp=probe, minutes=options.minutes)
            write_json(schedule, {"epochs": epochs})
        epochs = json.loads(schedule.read_text(encoding="utf-8"))["epochs"]
        return ask("run", exp=exp, seed=seed, epochs=epochs, trials=trials)

    return Side(seeds, "scores/{}.score", train)


def add_options(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    layout = "in the LibriSpeech layout (egs/mini's)"
    add("--corpus", type=Path, metavar="DIR", help=layout)
    models = "ours, one of conf/*.yaml (campplus_tiny)"
    add("--model", default="campplus_tiny", help=models)
    add("--method", help="train without labels: one of conf/ssl/*.yaml")
    teacher = "learn from this experiment, model folder, hub:NAME or .onnx file"
    add("--teacher", metavar="MODEL", help=teacher)
    add("--seeds", type=int, default=5, help="0 to this less one (5)")
    add("--minutes", type=float, default=10.0, help="of each training (10)")
    work = ROOT / "exp/learning"
    add("--work", type=Path, default=work, help="finished seeds (exp/learning)")
    ours = "of run.sh; part of the name"
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help=ours)
    peer = "of 3D-Speaker's configuration; part of the name"
    add("--peer-set", nargs="+", default=[], metavar="KEY=VALUE", help=peer)


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
