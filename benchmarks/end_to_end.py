"""A training from files: utterances a second, beside 3D-Speaker's own training.

    python benchmarks/end_to_end.py --peer DIR --json FILE      # DIR: a checkout of 3D-Speaker

In: recordings (--audio --noise --rirs; synthetic where there are none), as wav files that both
read. Out: a line and a row for each model and precision; without --peer, ours alone.

A step is everything: read, speed, room, noise, fbank, forward, backward, update, and the log. Ours
is what `speakerlab train` builds from `conf/<model>.yaml`; 3D-Speaker's is the loop of its train.py
over what its recipe's YAML builds by its own builder (end_to_end_peer.py says what had to be
replaced). Both take the same number of crops of the same length together, as many loader workers
and threads, and change speeds and augment as often (data.py). Before anything is timed, both must
have as many parameters and classes; that both compute the same of the same input is measured by
data.py and models.py.

`end_to_end.<model>` is ours with runtime.precision=bf16, `end_to_end.<model>.fp32` in fp32, each
beside 3D-Speaker as it ships, which has no other precision than fp32.

Sides take turns (sides.py), and the workers of the side whose turn it is not are stopped
(resting.py). `peak_mib` is the most memory that a side's first process held.
"""

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import speech
from rows import report, write_rows
from sides import ROOT, Process, add_peers, measure, recognise_peers, say

HERE = Path(__file__).parent
MARKS = {"3dspeaker": "speakerlab/bin/train.py"}
# And the steps of a turn at least: a short one may have found its crops read, or wait for them.
MODELS = {"campplus": 4, "eres2net": 2}
PRECISIONS = ("fp32", "bf16")


def require_equal(ours: Process, peer: Process) -> None:
    """Exit where the sides do not train networks of one size on as many classes."""
    own, other = (side.tell(do="facts") for side in (ours, peer))
    say(f"ours: {own}; 3D-Speaker: {other}")
    if own != other:
        raise SystemExit("end_to_end.py: the trainings are not alike; nothing was timed")


def name_of(model: str, precision: str) -> str:
    return f"end_to_end.{model}" + ("" if precision == "bf16" else f".{precision}")


def compare(model: str, folder: Path, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """The rows of a model."""
    words = {"folder": folder, "model": model, "micro-batch": options.micro_batch}
    words |= {"crop-seconds": options.crop_seconds, "workers": options.workers}
    words |= {"device": options.device, "prob": speech.PROB}
    peer = None
    if "3dspeaker" in options.peers:
        script, root = HERE / "end_to_end_peer.py", options.peers["3dspeaker"]
        of_peer = {**words, "prob": speech.AUGMENTED}
        peer = Process(script, root, words=of_peer, threads=options.threads)
    for precision in options.precision:
        exp = folder / f"exp_{model}_{precision}"
        of_ours = {**words, "source": options.source, "precision": precision, "exp": exp}
        script = HERE / "end_to_end_worker.py"
        ours = Process(script, ROOT, words=of_ours, threads=options.threads)
        turns = [(ours, {"do": "train"})]
        if peer is not None:
            require_equal(ours, peer)
            turns.append((peer, {"do": "train"}))
        found = measure(
            turns,
            utterances_per_step=options.micro_batch,
            seconds=options.seconds,
            least_steps=MODELS[model],
        )
        columns = {"precision": precision, "peak_mib": ours.tell(do="peak")["mib"]}
        columns["peer_peak_mib"] = None if peer is None else peer.tell(do="peak")["mib"]
        yield report(name_of(model, precision), found, **columns)
        ours.end()
    if peer is not None:
        peer.end()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_peers(parser, MARKS)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--source", default="wav", choices=speech.SOURCES, help="what ours reads")
    speech.add_options(parser)
    parser.add_argument("--crop-seconds", type=float, default=3.0)
    parser.add_argument("--micro-batch", type=int, default=16, help="crops of a step")
    parser.add_argument("--workers", type=int, default=1, help="of each side's loader")
    parser.add_argument("--threads", type=int, help="of each side; default: what torch takes")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each side of each row")
    options = parser.parse_args(words)
    options.peers = recognise_peers(parser, options.peer, MARKS)
    speech.settle(parser, options)
    return options


def main() -> None:
    options = parse()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, sources = Path(name), ["wav", options.source]
        found = speech.make(folder, options, crop_seconds=options.crop_seconds, sources=sources)
        say(
            f"{found}; {options.micro_batch} crops of {options.crop_seconds:g} s a step; "
            f"{options.workers} loader workers a side"
        )
        speech.warm(folder)
        for model in options.model:
            rows += compare(model, folder, options)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
