"""`speakerlab score` once: what is scored is kept, and each input scores again."""

import json

import numpy as np
import pytest
from embedded_sets import CHAINS, SHA, make_experiment
from refusals import refuses

from speakerlab.bin import score
from speakerlab.core import done
from speakerlab.scoring.embeddings import EmbeddingTable

KEPT = "already scored with these inputs, kept (--force scores again)"


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """An experiment whose scorings draw no pictures, which would take half of their time."""
    report = "speakerlab.experiments.report"
    monkeypatch.setattr(f"{report}.draw_list", lambda folder, group: [])
    # fewer replicates
    monkeypatch.setattr("speakerlab.scoring.bootstrap.MANY_TRIALS", 0)
    return make_experiment(tmp_path)


@pytest.fixture
def is_kept(experiment, caplog):
    """is_kept(*options) -> whether the results are kept."""
    exp, data = experiment

    def run(*options: str) -> bool:
        caplog.clear()
        with caplog.at_level("INFO"):
            trials = str(data / "test/trials")
            score.main(["--exp", str(exp), "--trials", trials, *options])
        return f"{exp}: {KEPT}" in caplog.text

    return run


def write_times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_second_scoring_prints_the_same_table(experiment, is_kept, capsys):
    exp, _ = experiment
    back_ends = ("--backend", *CHAINS[:2])
    assert not is_kept(*back_ends)
    printed = capsys.readouterr().out
    before = write_times(exp)
    assert is_kept(*back_ends)
    assert capsys.readouterr().out == printed
    assert write_times(exp) == before

    assert not is_kept(*back_ends, "--force")
    assert is_kept(*back_ends)

    # rows have no digests of the inputs
    rows = json.loads((exp / "results.json").read_text())
    keys = rows[0].keys()
    assert {"trials", "eer", "backend", "model_sha256"} <= keys
    for key in keys:
        assert "input" not in key
        assert "digest" not in key


def test_a_repeated_back_end_or_list_is_scored_once(experiment, is_kept, caplog):
    exp, data = experiment
    trials = str(data / "test/trials")
    assert not is_kept("--backend", CHAINS[0], CHAINS[0])
    assert f"--backend: {CHAINS[0]} is given 2 times, used once" in caplog.messages
    rows = json.loads((exp / "results.json").read_text())
    assert [row["backend"] for row in rows] == [CHAINS[0]]
    # The results are those without the repeats.
    assert is_kept("--backend", CHAINS[0])
    caplog.clear()
    score.main(["--exp", str(exp), "--trials", trials, trials])
    assert f"--trials: {trials} is given 2 times, used once" in caplog.messages


def test_a_wrong_list_is_the_only_line(experiment, tmp_path, caplog):
    exp, data = experiment
    outside = tmp_path / "other/trials"
    outside.parent.mkdir()
    outside.write_text((data / "test/trials").read_text())
    caplog.set_level("INFO")
    for path, subject, error in (
        (data / "test", data / "test", ValueError),
        (outside, outside.parent / "utt2spk", FileNotFoundError),
    ):
        with refuses(str(subject), error=error):
            score.main(["--exp", str(exp), "--trials", str(path)])
        assert caplog.messages == []


@pytest.mark.slow
def test_every_input_scores_again(experiment, is_kept, monkeypatch):
    exp, data = experiment
    trials = data / "test/trials"
    reference = exp.parent / "reference.json"
    stem = exp / "embeddings/test/trained"

    def remove_first_trial() -> None:
        lines = trials.read_text().splitlines(keepends=True)
        trials.write_text("".join(lines[1:]))

    def embed_again() -> None:
        table = EmbeddingTable.load(stem)
        other_ND = table.emb_ND + np.float32(1)
        EmbeddingTable(table.ids, other_ND, SHA).save(stem)

    def embed_untrained() -> None:
        table = EmbeddingTable.load(stem)
        table.save(f"{stem.parent}/untrained")

    def change_code() -> None:
        monkeypatch.setattr(done, "code_digest", lambda: "of another version")

    assert not is_kept()
    for change in (
        remove_first_trial,
        lambda: (data / "test/utt2device").unlink(),
        embed_again,
        embed_untrained,
        lambda: (data / "train/utt2dur").unlink(),
        lambda: (exp / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n'),
        lambda: (exp / "report.html").unlink(),
        lambda: (exp / "scores/test_trials.txt").unlink(),
        lambda: (exp / "results.json").write_text("[]"),
        lambda: (exp / "scores/.scored").write_bytes(b"\xff"),
        change_code,
    ):
        change()
        assert not is_kept()
        assert is_kept()
    for options in (
        ("--p-target", "0.1"),
        ("--calibration", "none"),
        ("--backend", "mean+cosine"),
        ("--reference", str(reference)),
    ):
        assert not is_kept(*options)
        assert is_kept(*options)
    assert not is_kept(), "the last scoring wrote another report"
    assert not is_kept("--reference", str(reference))
    reference.write_text("[]")
    assert not is_kept("--reference", str(reference))


def test_results_of_another_user_that_are_done_need_no_lock(experiment, is_kept):
    exp, _ = experiment
    assert not is_kept()
    (exp / ".results.lock").unlink()
    # opening it fails as without permission
    (exp / ".results.lock").mkdir()
    assert is_kept()
    with refuses(str(exp), "cannot be written"):
        is_kept("--force")


def test_missing_embeddings_name_the_command(experiment, is_kept):
    exp, data = experiment
    (exp / "embeddings/test/trained.json").unlink()
    command = f"run `speakerlab extract --exp {exp} --data {data / 'test'}`"
    with refuses(
        str(exp / "embeddings/test/trained"), command, error=FileNotFoundError
    ):
        is_kept()
