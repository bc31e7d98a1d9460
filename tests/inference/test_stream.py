"""`model.stream`: turns as they come, their latency and names, and the result of `diarize`."""

import math
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import cycle

import numpy as np
import pytest
from models_on_disk import CALIBRATION, publish_xvector
from refusals import refuses
from toy_segmentation import write_segmentation
from voices import RATE, make_noise, make_wave

import speakerlab
from speakerlab.diarization.local_speakers import (
    FIELD_SAMPLES,
    HOP_SAMPLES,
    SPEAKERS_CL,
)
from speakerlab.diarization.regions import Turn, merge_regions
from speakerlab.diarization.scoring import score
from speakerlab.diarization.windows import cut_windows
from speakerlab.inference.live_segmentation import LiveSegmentation
from speakerlab.inference.live_speech import LiveSpeech
from speakerlab.inference.segmentation import Segmentation
from speakerlab.inference.speech import find_speech
from speakerlab.inference.stream import Stream

PITCHES = 90 + 25 * np.arange(16)  # of make_wave's speakers
REGIONS = [(1.0, 9.0), (10.0, 16.0), (17.0, 24.0), (25.0, 34.0), (35.0, 37.0)]
SPEAKERS = ["speaker1", "speaker2", "speaker1", "speaker2", "speaker1"]


@cache
def pitch_waves(num_samples: int) -> np.ndarray:
    """Return a complex wave of each pitch, faded in and out."""
    time_S = np.arange(num_samples) / RATE
    wave_NS = np.exp(2j * np.pi * PITCHES[:, None] * time_S)
    return (wave_NS * np.hanning(num_samples)).astype(np.complex64)


def embed_pitches(reads, **_options) -> np.ndarray:
    """Return the strength of each pitch in a window, for speakers that are far apart."""
    embeddings = []
    for read in reads:
        wave_S = read().astype(np.float32)
        embeddings.append(np.abs(pitch_waves(len(wave_S)) @ wave_S))
    return np.array(embeddings, dtype=np.float32).reshape(-1, len(PITCHES))


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory):
    exp = publish_xvector(tmp_path_factory.mktemp("exp") / "exp", CALIBRATION)
    return speakerlab.load(exp, device="cpu")


@pytest.fixture
def model(plain_model, monkeypatch):
    """A model that hears the pitch."""
    monkeypatch.setattr(plain_model, "embed_many", embed_pitches)
    monkeypatch.setattr(plain_model, "speakers", {})
    return plain_model


def talk() -> np.ndarray:
    """Two speakers in turns, a second of quiet noise before and after each."""
    rng = np.random.default_rng(0)
    wave_S = rng.normal(size=38 * RATE) * 20
    for (start, end), speaker in zip(REGIONS, cycle((0, 3))):
        voice_S = make_wave(speaker, 0, end - start)
        wave_S[round(start * RATE) : round(end * RATE)] += voice_S
    return wave_S.astype(np.int16)


def run(stream: Stream, wave_S: np.ndarray, sizes) -> list:
    """Push chunks of these sizes, again and again; return all turns."""
    turns = []
    next_sizes = cycle(sizes)
    start = 0
    while start < len(wave_S):
        size = next(next_sizes)
        turns += stream.push(wave_S[start : start + size])
        start += size
    return turns + stream.finish()


def speakers_in(turns, regions=REGIONS) -> list[str]:
    """Return who speaks in the last part of each region, when a new speaker is known."""
    names = []
    for _, end in regions:
        (name,) = {turn.speaker for turn in turns if turn.start < end - 1.0 < turn.end}
        names.append(name)
    return names


def same(first, second) -> bool:
    """Return whether two results are equal, bit for bit."""
    if list(first) != list(second) or first.seconds != second.seconds:
        return False
    if list(first.speakers) != list(second.speakers):
        return False
    pairs = zip(first.speakers.values(), second.speakers.values())
    return all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("sizes", [[7001, 1, 0, 160], [10**7]])
