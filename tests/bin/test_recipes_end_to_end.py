"""Recipes through run.sh, from a corpus in its own layout to the report, with a tiny model."""

import re
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from tiny import ROOT, TINY, card, read_json, slow
from voices import RATE, make_wave, write_voices

from egs.common.reference import summarize
from speakerlab.data import audio
from speakerlab.experiments.curves import find_reference
from tests.egs.cnceleb_corpus import make_cnceleb
from tests.egs.corpora import write_3dspeaker, write_noise, write_voxceleb
from tests.egs.voxblink2_corpus import write_voxblink2

KEYS = {
    "trials",
    "system",
    "eer",
    "eer_untrained",
    "fine_tuned",
    "eer_ci95",
    "min_dcf",
    "cllr",
    "act_dcf",
    "num_target",
    "num_nontarget",
    "backend",
    "protocol",
    "model_sha256",
    "commit",
    "at_threshold",
    "bn_batch",
    "min_cllr",
    "intervals",
    "calibration",
    "conditions",
    "compared",
    "num_speakers",
    "primary",
}


def write_librispeech(corpus: Path) -> None:
    for subset, speakers in (("train-x", range(8)), ("test-x", range(8, 12))):
        for speaker, utterance in product(speakers, range(3)):
            chapter = corpus / subset / f"{speaker}/7"
            chapter.mkdir(parents=True, exist_ok=True)
            path = chapter / f"{speaker}-7-{utterance:04d}.flac"
            audio.write(path, make_wave(speaker, utterance, 1.5), RATE)


