"""The hardest trials are the right ones, and what is heard of them is short and theirs."""

import base64
import logging
from pathlib import Path

import numpy as np
import pytest
from voices import RATE

from speakerlab.data import audio
from speakerlab.experiments.hardest import data_uri, hardest_trials, loudest, player_of
from speakerlab.experiments.trial_list import ListScores, TrialList
from speakerlab.scoring.trials import Trials

SIX = Trials(
    enrol_ids=["a", "b"],
    test_ids=["x", "y", "z"],
    enrol_N=np.array([0, 0, 0, 1, 1, 1], dtype=np.int32),
    test_N=np.array([0, 1, 2, 0, 1, 2], dtype=np.int32),
    is_target_N=np.array([True, True, True, False, False, False]),
)
SCORES = np.array([0.9, -0.2, 0.4, 0.8, -0.7, 0.1])
LOW = "target trials scored low"
HIGH = "non-target trials scored high"


def scored(scores_N, models):
    enrol_speakers = np.array([0, 0, 0, 1, 1, 1])
    test_speakers = np.zeros(6, dtype=np.int64)
    six = TrialList(
        "six",
        Path("six"),
        SIX,
        (enrol_speakers, test_speakers),
        models,
        {},
        {},
    )
    return ListScores(six, "x", scores_N)


def hardest(scores_N=SCORES, **options):
    kinds = hardest_trials(scored(scores_N, {}), **options)
    rows = []
    for kind, trials in kinds.items():
        for trial in trials:
            rows.append((trial.enrol, trial.test, trial.score, kind))
    return rows


def decoded(uri):
    """(wave_S, sample rate) of a data URI."""
    content = base64.b64decode(uri.partition("base64,")[2])
    with audio.stream(content) as (rate, blocks):
        return np.concatenate(list(blocks)), rate


def test_the_hardest_of_six_trials_where_equal_scores_keep_their_order():
    assert hardest(num=2) == [
        ("a", "y", -0.2, LOW),
        ("a", "z", 0.4, LOW),
        ("b", "x", 0.8, HIGH),
        ("b", "z", 0.1, HIGH),
    ]
    assert len(hardest(num=9)) == 6

    equal = hardest(np.zeros(6), num=2)
    assert [test for _, test, *_ in equal] == ["x", "y", "x", "y"]


def test_a_model_of_several_utterances_is_heard_in_its_first():
    def player(utterance):
        return f"clip of {utterance}" if utterance != "y" else None

    scores = scored(SCORES, {"a": ["a-2", "a-1"]})
    kinds = hardest_trials(scores, player=player, num=1)
    (low,), (high,) = kinds.values()
    assert low.enrol_clip == "clip of a-2"
    assert low.test_clip is None
    assert high.enrol_clip == "clip of b"
    assert high.test_clip == "clip of x"


def test_the_loudest_segment_is_found():
    wave_S = np.full(1000, 10, dtype=np.int16)
    # loud enough that int16 squared would overflow
    wave_S[600:700] = 20000
    # no two segments are alike
    wave_S[:599] = np.arange(599) % 20
    loud_S = wave_S[600:700]
    assert np.array_equal(loudest(wave_S, 100, 50), loud_S)
    # a longer segment has the loudest rest
    longer_S = wave_S[450:700]
    assert np.array_equal(loudest(wave_S, 250, 50), longer_S)
    # a wave shorter than the segment is returned whole
    short_S = wave_S[:80]
    assert np.array_equal(loudest(short_S, 100, 50), short_S)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(3.0, 3.0), (10.0, 10.0), (14.0, 10.0)],
)
@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_clips_can_be_decoded_and_last_ten_seconds_at_most(seconds, expected, rate):
    rng = np.random.default_rng(0)
    num_samples = int(seconds * rate)
    wave_S = rng.normal(0, 3000, num_samples).astype(np.int16)
    segment_S = loudest(wave_S, 10 * rate, rate // 4)
    uri = data_uri(segment_S, rate)
    assert uri.startswith("data:audio/flac;" if rate == 8000 else "data:audio/mpeg;")
    decoded_S, decoded_rate = decoded(uri)
    assert len(decoded_S) == round(expected * rate)
    assert decoded_rate == rate
    deviation = np.std(decoded_S, dtype=np.float64)
    assert 2000 < deviation < 4000


def test_the_player_plays_utterances_of_a_data_directory(make_data_dir):
    folder = make_data_dir(seconds=[1.0])
    play = player_of(folder, sample_rate=RATE)
    uri = play("spk2-0")
    assert uri is not None
    assert play("no-such") is None
    wave_S, _ = decoded(uri)
    assert len(wave_S) == RATE
    # this speaker's pitch, in Hz
    pitch = 90 + 25 * 2
    spectrum_F = np.abs(np.fft.rfft(wave_S))
    assert np.argmax(spectrum_F) == pytest.approx(pitch, abs=1)


def test_missing_audio_is_logged_once_and_has_no_player(
    make_data_dir, tmp_path, caplog
):
    folder = make_data_dir(seconds=[1.0])
    for name in ("spk0-0", "spk1-0"):
        (tmp_path / "wav" / f"{name}.wav").unlink()
    play = player_of(folder, sample_rate=RATE)
    with caplog.at_level(logging.WARNING):
        assert play("spk0-0") is None
        assert play("spk1-0") is None
        assert play("spk2-0") is not None
    (line,) = caplog.messages
    assert line.startswith("report.html: ")
    assert "spk0-0.wav" in line