def test_infinite_latency_is_diarize(plain_model, sizes, tmp_path):
    """Of an untrained model, so that the result depends on each sample."""
    wave_S = talk()
    segmentation = write_segmentation(tmp_path / "segmentation.onnx")
    float_S = (wave_S[::2] / 32768).astype(np.float32)
    stereo_SC = np.stack([float_S, float_S[::-1]], axis=1)
    cases = [
        (wave_S, None, {}),
        (wave_S, None, {"num_speakers": 2, "method": "ahc"}),
        (wave_S, None, {"num_speakers": 3, "segmentation": segmentation}),
        (float_S, 8000, {"num_speakers": 2}),
        (stereo_SC, 44100, {"num_speakers": 2, "channels": "mix"}),
    ]
    for wave, rate, options in cases:
        stream = plain_model.stream(rate, latency=math.inf, **options)
        expected = plain_model.diarize(wave, rate, recording="stream", **options)
        turns = run(stream, wave, sizes)
        assert turns == list(expected)
        assert len(turns) > 2
        assert same(stream.diarization, expected)
        assert stream.diarization.to_rttm() == expected.to_rttm()


def test_turns_come_in_time_and_stay(model):
    wave_S = talk()
    for latency in (1.0, 2.0, 5.0):
        stream = model.stream(latency=latency)
        turns = []
        seen = []  # (final until, turns, current) at each time
        for start in range(0, len(wave_S), 1000):
            # What ended this long ago was returned before these samples.
            assert stream.final_until >= start / RATE - latency
            new_turns = stream.push(wave_S[start : start + 1000])
            assert all(start / RATE < turn.end + latency for turn in new_turns)
            turns += new_turns
            seen.append((stream.final_until, list(turns), stream.current))
        turns += stream.finish()
        assert stream.finish() == []
        assert turns == list(stream.diarization)

        for final_until, earlier, current in seen:
            assert turns[: len(earlier)] == earlier
            # Nothing begins in the final time that was not there then.
            begun = [turn for turn in turns if turn.start < final_until - 1e-6]
            assert len(begun) == len(earlier) + len(current)
            for turn, so_far in zip(begun[len(earlier) :], current, strict=True):
                assert turn[0] == so_far.start
                assert turn[2] == so_far.speaker
                assert turn[1] >= so_far.end

        assert speakers_in(turns) == SPEAKERS
        regions = merge_regions(turn[:2] for turn in turns)
        for region, expected in zip(regions, REGIONS, strict=True):
            assert region == pytest.approx(expected, abs=0.1)
        # The second speaker is new until there are two windows, 2.25 s.
        assert len(turns) == len(REGIONS) + (latency < 5)
        assert all(turn.confidence > 0.9 for turn in turns)
        speakers = stream.diarization.speakers
        assert list(speakers) == ["speaker1", "speaker2"]
        assert all(emb_D.shape == (16,) for emb_D in speakers.values())


def test_the_lengths_of_chunks_change_nothing(model):
    wave_S = talk()[: 20 * RATE]
    results = []
    for sizes in ([160], [7001, 1, 0, 16000], [10**7]):
        stream = model.stream(recording="talk")
        run(stream, wave_S, sizes)
        results.append(stream.diarization)
    assert len(results[0]) > 1
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_a_stream_of_another_rate_and_two_channels(model, caplog):
    """Resampling holds samples back, which must not make turns late."""
    wave_S = np.concatenate([talk()[: 20 * RATE], np.zeros(4 * RATE, np.int16)])
    telephone_S = wave_S[::2]
    two_SC = np.stack([telephone_S, np.roll(telephone_S, 4000)], axis=1)
    stream = model.stream(8000, latency=1.0, channels=1)
    turns = []
    for start in range(0, len(two_SC), 80):
        assert stream.final_until >= start / 8000 - 1.0
        turns += stream.push(two_SC[start : start + 80])
    turns += stream.finish()
    assert speakers_in(turns, REGIONS[:2]) == ["speaker1", "speaker2"]
    # Without a choice, the first is read, with a warning.
    caplog.clear()
    stream = model.stream(RATE)
    run(stream, np.stack([wave_S, wave_S[::-1]], axis=1), [4000])
    assert [
        message for message in caplog.messages if "2 channels that differ" in message
    ]


