"""`speakerlab verify`: what stages 5 and 6 write, decisions, pairs by path and by name."""

from itertools import combinations, product
from pathlib import Path

import pytest
from models_on_disk import CALIBRATION
from refusals import refuses

from speakerlab.bin import extract, score, verify
from speakerlab.data.tables import read_table


@pytest.fixture
def data_dir(make_data_dir) -> Path:
    """9 utterances and a list of 20 trials of them."""
    speaker_of = {}
    for speaker, take in product(("spk0", "spk1", "spk2"), range(3)):
        speaker_of[f"{speaker}-{take}"] = speaker
    trials = []
    for enrol, test in combinations(speaker_of, 2):
        is_target = speaker_of[enrol] == speaker_of[test]
        trials.append((enrol, test, is_target))
    return make_data_dir("test", speakers=[0, 1, 2], trials=trials[:20])


def printed(capsys, *arguments: object) -> list[str]:
    capsys.readouterr()
    options = [str(argument) for argument in arguments]
    verify.main([*options, "--device", "cpu"])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("overrides", [(), ("vad={}",)])
def test_20_pairs_give_the_scores_of_the_score_file(
    make_exp, data_dir, capsys, overrides
):
    exp = make_exp("exp", *overrides)
    trials = data_dir / "trials"
    extract.main(["--exp", str(exp), "--data", str(data_dir)])
    score.main(["--exp", str(exp), "--trials", str(trials)])
    scores = (exp / "scores/test_trials.txt").read_text()
    written = scores.splitlines()
    assert len(written) == 20
    places = ["--trials", trials, "--wav-scp", data_dir / "wav.scp"]
    lines = printed(capsys, *places, "--model", exp)
    assert len(lines) == 20
    table = read_table(data_dir / "wav.scp")
    for number, (line, expected) in enumerate(zip(lines, written)):
        enrol, test, value = line.split()
        expected_enrol, expected_test, expected_score, *_ = expected.split()
        assert enrol == expected_enrol
        assert test == expected_test
        decimals = value.partition(".")[2]
        assert len(decimals) == 6
        # Both are rounded to six decimals.
        score_of_file = pytest.approx(float(expected_score), abs=1.01e-6)
        assert float(value) == score_of_file

        # Two files alone give the same score.
        if number < 3:
            wavs = (table[enrol], table[test])
            first, *_ = printed(capsys, *wavs, "--model", exp)
            alone = float(first.removeprefix("score: "))
            assert alone == pytest.approx(float(value), abs=1.01e-6)


def test_pairs_of_paths_without_labels(make_exp, data_dir, capsys, tmp_path):
    table = read_table(data_dir / "wav.scp")
    first, second, third, *_ = table.values()
    # A pair may occur twice.
    pairs = [(first, second), (first, second), (third, third)]
    path = tmp_path / "pairs"
    trials = [f"{enrol} {test}\n" for enrol, test in pairs]
    path.write_text("".join(trials))
    exp = make_exp("exp")
    lines = printed(capsys, "--trials", path, "--model", exp)

    assert len(lines) == len(pairs)
    for line, (enrol, test) in zip(lines, pairs):
        assert line.startswith(f"{enrol} {test} ")
    assert lines[0] == lines[1]
    score_of_same_file = float(lines[2].split()[2])
    assert score_of_same_file == pytest.approx(1, abs=1e-6)


def test_a_decision(make_exp, data_dir, capsys):
    first, *_, last = read_table(data_dir / "wav.scp").values()
    exp = make_exp("exp", calibration=CALIBRATION)
    lines = printed(capsys, first, first, "--model", exp)
    assert lines == [
        "score: 1.000000",
        "log-likelihood ratio: +5.000",
        "threshold: 0.500000 (at EER)",
        "decision: same speaker",
    ]
    # A lower rate of false alarms needs a higher threshold.
    lines = printed(capsys, first, last, "--model", exp, "--far", "0.01")
    assert lines[2:] == [
        "threshold: 0.999900 (at 1 % false alarms)",
        "decision: different speakers",
    ]


def test_no_decision_without_calibration(make_exp, data_dir, capsys):
    wav, *_ = read_table(data_dir / "wav.scp").values()
    exp = make_exp("exp")
    lines = printed(capsys, wav, wav, "--model", exp)
    assert lines == [
        "score: 1.000000",
        "decision: none (no calibration; run `speakerlab calibrate`)",
    ]


@pytest.mark.parametrize(
    ("arguments", "text", "subject", "value"),
    [
        (["a.wav"], "", "verify", "1 recordings"),
        (["a.wav", "--trials", "FILE"], "a b\n", "verify", "1 recordings and --trials"),
        (["--trials", "FILE", "--far", "0.1"], "a b\n", "--far", 0.1),
        (["--trials", "FILE"], "a b\na\n", "FILE:2", "'a'"),
        (["--trials", "FILE"], "a b\n", "a", ""),
        (["--trials", "FILE", "--wav-scp", "SCP"], "a b\n", "FILE", "names a,"),
    ],
)
def test_what_is_refused(make_exp, data_dir, tmp_path, arguments, text, subject, value):
    pairs = tmp_path / "pairs"
    pairs.write_text(text)
    places = {"FILE": str(pairs), "SCP": str(data_dir / "wav.scp")}
    arguments = [places.get(word, word) for word in arguments]
    subject = subject.replace("FILE", places["FILE"])
    exp = make_exp("exp")
    with refuses(subject, value, error=Exception):
        verify.main([*arguments, "--model", str(exp)])
