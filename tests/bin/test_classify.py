"""Identification from training to a table, as a user runs it; and what is refused."""

import json
import shutil

import pytest
import refusals
from tiny import ROOT, TINY

from speakerlab.bin import classify
from speakerlab.data.tables import write_table

SETTINGS = ["task=identification", "data.labels=utt2lang", "training.num_epochs=2"]


@pytest.fixture(scope="module")
def languages(data, tmp_path_factory):
    """The corpus of this folder, its odd speakers speaking another language."""
    root = tmp_path_factory.mktemp("languages")
    for name in ("train", "test"):
        shutil.copytree(data / name, root / name)
        lines = (root / name / "utt2spk").read_text().split("\n")[:-1]
        speakers = dict(line.split() for line in lines)
        table = {u: ["de", "th"][int(speaker[1:]) % 2] for u, speaker in speakers.items()}
        write_table(root / name / "utt2lang", table)
    return root


@pytest.fixture(scope="module")
def experiment(languages, run, tmp_path_factory):
    """Trained, its test set embedded and classified."""
    exp = tmp_path_factory.mktemp("exp") / "lid"
    conf = str(ROOT / "conf" / "campplus_tiny.yaml")
    settings = [f"data.dir={languages}", "data.noise=null", "data.rirs=null", *TINY, *SETTINGS]
    trained = run(
        *("-m", "speakerlab", "train", "--exp", exp, "--config", conf, "--set", *settings)
    )
    assert trained.returncode == 0, trained.stderr
    test = ["--exp", exp, "--data", languages / "test"]
    extracted = run("-m", "speakerlab", "extract", *test)
    assert extracted.returncode == 0, extracted.stderr
    return exp, trained


def test_validation_is_the_error_by_its_own_name(experiment):
    exp, trained = experiment
    rows = [json.loads(line) for line in (exp / "metrics.jsonl").read_text().splitlines()]
    valid = [row for row in rows if row["kind"] == "valid"]
    assert valid and all(set(row) == {"kind", "step", "error"} for row in valid)
    # 2 of 8 speakers, 3 utterances each
    assert all(row["error"] * 6 == pytest.approx(round(row["error"] * 6)) for row in valid)
    card = json.loads((exp / "model" / "card.json").read_text())
    assert card["best_valid_error"] == min(row["error"] for row in valid)
    assert (card["train_classes"], card["train_utterances"], card["valid_utterances"]) == (2, 18, 6)
    assert "2 classes, 18 utterances" in trained.stderr
    assert "validation: error " in trained.stderr
    notes = [json.loads(path.read_text()) for path in exp.glob("checkpoints/*/note.json")]
    assert {note["valid_eer"] for note in notes} == {None}
    assert (
        min(note["valid_error"] for note in notes if note["valid_error"] is not None)
        == (card["best_valid_error"])
    )
    # speeds make no classes, and there is no threshold to learn
    assert (exp / "model" / "speakers.txt").read_text() == "de\nth\n"
    assert not (exp / "model" / "calibration.json").exists()


def test_every_test_utterance_is_named(experiment, languages, capsys):
    exp, _ = experiment
    classify.main(["--exp", str(exp), "--data", str(languages / "test")])
    told = capsys.readouterr().out
    lines = [line.split() for line in (exp / "scores/test_classes.txt").read_text().splitlines()]
    assert len(lines) == 12
    for utterance, true, found, posterior in lines:
        assert true == ["de", "th"][int(utterance.partition("-")[0][1:]) % 2]
        assert found in ("de", "th") and 0.5 <= float(posterior) <= 1
    (row,) = json.loads((exp / "results.json").read_text())
    num_right = sum(true == found for _, true, found, _ in lines)
    assert row["accuracy"] == pytest.approx(num_right / 12)
    assert sum(n for counts in row["confusion"].values() for n in counts.values()) == 12
    assert row["protocol"].endswith("interval by bootstrap over 4 speakers")
    assert f"{100 * num_right / 12:.2f}" in told
    page = (exp / "report.html").read_text()
    assert page.count("<table") == 2 and f"<b>{100 * num_right / 12:.2f} %</b>" in page
    assert "http" not in page and "<script" not in page


def refused(exp, folder) -> str:
    with pytest.raises(ValueError) as error:
        classify.main(["--exp", str(exp), "--data", str(folder)])
    return str(error.value)


def test_unknown_classes_are_refused(experiment, languages, tmp_path):
    exp, _ = experiment
    shutil.copytree(languages / "test", tmp_path / "test")
    table = tmp_path / "test/utt2lang"
    table.write_text(table.read_text().replace(" de", " fr"))
    told = refused(exp, tmp_path / "test")
    assert refusals.refused(told, str(table), "fr")
    table.write_text("".join(table.read_text().splitlines(keepends=True)[1:]))
    assert refusals.refused(refused(exp, tmp_path / "test"), str(table), "s10-u0")


def test_embeddings_of_another_model_are_refused(experiment, languages, tmp_path):
    exp, _ = experiment
    copy = tmp_path / "lid"
    shutil.copytree(exp, copy)
    about = copy / "embeddings/test/trained.json"
    about.write_text(
        about.read_text().replace(json.loads(about.read_text())["model_sha256"], "0" * 64)
    )
    told = refused(copy, languages / "test")
    assert refusals.refused(told, str(copy / "embeddings/test/trained"), "000000000000")
