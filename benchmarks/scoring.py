"""Scoring: trials a second beside the peers' own loops, and the time of the metrics.

    python benchmarks/scoring.py --peer DIR [DIR] --json FILE  # checkouts of 3D-Speaker, WeSpeaker

In: synthetic embeddings, every pair of an enrolment and a test (by default CN-Celeb's 196 x
17,777). Out: rows; beside WeSpeaker they end in `.wespeaker`.

`score.cosine` is from embeddings and trials in memory to scores in memory on our side;
`score.cosine_with_files` also reads the list and writes the scores. On the peer's side both are its
own loop over the trials, which parses each line of the list, computes one cosine and writes one
line: the three cannot be separated there. Peers take a part of the list, drawn from all of it, and
must give the same scores first. Replaced in the peers, and not timed: kaldiio, tqdm, fire.

`score.eer_min_dcf` is both metrics of the whole list. EER and minDCF must be equal on random scores
without ties first; with ties and at the ends of the curve the peers are wrong (RESULTS.md).

Letters: E enrolments, T tests, N trials or table rows, D dimensions, K thresholds.
"""

import argparse
import contextlib
import importlib.util
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from sides import (
    Process,
    close_sides,
    import_peer,
    replace_module,
    report,
    require_close,
    run_case,
    say,
    start_sides,
    suffix,
    timed,
    wants,
)

PEERS = ("3dspeaker", "wespeaker")
QUICK = ("--turns=3", "--repeats=2")
LOOPS = {
    "3dspeaker": "speakerlab.bin.compute_score_metrics",
    "wespeaker": "wespeaker.bin.score",
}
SCORE_AT = {"3dspeaker": 3, "wespeaker": 2}  # column of the peer's score file
WRITTEN = 5e-6  # the peers write five decimals
CLOSE = 1e-9  # two metrics that are the same but for rounding
NUM_RANDOM = 2000  # trials
SHA256 = "0" * 64  # of no model
# Of a speaker's utterances, where speakers spread by 1: an EER of some per cent.
SPREAD = 5.0


