"""`model.diarize(channels="each")`: known speakers, copied channels, and telephones at 8 kHz."""

import numpy as np
import pytest
import torch
from models_on_disk import XVECTOR, publish_small
from refusals import refuses
from toy_segmentation import write_segmentation
from voices import make_noise, make_wave

import speakerlab
from speakerlab.config.build import build_embedder
from speakerlab.config.schema import load_config
from speakerlab.inference.diarize import Diarization, Segment, name_known
from speakerlab.inference.known_speakers import Match, check_enrolled

TELEPHONE_RATE = 8000
# Seconds of the left and the right channel; both speak from 6 to 7 s.
LEFT = [(1.0, 4.0), (6.0, 9.0)]
RIGHT = [(4.5, 7.0), (10.0, 12.0)]


def make_call(rate: int, leak: float = 0.05) -> np.ndarray:
    """wave_SC, int16: voices that swell and fall as syllables do; each side hears the other."""
    time_S = np.arange(13 * rate) / rate
    syllables_S = 0.55 + 0.45 * np.sin(2 * np.pi * 4 * time_S)
    sides = []
    for speaker, spans in ((0, LEFT), (3, RIGHT)):
        voice_S = make_wave(speaker, 0, 13.0, rate=rate) * syllables_S
        speaks_S = np.zeros(len(time_S))
        for start, end in spans:
            speaks_S[round(start * rate) : round(end * rate)] = 1.0
        sides.append(voice_S * speaks_S)
    left_S, right_S = sides
    heard = [left_S + leak * right_S, right_S + leak * left_S]
    return np.stack(heard, axis=1).astype(np.int16)


def publish(folder, *settings: str):
    config = load_config([], [XVECTOR, *settings])
    embedder = build_embedder(config)
    with torch.no_grad():
        embedder.train()(make_noise(1.0, rows=4))
    return speakerlab.load(publish_small(folder, config, embedder.eval()), device="cpu")


@pytest.fixture(scope="module")
def telephone_model(tmp_path_factory):
    settings = (f"frontend.sample_rate={TELEPHONE_RATE}", "frontend.num_mel_bins=40")
    return publish(tmp_path_factory.mktemp("exp8k"), *settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("exp16k"))


def spans_on(diarization: Diarization, channel: int) -> list[tuple[float, float]]:
    return [
        (segment.start, segment.end)
        for segment in diarization
        if diarization.channel_of[segment.speaker] == channel
    ]


def check_call(diarization: Diarization) -> None:
    np.testing.assert_allclose(spans_on(diarization, 1), LEFT, atol=0.15)
    np.testing.assert_allclose(spans_on(diarization, 2), RIGHT, atol=0.15)


def test_a_call_at_8_khz_with_a_model_of_8_khz(telephone_model, caplog, tmp_path):
    assert telephone_model.sample_rate == TELEPHONE_RATE
    call_SC = make_call(TELEPHONE_RATE)
    settings = {"channels": "each", "num_speakers": 1}
    check_call(telephone_model.diarize(call_SC, TELEPHONE_RATE, **settings))
    # An array without a rate has the model's.
    check_call(telephone_model.diarize(call_SC, **settings))
    wide_SC = make_call(16000)
    check_call(telephone_model.diarize(wide_SC, 16000, **settings))
    assert caplog.messages == []


def test_detectors_of_16_khz_with_a_model_of_8_khz(telephone_model, tmp_path):
    call_SC = make_call(TELEPHONE_RATE)
    path = write_segmentation(tmp_path / "segmentation.onnx")
    found = telephone_model.diarize(
        call_SC, segmentation=path, channels="each", num_speakers=1
    )
    # The toy model takes the loud half of a syllable for speech.
    for channel, spans in ((1, LEFT), (2, RIGHT)):
        for start, end in spans_on(found, channel):
            assert any(low - 0.3 <= start < end <= high + 0.3 for low, high in spans)

    pytest.importorskip("silero_vad")
    # Silero finds no speech in harmonics; that it runs is tested here, its regions in
    # test_speech.py.
    telephone_model.diarize(call_SC, vad="silero", channels="each")


