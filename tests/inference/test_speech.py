"""Speech found by Silero VAD: equal to its frame by frame model, beside energy and the truth."""

import os
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses
from voices import RATE, make_wave

from speakerlab.data.convert import spool_wave
from speakerlab.diarization.regions import Region, Turn, merge_regions, read_rttm
from speakerlab.diarization.scoring import score, total
from speakerlab.inference import speech
from speakerlab.inference.speech import SileroVad, find_speech

BESIDE = Path(__file__).parents[3] / "shared"
SHARED = Path(os.environ.get("SPEAKERLAB_SHARED", BESIDE))


def test_probabilities_equal_those_frame_by_frame():
    package = pytest.importorskip("silero_vad")
    onnxruntime = pytest.importorskip("onnxruntime")
    path = Path(package.__file__).parent / "data/silero_vad.onnx"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    # More than a block, and no whole number of frames. A frame has 512 samples and 64 before them.
    wave_S = make_wave(0, 0, 16.9)
    missing = -len(wave_S) % 512
    framed_S = np.pad(wave_S, (64, missing)).astype(np.float32)
    framed_S = framed_S / 32768
    state = np.zeros((2, 1, 128), dtype=np.float32)
    expected = []
    for start in range(0, len(framed_S) - 64, 512):
        end = start + 576
        frame = {
            "input": framed_S[None, start:end],
            "state": state,
            "sr": np.array(RATE),
        }
        speech_B1, state = session.run(None, frame)
        expected.append(speech_B1[0, 0])
    vad = SileroVad()
    probabilities = vad.probabilities(wave_S)
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)

    of_nothing = vad.voiced_frames(wave_S[:0])
    assert len(of_nothing) == 0


def test_speech_starts_and_stops_at_different_probabilities(monkeypatch):
    pytest.importorskip("silero_vad")
    speech_T = np.array([0.15, 0.2, 0.12, 0.15, 0.09, 0.17, 0.9])

    def probabilities(self, wave_S):
        return speech_T

    monkeypatch.setattr(SileroVad, "probabilities", probabilities)
    no_samples_S = np.zeros(0)
    voiced = SileroVad().voiced_frames(no_samples_S)
    assert voiced.tolist() == [False, True, True, True, False, False, True]


@pytest.mark.skipif(not (SHARED / "data/diar").is_dir(), reason="needs ../shared")
def test_meetings_have_fewer_false_alarms_than_by_energy():
    pytest.importorskip("silero_vad")
    errors = {"energy": [], "silero": []}
    wav_folder = SHARED / "data/diar/wav"
    for path in sorted(wav_folder.glob("*.flac")):
        by_recording = read_rttm(SHARED / f"data/diar/rttm/{path.stem}.rttm")
        (turns,) = by_recording.values()
        regions = merge_regions(turn[:2] for turn in turns)
        reference = one_speaker(regions)
        wave_S = spool_wave(path, sample_rate=RATE)
        by_energy = find_speech(wave_S, sample_rate=RATE, vad="energy")
        by_silero = find_speech(wave_S, sample_rate=RATE, vad="silero")
        errors["energy"].append(score(reference, one_speaker(by_energy)))
        errors["silero"].append(score(reference, one_speaker(by_silero)))

        # At 8 kHz nearly the same regions are found.
        narrow_S = spool_wave(path, sample_rate=8000)
        narrow = find_speech(narrow_S, sample_rate=8000, vad="silero")
        changed = score(one_speaker(by_silero), one_speaker(narrow))
        assert changed.wrong < 0.2 * changed.scored
    energy = total(errors["energy"])
    silero = total(errors["silero"])
    assert silero.wrong < energy.wrong
    assert silero.false_alarm < 0.2 * energy.false_alarm


def one_speaker(regions: list[Region]) -> list[Turn]:
    return [Turn(*region, "x") for region in regions]


@pytest.mark.parametrize("missing", ["silero_vad", "onnxruntime"])
def test_refusals(monkeypatch, missing):
    wave_S = make_wave(0, 0, 1.0)
    with refuses("vad", "webrtc"):
        find_speech(wave_S, sample_rate=RATE, vad="webrtc")
    find = speech.find_spec

    def find_others(name):
        return None if name == missing else find(name)

    monkeypatch.setattr(speech, "find_spec", find_others)
    with refuses("vad", "pip install", error=ModuleNotFoundError):
        find_speech(wave_S, sample_rate=RATE, vad="silero")
