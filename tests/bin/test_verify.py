"""`speakerlab verify`: what stages 5 and 6 write, decisions, pairs by path and by name."""

from itertools import combinations
from pathlib import Path

import pytest
from models_on_disk import CALIBRATION
from refusals import refuses

from speakerlab.bin import extract, score, verify
from speakerlab.data.tables import read_table


@pytest.fixture
def data_dir(make_data_dir) -> Path:
    """9 utterances and a list of 20 trials of them."""
    names = [f"spk{speaker}-{take}" for speaker in range(3) for take in range(3)]
    pairs = list(combinations(names, 2))[:20]
    trials = [(a, b, a[:4] == b[:4]) for a, b in pairs]
    return make_data_dir("test", speakers=[0, 1, 2], trials=trials)


def printed(capsys, *words: object) -> list[str]:
    capsys.readouterr()
    verify.main([*map(str, words), "--device", "cpu"])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("overrides", [(), ("vad={}",)])
def test_20_pairs_give_the_scores_of_the_score_file(make_exp, data_dir, capsys, overrides):
    exp, trials = make_exp("exp", *overrides), data_dir / "trials"
    extract.main(["--exp", str(exp), "--data", str(data_dir)])
    score.main(["--exp", str(exp), "--trials", str(trials)])
    written = (exp / "scores" / "test_trials.txt").read_text().splitlines()
    assert len(written) == 20
    words = ["--trials", trials, "--wav-scp", data_dir / "wav.scp", "--model", exp]
    lines = printed(capsys, *words)
    assert len(lines) == 20
    for line, wanted in zip(lines, written):
        *names, value = line.split()
        assert names == wanted.split()[:2]
        assert len(value.partition(".")[2]) == 6
        assert float(value) == pytest.approx(float(wanted.split()[2]), abs=1.01e-6)
    table = read_table(data_dir / "wav.scp")
    for line in lines[:3]:  # two files alone: the same again
        a, b, value = line.split()
        first = printed(capsys, table[a], table[b], "--model", exp)[0]
        assert float(first.removeprefix("score: ")) == pytest.approx(float(value), abs=1.01e-6)


def test_pairs_of_paths_without_labels(make_exp, data_dir, capsys, tmp_path):
    wavs = list(read_table(data_dir / "wav.scp").values())[:3]
    pairs = [(wavs[0], wavs[1]), (wavs[0], wavs[1]), (wavs[2], wavs[2])]  # one may occur twice
    (tmp_path / "pairs").write_text("".join(f"{a} {b}\n" for a, b in pairs))
    lines = printed(capsys, "--trials", tmp_path / "pairs", "--model", make_exp("exp"))
    assert [tuple(line.split()[:2]) for line in lines] == pairs
    assert lines[0] == lines[1]
    assert float(lines[2].split()[2]) == pytest.approx(1, abs=1e-6)


def test_a_decision(make_exp, data_dir, capsys):
    wavs = list(read_table(data_dir / "wav.scp").values())
    exp = make_exp("exp", calibration=CALIBRATION)
    lines = printed(capsys, wavs[0], wavs[0], "--model", exp)
    assert lines == [
        "score: 1.000000",
        "log-likelihood ratio: +5.000",
        "threshold: 0.500000 (at EER)",
        "decision: same speaker",
    ]
    lines = printed(capsys, wavs[0], wavs[8], "--model", exp, "--far", "0.01")
    assert lines[2:] == [
        "threshold: 0.999900 (at 1 % false alarms)",
        "decision: different speakers",
    ]


def test_no_decision_without_calibration(make_exp, data_dir, capsys):
    wav = next(iter(read_table(data_dir / "wav.scp").values()))
    lines = printed(capsys, wav, wav, "--model", make_exp("exp"))
    assert lines == [
        "score: 1.000000",
        "decision: none (no calibration; run `speakerlab calibrate`)",
    ]


@pytest.mark.parametrize(
    ("words", "text", "subject", "value"),
    [
        (["a.wav"], "", "verify", "1 recordings"),
        (["a.wav", "--trials", "FILE"], "a b\n", "verify", "1 recordings and --trials"),
        (["--trials", "FILE", "--far", "0.1"], "a b\n", "--far", 0.1),
        (["--trials", "FILE"], "a b\na\n", "FILE:2", "'a'"),
        (["--trials", "FILE"], "a b\n", "a", ""),
        (["--trials", "FILE", "--wav-scp", "SCP"], "a b\n", "FILE", "names a,"),
    ],
)
def test_what_is_refused(make_exp, data_dir, tmp_path, words, text, subject, value):
    (tmp_path / "pairs").write_text(text)
    places = {"FILE": str(tmp_path / "pairs"), "SCP": str(data_dir / "wav.scp")}
    words = [places.get(word, word) for word in words]
    with refuses(subject.replace("FILE", places["FILE"]), value, error=Exception):
        verify.main([*words, "--model", str(make_exp("exp"))])
