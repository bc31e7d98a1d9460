"""Scoring: trials a second beside the peers' loops, whether the metrics agree, a large list's time.

    python benchmarks/scoring.py --peer DIR [DIR] --json FILE  # checkouts of 3D-Speaker, WeSpeaker

In: made-up embeddings, every pair of an enrolment and a test (by default CN-Celeb's 196 x 17,777).
Out: a line and a row for each figure, {"name", "ours", "peer", "ratio", "unit"}; without --peer,
ours alone.

`score.cosine` is from embeddings and trials in memory to scores in memory on our side;
`score.cosine_with_files` also reads the list and writes the scores. On the peer's side it is its
own loop over the trials both times, which takes each line of the list apart, computes one cosine
and writes one line: the three cannot be separated there. The rows are beside 3D-Speaker, those that
end in `.wespeaker` beside WeSpeaker. The peers take turns with ours, on a part of the list that is
drawn from all of it; before that, all must give the same scores.

The rows in seconds are of our side in a process of its own, `score.peak_memory` is that process's.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import scoring_agreement
from rows import lone_row, report, write_rows
from sides import ROOT, Measured, Process, add_peers, recognise_peers, say
from targets import AT_MOST

HERE = Path(__file__).parent
PEERS = {
    "3dspeaker": "speakerlab/bin/compute_score_metrics.py",
    "wespeaker": "wespeaker/bin/score.py",
}
WRITTEN = 5e-6  # the peers write five decimals
GB = 1e9


def start_ours(folder: Path, options: argparse.Namespace) -> Process:
    words = {"folder": folder}
    return Process(HERE / "scoring_ours.py", ROOT, words=words, threads=options.threads)


def start_peers(folder: Path, options: argparse.Namespace) -> dict[str, Process]:
    """Those whose checkouts were given, in the order of PEERS."""
    return {
        side: Process(
            HERE / "scoring_worker.py",
            options.peers[side],
            words={"side": side, "folder": folder},
            threads=options.threads,
        )
        for side in PEERS
        if side in options.peers
    }


def require_equal(ours: Process, peers: Mapping[str, Process], folder: Path) -> None:
    """All give the same scores of the short list; exit where they do not."""
    ours.tell(do="head")
    wanted = [line.split()[:3] for line in (folder / "head.ours").read_text().splitlines()]
    for side, peer in peers.items():
        replaced = ", ".join(peer.tell(do="facts")["replaced"])
        peer.tell(do="loop")
        found = [line.split() for line in (folder / side / "head.score").read_text().splitlines()]
        score_at = 2 if side == "wespeaker" else 3
        furthest = max(
            abs(float(score) - float(row[score_at])) for (*_, score), row in zip(wanted, found)
        )
        say(
            f"{side}: {len(found)} scores differ by at most {furthest:.0e} (written with five "
            f"decimals); replaced, and not timed: {replaced}"
        )
        same_pairs = [row[:2] for row in wanted] == [row[:2] for row in found]
        if not same_pairs or furthest > 2 * WRITTEN:
            raise SystemExit(f"{side}: the scores are not equal; nothing was timed")


def compare_rates(
    ours: Process, peers: Mapping[str, Process], *, num_trials: int, options: argparse.Namespace
) -> Iterable[dict[str, Any]]:
    """The rows in trials/s: turns of every side, one after the other."""
    works = ("cosine", "cosine_with_files")
    rates: dict[str, list[float]] = {name: [] for name in (*works, *peers)}
    for _ in range(options.turns):
        for work in works:
            rates[work].append(num_trials / ours.tell(do=work)["seconds"])
        for side, peer in peers.items():
            rates[side].append(options.head / peer.tell(do="loop")["seconds"])
    for work in works:
        if "3dspeaker" not in peers:
            own = statistics.median(rates[work])
            yield report(f"score.{work}", Measured(own, None, None, None), unit="trials/s")
        for side in peers:
            turns = list(zip(rates[work], rates[side]))
            suffix = "" if side == "3dspeaker" else f".{side}"
            yield report(f"score.{work}{suffix}", medians(turns), unit="trials/s")


def measure_large(folder: Path, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """The rows of the whole list, ours alone, and what it took at most."""
    ours = start_ours(folder, options)
    ours.tell(do="load")
    for work in ("metrics", "intervals", "asnorm"):
        answers = [ours.tell(do=work) for _ in range(options.repeats)]
        seconds = statistics.median(answer.pop("seconds") for answer in answers)
        listed = ", ".join(f"{name} {shown(value)}" for name, value in answers[0].items())
        yield own_row(f"score.{work}", seconds, "s", AT_MOST[f"score.{work}"], listed)
    peak = ours.tell(do="peak")["bytes"] / GB
    yield own_row("score.peak_memory", peak, "GB", AT_MOST["score.peak_memory"], "of this process")
    ours.end()


def shown(value: Any) -> str:
    """A number, an interval or a text, short."""
    if isinstance(value, list):
        return f"[{value[0]:.4f}, {value[1]:.4f}]"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def own_row(name: str, value: float, unit: str, limit: float, remark: str) -> dict[str, Any]:
    """Print a line; the row for the file."""
    say(f"{name:32s} ours {value:8.2f} {unit} (at CN-Celeb's size at most {limit:g}); {remark}")
    return lone_row(name, value, unit)


def compare_large_metrics(
    ours: Process, peers: Mapping[str, Process], folder: Path, options: argparse.Namespace
) -> Iterable[dict[str, Any]]:
    """EER and minDCF of the whole list: the same figures, and in which time."""
    path = str(folder / "large.npz")
    ours.tell(do="save", path=path)
    order = {"do": "rates", "path": path, "p_target": 0.01}
    for side, peer in peers.items():
        turns = [(ours.tell(**order), peer.tell(**order)) for _ in range(options.repeats)]
        own, answer = turns[0]
        say(
            f"whole list: EER {own['eer']:.9f}, {side} {answer['eer']:.9f}; "
            f"minDCF {own['min_dcf']:.9f}, {side} {answer['min_dcf']:.9f}"
        )
        rates = [(1 / own["seconds"], 1 / answer["seconds"]) for own, answer in turns]
        name = "score.eer_min_dcf" + ("" if side == "3dspeaker" else f".{side}")
        yield report(name, medians(rates), unit="lists/s")


def medians(rates: Sequence[tuple[float, float]]) -> Measured:
    """Of the turns of both sides."""
    own, peer = (statistics.median(of_side) for of_side in zip(*rates))
    low, _, high = statistics.quantiles([mine / theirs for mine, theirs in rates], n=4)
    return Measured(own, peer, own / peer, (low, high))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_peers(parser, PEERS)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--enrol", type=int, default=196)
    parser.add_argument("--test", type=int, default=17_777)
    parser.add_argument("--dim", type=int, default=512, help="of an embedding")
    parser.add_argument("--cohort", type=int, default=3000, help="speakers, ten utterances each")
    parser.add_argument("--head", type=int, default=10_000, help="trials of a peer's turn")
    parser.add_argument("--turns", type=int, default=7, help="of each side")
    parser.add_argument("--repeats", type=int, default=3, help="of what is measured in seconds")
    parser.add_argument("--threads", type=int, help="of each side; default: what numpy takes")
    options = parser.parse_args(words)
    for name in ("turns", "repeats"):
        if getattr(options, name) < 2:
            parser.error(
                f"--{name}: must be at least 2 to tell a spread, got {getattr(options, name)}"
            )
    options.peers = recognise_peers(parser, options.peer, PEERS)
    return options


def main() -> None:
    options = parse()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = start_ours(folder, options)
        sizes = {key: getattr(options, key) for key in ("enrol", "test", "dim", "head", "cohort")}
        num_trials = ours.tell(do="make", **sizes)["trials"]
        options.head = min(options.head, num_trials)
        say(f"{options.enrol} enrolments x {options.test} tests = {num_trials} trials")
        peers = start_peers(folder, options)
        require_equal(ours, peers, folder)
        rows += scoring_agreement.compare({"ours": ours, **peers}, folder)
        ours.tell(do="load")
        rows += compare_rates(ours, peers, num_trials=num_trials, options=options)
        rows += compare_large_metrics(ours, peers, folder, options)
        for process in (ours, *peers.values()):
            process.end()
        rows += measure_large(folder, options)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
