"""Random pairs of reference and hypothesis, and NIST's md-eval-22.pl, which scores them.

    python tests/diarization/md_eval.py DSCORE

writes md_eval.json, 40 pairs and their errors in seconds under each of PROTOCOLS. DSCORE is a
checkout of https://github.com/nryant/dscore, which contains the script; it needs perl.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from speakerlab.diarization.regions import (
    Region,
    Turn,
    merge_turns,
    write_rttm,
    write_uem,
)

STORED = Path(__file__).with_name("md_eval.json")
PROTOCOLS = [
    # collar, whether overlap is left out
    (0.0, False),
    (0.0, True),
    (0.25, False),
    (0.25, True),
]
Pair = tuple[list[Turn], list[Turn], list[Region] | None]
# scored, missed, false alarm and confusion
Figures = tuple[float, ...]


def random_pair(seed: int) -> Pair:
    """Return reference, hypothesis and regions to score, with bounds in milliseconds.

    Turns overlap, touch, have no length, or are shorter than the collar. The hypothesis has moved,
    lost and renamed turns. Every other pair has regions, which cut turns; none: all the reference.
    """
    rng = np.random.default_rng([seed, 21])
    reference: list[tuple[int, int, str]] = []
    now = int(rng.integers(5000))
    num_speakers = rng.integers(1, 7)
    num_turns = rng.integers(1, 30)
    for _ in range(num_turns):
        length = 0
        if rng.random() >= 0.03:
            length = 1 + int(rng.exponential(2000))
        speaker = rng.integers(num_speakers)
        reference.append((now, now + length, f"r{speaker}"))
        gap = 0
        if rng.random() >= 0.3:
            gap = int(rng.normal(300, 900))
        now = max(now + length + gap, 0)

    hypothesis: list[tuple[int, int, str]] = []
    renamed = rng.permutation(8)
    num_found = rng.integers(1, 9)
    for start, end, speaker in reference:
        if rng.random() < 0.85:
            moves = [0, 0]
            if rng.random() < 0.8:
                moves = rng.normal(0, 150, 2).astype(int).tolist()
            new_speaker = renamed[int(speaker[1:])] % num_found
            if rng.random() < 0.2:
                new_speaker = rng.integers(num_found)
            bounds = [max(start + moves[0], 0), max(end + moves[1], 0)]
            low, high = sorted(bounds)
            hypothesis.append((low, high, f"h{new_speaker}"))
        if rng.random() < 0.1:
            low = int(rng.integers(now + 3000))
            length = int(rng.exponential(1500))
            false_speaker = rng.integers(8)
            hypothesis.append((low, low + length, f"h{false_speaker}"))

    regions = None
    if seed % 2:
        num_regions = rng.integers(1, 4)
        cuts = rng.choice(now + 5000, size=2 * num_regions, replace=False)
        cuts = np.sort(cuts).reshape(-1, 2)
        regions = [(low / 1000, high / 1000) for low, high in cuts.tolist()]

    # md-eval would take overlapping turns of one speaker for two who overlap
    reference_turns, _ = merge_turns(_seconds(reference))
    return reference_turns, _seconds(hypothesis), regions


def _seconds(rows: Sequence[tuple[int, int, str]]) -> list[Turn]:
    turns = []
    for start, end, speaker in rows:
        turns.append(Turn(start / 1000, end / 1000, speaker))
    return turns


def run_md_eval(
    dscore: Path,
    pairs: Mapping[str, Pair],
    *,
    collar: float,
    skip_overlap: bool,
) -> dict[str, Figures]:
    """Return what the script finds: a copy of it, changed to print 12 decimals instead of six.

    The copy can also print the error rate of a recording without scored speech.
    """
    path = dscore / "scorelib/md-eval-22.pl"
    script = path.read_text(encoding="latin-1")
    script = script.replace("=%f secs", "=%.12f secs")
    script = re.sub(r'(\$scores->\{SCORED_SPEAKER\})(, "`)', r"(\1 || 1)\2", script)
    references = {}
    hypotheses = {}
    uem = {}
    for key, (reference, hypothesis, regions) in pairs.items():
        references[key] = reference
        hypotheses[key] = hypothesis
        if regions:
            uem[key] = regions
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "md-eval.pl").write_text(script, encoding="latin-1")
        write_rttm(place / "ref", references)
        write_rttm(place / "hyp", hypotheses)
        write_uem(place / "uem", uem)
        arguments = [
            "perl",
            "md-eval.pl",
            "-a",
            "f",
            "-r",
            "ref",
            "-s",
            "hyp",
            "-u",
            "uem",
        ]
        arguments += ["-c", str(collar)]
        if skip_overlap:
            arguments.append("-1")
        done = subprocess.run(
            arguments,
            cwd=place,
            check=True,
            capture_output=True,
            text=True,
        )
    kinds = (
        "SCORED SPEAKER",
        "MISSED SPEAKER",
        "FALARM SPEAKER",
        "SPEAKER ERROR",
    )
    heading = r"Speaker Diarization for (?:f=)?(\S+) \*\*\*"
    # text before the first recording, then name and text of each
    _, *parts = re.split(heading, done.stdout)
    figures = {}
    for key, text in zip(parts[::2], parts[1::2]):
        if key == "ALL":
            continue
        seconds = []
        for kind in kinds:
            values = re.findall(rf"{kind} TIME =(\S+) secs", text)
            seconds.append(float(values[0]))
        figures[key] = tuple(seconds)
    return figures


def main(dscore: Path) -> None:
    pairs = {str(seed): random_pair(seed) for seed in range(40)}
    cases = []
    for collar, skip_overlap in PROTOCOLS:
        figures = run_md_eval(
            dscore,
            pairs,
            collar=collar,
            skip_overlap=skip_overlap,
        )
        cases.append(figures)
    rows = []
    for key, pair in pairs.items():
        figures_of_pair = [figures[key] for figures in cases]
        rows.append(json.dumps((*pair, figures_of_pair)))
    STORED.write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
