"""A data directory to embeddings: utterances a second, beside 3D-Speaker's extraction.

    python benchmarks/extract.py --peer DIR --json FILE      # DIR: a checkout of 3D-Speaker

In: recordings of mixed lengths (--audio; synthetic where there are none), as wav files that both
read. Out: a line and a row for each model and precision, `extract.<model>.<precision>`; without
--peer, ours alone.

A turn is the whole command in a process that has been started before: the model read, every
recording read and embedded whole, the table written. Ours is `speakerlab extract`; 3D-Speaker's is
the main function of its bin/extract.py, unchanged, which takes one recording at a time, unpadded,
and has no other precision than fp32. Both have the same weights: drawn once, with the BatchNorm
statistics that two batches of noise leave. Before anything is timed, both must give the same
embeddings; in bf16 ours may be as far away as that format rounds.
"""

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import speech
from rows import report, write_rows
from sides import ROOT, Process, add_peers, measure, recognise_peers, say

HERE = Path(__file__).parent
MARKS = {"3dspeaker": "speakerlab/bin/extract.py"}
MODELS = ("campplus", "eres2net")
ALLOWED = {"fp32": 1e-4, "bf16": 3e-2}  # 1 - cosine, of the worst recording
MIXED = {"audio": "librispeech-mini/test-other"}


def require_equal(ours: Process, peer: Process, precision: str, folder: Path) -> None:
    """Print how far the embeddings are apart; exit where they are not the same."""
    paths = [folder / "ours.npz", folder / "peer.npz"]
    orders = [{"precision": precision}, {}]
    for side, path, order in zip((ours, peer), paths, orders):
        side.tell(do="values", path=str(path), **order)
    found, expected = (dict(np.load(path)) for path in paths)
    assert found.keys() == expected.keys()
    furthest = max(1 - cosine(found[name], expected[name]) for name in expected)
    say(f"{precision}: {len(found)} embeddings, cosine to 3D-Speaker's at least {1 - furthest:.7f}")
    if not furthest <= ALLOWED[precision]:
        raise SystemExit("extract.py: the embeddings are not equal; nothing was timed")


def cosine(a_D: np.ndarray, b_D: np.ndarray) -> float:
    a_D, b_D = a_D.astype(np.float64), b_D.astype(np.float64)
    return float(a_D @ b_D / np.sqrt((a_D @ a_D) * (b_D @ b_D)))


def compare(
    model: str, folder: Path, options: argparse.Namespace, *, num_utterances: int
) -> Iterable[dict[str, Any]]:
    """The rows of a model."""
    words = {"folder": folder, "model": model}
    ours = Process(HERE / "extract_worker.py", ROOT, words=words, threads=options.threads)
    peer = None
    if "3dspeaker" in options.peers:
        root = options.peers["3dspeaker"]
        peer = Process(HERE / "extract_peer.py", root, words=words, threads=options.threads)
    for precision in options.precision:
        turns = [(ours, {"do": "extract", "precision": precision})]
        if peer is not None:
            require_equal(ours, peer, precision, folder)
            turns.append((peer, {"do": "extract"}))
        found = measure(turns, utterances_per_step=num_utterances, seconds=options.seconds)
        columns = {"peak_mib": ours.tell(do="peak")["mib"]}
        columns["peer_peak_mib"] = None if peer is None else peer.tell(do="peak")["mib"]
        yield report(f"extract.{model}.{precision}", found, **columns)
    ours.end()
    if peer is not None:
        peer.end()


def thin_out(data_dir: Path, most: int) -> int:
    """Leave at most so many recordings in a data directory, spread over it; how many there are."""
    ids = [line.split()[0] for line in (data_dir / "wav.scp").read_text().splitlines()]
    step = -(-len(ids) // most)
    kept = set(ids[::step])
    for name in ("wav.scp", "utt2spk", "utt2dur"):
        lines = (data_dir / name).read_text().splitlines()
        text = "".join(f"{line}\n" for line in lines if line.split()[0] in kept)
        (data_dir / name).write_text(text, encoding="utf-8")
    return len(kept)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_peers(parser, MARKS)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    precisions = tuple(ALLOWED)
    parser.add_argument("--precision", nargs="+", default=list(precisions), choices=precisions)
    speech.add_options(parser)
    parser.add_argument("--utterances", type=int, default=70, help="at most so many (70)")
    parser.add_argument("--threads", type=int, help="of each side; default: what torch takes")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each side of each row")
    options = parser.parse_args(words)
    options.peers = recognise_peers(parser, options.peer, MARKS)
    speech.settle(parser, options, MIXED)
    return options


def main() -> None:
    options = parse()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = speech.make(folder, options, crop_seconds=1.0, sources=["wav"])
        num_utterances = thin_out(folder / "wav", options.utterances)
        say(f"{found}; {num_utterances} of them, in one turn")
        speech.warm(folder)
        for model in options.model:
            rows += compare(model, folder, options, num_utterances=num_utterances)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
