"""What a core gives a training: crops a second, beside 3D-Speaker's processing chain.

    python benchmarks/data.py --peer DIR --json FILE      # DIR: a checkout of 3D-Speaker

In: real recordings, noises and rooms (--audio --noise --rirs; synthetic where there are none). Out:
a line and a row for each work and source, {"name", "ours", "peer", "ratio", "unit"}, then where
the time of each side goes; without --peer, ours alone.

`data.to_device` is read, draw, collate: what the CPU does when the front end is on the GPU.
`data.full_cpu` is that and speed, room, noise and fbank. Bare names are from shards, `.wav` and
`.flac` from loose files. 3D-Speaker has no such split: beside either stands its whole chain, which
is what its CPU does before a GPU has anything, always over wav files of the same samples.

Each side is one process with one thread and no workers; they take turns (sides.py), the files in
the system's cache. Both change the speed of two crops in three and augment four in five. Of these
3D-Speaker gives a third each noise, a room, or both; ours draws room and noise independently, each
with the probability PROB that leaves one crop in five alone: both come together a little oftener.
Before anything is timed, both must give the same features of the same crops.
"""

import argparse
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import speech
from rows import report, write_rows
from sides import ROOT, Process, measure, say
from speech import AUGMENTED, PROB, SOURCES

HERE = Path(__file__).parent
WORKS = ("to_device", "full_cpu")
ALLOWED = 1e-2  # difference of mean-normalised log mel features: the peer's rounding in fp32
Split = Mapping[str, Any]  # the answer to "hops"


def require_equal(ours: Process, peer: Process, folder: Path) -> None:
    """Print how far the features are apart; exit where they are not the same."""
    paths = [folder / "ours.npz", folder / "peer.npz"]
    for process, path in zip((ours, peer), paths):
        process.tell(do="values", path=str(path))
    found, expected = (dict(np.load(path)) for path in paths)
    assert found.keys() == expected.keys()
    error = max(float(np.abs(found[name] - expected[name]).max()) for name in expected)
    say(f"features of {len(found)} crops, largest difference: {error:.1e}")
    if not error <= ALLOWED:
        raise SystemExit("data.py: the features are not equal; nothing was timed")


def compare(folder: Path, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """The rows; prints the splits last."""
    words = {"folder": folder, "micro-batch": options.micro_batch}
    words["crop-seconds"] = options.crop_seconds
    peer, splits = None, dict[str, Split]()
    if options.peer is not None:
        of_peer = {**words, "prob": AUGMENTED}
        peer = Process(HERE / "data_peer.py", options.peer, words=of_peer, threads=1)
    for source in options.source:
        of_ours = {**words, "prob": PROB, "source": source}
        ours = Process(HERE / "data_worker.py", ROOT, words=of_ours, threads=1)
        if peer is not None and source == options.source[0]:
            require_equal(ours, peer, folder)
        for work in WORKS:
            turns = [(ours, {"do": work}), *([(peer, {"do": "chain"})] if peer else [])]
            found = measure(turns, utterances_per_step=options.micro_batch, seconds=options.seconds)
            suffix = "" if source == "shard" else f".{source}"
            yield report(f"data.{work}{suffix}", found, unit="crops/s")
        splits[f"ours {source}"] = ours.tell(do="hops", steps=options.hop_steps)
        ours.end()
    if peer is not None:
        splits["peer wav"] = peer.tell(do="hops", steps=options.hop_steps)
        peer.end()
    for line in table(splits, num_crops=options.hop_steps * options.micro_batch):
        say(line)


def table(splits: Mapping[str, Split], *, num_crops: int) -> Iterable[str]:
    """Lines: microseconds a crop of each hop and its share, what was drawn, what was read."""
    yield f"{'us a crop (share)':18s}" + "".join(f"{name:>17s}" for name in splits)
    for hop in dict.fromkeys(hop for split in splits.values() for hop in split["hops"]):
        yield line_of(hop, [time_of(split, hop, num_crops) for split in splits.values()])
    yield line_of("loader, the rest", [time_of(s, None, num_crops) for s in splits.values()])
    totals = [f"{1e6 * split['total'] / num_crops:8.0f} (100 %)" for split in splits.values()]
    yield line_of("all", totals)
    for draw in ("speed", "room", "noise"):
        shares = [100 * split["drawn"][draw] / num_crops for split in splits.values()]
        yield line_of(f"{draw} drawn", [f"{share:.0f} %" for share in shares])
    reads = [split["read"] for split in splits.values()]
    yield line_of("kB read a crop", [f"{r / num_crops / 1e3:.0f}" if r else "-" for r in reads])


def time_of(split: Split, hop: str | None, num_crops: int) -> str:
    """Of a hop, or of what no hop took."""
    hops = split["hops"]
    if hop is None:
        seconds = split["total"] - sum(hops.values())
    elif hop in hops:
        seconds = hops[hop]
    else:
        return "-"
    return f"{1e6 * seconds / num_crops:8.0f} ({100 * seconds / split['total']:3.0f} %)"


def line_of(name: str, cells: Sequence[str]) -> str:
    return f"{name:18s}" + "".join(f"{cell:>17s}" for cell in cells)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", type=Path, help="a checkout of 3D-Speaker")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--source", nargs="+", default=list(SOURCES), choices=SOURCES)
    speech.add_options(parser)
    parser.add_argument("--crop-seconds", type=float, default=3.0)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each side of each row")
    parser.add_argument("--hop-steps", type=int, default=16, help="batches to time hop by hop")
    options = parser.parse_args(words)
    if options.peer is not None and not (options.peer / "speakerlab/process").is_dir():
        parser.error(f"--peer: must be a checkout of 3D-Speaker, got {options.peer}")
    speech.settle(parser, options)
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = speech.make(
            folder, options, crop_seconds=options.crop_seconds, sources=options.source
        )
        say(
            f"{found}; crops of {options.crop_seconds:g} s, {options.micro_batch} together; one "
            "thread each side"
        )
        speech.warm(folder)
        rows = list(compare(folder, options))
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
