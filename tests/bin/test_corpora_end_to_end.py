"""Each corpus from its own layout and file formats to the report: stages 1 to 6, a tiny model."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import ROOT, TINY

from tests.egs.cnceleb_corpus import make_cnceleb
from tests.egs.corpora import write_3dspeaker, write_voxceleb

# name -> what writes the corpus, (targets, nontargets) of each list, conditions of its utterances
RECIPES: dict[str, tuple[Callable[[Path], None], dict[str, tuple[int, int]], set[str]]] = {
    # 6 test speakers of 4 utterances: 6 x 6 pairs of one speaker, 276 - 36 of two; O is half the
    # speakers, H every other trial of E.
    "voxceleb": (
        write_voxceleb,
        {"test/trials_O": (18, 48), "test/trials_E": (36, 240), "test/trials_H": (18, 120)},
        {"gender"},
    ),
    # 6 test speakers of 3 devices: 6 x 3 pairs of one speaker, 153 - 18 of two.
    "3dspeaker": (
        write_3dspeaker,
        {f"test/trials_cross_{kind}": (18, 135) for kind in ("device", "distance", "dialect")},
        {"device", "distance", "dialect"},
    ),
    # 5 enrolled speakers and one who is not, 3 tests each: 5 x 3 and 5 x 18 - 15.
    "cnceleb": (
        make_cnceleb,
        {"test/trials_concat": (15, 75), "test/trials_average": (15, 75)},
        set(),  # its tests are of one genre
    ),
}


@pytest.mark.parametrize(
    "name",
    ["voxceleb", *(pytest.param(n, marks=pytest.mark.slow) for n in ("3dspeaker", "cnceleb"))],
)
def test_stages_1_to_6(environment, tmp_path, name):
    write, lists, conditions = RECIPES[name]
    write(tmp_path / "corpus")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        words = ["bash", str(ROOT / "egs" / name / "run.sh"), "--model", "campplus_tiny"]
        for option in ("corpus", "data", "exp"):
            words += [f"--{option}", str(tmp_path / option)]
        words += options
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)

    stages = ("--stage", "1", "--stop-stage", "6")
    done = run(*stages, "--set", *TINY, "training.num_epochs=1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "exp" / "results.json").read_text())
    assert {row["trials"]: (row["num_target"], row["num_nontarget"]) for row in rows} == lists
    assert all(0 <= row["eer"] <= 1 for row in rows)
    assert {row["backend"] for row in rows} == {"cosine", "mean+cosine", "mean+cosine+asnorm"}
    assert conditions <= {found["condition"] for row in rows for found in row["conditions"]}
    assert (tmp_path / "exp" / "report.html").stat().st_size > 10_000

    other = run("--stage", "6", "--noise", "elsewhere")
    assert other.returncode == 1
    assert "--noise: is not what stage 1 was run with, got " in other.stderr
