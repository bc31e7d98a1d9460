"""Identification from training to a table, and what is refused."""

import json
import shutil

import pytest
from refusals import refuses
from tiny import BARE, CONFIG, TINY, card, rows

from speakerlab.bin import classify, extract
from speakerlab.data.tables import read_table, write_table

SETTINGS = ["task=identification", "data.labels=utt2lang", "training.num_epochs=2"]


def language_of(speaker: str) -> str:
    return ["de", "th"][int(speaker.removeprefix("spk")) % 2]


@pytest.fixture(scope="module")
def languages(data, tmp_path_factory):
    """The corpus of this folder; its odd speakers speak another language."""
    root = tmp_path_factory.mktemp("languages")
    for name in ("train", "test"):
        shutil.copytree(data / name, root / name)
        speakers = read_table(root / name / "utt2spk")
        write_table(root / name / "utt2lang", {u: language_of(s) for u, s in speakers.items()})
    return root


@pytest.fixture(scope="module")
def experiment(languages, run, tmp_path_factory):
    """(trained experiment whose test set is embedded, what training wrote)."""
    exp = tmp_path_factory.mktemp("exp") / "lid"
    settings = [f"data.dir={languages}", *BARE, *TINY, *SETTINGS]
    found = run("-m", "speakerlab", "train", "--exp", exp, "--config", CONFIG, "--set", *settings)
    extract.main(["--exp", str(exp), "--data", str(languages / "test")])
    return exp, found.stderr


def test_validation_reports_the_error_rate(experiment):
    exp, text = experiment
    valid = rows(exp, "valid")
    assert valid and all(set(row) == {"kind", "step", "error"} for row in valid)
    # 2 of 8 speakers, 3 utterances each
    assert all(row["error"] * 6 == pytest.approx(round(row["error"] * 6)) for row in valid)
    found, best = card(exp), min(row["error"] for row in valid)
    assert found["best_valid_error"] == best
    counts = [found[key] for key in ("train_classes", "train_utterances", "valid_utterances")]
    assert counts == [2, 18, 6]
    assert "2 classes, 18 utterances" in text and "validation: error " in text
    notes = [json.loads(path.read_text()) for path in exp.glob("checkpoints/*/note.json")]
    assert min(n["valid_error"] for n in notes if n["valid_error"] is not None) == best
    # speeds make no classes, and there is no threshold to learn
    assert (exp / "model/speakers.txt").read_text() == "de\nth\n"
    assert not (exp / "model/calibration.json").exists()


def test_every_test_utterance_is_classified(experiment, languages, capsys):
    exp, _ = experiment
    classify.main(["--exp", str(exp), "--data", str(languages / "test")])
    lines = [line.split() for line in (exp / "scores/test_classes.txt").read_text().splitlines()]
    assert len(lines) == 12
    for utterance, true, found, posterior in lines:
        assert true == language_of(utterance.partition("-")[0])
        assert found in ("de", "th") and 0.5 <= float(posterior) <= 1
    (row,) = json.loads((exp / "results.json").read_text())
    accuracy = sum(true == found for _, true, found, _ in lines) / 12
    assert row["accuracy"] == pytest.approx(accuracy)
    assert sum(n for counts in row["confusion"].values() for n in counts.values()) == 12
    assert "4 speakers" in row["protocol"]
    assert f"{100 * accuracy:.2f}" in capsys.readouterr().out
    page = (exp / "report.html").read_text()
    assert page.count("<table") == 2 and f"{100 * accuracy:.2f} %" in page
    assert "http:" not in page and "<script" not in page


def test_labels_that_do_not_fit_the_model_are_refused(experiment, languages, tmp_path):
    exp, _ = experiment
    folder = shutil.copytree(languages / "test", tmp_path / "test")
    table = folder / "utt2lang"
    words = ["--exp", str(exp), "--data", str(folder)]
    text = table.read_text()
    table.write_text(text.replace(" de", " fr"))
    with refuses(str(table), "fr"):
        classify.main(words)
    table.write_text("".join(text.splitlines(keepends=True)[1:]))
    with refuses(str(table), "spk10-0"):
        classify.main(words)
