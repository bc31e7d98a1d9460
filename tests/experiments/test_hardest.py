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
LOW, HIGH = "target trials scored low", "non-target trials scored high"


def scored(scores_N, models):
    speakers = np.array([0, 0, 0, 1, 1, 1]), np.zeros(6, dtype=np.int64)
    return ListScores(TrialList("six", Path("six"), SIX, speakers, models, {}, {}), "x", scores_N)


def found(scores_N=SCORES, **options):
    kinds = hardest_trials(scored(scores_N, {}), **options)
    return [(t.enrol, t.test, t.score, kind) for kind, group in kinds.items() for t in group]


def decoded(uri):
    """(wave_S, sample rate) of a data URI."""
    with audio.stream(base64.b64decode(uri.partition("base64,")[2])) as (rate, blocks):
        return np.concatenate(list(blocks)), rate


def test_the_hardest_of_six_trials_where_equal_scores_keep_their_order():
    assert found(num=2) == [
        ("a", "y", -0.2, LOW),
        ("a", "z", 0.4, LOW),
        ("b", "x", 0.8, HIGH),
        ("b", "z", 0.1, HIGH),
    ]
    assert [test for _, test, *_ in found(np.zeros(6), num=2)] == ["x", "y", "x", "y"]
    assert len(found(num=9)) == 6


def test_a_model_of_several_utterances_is_heard_in_its_first():
    def player(utterance):
        return f"clip of {utterance}" if utterance != "y" else None

    scores = scored(SCORES, {"a": ["a-2", "a-1"]})
    (low,), (high,) = hardest_trials(scores, player=player, num=1).values()
    assert (low.enrol_clip, low.test_clip) == ("clip of a-2", None)
    assert (high.enrol_clip, high.test_clip) == ("clip of b", "clip of x")


def test_the_loudest_segment_is_found():
    wave_S = np.full(1000, 10, dtype=np.int16)
    wave_S[600:700] = 20000  # loud enough that int16 squared would overflow
    wave_S[:599] = np.arange(599) % 20  # no two segments are alike
    assert np.array_equal(loudest(wave_S, 100, 50), wave_S[600:700])
    assert np.array_equal(loudest(wave_S, 250, 50), wave_S[450:700])  # with the loudest rest
    assert np.array_equal(loudest(wave_S[:80], 100, 50), wave_S[:80])


@pytest.mark.parametrize(("seconds", "expected"), [(3.0, 3.0), (10.0, 10.0), (14.0, 10.0)])
@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_clips_can_be_decoded_and_last_ten_seconds_at_most(seconds, expected, rate):
    rng = np.random.default_rng(0)
    wave_S = rng.normal(0, 3000, int(seconds * rate)).astype(np.int16)
    uri = data_uri(loudest(wave_S, 10 * rate, rate // 4), rate)
    assert uri.startswith("data:audio/flac;" if rate == 8000 else "data:audio/mpeg;")
    wave_S, found_rate = decoded(uri)
    assert (len(wave_S), found_rate) == (round(expected * rate), rate)
    assert 2000 < np.std(wave_S, dtype=np.float64) < 4000


def test_the_player_plays_utterances_of_a_data_directory(make_data_dir):
    play = player_of(make_data_dir(seconds=[1.0]), sample_rate=RATE)
    uri = play("spk2-0")
    assert uri is not None and play("no-such") is None
    wave_S, _ = decoded(uri)
    spectrum = np.abs(np.fft.rfft(wave_S))
    assert len(wave_S) == RATE
    assert np.argmax(spectrum) == pytest.approx(90 + 25 * 2, abs=1)  # this speaker's pitch, in Hz


def test_missing_audio_is_logged_once_and_has_no_player(make_data_dir, tmp_path, caplog):
    folder = make_data_dir(seconds=[1.0])
    for name in ("spk0-0", "spk1-0"):
        (tmp_path / "wav" / f"{name}.wav").unlink()
    play = player_of(folder, sample_rate=RATE)
    with caplog.at_level(logging.WARNING):
        assert play("spk0-0") is None and play("spk1-0") is None and play("spk2-0") is not None
    (line,) = caplog.messages
    assert line.startswith("report.html: ") and "spk0-0.wav" in line
