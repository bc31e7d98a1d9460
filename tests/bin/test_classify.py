"""Identification from training to a table, and what is refused."""

import shutil

import pytest
from refusals import refuses
from tiny import BARE, CONFIG, TINY, card, read_json, rows

from speakerlab.bin import classify, extract
from speakerlab.data.tables import read_table, write_table

SETTINGS = ["task=identification", "data.labels=utt2lang", "training.num_epochs=2"]


def language_of(speaker: str) -> str:
    number = int(speaker.removeprefix("spk"))
    return ["de", "th"][number % 2]


@pytest.fixture(scope="module")
def languages(data, tmp_path_factory):
    """The corpus of this folder; its odd speakers speak another language."""
    root = tmp_path_factory.mktemp("languages")
    for name in ("train", "test"):
        shutil.copytree(data / name, root / name)
        speakers = read_table(root / name / "utt2spk")
        labels = {}
        for utterance, speaker in speakers.items():
            labels[utterance] = language_of(speaker)
        write_table(root / name / "utt2lang", labels)
    return root


@pytest.fixture(scope="module")
def experiment(languages, run, tmp_path_factory):
    """(trained experiment whose test set is embedded, what training wrote)."""
    exp = tmp_path_factory.mktemp("exp") / "lid"
    settings = [f"data.dir={languages}", *BARE, *TINY, *SETTINGS]
    command = ["-m", "speakerlab", "train", "--exp", exp, "--config", CONFIG]
    finished = run(*command, "--set", *settings)
    extract.main(["--exp", str(exp), "--data", str(languages / "test")])
    return exp, finished.stderr


def test_validation_reports_the_error_rate(experiment):
    exp, text = experiment
    valid = rows(exp, "valid")
    assert valid
    errors = []
    for row in valid:
        assert set(row) == {"kind", "step", "error"}
        # 2 of 8 speakers, 3 utterances each.
        num_errors = row["error"] * 6
        assert num_errors == pytest.approx(round(num_errors))
        errors.append(row["error"])

    model_card = card(exp)
    assert model_card["best_valid_error"] == min(errors)
    assert model_card["train_classes"] == 2
    assert model_card["train_utterances"] == 18
    assert model_card["valid_utterances"] == 6
    assert "2 classes, 18 utterances" in text
    assert "validation: error " in text

    errors_of_checkpoints = []
    for path in exp.glob("checkpoints/*/note.json"):
        error = read_json(path)["valid_error"]
        if error is not None:
            errors_of_checkpoints.append(error)
    assert min(errors_of_checkpoints) == min(errors)
    # Speeds make no classes, and there is no threshold to learn.
    assert (exp / "model/speakers.txt").read_text() == "de\nth\n"
    assert not (exp / "model/calibration.json").exists()


def test_every_test_utterance_is_classified(experiment, languages, capsys):
    exp, _ = experiment
    classify.main(["--exp", str(exp), "--data", str(languages / "test")])
    scores = (exp / "scores/test_classes.txt").read_text().splitlines()
    assert len(scores) == 12
    num_correct = 0
    for line in scores:
        utterance, true, decided, posterior = line.split()
        speaker = utterance.partition("-")[0]
        assert true == language_of(speaker)
        assert decided in ("de", "th")
        assert 0.5 <= float(posterior) <= 1
        num_correct += true == decided

    accuracy = num_correct / 12
    (row,) = read_json(exp / "results.json")
    assert row["accuracy"] == pytest.approx(accuracy)
    num_decisions = 0
    for counts in row["confusion"].values():
        num_decisions += sum(counts.values())
    assert num_decisions == 12
    assert "4 speakers" in row["protocol"]
    assert f"{100 * accuracy:.2f}" in capsys.readouterr().out
    page = (exp / "report.html").read_text()
    assert page.count("<table") == 2
    assert f"{100 * accuracy:.2f} %" in page
    assert "http:" not in page
    assert "<script" not in page


def test_decisions_of_the_same_inputs_are_kept(
    experiment, languages, capsys, caplog, tmp_path
):
    trained, _ = experiment
    exp = shutil.copytree(trained, tmp_path / "exp")
    data = shutil.copytree(languages / "test", tmp_path / "test")
    caplog.set_level("INFO")

    def is_kept(*options: str) -> bool:
        caplog.clear()
        classify.main(["--exp", str(exp), "--data", str(data), *options])
        return "already classified with these inputs, kept (--force" in caplog.text

    assert not is_kept()
    printed = capsys.readouterr().out
    before = (exp / "results.json").stat().st_mtime_ns
    assert is_kept()
    assert capsys.readouterr().out == printed
    assert (exp / "results.json").stat().st_mtime_ns == before
    assert not is_kept("--force")

    # Another label of one utterance.
    table = read_table(data / "utt2lang")
    first = next(iter(table))
    table[first] = "th" if table[first] == "de" else "de"
    write_table(data / "utt2lang", table)
    assert not is_kept()
    assert is_kept()

    # A missing result.
    for name in ("report.html", "scores/test_classes.txt", "results.json"):
        (exp / name).unlink()
        assert not is_kept()
        assert is_kept()


def test_labels_that_do_not_fit_the_model_are_refused(experiment, languages, tmp_path):
    exp, _ = experiment
    folder = shutil.copytree(languages / "test", tmp_path / "test")
    table = folder / "utt2lang"
    arguments = ["--exp", str(exp), "--data", str(folder)]
    text = table.read_text()
    table.write_text(text.replace(" de", " fr"))
    with refuses(str(table), "fr"):
        classify.main(arguments)
    # A table without the first utterance.
    _, *lines = text.splitlines(keepends=True)
    table.write_text("".join(lines))
    with refuses(str(table), "spk10-0"):
        classify.main(arguments)