# Recipes that do not extract embeddings of initial weights.
WITHOUT_UNTRAINED = ("voxceleb", "3dspeaker", "cnceleb")
# Function that writes the corpus, (targets, nontargets) of each list, conditions of its utterances.
Expected = tuple[Callable[[Path], None], dict[str, tuple[int, int]], set[str]]
RECIPES: dict[str, Expected] = {
    # 4 test speakers of 3 utterances: 4 x 3 pairs of one speaker, 66 - 12 of two.
    "librispeech": (write_librispeech, {"test/trials": (12, 54)}, set()),
    # 6 test speakers of 4 utterances: 6 x 6 pairs of one speaker, 276 - 36 of two; O is half the
    # speakers, H every other trial of E.
    "voxceleb": (
        write_voxceleb,
        {
            "test/trials_O": (18, 48),
            "test/trials_E": (36, 240),
            "test/trials_H": (18, 120),
        },
        {"gender"},
    ),
    # 6 test speakers of 3 devices: 6 x 3 pairs of one speaker, 153 - 18 of two.
    "3dspeaker": (
        write_3dspeaker,
        {
            "test/trials_cross_device": (18, 135),
            "test/trials_cross_distance": (18, 135),
            "test/trials_cross_dialect": (18, 135),
        },
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
        arguments = ["bash", str(ROOT / "egs" / name / "run.sh")]
        for option in ("corpus", "data", "exp"):
            arguments += [f"--{option}", str(tmp_path / option)]
        done = subprocess.run(
            [*arguments, *options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60 * minutes,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def assert_all_is_kept(said: str) -> None:
    """Check what librispeech prints when all its stages are done already."""
    assert said.count("already prepared with the same options") == 1
    # The headers, and then all audio.
    assert said.count("already checked with these inputs") == 2
    assert said.count("already packed") == 1
    assert said.count("already trained to the end") == 1
    assert said.count("already scored with these inputs") == 1
    extracted = set(re.findall(r"embeddings/(\S+): already extracted", said))
    assert extracted == {
        "test/trained",
        "test/trained_2s",
        "test/trained_3s",
        "test/untrained",
        "train/trained",
    }


# One recipe is enough for a quick run of the tests.
QUICK = "voxceleb"
SLOW = [slow(name) for name in RECIPES if name != QUICK]


@pytest.mark.parametrize("name", [QUICK, *SLOW])
def test_a_corpus_becomes_a_report(run_recipe, tmp_path, name):
    write, lists, conditions = RECIPES[name]
    write(tmp_path / "corpus")
    write_noise(tmp_path / "corpus")
    exp = tmp_path / "exp"
    settings = ("--set", *TINY, "training.num_epochs=1")
    options = ("--model", "campplus_tiny", "--stage", "1", *settings)
    done = run_recipe(name, *options)
    for backend in ("mean+cosine", "mean+cosine+asnorm"):
        reason = rf"skipped {re.escape(backend)}: mean: .*50 speakers, got"
        assert re.search(reason, done.stderr)

    rows = read_json(exp / "results.json")
    counts = {}
    measured = set()
    for row in rows:
        counts[row["trials"]] = (row["num_target"], row["num_nontarget"])
        measured |= {part["condition"] for part in row["conditions"]}
        # There is too little data for the other back ends.
        assert row["backend"] == "cosine"
    assert counts == lists
    assert conditions <= measured

    page = (exp / "report.html").read_text()
    for row in rows:
        assert set(row) == KEYS
        assert row["system"] == "exp"
        assert row["model_sha256"] == card(exp)["sha256"]
        has_interval = row["eer_ci95"] is not None
        assert has_interval == (row["num_speakers"] >= 5)
        low, high = row["eer_ci95"] or (0, 1)
        assert 0 <= low <= row["eer"] <= high <= 1
        assert f"{100 * row['eer']:.2f}" in page
    assert page.count("data:image/png") >= 2

    # A lack of untrained embeddings is logged once, not for each list.
    first = rows[0]
    leaves_out = name in WITHOUT_UNTRAINED
    assert (first["eer_untrained"] is None) == leaves_out
    assert done.stderr.count("no untrained embeddings") == int(leaves_out)

    file = f"{first['trials'].replace('/', '_')}.txt"
    scores = (exp / "scores" / file).read_text().splitlines()
    expected = first["num_target"] + first["num_nontarget"]
    assert len(scores) == expected
    assert re.fullmatch(r"\S+ \S+ -?[01]\.\d{6} (non)?target", scores[0])

    # The default of librispeech is no noise.
    num_banks = 0 if name == "librispeech" else 1
    assert card(exp)["rooms"] == num_banks
    assert card(exp)["noises"] == num_banks

    if name == "librispeech":
        again = run_recipe(name, *options)
        assert_all_is_kept(again.stdout + again.stderr)
        assert read_json(exp / "results.json") == rows
    other_exp = ("--exp", str(tmp_path / "other"))
    other = run_recipe(name, *options, *other_exp, "--noise", "elsewhere", code=1)
    assert re.search(r"elsewhere.*--noise none\nstage 1: failed", other.stderr)


@pytest.mark.slow
def test_voxblink2_is_tested_and_fine_tuned_on_voxceleb(run_recipe, tmp_path):
    write_voxblink2(tmp_path / "corpus")
    write_noise(tmp_path / "corpus")
    write_voxceleb(tmp_path / "celebs")
    voxceleb = str(tmp_path / "voxceleb")
    places = ("--corpus", str(tmp_path / "celebs"), "--data", voxceleb)
    silent = ("--noise", "none", "--rirs", "none")
    run_recipe("voxceleb", *places, *silent, "--stage", "1", "--stop-stage", "2")

    # In the second step, the first two epochs are of the head alone.
    settings = ("--set", *TINY, "training.num_epochs=3")
    options = ("--model", "campplus_tiny", "--stage", "1", "--large-margin", "true")
    run_recipe("voxblink2", "--voxceleb", voxceleb, *options, *settings)

    exp = tmp_path / "exp"
    tuned = tmp_path / "exp-lm"
    for folder, first in ((exp, "id000000"), (tuned, "id00012")):
        speakers = (folder / "model/speakers.txt").read_text().splitlines()
        # Two of twelve speakers validate, and there is no other speed.
        assert len(speakers) == 10
        assert len(speakers[0]) == len(first)
        rows = read_json(folder / "results.json")
        counts = [(row["num_target"], row["num_nontarget"]) for row in rows]
        assert counts == [(18, 48), (36, 240), (18, 120)]
        # Noise and rooms are those beside VoxBlink2, in both steps.
        assert card(folder)["noises"] == 1
    log = (tuned / "train.log").read_text()
    assert "head: 0 of 10 rows loaded by name, 10 new" in log


@pytest.mark.slow
def test_mini_reports_durations_and_codecs(run_recipe, tmp_path):
    data = tmp_path / "data"
    exp = tmp_path / "exp"
    write_voices(data / "train", speakers=range(8))
    seconds = (2.2, 2.5, 2.8)
    write_voices(data / "test", speakers=range(8, 14), seconds=seconds, trials="all")
    silent = ("--noise", "none", "--rirs", "none")
    settings = ("--set", *TINY, "training.num_epochs=1")
    run_recipe("mini", "--stage", "3", *silent, *settings)

    (row,) = read_json(exp / "results.json")
    eers: dict[str, dict[str, float]] = {"duration": {}, "codec": {}}
    for part in row["conditions"]:
        low, high = part["eer_ci95"]
        assert 0 <= low <= part["eer"] <= high <= 1
        condition = part["condition"]
        if condition.endswith("of the test side"):
            kind = condition.split()[0]
            eers[kind][part["value"]] = part["eer"]
    assert list(eers["duration"]) == ["1 s", "2 s", "full"]
    assert list(eers["codec"]) == ["none", "mp3:16k", "opus:8k", "gsm"]
    assert eers["codec"]["none"] == row["eer"]
    assert eers["duration"]["full"] == row["eer"]
    page = (exp / "report.html").read_text()
    for value in (*eers["duration"], *eers["codec"]):
        assert value in page


@pytest.mark.slow
def test_mini_learns_as_its_reference(run_recipe, tmp_path):
    """The README's first command, with a seed that the reference lacks."""
    exp = tmp_path / "exp"
    run_recipe("mini", "--seed", "100", minutes=30)
    (row,) = read_json(exp / "results.json")
    assert row["num_target"] == 1512
    assert row["num_nontarget"] == 6000
    assert row["eer"] < row["eer_untrained"] - 0.05

    reference = find_reference(ROOT / "egs/mini/reference.json", exp)
    assert reference is not None, "the recipe has changed: write its reference again"
    expected_curves = reference["curves"]
    curves = summarize([exp])["curves"]
    rates = curves["learning rate"]["median"]
    expected_rates = expected_curves["learning rate"]["median"]
    assert rates == pytest.approx(expected_rates, rel=1e-3)
    for name in ("loss", "validation EER in %"):
        low_B = np.array(expected_curves[name]["low"])
        high_B = np.array(expected_curves[name]["high"])
        middle_B = (low_B + high_B) / 2
        # Another seed: the band is wider than the one of the reference.
        away_B = np.abs(np.array(curves[name]["median"]) - middle_B)
        is_near_B = away_B <= 1.5 * (high_B - low_B) + 0.1 * middle_B
        details = (name, curves[name], low_B, high_B)
        assert is_near_B.mean() >= 0.8, details
        assert is_near_B[-1], details

    num_seeds = len(reference["seeds"])
    page = (exp / "report.html").read_text()
    assert f"range of {num_seeds} reference runs" in page
