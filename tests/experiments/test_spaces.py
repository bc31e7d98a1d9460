"""Embeddings of student and teacher are compared; those of other models are refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from models_on_disk import CALIBRATION
from refusals import refuses
from voices import RATE, make_wave

import speakerlab
from speakerlab.bin import extract, score
from speakerlab.scoring.score_files import read_scores
from speakerlab.scoring.trials import read_trials


def mark_as_student(exp: Path, teacher: Path) -> None:
    """Write into the card of a model that it lives in the space of another one."""
    path = exp / "model/card.json"
    card = json.loads(path.read_text())
    card["space"] = json.loads((teacher / "model/card.json").read_text())["sha256"]
    path.write_text(json.dumps(card))


@pytest.fixture
def models(publish_to, tmp_path) -> dict[str, Path]:
    """Experiments `teacher`, its `student`, and `stranger`, all of 16 dimensions."""
    found = {}
    for seed, name in enumerate(("teacher", "student", "stranger")):
        folder, _, _ = publish_to(f"{name}-model", f"seed={seed}")
        exp = tmp_path / name
        exp.mkdir()
        shutil.move(folder, exp / "model")
        shutil.copy(exp / "model/config.yaml", exp / "config.yaml")
        found[name] = exp
    mark_as_student(found["student"], found["teacher"])
    return found


def test_a_list_is_scored_with_enrolments_of_the_teacher(models, make_data_dir):
    folder = make_data_dir("test", trials="all")
    trials = folder / "trials"
    for exp in models.values():
        extract.main(["--exp", str(exp), "--data", str(folder), "--gpus", ""])
    student = models["student"]
    options = ["--exp", str(student), "--trials", str(trials), "--gpus", ""]
    score.main([*options, "--enrol-exp", str(models["teacher"])])

    listed = read_trials(trials)
    loaded = {name: speakerlab.load(exp) for name, exp in models.items()}
    scores_N = read_scores(
        student / "scores/test_trials_enrolled_by_teacher.txt", listed
    )
    for number in range(3):
        enrol = listed.enrol_ids[listed.enrol_N[number]]
        test = listed.test_ids[listed.test_N[number]]
        wavs = folder.parent / "wav"
        first_D = loaded["teacher"].embed(wavs / f"{enrol}.wav")
        second_D = loaded["student"].embed(wavs / f"{test}.wav")
        norms = np.linalg.norm(first_D) * np.linalg.norm(second_D)
        assert scores_N[number] == pytest.approx(first_D @ second_D / norms, abs=1e-4)

    # The result of the student alone is kept beside it.
    score.main(options)
    rows = json.loads((student / "results.json").read_text())
    names = [row["trials"] for row in rows]
    assert names == ["test/trials, enrolled by teacher", "test/trials"]
    assert rows[0]["eer"] != rows[1]["eer"]

    with refuses("--enrol-exp", "stranger", "cannot be compared"):
        score.main([*options, "--enrol-exp", str(models["stranger"])])


def test_a_student_identifies_with_enrolments_of_its_teacher(models, tmp_path):
    file = tmp_path / "known.safetensors"
    teacher = speakerlab.load(models["teacher"])
    teacher.enroll("ann", [make_wave(0, 0, 1.0)], RATE)
    teacher.save_speakers(file)

    student = speakerlab.load(models["student"])
    student.load_speakers(file)
    np.testing.assert_array_equal(student.speakers["ann"], teacher.speakers["ann"])
    # The student's threshold is not for scores of two models.
    student.calibration = CALIBRATION
    recording = make_wave(0, 1, 1.0)
    assert student.identify(recording, RATE).is_known is None
    assert student.identify(recording, RATE, threshold=-1.0).is_known
    with refuses("far", "there is no calibration; give a threshold"):
        student.identify(recording, RATE, far=0.1)
    with refuses("known", "enrolled by another model"):
        student.diarize(recording, RATE, known=True)

    # Scores of a speaker depend on the model that enrolled it: one file, one model.
    with refuses("enrol", "enrol bob with that model"):
        student.enroll("bob", [make_wave(1, 0, 1.0)], RATE)
    alone = speakerlab.load(models["student"])
    alone.enroll("bob", [make_wave(1, 0, 1.0)], RATE)
    with refuses(str(file), "was made with model"):
        alone.save_speakers(file, add="bob")

    stranger = speakerlab.load(models["stranger"])
    with refuses(str(file), "was made with model"):
        stranger.load_speakers(file)
