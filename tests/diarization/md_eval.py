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

from speakerlab.diarization.regions import Region, Turn, merge_turns, write_rttm, write_uem

STORED = Path(__file__).with_name("md_eval.json")
PROTOCOLS = [(collar, skip_overlap) for collar in (0.0, 0.25) for skip_overlap in (False, True)]
Pair = tuple[list[Turn], list[Turn], list[Region] | None]
Figures = tuple[float, ...]  # scored, missed, false alarm and confusion


def random_pair(seed: int) -> Pair:
    """Return reference, hypothesis and regions to score, with bounds in milliseconds.

    Turns overlap, touch, have no length, or are shorter than the collar. The hypothesis has moved,
    lost and renamed turns. Every other pair has regions, which cut turns; none: all the reference.
    """
    rng = np.random.default_rng([seed, 21])
    reference: list[tuple[int, int, str]] = []
    now, num_speakers = int(rng.integers(5000)), rng.integers(1, 7)
    for _ in range(rng.integers(1, 30)):
        length = 0 if rng.random() < 0.03 else 1 + int(rng.exponential(2000))
        reference.append((now, now + length, f"r{rng.integers(num_speakers)}"))
        gap = 0 if rng.random() < 0.3 else int(rng.normal(300, 900))
        now = max(now + length + gap, 0)
    hypothesis: list[tuple[int, int, str]] = []
    renamed, num_found = rng.permutation(8), rng.integers(1, 9)
    for start, end, speaker in reference:
        if rng.random() < 0.85:
            moved = rng.normal(0, 150, 2).astype(int) if rng.random() < 0.8 else (0, 0)
            found = renamed[int(speaker[1:])] % num_found
            found = rng.integers(num_found) if rng.random() < 0.2 else found
            low, high = sorted((max(start + moved[0], 0), max(end + moved[1], 0)))
            hypothesis.append((int(low), int(high), f"h{found}"))
        if rng.random() < 0.1:
            low = int(rng.integers(now + 3000))
            hypothesis.append((low, low + int(rng.exponential(1500)), f"h{rng.integers(8)}"))
    regions = None
    if seed % 2:
        cuts = np.sort(rng.choice(now + 5000, size=2 * rng.integers(1, 4), replace=False))
        regions = [(low / 1000, high / 1000) for low, high in cuts.reshape(-1, 2).tolist()]
    # md-eval would take overlapping turns of one speaker for two who overlap
    return merge_turns(_seconds(reference))[0], _seconds(hypothesis), regions


def _seconds(rows: Sequence[tuple[int, int, str]]) -> list[Turn]:
    return [Turn(start / 1000, end / 1000, speaker) for start, end, speaker in rows]


def run_md_eval(
    dscore: Path, pairs: Mapping[str, Pair], *, collar: float, skip_overlap: bool
) -> dict[str, Figures]:
    """Return what the script finds: a copy of it, changed to print 12 decimals instead of six.

    The copy can also print the error rate of a recording without scored speech.
    """
    script = (dscore / "scorelib/md-eval-22.pl").read_text(encoding="latin-1")
    script = script.replace("=%f secs", "=%.12f secs")
    script = re.sub(r'(\$scores->\{SCORED_SPEAKER\})(, "`)', r"(\1 || 1)\2", script)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "md-eval.pl").write_text(script, encoding="latin-1")
        write_rttm(place / "ref", {key: reference for key, (reference, _, _) in pairs.items()})
        write_rttm(place / "hyp", {key: hypothesis for key, (_, hypothesis, _) in pairs.items()})
        write_uem(place / "uem", {key: regions for key, (*_, regions) in pairs.items() if regions})
        words = ["perl", "md-eval.pl", "-a", "f", "-r", "ref", "-s", "hyp", "-u", "uem"]
        words += ["-c", str(collar), *(["-1"] if skip_overlap else [])]
        done = subprocess.run(words, cwd=place, check=True, capture_output=True, text=True)
    kinds = ("SCORED SPEAKER", "MISSED SPEAKER", "FALARM SPEAKER", "SPEAKER ERROR")
    parts = re.split(r"Speaker Diarization for (?:f=)?(\S+) \*\*\*", done.stdout)[1:]
    return {
        key: tuple(float(re.findall(rf"{kind} TIME =(\S+) secs", text)[0]) for kind in kinds)
        for key, text in zip(parts[::2], parts[1::2])
        if key != "ALL"
    }


def main(dscore: Path) -> None:
    pairs = {str(seed): random_pair(seed) for seed in range(40)}
    found = [run_md_eval(dscore, pairs, collar=c, skip_overlap=skip) for c, skip in PROTOCOLS]
    rows = [(*pairs[key], [figures[key] for figures in found]) for key in pairs]
    STORED.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