def test_regions_are_those_of_the_whole_recording(model):
    """Once the quietest and the loudest frames were heard; then cut into the same windows."""
    wave_S = talk()
    offline = find_speech(wave_S, sample_rate=RATE)
    speech = LiveSpeech(RATE)
    regions = []
    for start in range(0, len(wave_S), 4000):
        regions += speech.push(wave_S[start : start + 4000])
    regions += speech.finish()
    closed = {(region.start, region.end) for region in regions}
    np.testing.assert_allclose(sorted(closed), offline)

    stream = model.stream(latency=30.0)
    windows = []

    def embed(reads, **options):
        windows.extend(len(read()) / RATE for read in reads)
        return embed_pitches(reads, **options)

    model.embed_many = embed  # restored by the fixture
    run(stream, wave_S, [4000])
    expected = [end - start for start, end in cut_windows(sorted(closed))]
    assert windows == pytest.approx(expected)


class PitchRuntime:
    """Segmentation network that hears the two voices of `argue`, in an order that changes."""

    sha256 = "pitch"

    def __init__(self) -> None:
        self.num_windows = 0
        time_S = np.arange(FIELD_SAMPLES) / RATE
        wave_S2 = np.exp(2j * np.pi * PITCHES[[2, 5]] * time_S[:, None])
        self._waves_S2 = wave_S2 * np.hanning(FIELD_SAMPLES)[:, None] / FIELD_SAMPLES

    def threads(self) -> ThreadPoolExecutor:
        # One, because places are drawn in the order of the windows.
        return ThreadPoolExecutor(1)

    def log_prob(self, window_S: np.ndarray) -> np.ndarray:
        self.num_windows += 1
        views = np.lib.stride_tricks.sliding_window_view(window_S, FIELD_SAMPLES)
        frames_FS = views[::HOP_SAMPLES]
        strength_F2 = np.abs(frames_FS @ self._waves_S2)
        # Which two of the three local speakers the voices are, in this window.
        rng = np.random.default_rng(self.num_windows)
        places = rng.permutation(3)[:2]
        active_F3 = np.zeros((len(frames_FS), 3), dtype=bool)
        active_F3[:, places] = strength_F2 > 0.005

        active_F13 = active_F3[:, None]
        set_C3 = SPEAKERS_CL.astype(bool)
        is_set_FC = (active_F13 == set_C3).all(axis=2)
        return np.where(is_set_FC, 0.0, -20.0).astype(np.float32)


def pitch_segmentation() -> Segmentation:
    segmentation = Segmentation.__new__(Segmentation)
    segmentation._runtime = PitchRuntime()
    return segmentation


ARGUMENT = [
    Turn(1.0, 9.0, "A"),
    Turn(8.0, 15.0, "B"),
    Turn(16.0, 24.0, "A"),
    Turn(19.0, 21.0, "B"),
    Turn(25.0, 29.0, "B"),
]


def argue() -> np.ndarray:
    """Two voices that interrupt each other, and steady noise as loud as they are."""
    rng = np.random.default_rng(0)
    wave_S = rng.normal(size=30 * RATE) * 1000
    for start, end, speaker in ARGUMENT:
        voice_S = make_wave(2 if speaker == "A" else 5, 0, end - start)
        wave_S[round(start * RATE) : round(end * RATE)] += voice_S
    return np.clip(wave_S, -32768, 32767).astype(np.int16)


