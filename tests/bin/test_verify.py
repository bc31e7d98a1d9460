"""`speakerlab verify`: what stages 5 and 6 write, decisions, pairs by path and by name."""

import json
import statistics
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from models_on_disk import CALIBRATION
from named_pipes import piped
from refusals import refused, refuses
from voices import RATE, make_noise, make_wave

import speakerlab
from speakerlab.bin import extract, score, verify
from speakerlab.data import audio
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
        "speech: 1.00 s and 1.00 s",
        "decision: same speaker",
    ]
    # A lower rate of false alarms needs a higher threshold.
    lines = printed(capsys, first, last, "--model", exp, "--far", "0.01")
    assert lines[2:] == [
        "threshold: 0.999900 (at 1 % false alarms)",
        "speech: 1.00 s and 1.50 s",
        "decision: different speakers",
    ]
    lines = printed(capsys, first, last, "--model", exp, "--threshold", "-1")
    assert lines[2:] == [
        "threshold: -1.000000 (of --threshold)",
        "speech: 1.00 s and 1.50 s",
        "decision: same speaker",
    ]


def test_no_decision_without_calibration(make_exp, data_dir, capsys):
    wav, *_ = read_table(data_dir / "wav.scp").values()
    exp = make_exp("exp")
    lines = printed(capsys, wav, wav, "--model", exp)
    assert lines == [
        "score: 1.000000",
        "speech: 1.00 s and 1.00 s",
        "decision: none (no calibration; run `speakerlab calibrate`, or give --threshold)",
    ]
    lines = printed(capsys, wav, wav, "--model", exp, "--threshold", "0.9")
    assert lines[-1] == "decision: same speaker"


def test_no_decision_without_speech(make_exp, tmp_path, capsys):
    exp = make_exp("exp", calibration=CALIBRATION)
    noise = tmp_path / "noise.wav"
    audio.write(noise, audio.to_int16(make_noise(2.0)[0].numpy()), RATE)
    voice = tmp_path / "voice.wav"
    audio.write(voice, make_wave(0, 0, 2.0), RATE)
    options = ["--model", exp]
    for pair in ((noise, noise), (voice, noise)):
        for point in ([], ["--threshold", "0.1"]):
            lines = printed(capsys, *pair, *options, *point)
            assert lines[0].startswith("score: ")
            assert lines[-1] == "decision: none (a recording has no speech)"
    (line,) = printed(capsys, noise, noise, *options, "--json")
    result = json.loads(line)
    assert result["same"] is None
    assert result["score"] == pytest.approx(1, abs=1e-6)
    assert result["speech_seconds"] == [0.0, 0.0]

    pairs = tmp_path / "pairs"
    pairs.write_text(f"{noise} {noise}\n{voice} {voice}\n")
    lines = printed(capsys, "--trials", pairs, *options, "--threshold", "0.1")
    assert [line.split()[3] for line in lines] == ["none", "same"]


FIELDS = [
    "a",
    "b",
    "score",
    "llr",
    "threshold",
    "same",
    "speech_seconds",
    "warnings",
]


def test_json_of_two_files_and_of_each_trial(make_exp, data_dir, capsys, tmp_path):
    exp = make_exp("exp", calibration=CALIBRATION)
    first, second, third, *_ = read_table(data_dir / "wav.scp").values()
    options = ["--model", exp, "--json"]
    (line,) = printed(capsys, first, second, *options, "--threshold", "0.3")
    result = json.loads(line)
    assert list(result) == FIELDS
    assert result["a"] == first
    assert result["threshold"] == 0.3
    assert result["same"] is (result["score"] >= 0.3)
    assert result["speech_seconds"] == pytest.approx([1.0, 1.25], abs=0.02)
    (line,) = printed(capsys, first, second, *options, "--far", "0.01")
    assert json.loads(line)["threshold"] == 0.9999

    trials = tmp_path / "pairs"
    trials.write_text("spk0-0 spk0-1\nspk0-2 spk0-2\n")
    options += ["--trials", trials, "--wav-scp", data_dir / "wav.scp"]
    lines = printed(capsys, *options)
    rows = [json.loads(line) for line in lines]
    assert [list(row) for row in rows] == [FIELDS, FIELDS]
    assert rows[0]["score"] == pytest.approx(result["score"], abs=1e-6)
    assert rows[0]["a"] == "spk0-0"
    assert rows[0]["llr"] == pytest.approx(10 * rows[0]["score"] - 5)
    assert rows[1]["same"] is True
    assert rows[1]["threshold"] == 0.5
    assert rows[1]["speech_seconds"] == pytest.approx([1.5, 1.5], abs=0.02)
    # Without a calibration there is a decision only at a given threshold.
    (exp / "model/calibration.json").unlink()
    row, _ = (json.loads(line) for line in printed(capsys, *options))
    assert row["llr"] is None
    assert row["threshold"] is None
    assert row["same"] is None


