"""Recipes through run.sh, from a corpus in its own layout to the report, with a tiny model."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny import ROOT, TINY, card
from voices import RATE, make_wave, write_voices

from speakerlab.data import audio
from speakerlab.experiments.curves import find_reference
from tests.egs.cnceleb_corpus import make_cnceleb
from tests.egs.corpora import write_3dspeaker, write_noise, write_voxceleb

sys.path.append(str(ROOT / "benchmarks"))

from reference import summarize

KEYS = {
    *("trials", "system", "eer", "eer_untrained", "eer_ci95", "min_dcf", "cllr", "act_dcf"),
    *("num_target", "num_nontarget", "backend", "protocol", "model_sha256", "commit"),
    *("at_threshold", "bn_batch", "min_cllr", "intervals", "calibration", "conditions"),
    *("compared", "num_speakers", "primary"),
}


def write_librispeech(corpus: Path) -> None:
    for subset, speakers in (("train-x", range(8)), ("test-x", range(8, 12))):
        for speaker in speakers:
            for utterance in range(3):
                path = corpus / subset / f"{speaker}" / "7" / f"{speaker}-7-{utterance:04d}.flac"
                path.parent.mkdir(parents=True, exist_ok=True)
                audio.write(path, make_wave(speaker, utterance, 1.5), RATE)


# name -> what writes the corpus, (targets, nontargets) of each list, conditions of its utterances
RECIPES: dict[str, tuple[Callable[[Path], None], dict[str, tuple[int, int]], set[str]]] = {
    # 4 test speakers of 3 utterances: 4 x 3 pairs of one speaker, 66 - 12 of two.
    "librispeech": (write_librispeech, {"test/trials": (12, 54)}, set()),
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


@pytest.fixture
def run_recipe(environment, tmp_path):
    """run_recipe(name, *options, code=0, minutes=5) -> finished run.sh, on folders of tmp_path."""

    def run(
        name: str, *options: str, code: int = 0, minutes: float = 5
    ) -> subprocess.CompletedProcess[str]:
        words = ["bash", str(ROOT / "egs" / name / "run.sh")]
        for option in ("corpus", "data", "exp"):
            words += [f"--{option}", str(tmp_path / option)]
        how = {"env": environment, "capture_output": True, "text": True}
        done = subprocess.run([*words, *options], **how, timeout=60 * minutes)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


@pytest.mark.parametrize(
    "name",
    ["voxceleb", *(pytest.param(n, marks=pytest.mark.slow) for n in RECIPES if n != "voxceleb")],
)
def test_a_corpus_becomes_a_report(run_recipe, tmp_path, name):
    write, lists, conditions = RECIPES[name]
    write(tmp_path / "corpus")
    write_noise(tmp_path / "corpus")
    exp, model = tmp_path / "exp", ("--model", "campplus_tiny")
    options = (*model, "--stage", "1", "--set", *TINY, "training.num_epochs=1")
    done = run_recipe(name, *options)
    for backend in ("mean+cosine", "mean+cosine+asnorm"):
        assert re.search(rf"skipped {re.escape(backend)}: mean: .*50 speakers, got", done.stderr)
    rows = json.loads((exp / "results.json").read_text())
    assert {row["trials"]: (row["num_target"], row["num_nontarget"]) for row in rows} == lists
    assert {row["backend"] for row in rows} == {"cosine"}  # there is too little for the others
    assert conditions <= {found["condition"] for row in rows for found in row["conditions"]}
    page = (exp / "report.html").read_text()
    for row in rows:
        assert set(row) == KEYS and row["system"] == "exp"
        assert row["model_sha256"] == card(exp)["sha256"]
        assert (row["eer_ci95"] is None) == (row["num_speakers"] < 5)
        low, high = row["eer_ci95"] or (0, 1)
        assert 0 <= low <= row["eer"] <= high <= 1
        assert f"{100 * row['eer']:.2f}" in page
    assert page.count("data:image/png") >= 2
    first = rows[0]
    leaves_out = "untrained=false" in (ROOT / f"egs/{name}/recipe.sh").read_text()
    assert (first["eer_untrained"] is None) == leaves_out
    assert done.stderr.count("no untrained embeddings") == leaves_out  # not once for each list
    scores = (exp / "scores" / f"{first['trials'].replace('/', '_')}.txt").read_text().splitlines()
    assert len(scores) == first["num_target"] + first["num_nontarget"]
    assert re.fullmatch(r"\S+ \S+ -?[01]\.\d{6} (non)?target", scores[0])

    is_augmented = name != "librispeech"  # whose default is no noise
    assert [card(exp)[key] for key in ("rooms", "noises")] == 2 * [int(is_augmented)]

    if name == "librispeech":
        again = run_recipe(name, *options)
        assert [again.stdout.count(f"stage {n}: skipped") for n in (1, 2, 4)] == [1, 1, 1]
        kept = set(re.findall(r"embeddings/(\S+): already extracted", again.stderr))
        durations = {"test/trained_2s", "test/trained_3s"}
        assert kept == {"test/trained", "test/untrained", "train/trained"} | durations
        assert json.loads((exp / "results.json").read_text()) == rows
    other = run_recipe(name, *model, "--stage", "6", "--noise", "elsewhere", code=1)
    assert re.search(r"^--noise: .*elsewhere", other.stderr, re.MULTILINE)


@pytest.mark.slow
def test_mini_reports_durations_and_codecs(run_recipe, tmp_path):
    data, exp = tmp_path / "data", tmp_path / "exp"
    write_voices(data / "train", speakers=range(8))
    write_voices(data / "test", speakers=range(8, 14), seconds=(2.2, 2.5, 2.8), trials="all")
    for name in (".stage1", ".stage2"):
        (data / name).touch()
    silent = ("--noise", "none", "--rirs", "none")
    run_recipe("mini", "--stage", "3", *silent, "--set", *TINY, "training.num_epochs=1")
    (row,) = json.loads((exp / "results.json").read_text())
    found = {name: dict[str, float]() for name in ("duration", "codec")}
    for part in row["conditions"]:
        low, high = part["eer_ci95"]
        assert 0 <= low <= part["eer"] <= high <= 1
        if part["condition"].endswith("of the test side"):
            found[part["condition"].split()[0]][part["value"]] = part["eer"]
    assert list(found["duration"]) == ["1 s", "2 s", "full"]
    assert list(found["codec"]) == ["none", "mp3:16k", "opus:8k", "gsm"]
    assert found["codec"]["none"] == found["duration"]["full"] == row["eer"]
    page = (exp / "report.html").read_text()
    assert all(value in page for values in found.values() for value in values)


@pytest.mark.slow
def test_mini_learns_as_its_reference(run_recipe, tmp_path):
    """The README's first command, with a seed that the reference lacks."""
    exp = tmp_path / "exp"
    run_recipe("mini", "--seed", "100", minutes=30)
    (row,) = json.loads((exp / "results.json").read_text())
    assert (row["num_target"], row["num_nontarget"]) == (1512, 6000)
    assert row["eer"] < row["eer_untrained"] - 0.05
    reference = find_reference(ROOT / "egs/mini/reference.json", exp)
    assert reference is not None, "the recipe has changed: write its reference again"
    found = summarize([exp])["curves"]
    assert found["learning rate"]["median"] == pytest.approx(
        reference["curves"]["learning rate"]["median"], rel=1e-3
    )
    for name in ("loss", "validation EER in %"):  # another seed: a wider band
        low_B, high_B = (np.array(reference["curves"][name][key]) for key in ("low", "high"))
        middle_B = (low_B + high_B) / 2
        away_B = np.abs(np.array(found[name]["median"]) - middle_B)
        is_near_B = away_B <= 1.5 * (high_B - low_B) + 0.1 * middle_B
        assert is_near_B.mean() >= 0.8 and is_near_B[-1], (name, found[name], low_B, high_B)
    assert f"range of {len(reference['seeds'])} reference runs" in (exp / "report.html").read_text()
