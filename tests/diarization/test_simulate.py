"""Simulated conversations for tables: turns, rooms and noise."""

import numpy as np
import pytest
from simulate import RATE, SNR_DB, add_room_and_noise, converse
from voices import write_voices

from speakerlab.data.manifest import read_manifest
from speakerlab.inference.speech import find_speech


def test_turns_are_where_the_conversation_has_speech(tmp_path):
    write_voices(tmp_path / "data", speakers=range(5), seconds=(3.0, 2.0))
    manifest = read_manifest([tmp_path / "data"], sample_rate=RATE)
    wave_S, turns = converse(manifest, 0, seed=0)
    assert len(wave_S) == 40 * RATE
    assert len({turn.speaker for turn in turns}) == 2
    speaks_S = np.zeros(len(wave_S), dtype=bool)
    for turn in turns:
        speaks_S[round(turn.start * RATE) : round(turn.end * RATE)] = True
    found_S = np.zeros(len(wave_S), dtype=bool)
    int16_S = np.round(32768 * wave_S).astype(np.int16)
    for start, end in find_speech(int16_S, sample_rate=RATE):
        found_S[round(start * RATE) : round(end * RATE)] = True
    assert np.mean(speaks_S == found_S) > 0.9

    again_S, again = converse(manifest, 0, seed=0)
    assert again == turns
    np.testing.assert_array_equal(again_S, wave_S)


def test_a_room_keeps_the_time_of_the_direct_sound():
    wave_S = np.zeros(RATE)
    wave_S[1000] = 1.0
    # An echo after 200 samples, and 500 samples before the direct sound.
    room_R = np.zeros(2000)
    room_R[500], room_R[700] = 1.0, 0.5
    silence_S = np.full(RATE, 1e-9)
    rng = np.random.default_rng(0)
    mixed_S = add_room_and_noise(wave_S, [room_R], [silence_S], rng)
    assert np.argmax(np.abs(mixed_S)) == 1000

    speech_S = np.sin(0.1 * np.arange(RATE))
    noise_S = rng.standard_normal(RATE)
    mixed_S = add_room_and_noise(speech_S, [np.eye(1, 9)[0]], [noise_S], rng)
    scale = mixed_S @ speech_S / (speech_S @ speech_S)
    rest_S = mixed_S / scale - speech_S
    snr = 10 * np.log10(np.mean(speech_S**2) / np.mean(rest_S**2))
    assert SNR_DB[0] - 0.5 <= snr <= SNR_DB[1] + 0.5
    assert np.abs(mixed_S).max() == pytest.approx(0.9)