def test_decisions_on_trials_are_columns(make_exp, data_dir, capsys):
    exp = make_exp("exp", calibration=CALIBRATION)
    places = ["--trials", data_dir / "trials", "--wav-scp", data_dir / "wav.scp"]
    scores = printed(capsys, *places, "--model", exp)
    # One at which about half of the decisions differ from those of the calibration.
    middle = statistics.median(float(line.split()[2]) for line in scores)
    for option, value, threshold in (
        ("--threshold", str(middle), middle),
        ("--far", "0.01", 0.9999),
    ):
        lines = printed(capsys, *places, "--model", exp, option, value)
        assert len(lines) == len(scores)
        for line, plain_line in zip(lines, scores):
            *pair, score, decision, seconds_a, seconds_b = line.split()
            *plain_pair, plain_score = plain_line.split()
            assert pair == plain_pair
            assert float(score) == pytest.approx(float(plain_score), abs=1.01e-6)
            is_same = float(score) >= threshold
            assert decision == ("same" if is_same else "different")
            assert float(seconds_a) >= 0.98
            assert float(seconds_b) >= 0.98

    options = [*places, "--model", exp, "--threshold", middle]
    decisions = [line.split()[3] for line in printed(capsys, *options)]
    assert set(decisions) == {"same", "different"}
    rows = [json.loads(line) for line in printed(capsys, *options, "--json")]
    assert {row["threshold"] for row in rows} == {middle}
    for row, decision in zip(rows, decisions, strict=True):
        assert row["same"] is (decision == "same")


def test_little_speech_is_warned_of_once(make_exp, tmp_path, capsys, caplog):
    exp = make_exp("exp", calibration=CALIBRATION)
    paths = []
    for name, seconds in (("short", 0.3), ("long", 1.0)):
        path = tmp_path / f"{name}.wav"
        audio.write(path, make_wave(0, 0, seconds), RATE)
        paths.append(path)
    pairs = tmp_path / "pairs"
    pairs.write_text(f"{paths[0]} {paths[1]}\n{paths[0]} {paths[0]}\n")
    for arguments in (paths, ["--trials", pairs, "--json"]):
        caplog.clear()
        lines = printed(capsys, *arguments, "--model", exp)
        assert "0.3" in "".join(lines)
        warnings = [text for text in caplog.messages if "s of speech" in text]
        assert len(warnings) == 1
        assert refused(warnings[0], str(paths[0]), "0.30 s")

    # Each result has the warnings of its recordings, each once.
    short, same = (json.loads(line) for line in lines)
    assert short["warnings"] == same["warnings"] == warnings
    pairs.write_text(f"{paths[1]} {paths[1]}\n")
    (line,) = printed(capsys, "--trials", pairs, "--json", "--model", exp)
    assert json.loads(line)["warnings"] == []
    (line,) = printed(capsys, *paths, "--json", "--model", exp)
    assert json.loads(line)["warnings"] == warnings


def test_a_channel_of_two_recordings(make_exp, tmp_path, capsys):
    first_S = make_wave(0, 0, 1.0)
    second_S = make_wave(3, 0, 1.0)
    stereo = tmp_path / "call.wav"
    second = tmp_path / "second.wav"
    audio.write(stereo, np.stack([first_S, second_S], axis=1), RATE)
    audio.write(second, np.stack([0 * second_S, second_S], axis=1), RATE)
    pairs = tmp_path / "pairs"
    pairs.write_text(f"{stereo} {second}\n")
    exp = make_exp("exp")
    options = ["--model", exp, "--channel", "2"]
    line, *_ = printed(capsys, stereo, second, *options)
    assert line == "score: 1.000000"
    for more_options in ([], ["--threshold", "0.5"]):
        (line,) = printed(capsys, "--trials", pairs, *options, *more_options)
        assert line.split()[2] == "1.000000"


