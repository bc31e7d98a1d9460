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

SHARED = Path(os.environ.get("SPEAKERLAB_SHARED", Path(__file__).parents[3] / "shared"))


def test_probabilities_equal_those_frame_by_frame():
    package = pytest.importorskip("silero_vad")
    onnxruntime = pytest.importorskip("onnxruntime")
    path = Path(package.__file__).parent / "data/silero_vad.onnx"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    wave_S = make_wave(0, 0, 16.9)  # more than a block, and no whole number of frames
    framed_S = np.pad(wave_S, (64, -len(wave_S) % 512)).astype(np.float32) / 32768
    state, wanted = np.zeros((2, 1, 128), dtype=np.float32), []
    for start in range(0, len(framed_S) - 64, 512):
        frame = {"input": framed_S[None, start : start + 576], "state": state, "sr": np.array(RATE)}
        speech_B1, state = session.run(None, frame)
        wanted.append(speech_B1[0, 0])
    np.testing.assert_allclose(SileroVad().probabilities(wave_S), wanted, atol=1e-6)
    assert len(SileroVad().voiced_frames(wave_S[:0])) == 0


def test_speech_starts_and_stops_at_different_probabilities(monkeypatch):
    pytest.importorskip("silero_vad")
    speech_T = np.array([0.15, 0.2, 0.12, 0.15, 0.09, 0.17, 0.9])
    monkeypatch.setattr(SileroVad, "probabilities", lambda self, wave_S: speech_T)
    found = SileroVad().voiced_frames(np.zeros(0))
    assert found.tolist() == [False, True, True, True, False, False, True]


@pytest.mark.skipif(not (SHARED / "data/diar").is_dir(), reason="needs ../shared")
def test_meetings_have_fewer_false_alarms_than_by_energy():
    pytest.importorskip("silero_vad")
    found = {"energy": [], "silero": []}
    for path in sorted((SHARED / "data/diar/wav").glob("*.flac")):
        (turns,) = read_rttm(SHARED / f"data/diar/rttm/{path.stem}.rttm").values()
        reference = merge_regions(turn[:2] for turn in turns)
        wave_S = spool_wave(path, sample_rate=RATE)
        for vad, errors in found.items():
            regions = find_speech(wave_S, sample_rate=RATE, vad=vad)
            errors.append(score(one_speaker(reference), one_speaker(regions)))
        narrow_S = spool_wave(path, sample_rate=8000)
        narrow = find_speech(narrow_S, sample_rate=8000, vad="silero")
        changed = score(one_speaker(regions), one_speaker(narrow))
        assert changed.wrong < 0.2 * changed.scored
    energy, silero = (total(errors) for errors in found.values())
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
    monkeypatch.setattr(speech, "find_spec", lambda name: None if name == missing else find(name))
    with refuses("vad", "pip install", error=ModuleNotFoundError):
        find_speech(wave_S, sample_rate=RATE, vad="silero")
