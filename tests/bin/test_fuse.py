"""`speakerlab fuse`: the fusion beats its systems, and files that do not fit are refused."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.bin.fuse import main
from speakerlab.scoring.metrics import cllr, eer
from speakerlab.scoring.score_files import read_scores, write_scores
from speakerlab.scoring.trials import read_trials


def write_list(folder, *, seed, speakers=24, per_speaker=4):
    """All pairs; two systems whose errors are independent: `a` and `b`, in other units."""
    folder.mkdir()
    ids = [f"s{i // per_speaker:02}-{i}" for i in range(speakers * per_speaker)]
    pairs = [(a, b) for i, a in enumerate(ids) for b in ids[i + 1 :]]
    lines = [f"{a} {b} {'target' if a[:3] == b[:3] else 'nontarget'}\n" for a, b in pairs]
    (folder / "trials").write_text("".join(lines))
    (folder / "utt2spk").write_text("".join(f"{name} {name[:3]}\n" for name in ids))
    trials = read_trials(folder / "trials")
    rng = np.random.default_rng(seed)
    for name, unit in (("a", 0.1), ("b", 7.0)):
        scores_N = rng.normal(size=len(trials)) + 2.5 * trials.is_target_N
        write_scores(folder / name, trials, unit * scores_N + 0.3)
    return trials


def fuse(folder, *words):
    scores = [str(folder / name) for name in "ab"]
    out = ["--out", str(folder / "fused")]
    main(["--trials", str(folder / "trials"), "--scores", *scores, *out, *map(str, words)])


def rows_of(text):
    """first word -> the numbers of its line."""
    lines = [line.split() for line in text.splitlines()[3:]]
    return {words[0].rpartition("/")[2]: [float(word) for word in words[1:]] for words in lines}


@pytest.mark.parametrize("learned_from", ["cross-validation", "other speakers"])
def test_a_fusion_of_two_systems_is_better_than_each(tmp_path, capsys, learned_from):
    trials, words = write_list(tmp_path / "test", seed=0), []
    if learned_from == "other speakers":
        write_list(tmp_path / "dev", seed=1)
        (tmp_path / "test/utt2spk").unlink()  # not needed
        dev = tmp_path / "dev"
        words = ["--dev-trials", dev / "trials", "--dev-scores", dev / "a", dev / "b"]
    fuse(tmp_path / "test", *words)
    rows = rows_of(capsys.readouterr().out)
    llr_N = read_scores(tmp_path / "test/fused", trials)
    assert rows["fused"][0] == pytest.approx(100 * eer(llr_N, trials.is_target_N), abs=0.006)
    assert rows["fused"][3] == pytest.approx(cllr(llr_N, trials.is_target_N), abs=0.0006)
    assert 2 < rows["fused"][0] < 6 < min(rows["a"][0], rows["b"][0]) < 13  # Phi(-1.77), Phi(-1.25)
    assert rows["fused"][3] < 0.7 * min(rows["a"][3], rows["b"][3]) < 0.4
    assert rows["fused"][1] <= rows["fused"][2] < 1.5 * rows["fused"][1]  # of 144 targets


def test_speakers_may_lie_elsewhere(tmp_path, capsys):
    folder = tmp_path / "test"
    write_list(folder, seed=0)
    fuse(folder)
    beside = (folder / "fused").read_text()
    (folder / "utt2spk").rename(tmp_path / "speakers")
    with pytest.raises(FileNotFoundError, match="utt2spk: no such file"):
        fuse(folder)
    fuse(folder, "--speakers", tmp_path / "speakers")
    assert (folder / "fused").read_text() == beside
    (tmp_path / "speakers").write_text("s00-0 s00\n")
    with refuses(f"{tmp_path}/speakers", "s00-1"):
        fuse(folder, "--speakers", tmp_path / "speakers")


@pytest.mark.parametrize(
    ("words", "subject", "value"),
    [
        ("--dev-trials FOLDER/trials", "--dev-scores", ""),
        ("--dev-trials FOLDER/trials --dev-scores FOLDER/a", "--dev-scores", ""),
        ("--dev-scores FOLDER/a", "--dev-scores", ""),
        ("--speakers FOLDER/utt2spk DEV --dev-trials DEV/trials", "--speakers", "FOLDER/utt2spk"),
        ("DEV --dev-trials FOLDER/trials", "--dev-trials", "FOLDER/trials"),
        ("--scores FOLDER/a FOLDER/a", "--scores", "FOLDER/a"),
        ("--out FOLDER/b", "--out", "FOLDER/b"),
    ],
)
def test_options_and_files_that_do_not_go_together_are_refused(tmp_path, words, subject, value):
    folder, dev = tmp_path / "test", tmp_path / "dev"
    write_list(folder, seed=0)
    write_list(dev, seed=1)
    before = (folder / "b").read_bytes()
    words = words.replace("DEV ", "--dev-scores DEV/a DEV/b ").replace("DEV", str(dev))
    with refuses(subject, value.replace("FOLDER", str(folder))):
        fuse(folder, *words.replace("FOLDER", str(folder)).split())
    assert (folder / "b").read_bytes() == before and not (folder / "fused").exists()


def test_scores_of_another_list_are_refused(tmp_path):
    folder = tmp_path / "test"
    write_list(folder, seed=0)
    lines = (folder / "b").read_text().splitlines(keepends=True)
    (folder / "b").write_text("".join(lines[1:]))
    with refuses(f"{folder}/b", "s00-0 s00-1"):
        fuse(folder)
    assert not (folder / "fused").exists()
