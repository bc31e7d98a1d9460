"""The benchmark of scoring, on a list so small that its figures mean nothing.

SPEAKERLAB_3DSPEAKER=DIR and SPEAKERLAB_WESPEAKER=DIR give checkouts to compare with.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEERS = [os.environ.get(f"SPEAKERLAB_{name}", "") for name in ("3DSPEAKER", "WESPEAKER")]
SMALL = "--enrol=6 --test=60 --dim=16 --cohort=12 --head=100 --turns=2 --repeats=2 --threads=1"
RATES = ["score.cosine", "score.cosine_with_files"]
OWN = [f"score.{what}" for what in ("metrics", "intervals", "asnorm", "peak_memory")]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/scoring.py", *SMALL.split(), *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def read_rows(done: subprocess.CompletedProcess[str], path: Path) -> dict[str, dict]:
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert all(list(row)[:5] == ["name", "ours", "peer", "ratio", "unit"] for row in rows)
    assert all(row["ours"] > 0 for row in rows)
    return {row["name"]: row for row in rows}


def test_scoring_alone(tmp_path):
    done = run("--json", tmp_path / "rows.json")
    rows = read_rows(done, tmp_path / "rows.json")
    assert list(rows) == RATES + OWN
    assert all(row["peer"] is None and row["ratio"] is None for row in rows.values())
    assert rows["score.cosine"]["ours"] > rows["score.cosine_with_files"]["ours"]
    assert "6 enrolments x 60 tests = 360 trials" in done.stdout
    assert "score.asnorm" in done.stdout and "cohort of 12 speakers" in done.stdout


# What scoring.py uses of WeSpeaker, with a wrong score where OFFSET is one.
LOOP = """
import kaldiio
from sklearn.metrics.pairwise import cosine_similarity
from tqdm import tqdm

def trials_cosine_score(eval_scp_path, store_dir, mean_vec, trials):
    found = dict(kaldiio.load_scp_sequential(eval_scp_path))
    with open(trials[0]) as lines, open(f"{store_dir}/head.score", "w") as out:
        for line in tqdm(lines.readlines(), desc="trials"):
            a, b, label = line.split()
            score = cosine_similarity(found[a][None], found[b][None])[0][0] + OFFSET
            out.write(f"{a} {b} {score:.5f} {label}\\n")
"""
RATES_OF_PEER = """
import numpy as np

def compute_pmiss_pfa(scores, labels):
    raise TypeError("not like this")

def compute_pmiss_pfa_rbst(scores, labels):
    labels = labels[np.argsort(scores)]
    return np.cumsum(labels) / labels.sum(), 1 - np.cumsum(1 - labels) / (1 - labels).sum()

def compute_eer(fnr, fpr, scores):
    after = np.flatnonzero(fnr >= fpr)[0]
    gap = fpr - fnr
    share = gap[after - 1] / (gap[after - 1] - gap[after])
    return fnr[after - 1] + share * (fnr[after] - fnr[after - 1]), scores[after]

def compute_c_norm(fnr, fpr, p):
    return (p * fnr + (1 - p) * fpr).min() / min(p, 1 - p)
"""


@pytest.mark.parametrize("offset", ["0", "1e-4"])
def test_only_loops_of_equal_scores_are_timed(tmp_path, offset):
    for name, source in (("bin/score", LOOP), ("utils/score_metrics", RATES_OF_PEER)):
        path = tmp_path / f"peer/wespeaker/{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(source.replace("OFFSET", offset))
    done = run("--peer", tmp_path / "peer", "--json", tmp_path / "rows.json")
    if offset != "0":
        assert "wespeaker: the scores are not equal; nothing was timed" in done.stderr
        assert done.returncode != 0 and not (tmp_path / "rows.json").exists()
        return
    rows = read_rows(done, tmp_path / "rows.json")
    beside = [f"{name}.wespeaker" for name in RATES]
    assert {*beside, "score.eer.wespeaker", "score.min_dcf.wespeaker"} < set(rows)
    for name in beside:
        assert rows[name]["ratio"] == pytest.approx(rows[name]["ours"] / rows[name]["peer"])
    agreement = rows["score.eer.wespeaker"]
    assert agreement["ours"] == pytest.approx(agreement["peer"], rel=1e-9)
    assert agreement["ratio"] is None
    assert "20 random lists, eer: equal to wespeaker" in done.stdout
    assert "compute_pmiss_pfa of wespeaker, which it does not use: TypeError" in done.stdout


def test_a_peer_that_is_none_is_refused(tmp_path):
    done = run("--peer", tmp_path)
    assert done.returncode != 0
    line = f"must be a checkout of 3D-Speaker or of WeSpeaker, got {tmp_path}"
    assert line in " ".join(done.stderr.split())


@pytest.mark.skipif(not all(PEERS), reason="SPEAKERLAB_3DSPEAKER, SPEAKERLAB_WESPEAKER are not set")
def test_scoring_beside_both(tmp_path):
    rows = read_rows(
        run("--peer", *PEERS, "--json", tmp_path / "rows.json"), tmp_path / "rows.json"
    )
    assert {*RATES, *(f"{name}.wespeaker" for name in RATES), *OWN} < set(rows)
    for name in ("score.eer", "score.min_dcf"):
        assert rows[name]["ours"] == pytest.approx(rows[name]["peer"], abs=1e-9)