def test_a_call_at_8_khz_with_a_model_of_16_khz_is_warned_of(model, caplog):
    call_SC = make_call(TELEPHONE_RATE)
    found = model.diarize(call_SC, TELEPHONE_RATE, channels="each", num_speakers=1)
    check_call(found)
    (line,) = caplog.messages
    assert "8000 Hz, and is read at 16000 Hz" in line


def test_copied_channels_are_warned_of(model, caplog):
    wave_S = make_call(16000)[:, 0]
    silent_S = np.zeros_like(wave_S)
    copied_SC = np.stack([wave_S, silent_S, wave_S // 2], axis=1)
    found = model.diarize(copied_SC, channels="each", num_speakers=1)
    assert list(found.speakers) == ["channel1"]
    (line,) = caplog.messages
    assert "channel 3 is a copy of channel 1" in line

    caplog.clear()
    model.diarize(copied_SC[:, :2], channels="each", num_speakers=1)
    assert caplog.messages == []


def test_the_channel_of_a_speaker_is_in_the_json(model):
    call_SC = make_call(16000)
    diarization = model.diarize(call_SC, channels="each", num_speakers=1)
    assert diarization.channel_of == {"channel1": 1, "channel2": 2}
    speakers = diarization.to_dict()["speakers"]
    assert speakers["channel1"]["channel"] == 1
    assert speakers["channel2"]["channel"] == 2

    # A recording of one channel has none in its JSON.
    left_S = call_SC[:, 0]
    diarization = model.diarize(left_S, num_speakers=1)
    speakers = diarization.to_dict()["speakers"]
    assert "channel" not in speakers["speaker1"]


def scores_of(monkeypatch, scores: dict[str, dict[str, float]]) -> None:
    """Replace `match_enrolled` by one with these scores and the threshold 0.5.

    scores: name of a speaker -> the nearest enrolled speaker -> score.
    """

    def match_enrolled(embeddings, model, *, far=None):
        candidates = []
        for name in embeddings:
            ((nearest, score),) = scores[name].items()
            candidates.append((score, name, nearest))
        matches = {}
        taken = set()
        # The best score first: each enrolled speaker is known once.
        for score, name, nearest in sorted(candidates, reverse=True):
            is_known = score >= 0.5 and nearest not in taken
            if is_known:
                taken.add(nearest)
            matches[name] = Match(nearest, score, 0.5, is_known=is_known)
        return matches

    monkeypatch.setattr(
        "speakerlab.inference.diarize.match_enrolled",
        match_enrolled,
    )


def test_a_known_speaker_on_two_channels_has_a_name_on_each(monkeypatch):
    """As after a transfer. On one channel, a name is of one speaker."""
    names = ["channel1-speaker1", "channel1-speaker2", "channel2"]
    channels = [1, 1, 2]
    segments = []
    for start, name in enumerate(names):
        segment = Segment(start=start, end=start + 1.0, speaker=name, confidence=1.0)
        segments.append(segment)
    diarization = Diarization(
        recording="call",
        seconds=3.0,
        segments=segments,
        speakers=dict.fromkeys(names, np.ones(2)),
        channel_of=dict(zip(names, channels)),
    )
    scores = {
        "channel1-speaker1": {"Ann": 0.6},
        "channel1-speaker2": {"Ann": 0.55},
        "channel2": {"Ann": 0.8},
    }
    scores_of(monkeypatch, scores)
    named = name_known(diarization, None)
    assert [segment.speaker for segment in named] == [
        "channel1-Ann",
        "channel1-speaker2",
        "Ann",
    ]
    assert named.channel_of == {"channel1-Ann": 1, "channel1-speaker2": 1, "Ann": 2}
    known = [match.is_known for match in named.matches.values()]
    assert known == [True, False, True]
    assert [match.name for match in named.matches.values()] == ["Ann"] * 3


@pytest.mark.parametrize("name", ["channel2-Ann", "channel1", "channel1-speaker2"])
def test_names_of_channels_cannot_be_enrolled_names(model, name):
    class Enrolled:
        speakers = {name: np.ones(2)}
        enrolled_by = sha256 = "same"
        calibration = object()

    with refuses("known", name, "same name in RTTM"):
        check_enrolled(Enrolled())