@pytest.mark.parametrize("latency", [1.0, 2.0, 5.0])
def test_overlapping_turns_come_in_time_and_stay(model, latency):
    """Only the segmentation model hears which part of the noise is speech."""
    wave_S = argue()
    stream = model.stream(latency=latency, segmentation=pitch_segmentation())
    turns = []
    seen = []
    for start in range(0, len(wave_S), 1000):
        assert stream.final_until >= start / RATE - latency
        new_turns = stream.push(wave_S[start : start + 1000])
        assert new_turns == sorted(new_turns)
        assert all(start / RATE < turn.end + latency for turn in new_turns)
        turns += new_turns
        seen.append((stream.final_until, list(turns), stream.current))
    turns += stream.finish()
    assert sorted(turns) == list(stream.diarization)

    for final_until, earlier, current in seen:
        assert turns[: len(earlier)] == earlier
        begun = [turn for turn in turns if turn.start < final_until - 1e-6]
        rest = sorted(set(begun) - set(earlier))
        for turn, so_far in zip(rest, current, strict=True):
            assert (turn.start, turn.speaker) == (so_far.start, so_far.speaker)
            assert turn.end >= so_far.end
    errors = score(ARGUMENT, [Turn(*turn[:3]) for turn in turns])
    assert errors.num_found == 2
    # The second voice has no name before it was heard alone.
    assert errors.der is not None
    assert errors.der < (0.02 if latency == 5.0 else 0.1)
    # The second interruption, when both voices are known.
    inside = [turn.speaker for turn in turns if turn.start < 20.0 < turn.end]
    assert len(set(inside)) == 2


def test_with_a_segmentation_model_the_lengths_of_chunks_change_nothing(model):
    wave_S = argue()
    results = []
    for sizes in ([160], [7001, 1, 0, 16000], [10**7]):
        stream = model.stream(segmentation=pitch_segmentation())
        run(stream, wave_S, sizes)
        results.append(stream.diarization)
    assert len(results[0]) > 4
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.parametrize("rate", [RATE, 8000])
def test_regions_of_the_segmentation_model_are_those_of_the_recording(rate):
    """Of each window, which hears the last 10 s; a model of 8 kHz is resampled."""
    wave_S = argue()[:: RATE // rate]
    block = rate // 4
    segmentation = pitch_segmentation()
    runtime = segmentation._runtime
    assert isinstance(runtime, PitchRuntime)
    source = LiveSegmentation(
        segmentation, sample_rate=rate, block_seconds=0.25, latency=2.0
    )
    closed = []
    for start in range(0, len(wave_S), block):
        closed += source.push(wave_S[start : start + block])
        now = (start + block) / rate
        source.forget(now - 2.0)
        local = source.local(now - 2.0, now)
        # Every half second; those that heard something of the last 2 s.
        assert local is None or len(local.start_W) <= 5
    assert runtime.num_windows == len(wave_S) // (2 * block)
    closed += source.finish()
    regions = {(region.start, region.end) for region in closed}
    offline = segmentation.run(wave_S, sample_rate=rate).speech()
    np.testing.assert_allclose(sorted(regions), offline, atol=0.05)


def test_known_speakers_are_named_as_they_speak(model):
    axes = np.eye(16)
    model.speakers = {"Ann Lee": 0.995 * axes[3] + 0.1 * axes[4], "Bob": axes[5]}
    stream = model.stream(known=True)
    turns = run(stream, talk(), [1600])
    names = ["speaker1", "Ann Lee", "speaker1", "Ann Lee", "speaker1"]
    assert speakers_in(turns) == names
    result = stream.diarization
    assert list(result.speakers) == ["speaker1", "Ann Lee"]
    assert result.matches["Ann Lee"].is_known
    assert result.matches["Ann Lee"].score > CALIBRATION.threshold
    assert not result.matches["speaker1"].is_known
    assert " Ann_Lee " in result.to_rttm()
    # Nobody reaches the threshold of a low false-alarm rate.
    stream = model.stream(known=True, far=0.01)
    assert speakers_in(run(stream, talk(), [1600])) == SPEAKERS


def test_a_speaker_who_is_known_later_has_the_name_from_then_on(model, monkeypatch):
    """What was returned stays."""
    model.speakers = {"Ann": np.eye(16)[0]}
    # Her first windows have another voice's pitch in them, with a cosine of 0.45 to hers.
    calls = []

    def embed(reads, **options):
        emb_ND = embed_pitches(reads, **options)
        for emb_D in emb_ND:
            calls.append(0)
            if len(calls) < 6:
                emb_D[8] = 2 * emb_D[0]
        return emb_ND

    monkeypatch.setattr(model, "embed_many", embed)
    stream = model.stream(known=True, threshold=0.1)
    turns = run(stream, talk()[: 9 * RATE], [1600])
    assert [turn.speaker for turn in turns] == ["speaker1", "Ann"]
    assert turns[0].end == turns[1].start
    assert list(stream.diarization.speakers) == ["speaker1", "Ann"]
    assert list(stream.diarization.matches) == ["speaker1", "Ann"]


def test_silence_and_noise_have_no_turns(model, caplog):
    noise_S = (32768 * make_noise(8.0)[0].numpy()).astype(np.int16)
    for wave_S in (np.zeros(8 * RATE, np.int16), noise_S, noise_S[:100]):
        stream = model.stream()
        assert run(stream, wave_S, [1600]) == []
        assert not stream.diarization.speakers
    assert caplog.messages.count("stream: no speech was found") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("segmentation", "step"), [(None, 12), (pitch_segmentation(), 3)]
)
def test_the_memory_of_a_stream_does_not_grow(model, segmentation, step):
    """After ten minutes, which the levels of energy are kept for; a turn takes 0.2 kB.

    step: minutes from one measurement to the next; a segmentation model keeps no levels.
    """
    talk_S = talk() if segmentation is None else argue()
    stream = model.stream(segmentation=segmentation)
    sizes = []
    num_turns = 0
    tracemalloc.start()
    try:
        for minutes in range(step, 5 * step + 1, step):
            while stream.final_until < 60 * minutes:
                num_turns += len(stream.push(talk_S))
            size, _ = tracemalloc.get_traced_memory()
            sizes.append(size)
    finally:
        tracemalloc.stop()
    assert num_turns > 30 * step
    assert max(sizes[1:]) - sizes[0] < 200_000