class Ours:
    """What a trial list goes through in our package."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def make(self, *, enrol: int, test: int, dim: int, head: int) -> int:
        """Write speakers as points with utterances around them; return the number of trials."""
        from speakerlab.scoring.embeddings import EmbeddingTable

        rng = np.random.default_rng(0)
        speaker_ED = rng.standard_normal((enrol, dim), np.float32)
        spoken_by_T = [i % enrol for i in range(test)]
        test_TD = speaker_ED[spoken_by_T] + SPREAD * rng.standard_normal(
            (test, dim), np.float32
        )
        enrol_ED = speaker_ED + rng.standard_normal((enrol, dim), np.float32)
        enrol_ids = [f"id{speaker:05d}-enroll" for speaker in range(enrol)]
        test_ids = [f"id{speaker:05d}-{i:07d}" for i, speaker in enumerate(spoken_by_T)]
        emb_ND = np.concatenate([enrol_ED, test_TD])
        EmbeddingTable(enrol_ids + test_ids, emb_ND, SHA256).save(self.folder / "all")
        (self.folder / "arks").mkdir()
        (
            self.folder / "arks/all.ark"
        ).touch()  # the peer finds this name and reads our table
        for ending in (".npy", ".ids"):
            (self.folder / f"arks/all{ending}").symlink_to(self.folder / f"all{ending}")
        rows = [
            f"{enrol_id} {test_id}"
            f" {'target' if speaker == spoken_by else 'nontarget'}\n"
            for speaker, enrol_id in enumerate(enrol_ids)
            for spoken_by, test_id in zip(spoken_by_T, test_ids)
        ]
        for name, chosen in (
            ("trials", rows),
            ("head", rows[:: max(1, len(rows) // head)][:head]),
        ):
            (self.folder / name).write_text("".join(chosen), encoding="utf-8")
        return len(rows)

    @cached_property
    def table(self) -> Any:
        from speakerlab.scoring.embeddings import EmbeddingTable

        return EmbeddingTable.load(self.folder / "all")

    @cached_property
    def trials(self) -> Any:
        return self._read("trials")

    @cached_property
    def scores_N(self) -> np.ndarray:
        return self._score(self.trials)

    def _read(self, name: str) -> Any:
        from speakerlab.scoring.trials import read_trials

        return read_trials(self.folder / name)

    def _score(self, trials: Any) -> np.ndarray:
        from speakerlab.scoring.chain import build_chain

        return (
            build_chain("cosine", None).score(self.table, self.table, trials).scores_N
        )

    def with_files(self, name: str = "trials") -> None:
        """Score a list on disk to scores on disk."""
        from speakerlab.scoring.score_files import write_scores

        trials = self._read(name)
        write_scores(self.folder / f"{name}.ours", trials, self._score(trials))

    def load(self) -> None:
        """Read, and import, what is not timed."""
        assert len(self.trials) == len(self._score(self.trials))

    def cosine(self) -> float:
        return timed(lambda: self._score(self.trials))

    def cosine_with_files(self) -> float:
        return timed(self.with_files)

    def rates(self, path: str) -> dict[str, float]:
        """Return EER and minDCF of scores in a file, and the seconds that both took."""
        from speakerlab.scoring.metrics import (
            eer_of_points,
            min_dcf_of_points,
            operating_points,
        )

        with np.load(path) as arrays:
            scores_N, is_target_N = arrays["scores"], arrays["is_target"]
        start = time.perf_counter()
        miss_K, fa_K, _ = operating_points(scores_N, is_target_N)
        metrics = (
            eer_of_points(miss_K, fa_K),
            min_dcf_of_points(miss_K, fa_K, p_target=0.01),
        )
        seconds = time.perf_counter() - start
        return {"eer": metrics[0], "min_dcf": metrics[1], "seconds": seconds}

    def save(self, path: str) -> None:
        """Write the scores of all trials, as `rates` reads them."""
        np.savez(path, scores=self.scores_N, is_target=self.trials.is_target_N)


class Clock:
    """Replaces tqdm: passes lines on and notes how long the loop over them takes."""

    seconds = 0.0

    def __call__(self, lines: Iterable[str], **_: Any) -> Iterator[str]:
        start = time.perf_counter()
        yield from lines
        self.seconds = time.perf_counter() - start


class Peer:
    """3D-Speaker or WeSpeaker: its own loop, timed from its first trial to its last."""

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.folder, self.clock = name, Path(folder), Clock()
        replace_modules(self.clock)
        logging.disable()  # its metrics of each turn
        self.module = import_peer(LOOPS[name])
        self.metrics = import_peer(
            LOOPS[name].partition(".")[0] + ".utils.score_metrics"
        )

    def loop(self) -> float:
        """Score the list `head`; return the seconds of the loop alone."""
        out, trials = self.folder / self.name, self.folder / "head"
        out.mkdir(exist_ok=True)
        if self.name == "wespeaker":
            self.module.trials_cosine_score(
                str(self.folder / "all"), str(out), None, [str(trials)]
            )
        else:
            tables = [
                f"--{kind}_data={self.folder / 'arks'}" for kind in ("enrol", "test")
            ]
            sys.argv = ["", *tables, f"--scores_dir={out}", f"--trials={trials}"]
            self.module.main()
        return self.clock.seconds

    def rates(self, path: str) -> dict[str, float]:
        """Return EER and minDCF of scores in a file, and the seconds that both took."""
        with np.load(path) as arrays:
            scores_N = arrays["scores"]
            labels_N = arrays["is_target"].astype(int)
        start = time.perf_counter()
        fnr, fpr = self.metrics.compute_pmiss_pfa_rbst(scores_N, labels_N)
        min_dcf = float(self.metrics.compute_c_norm(fnr, fpr, 0.01))
        eer, *_ = self.metrics.compute_eer(fnr, fpr, scores_N)
        seconds = time.perf_counter() - start
        return {"eer": float(eer), "min_dcf": min_dcf, "seconds": seconds}


def replace_modules(clock: Clock) -> None:
    """Put what the peers import, and what is not timed, in place."""

    def read_vectors(stem: str) -> Iterator[tuple[str, np.ndarray]]:
        ids = Path(f"{stem}.ids").read_text(encoding="utf-8").split()
        yield from zip(ids, np.load(f"{stem}.npy"))

    @contextlib.contextmanager
    def read_helper(source: str) -> Iterator[Iterator[tuple[str, np.ndarray]]]:
        yield read_vectors(source.removeprefix("ark:").removesuffix(".ark"))

    def cosine_similarity(a_ND: np.ndarray, b_MD: np.ndarray) -> np.ndarray:
        return (a_ND @ b_MD.T) / (np.linalg.norm(a_ND) * np.linalg.norm(b_MD))

    replace_module("tqdm", tqdm=clock)
    replace_module("kaldiio", ReadHelper=read_helper, load_scp_sequential=read_vectors)
    replace_module("fire", Fire=None)
    if importlib.util.find_spec("sklearn") is None:  # as little as can be done
        replace_module("sklearn.metrics")
        replace_module("sklearn.metrics.pairwise", cosine_similarity=cosine_similarity)


SIDES = {"ours": Ours, **{name: partial(Peer, name) for name in PEERS}}


def require_equal(ours: Process, peers: dict[str, Process], folder: Path) -> None:
    """Score the short list on all sides; exit where the scores differ."""
    ours.ask("with_files", name="head")
    our_rows = [
        line.split()[:3] for line in (folder / "head.ours").read_text().splitlines()
    ]
    for name, peer in peers.items():
        peer.ask("loop")
        peer_rows = [
            line.split()
            for line in (folder / name / "head.score").read_text().splitlines()
        ]
        pairs = list(zip(our_rows, peer_rows, strict=True))
        assert all(a[:2] == b[:2] for a, b in pairs)
        furthest = max(abs(float(a[2]) - float(b[SCORE_AT[name]])) for a, b in pairs)
        require_close(f"{name}: scores", furthest, 2 * WRITTEN)

    path = folder / "random.npz"
    rng = np.random.default_rng(0)
    is_target_N = rng.random(NUM_RANDOM) < 0.2
    scores_N = rng.standard_normal(NUM_RANDOM) + 1.5 * is_target_N
    np.savez(path, scores=scores_N, is_target=is_target_N)
    our_rates = ours.ask("rates", path=path)
    for name, peer in peers.items():
        peer_rates = peer.ask("rates", path=path)
        for metric in ("eer", "min_dcf"):
            apart = abs(our_rates[metric] - peer_rates[metric])
            require_close(f"{name}: values of {metric}", apart, CLOSE)


def rate_rows(
    ours: Process,
    peers: dict[str, Process],
    num_trials: int,
    options: argparse.Namespace,
) -> Iterator[Any]:
    """Yield the rows in trials a second and, of the whole list, in lists a second."""
    works = ("cosine", "cosine_with_files")
    rates: dict[str, list[float]] = {name: [] for name in (*works, *peers)}
    for _ in range(options.turns):
        for work in works:
            rates[work].append(num_trials / ours.ask(work))
        for name, peer in peers.items():
            rates[name].append(min(options.head, num_trials) / peer.ask("loop"))
    for work in works:
        if "3dspeaker" not in peers:
            yield report(
                f"score.{work}", [[rate] for rate in rates[work]], unit="trials/s"
            )
        for name in peers:
            turns = list(zip(rates[work], rates[name]))
            yield report(f"score.{work}{suffix(name)}", turns, unit="trials/s")
    path = options.folder / "large.npz"
    ours.ask("save", path=path)
    for name, peer in peers.items():
        sides = (ours, peer)
        seconds = [
            [s.ask("rates", path=path)["seconds"] for s in sides]
            for _ in range(options.repeats)
        ]
        turns = [
            [1 / our_seconds, 1 / peer_seconds] for our_seconds, peer_seconds in seconds
        ]
        yield report(f"score.eer_min_dcf{suffix(name)}", turns, unit="lists/s")


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield all rows."""
    folder = options.folder
    sides = start_sides("scoring", options.threads, options.peers, folder=folder)
    ours, *processes = sides
    sizes = {key: getattr(options, key) for key in ("enrol", "test", "dim", "head")}
    num_trials = ours.ask("make", **sizes)
    say(f"{options.enrol} enrolments x {options.test} tests = {num_trials} trials")
    peers = dict(zip(options.peers, processes))
    require_equal(ours, peers, folder)
    ours.ask("load")
    rows = list(rate_rows(ours, peers, num_trials, options))
    close_sides(sides)
    for row in rows:
        if wants(options, row.name):
            yield row


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--enrol", type=int, default=196)
    add("--test", type=int, default=17_777)
    add("--dim", type=int, default=512, help="of an embedding")
    add("--head", type=int, default=10_000, help="trials of a peer's turn")
    add("--turns", type=at_least_two, default=7, help="of each side")
    add("--repeats", type=at_least_two, default=3, help="of what takes seconds")


def at_least_two(text: str) -> int:
    """Read a number of turns: quartiles need two."""
    if int(text) < 2:
        raise argparse.ArgumentTypeError(f"at least 2 turns are needed, not {text}")
    return int(text)


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
