"""The front end alone: crops a second from waves to features, beside the peers' own.

    python benchmarks/frontend.py --peer DIR [DIR ...] --json FILE

In: made-up crops. Out: a line and a row for each peer, {"name", "ours", "peer", "ratio", "unit"};
without --peer, ours alone. `frontend.fbank` is beside 3D-Speaker, `.wespeaker` and `.speechbrain`
beside these. What speed, room and noise cost is in data.py, `data.full_cpu`.

On a GPU ours and SpeechBrain's features are made there, 3D-Speaker's and WeSpeaker's on the CPU
where their workers make them. On a CPU each side has one thread, as a worker has. Before anything
is timed, the features of 3D-Speaker and WeSpeaker must be equal to ours with their settings.
SpeechBrain's are others by definition.
"""

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from frontend_sides import ALLOWED, MARKS, RATE
from rows import report, write_rows
from sides import ROOT, Process, add_peers, measure, recognise_peers, say

WORKER = Path(__file__).with_name("frontend_worker.py")


def start(side: str, root: Path, like: str, options: argparse.Namespace) -> Process:
    words = {"side": side, "like": like, "device": options.device, "crops": options.micro_batch}
    words["samples"] = round(options.crop_seconds * RATE)
    return Process(WORKER, root, words=words, threads=1 if options.device == "cpu" else None)


def require_equal(ours: Process, peer: Process, name: str) -> None:
    """Print how far the features are apart; exit where they are not the same."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "ours.pt", Path(folder) / "peer.pt"]
        for side, path in zip((ours, peer), paths):
            side.tell(do="values", path=str(path))
        found, expected = (torch.load(path) for path in paths)
    error = float((found - expected).abs().max())
    say(f"{name}: features differ by at most {error:.1e}")
    if not error <= ALLOWED[name]:
        raise SystemExit(f"{name}: the features are not equal; nothing was timed")


def compare(name: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """The row beside one peer, or alone."""
    ours = start("ours", ROOT, name or "3dspeaker", options)
    turns = [(ours, {"do": "fbank"})]
    if name is not None:
        peer = start(name, options.peers[name], name, options)
        if name in ALLOWED:
            require_equal(ours, peer, name)
        turns.append((peer, {"do": "fbank"}))
    found = measure(turns, utterances_per_step=options.micro_batch, seconds=options.seconds)
    for side, _ in turns:
        side.end()
    suffix = "" if name in (None, "3dspeaker") else f".{name}"
    return report(f"frontend.fbank{suffix}", found, unit="crops/s")


def rows(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    for name in list(options.peers) or [None]:
        yield compare(name, options)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_peers(parser, MARKS)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--crop-seconds", type=float, default=3.0)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each side of each row")
    options = parser.parse_args(words)
    options.peers = recognise_peers(parser, options.peer, MARKS)
    return options


def main() -> None:
    options = parse()
    write_rows(options.json, list(rows(options)))


if __name__ == "__main__":
    main()