@pytest.mark.parametrize(
    ("arguments", "text", "subject", "value"),
    [
        (["a.wav"], "", "verify", "1 recording "),
        (["a.wav", "--trials", "FILE"], "a b\n", "verify", "1 recording and --trials"),
        (["a.wav", "b.wav", "--threshold", "50"], "", "--threshold", 50),
        (["--trials", "FILE"], "a b\na\n", "FILE:2", "'a'"),
        (["--trials", "FILE"], '"my a.wav",b.wav\n', "FILE:1", "'enrol,test'"),
        (["--trials", "FILE"], "my a.wav,b.wav\n", "FILE:1", "'enrol,test'"),
        (["--trials", "FILE"], "a.wav,b.wav\n", "FILE:1", "'enrol,test'"),
        (["--trials", "FILE"], "a.wav, b.wav\n", "FILE:1", "'enrol,test'"),
        (["--trials", "FILE"], "\nmy a.wav my b.wav\n", "FILE:2", "'enrol,test'"),
        (["--trials", "FILE"], "\nenrol,test\na,b,c\n", "FILE:3", "3 columns"),
        (["--trials", "FILE"], "enrol,test,label\na,b,yes\n", "FILE:2", "'yes'"),
        (["--trials", "FILE"], "enrol,test\na,b\nc,\n", "FILE:3", "pair 'a b'"),
        (["--trials", "FILE"], "enrol,test\na,b,c\n", "FILE:2", "3 columns, not 2"),
        (["--trials", "FILE"], "enrol,test\n", "FILE", "no pairs"),
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


@pytest.mark.parametrize(
    "header",
    ["enrol,test\n", "Test;sex;Enrol\n", "file1\tfile2\n"],
)
def test_a_table_of_pairs_without_labels(make_exp, tmp_path, capsys, header):
    voices = []
    for number, name in enumerate(("my voice.wav", "other.wav")):
        path = tmp_path / name
        audio.write(path, make_wave(number, 0, 1.0), RATE)
        voices.append(path)
    first, second = voices
    rows = {
        "enrol,test\n": f'"{first}",{second}\n',
        "Test;sex;Enrol\n": f"{second};f;{first}\n",
        "file1\tfile2\n": f"{first}\t{second}\n",
    }
    pairs = tmp_path / "pairs"
    pairs.write_text(header + rows[header])
    exp = make_exp("exp")
    (line,) = printed(capsys, "--trials", pairs, "--json", "--model", exp)
    result = json.loads(line)
    assert [result["a"], result["b"]] == [str(first), str(second)]
    # A path with blanks is in quotes.
    for options in ([], ["--threshold", "0.5"]):
        (line,) = printed(capsys, "--trials", pairs, "--model", exp, *options)
        names = f'"{first}" {second} '
        assert line.startswith(names)
        score, *_ = line.removeprefix(names).split()
        assert float(score) == pytest.approx(result["score"], abs=1e-6)
    line, *_ = printed(capsys, first, second, "--model", exp)
    assert float(line.split()[1]) == pytest.approx(result["score"], abs=1e-6)


def test_json_of_a_pair_that_cannot_be_read(make_exp, tmp_path, run):
    voice = tmp_path / "voice.wav"
    audio.write(voice, make_wave(0, 0, 1.0), RATE)
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF")
    model = ["--model", make_exp("exp"), "--device", "cpu"]
    command = ["-m", "speakerlab", "verify", voice, broken, *model]
    finished = run(*command, "--json", code=1)
    result = json.loads(finished.stdout)
    assert list(result) == ["a", "b", "error"]
    assert result["b"] == str(broken)
    assert refused(result["error"], str(broken), "readable audio")
    assert refused(finished.stderr, str(broken), "readable audio")
    assert run(*command, code=1).stdout == ""
    # An error of the model is none of the recordings.
    assert run(*command, "--json", "--far", "0.01", code=1).stdout == ""


def test_bad_files_do_not_stop_the_other_trials(make_exp, tmp_path, run):
    voice = tmp_path / "voice.wav"
    audio.write(voice, make_wave(0, 0, 1.0), RATE)
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF")
    missing = tmp_path / "missing.wav"
    pairs = tmp_path / "pairs"
    rows = [(missing, broken), (voice, voice), (broken, voice), (broken, broken)]
    pairs.write_text("".join(f"{first} {second}\n" for first, second in rows))
    model = ["--model", make_exp("exp"), "--device", "cpu"]
    command = ["-m", "speakerlab", "verify", "--trials", pairs, *model]
    for options in ([], ["--threshold", "0.5"]):
        finished = run(*command, *options, code=1)
        (line,) = finished.stdout.splitlines()
        assert line.startswith(f"{voice} {voice} 1.0000")
        assert finished.stderr.count(f"{broken}: ") == 1
        assert refused(finished.stderr, str(missing), "no such file")
        assert "2 of 3 recordings" in finished.stderr
        assert "--wav-scp" not in finished.stderr

    lines = run(*command, "--json", code=1).stdout.splitlines()
    results = [json.loads(line) for line in lines]
    assert [(row["a"], row["b"]) for row in results] == [
        (str(first), str(second)) for first, second in rows
    ]
    assert [list(row)[2] for row in results] == ["error", "score", "error", "error"]
    assert refused(results[0]["error"], str(missing), f"; {broken}: ")
    assert results[3]["error"].count(str(broken)) == 1

    # Ids without a wav.scp.
    pairs.write_text("ann bob\n")
    finished = run(*command, code=1)
    assert finished.stdout == ""
    assert refused(finished.stderr, "ann", "no such file")
    assert "--wav-scp" in finished.stderr


@pytest.mark.parametrize("labels", [True, False])
def test_lists_may_come_from_pipes(make_exp, data_dir, tmp_path, capsys, labels):
    trials = data_dir / "trials"
    if not labels:
        rows = [line.split()[:2] for line in trials.read_text().splitlines()]
        trials = tmp_path / "pairs"
        trials.write_text("".join(f"{first} {second}\n" for first, second in rows))
    model = ["--model", make_exp("exp")]
    wav_scp = data_dir / "wav.scp"
    scores = printed(capsys, "--trials", trials, "--wav-scp", wav_scp, *model)
    assert len(scores) == 20

    with piped(tmp_path, trials, wav_scp) as (trials_pipe, wav_pipe):
        lists = ["--trials", trials_pipe, "--wav-scp", wav_pipe]
        from_pipes = printed(capsys, *lists, *model)
    assert from_pipes == scores


def test_a_channel_of_each_recording(make_exp, tmp_path, capsys):
    first_S = make_wave(0, 0, 1.0)
    second_S = make_wave(3, 0, 1.0)
    call = tmp_path / "call.wav"
    turned = tmp_path / "turned.wav"
    audio.write(call, np.stack([first_S, second_S], axis=1), RATE)
    audio.write(turned, np.stack([second_S, first_S], axis=1), RATE)
    options = ["--model", make_exp("exp")]
    line, *_ = printed(capsys, call, turned, *options, "--channel", "1,2")
    assert line == "score: 1.000000"
    line, *_ = printed(capsys, call, turned, *options, "--channel", "mix,mix")
    assert line == "score: 1.000000"
    line, *_ = printed(capsys, call, call, *options, "--channel", "1,2")
    assert line != "score: 1.000000"

    pairs = tmp_path / "pairs"
    pairs.write_text(f"{call} {turned}\n")
    with refuses("--channel", "1,2", "--trials"):
        printed(capsys, "--trials", pairs, *options, "--channel", "1,2")
    for text in ("1,", "0,1", "1,2,3", "first"):
        with pytest.raises(SystemExit):
            printed(capsys, call, turned, *options, "--channel", text)
        assert "--channel" in capsys.readouterr().err
    model = speakerlab.load(options[1], device="cpu")
    with refuses("channels", "(1, 2, 1)"):
        model.verify(call, turned, channels=(1, 2, 1))


def test_json_has_names_as_they_are(make_exp, tmp_path, capsys):
    voice = tmp_path / "张三.wav"
    audio.write(voice, make_wave(0, 0, 1.0), RATE)
    (line,) = printed(capsys, voice, voice, "--json", "--model", make_exp("exp"))
    assert f'"a": "{voice}"' in line