def test_what_a_stream_refuses(model):
    for latency in (0.5, math.nan, True, "2", -math.inf):
        with refuses("latency", repr(latency)):
            model.stream(latency=latency)
    # Resampling from so low a rate takes more than half a second.
    with refuses("latency", "1.0"):
        model.stream(2000, latency=1.0)
    # A model in windows also waits for the next window.
    with refuses("latency", "1.13", "segmentation model"):
        model.stream(4000, latency=1.0, segmentation=pitch_segmentation())
    with refuses("segmentation", "True"):
        model.stream(segmentation=True)
    with refuses("num_speakers", "latency=math.inf"):
        model.stream(num_speakers=2)
    with refuses("threshold", "finite"):
        model.stream(latency=None, threshold=0.5)
    with refuses("threshold", "1.5"):
        model.stream(threshold=1.5)
    for number in (0, 2.5):
        with refuses("max_speakers", number):
            model.stream(max_speakers=number)
    with refuses("known", "no speaker"):
        model.stream(known=True)
    with refuses("far", "known=True"):
        model.stream(far=0.1)
    with refuses("stream", "sample_rate", 16):
        model.stream(16)
    with refuses("channels", "'each'"):
        model.stream(channels="each")


def test_what_push_refuses(model):
    for latency in (2.0, math.inf):
        stream = model.stream(latency=latency)
        with refuses("stream", "has not finished"):
            stream.diarization  # noqa: B018
        with refuses("stream", "holds no audio"):
            stream.finish()
        with refuses("stream", "(4, 3, 2)"):
            stream.push(np.zeros((4, 3, 2), np.int16))
        with refuses("stream", "NaN"):
            stream.push(np.full(9, np.nan))
        with refuses("stream", "list"):
            stream.push([0, 1])
        stream.push(np.zeros(1600, np.int16))
        with refuses("stream", "1 to 2 channels"):
            stream.push(np.zeros((1600, 2), np.int16))
        stream.finish()
        with refuses("stream", "finished"):
            stream.push(np.zeros(1600, np.int16))
    # 16-bit values in int32, which rounding makes silent.
    stream = model.stream()
    stream.push(np.ones(1600, np.int32))
    with refuses("stream", "cast 16-bit values to int16"):
        stream.finish()
