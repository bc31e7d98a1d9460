"""Any audio at the model's rate: exact where nothing changes, one line for what is broken."""

import gc
import io
import os
import sys
import threading
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import soxr
import torch
from refusals import refuses
from scipy.signal import correlate
from voices import make_wave

from speakerlab.data import audio
from speakerlab.data.convert import (
    read_channels,
    read_wave,
    spool_channels,
    spool_wave,
)

RATE = 16000


def tone(hertz: float, rate: int, seconds: float = 1.0) -> np.ndarray:
    seconds_S = np.arange(round(seconds * rate)) / rate
    wave_S = 0.5 * np.sin(2 * np.pi * hertz * seconds_S)
    return wave_S.astype(np.float32)


def write_aac(path: Path, wave_S: np.ndarray, rate: int) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=rate, layout="mono")
        # PyAV 19 would keep threads, on which processes that are forked later wait for ever.
        stream.codec_context.thread_count = 1
        wave_1S = wave_S[None]
        frame = av.AudioFrame.from_ndarray(
            wave_1S,
            format="s16",
            layout="mono",
        )
        frame.sample_rate = rate
        frame.pts = 0
        packets = stream.encode(frame)
        packets += stream.encode(None)  # flush the encoder
        for packet in packets:
            container.mux(packet)


@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_at_the_models_rate_the_samples_are_those_of_stage_5(tmp_path: Path, suffix):
    path = tmp_path / f"a.{suffix}"
    # more than a block
    audio.write(path, make_wave(0, 0, 20.0), RATE)
    wave_S = read_wave(path, sample_rate=RATE)
    assert wave_S.dtype == np.float32
    assert len(wave_S) == 320000 > audio.BLOCK_SAMPLES
    expected_S = audio.read(path) / np.float32(32768)
    assert np.array_equal(wave_S, expected_S)


def test_every_way_to_give_a_file(tmp_path: Path):
    path = tmp_path / "a.wav"
    audio.write(path, make_wave(0, 0, 1.0), RATE)
    content = path.read_bytes()
    expected_S = read_wave(path, sample_rate=RATE)

    # a thread, as the content may be more than a pipe holds
    reader, writer = os.pipe()

    def write_content() -> None:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(content)

    thread = threading.Thread(target=write_content)
    thread.start()
    with path.open("rb") as opened, os.fdopen(reader, "rb") as piped:
        sources = (
            str(path),
            content,
            bytearray(content),
            io.BytesIO(content),
            opened,
            piped,
        )
        for source in sources:
            wave_S = read_wave(source, sample_rate=RATE)
            assert np.array_equal(wave_S, expected_S), type(source)
    thread.join()


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", "int16", "int32", "uint8", "float16"],
)
def test_every_type_means_the_same_amplitudes(dtype):
    values = np.array([0.0, 0.5, -0.5, -1.0, 0.25])
    scale = {"int16": 2.0**15, "int32": 2.0**31, "uint8": 128}
    raw = values * scale.get(dtype, 1.0)
    if dtype == "uint8":
        raw += 128
    raw = raw.astype(dtype)
    for source in (raw, torch.from_numpy(raw)):
        wave_S = read_wave(source, sample_rate=RATE)
        assert wave_S.dtype == np.float32
        assert wave_S.tolist() == values.tolist()


def test_the_first_channel_of_either_layout(tmp_path: Path):
    first_S = make_wave(0, 0, 1.0)
    second_S = make_wave(1, 0, 1.0)
    wave_SC = np.stack([first_S, second_S], axis=1)
    path = tmp_path / "a.wav"
    soundfile.write(path, wave_SC, RATE, subtype="PCM_16")
    wanted_S = first_S / np.float32(32768)
    mono_S1 = wave_SC[:, :1]
    sources = (
        path,
        wave_SC,
        wave_SC.T,
        mono_S1,
        mono_S1.T,
        torch.from_numpy(wave_SC),
        torch.from_numpy(wave_SC.T),
    )
    for source in sources:
        wave_S = read_wave(source, sample_rate=RATE)
        assert np.array_equal(wave_S, wanted_S)

    # bfloat16: numpy has no such type
    bfloat16_SC = torch.from_numpy(wave_SC).to(torch.bfloat16)
    halved = bfloat16_SC / 32768
    wave_S = read_wave(halved, sample_rate=RATE)
    assert np.allclose(wave_S, wanted_S, rtol=2**-8)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_another_rate_keeps_tones_and_lets_nothing_alias(rate):
    wave_S = read_wave(
        tone(1000, rate),
        sample_rate=RATE,
        source_rate=rate,
    )
    assert abs(len(wave_S) - RATE) <= 1
    # the filter's edges are left out
    middle = slice(1000, 15000)
    expected_S = tone(1000, RATE)
    expected_S = expected_S[: len(wave_S)]
    error_S = np.abs(wave_S - expected_S)
    assert error_S[middle].max() < 1e-3

    # 9500 Hz is above half of the new rate and has to vanish
    if rate > 2 * 9500:
        high_S = read_wave(
            tone(9500, rate),
            sample_rate=RATE,
            source_rate=rate,
        )
        amplitude_S = np.abs(high_S[middle])
        assert amplitude_S.max() < 1e-3


@pytest.mark.parametrize(
    ("rate", "is_narrow"),
    [(8000, True), (11025, False), (16000, False), (48000, False)],
)
def test_a_telephones_rate_is_told(tmp_path: Path, caplog, rate: int, is_narrow: bool):
    wave_S = make_wave(0, 0, 1.0, rate)
    path = tmp_path / "a.wav"
    audio.write(path, wave_S, rate)
    readers = [read_wave, read_channels, spool_wave, spool_channels]
    for read in readers:
        caplog.clear()
        read(path, sample_rate=RATE)
        is_told = f"{path}: has {rate} Hz" in caplog.text
        assert is_told == is_narrow


def test_resampling_in_blocks_is_resampling_at_once(tmp_path: Path):
    wave_S = make_wave(0, 0, 15.0, 44100)
    assert len(wave_S) > 2 * audio.BLOCK_SAMPLES
    audio.write(tmp_path / "a.wav", wave_S, 44100)
    float_S = (wave_S / 32768).astype(np.float32)
    expected_S = soxr.resample(float_S, 44100, RATE, quality="HQ")

    from_file = read_wave(tmp_path / "a.wav", sample_rate=RATE)
    error_S = np.abs(from_file - expected_S)
    half_a_step = 0.5 / audio.FULL_SCALE  # it is rounded to 16 bits
    assert error_S.max() < half_a_step + 1e-6
    from_array = read_wave(wave_S, sample_rate=RATE, source_rate=44100)
    assert np.array_equal(from_array, from_file)


@pytest.mark.parametrize("rate", [8000, 44100])
def test_a_recording_reads_as_its_conversion_to_the_models_rate(tmp_path: Path, rate):
    """What is above a telephone's band is the noise of 16 bits, in both."""
    audio.write(tmp_path / "a.wav", make_wave(0, 0, 2.0, rate), rate)
    wave_S = read_wave(tmp_path / "a.wav", sample_rate=RATE)
    audio.write(tmp_path / "converted.wav", audio.to_int16(wave_S), RATE)
    converted_S = read_wave(tmp_path / "converted.wav", sample_rate=RATE)
    assert np.array_equal(wave_S, converted_S)


@pytest.mark.parametrize("suffix", ["mp3", "ogg", "m4a", "aac", "aiff", "caf", "au"])
@pytest.mark.parametrize("rate", [16000, 44100])
def test_formats(tmp_path: Path, suffix, rate):
    path = tmp_path / f"a.{suffix}"
    wave_S = make_wave(0, 0, 2.0, rate)
    if suffix in ("m4a", "aac"):
        write_aac(path, wave_S, rate)
    else:
        soundfile.write(path, wave_S, rate)
    expected_S = read_wave(wave_S, sample_rate=RATE, source_rate=rate)
    for source in (path, path.read_bytes()):
        read_S = read_wave(source, sample_rate=RATE)
        # a codec puts samples before and behind
        num_additional = len(read_S) - len(expected_S)
        assert abs(num_additional) < 2500

        # the same wave, wherever the codec put it
        part_S = expected_S[4000:20000]
        products = correlate(
            read_S[2000:24000],
            part_S,
            mode="valid",
            method="fft",
        )
        power = part_S @ part_S
        assert 0.95 < products.max() / power < 1.05


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists threads")
def test_a_decoded_file_leaves_no_threads(tmp_path: Path):
    """Not even until Python collects garbage: a process that is forked before would hang then."""
    path = tmp_path / "a.m4a"
    write_aac(path, make_wave(0, 0, 1.0), RATE)
    read_wave(path, sample_rate=RATE)
    gc.collect()
    gc.disable()
    try:
        threads_before = list(Path("/proc/self/task").iterdir())
        read_wave(path, sample_rate=RATE)
        assert list(Path("/proc/self/task").iterdir()) == threads_before
    finally:
        gc.enable()


def test_m4a_without_its_extra_names_it(tmp_path: Path, monkeypatch):
    path = tmp_path / "a.m4a"
    write_aac(path, make_wave(0, 0, 1.0), RATE)
    # as if it were not installed
    monkeypatch.setitem(sys.modules, "av", None)
    with refuses(str(path), "pip install av"):
        read_wave(path, sample_rate=RATE)


@pytest.mark.parametrize(
    ("source", "kind", "value"),
    [
        (b"hello " * 100, "bytes", "not readable audio"),
        (b"", "bytes", "0 bytes"),
        ([0.0, 0.1], "list", "got list"),
        (np.float32(1), "float32", "got float32"),
        (np.zeros(0, np.float32), "ndarray", "0 samples"),
        (np.zeros((2, 0), np.int16), "ndarray", "0 samples"),
        (np.zeros(99, np.int16), "ndarray", "is silent, got 0 in every sample"),
        (np.full(99, 128, np.uint8), "ndarray", "is silent, got 0 in every sample"),
        (np.array([0, 128.0, 255]), "ndarray", "subtract 128"),
        (np.full(99, 0.5), "ndarray", "is constant, got 0.5 in every sample"),
        (np.array([0, np.nan]), "ndarray", "got NaN"),
        (np.array([0, np.inf]), "ndarray", "infinity"),
        (np.array([0, 1234.0]), "ndarray", "got 1234"),
        (np.arange(9), "ndarray", "got int64"),
        (np.zeros((40, 50)), "ndarray", "(40, 50)"),
        (np.array([0, 6.5]), "ndarray", "divide by the peak"),
        (np.array(0.5), "ndarray", "()"),
        (torch.tensor(0.5), "Tensor", "()"),
        (torch.tensor([0.0, np.nan]), "Tensor", "got NaN"),
        (torch.ones(9).to_sparse(), "Tensor", "sparse"),
        (torch.ones(9, device="meta"), "Tensor", "meta"),
    ],
)
def test_what_is_no_audio_is_refused(source, kind, value):
    with refuses(f"audio ({kind})", value):
        read_wave(source, sample_rate=RATE)


def test_an_overshoot_is_clipped():
    values = np.array([0.0, 1.3, -2.0, 0.5])
    wave_S = read_wave(values, sample_rate=RATE)
    assert wave_S.tolist() == [0.0, 1.0, -1.0, 0.5]


def test_paths_and_rates_that_cannot_be_are_refused(tmp_path: Path):
    with refuses("/no/such.wav", "no such file", error=FileNotFoundError):
        read_wave("/no/such.wav", sample_rate=RATE)
    with refuses("/", "a folder"):
        read_wave("/", sample_rate=RATE)
    path = tmp_path / "a.wav"
    audio.write(path, make_wave(0, 0, 1.0), RATE)
    with refuses(str(path), 16000, 8000):
        read_wave(path, sample_rate=RATE, source_rate=8000)
    wave_S = np.ones(9)
    # The last is in kHz.
    for rate in ("16000", 44100.5, float("nan"), True, -1, 0, 16):
        with refuses("audio (ndarray)", f"got {rate!r}"):
            read_wave(wave_S, sample_rate=RATE, source_rate=rate)


def test_a_whole_rate_may_have_any_type():
    wave_S = make_wave(0, 0, 1.0)
    expected_S = read_wave(wave_S, sample_rate=RATE, source_rate=8000)
    for rate in (8000.0, np.int64(8000), np.float32(8000)):
        read_S = read_wave(wave_S, sample_rate=RATE, source_rate=rate)
        assert np.array_equal(read_S, expected_S)


def test_a_view_of_a_tensor_with_another_sign_is_read():
    wave = torch.linspace(-0.5, 0.5, 99)
    read_S = read_wave(torch._neg_view(wave), sample_rate=RATE)
    assert np.array_equal(read_S, -wave.numpy())


def test_a_float_file_with_nan_is_refused(tmp_path: Path):
    values = np.array([0.1, np.nan, 0.2], dtype=np.float32)
    path = tmp_path / "b.wav"
    soundfile.write(path, values, RATE, subtype="FLOAT")
    with refuses(str(path), "NaN"):
        read_wave(path, sample_rate=RATE)


def two_channels(speakers: tuple[int, int] = (0, 1)) -> np.ndarray:
    """wave_SC, int16, with a voice on each channel."""
    voices = [make_wave(speaker, 0, 1.0) for speaker in speakers]
    return np.stack(voices, axis=1)


def as_sources(folder: Path, wave_SC: np.ndarray) -> list[Any]:
    """Return a recording as files that libsndfile and PyAV read, as bytes and as arrays."""
    wav = folder / "a.wav"
    soundfile.write(wav, wave_SC, RATE, subtype="PCM_16")
    mka = folder / "a.mka"
    with av.open(str(mka), "w") as container:
        layout = {2: "stereo", 4: "4.0"}[wave_SC.shape[1]]
        stream = container.add_stream("pcm_s16le", rate=RATE, layout=layout)
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(wave_SC).reshape(1, -1),
            format="s16",
            layout=layout,
        )
        frame.sample_rate = RATE
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    return [wav, mka, wav.read_bytes(), wave_SC, torch.from_numpy(wave_SC.T.copy())]


def test_a_channel_the_mean_or_each(tmp_path: Path, caplog):
    wave_SC = two_channels()
    float_SC = wave_SC / np.float32(32768)
    for source in as_sources(tmp_path, wave_SC):
        numbers: list[Any] = [1, 2, np.int64(2)]
        for number in numbers:
            wave_S = read_wave(source, sample_rate=RATE, channels=number)
            assert np.array_equal(wave_S, float_SC[:, number - 1])
        mixed_S = read_wave(source, sample_rate=RATE, channels="mix")
        assert np.array_equal(mixed_S, float_SC.mean(axis=1))
        each_CS = read_channels(source, sample_rate=RATE)
        assert np.array_equal(each_CS, float_SC.T)
    # The choice is the user's.
    assert caplog.messages == []

    narrow_CS = read_channels(wave_SC, sample_rate=8000, source_rate=RATE)
    for number, narrow_S in enumerate(narrow_CS, start=1):
        expected_S = read_wave(
            wave_SC,
            sample_rate=8000,
            source_rate=RATE,
            channels=number,
        )
        assert np.array_equal(narrow_S, expected_S)

    # The mean of a single channel is the channel.
    mono_S = read_wave(wave_SC[:, 0], sample_rate=RATE, channels="mix")
    assert np.array_equal(mono_S, float_SC[:, 0])


@pytest.mark.parametrize("channels", [0, -1, True, 1.0, "2", "left", "each", [1]])
def test_channels_that_do_not_exist(channels):
    with refuses("channels", repr(channels)):
        read_wave(two_channels(), sample_rate=RATE, channels=channels)
    with refuses("audio (ndarray)", "2 channels, got channel 3"):
        read_wave(two_channels(), sample_rate=RATE, channels=3)


def test_channels_that_differ_are_reported_once(tmp_path: Path, caplog):
    for source in as_sources(tmp_path, two_channels()):
        caplog.clear()
        wave_S = read_wave(source, sample_rate=RATE)
        assert len(wave_S) == RATE
        (line,) = caplog.messages
        assert line.startswith(audio.name_of(source))
        assert "2 channels" in line
        assert "channel 1" in line
        choice = "--channel" if isinstance(source, Path | bytes) else "embed_many"
        assert choice in line


def test_channels_with_the_same_sound_are_not_reported(caplog):
    first_S = make_wave(0, 0, 1.0)
    noise_S = np.random.default_rng(0).integers(-3, 4, len(first_S))
    # A copy, a quieter and an inverted one, rounding of a codec, an open input, silence.
    for second_S in (
        first_S,
        first_S // 2,
        -first_S,
        first_S + noise_S,
        noise_S,
        0 * first_S,
    ):
        wave_SC = np.stack([first_S, second_S.astype(np.int16)], axis=1)
        read_wave(wave_SC, sample_rate=RATE)
    assert caplog.messages == []

    # In a later channel, and in a part of the recording.
    wave_SC = np.zeros((RATE, 4), dtype=np.int16)
    wave_SC[:, 0] = first_S
    wave_SC[12000:13000, 3] = first_S[:1000] // 10
    content = io.BytesIO()
    soundfile.write(content, wave_SC, RATE, format="WAV")
    read_wave(content.getvalue(), sample_rate=RATE)
    (line,) = caplog.messages
    assert "4 channels" in line


def test_a_silent_first_channel_names_the_other():
    wave_SC = two_channels()
    wave_SC[:, 0] = 0
    with refuses("audio (ndarray), channel 1", "channel 2 has sound"):
        read_wave(wave_SC, sample_rate=RATE)
    with refuses("audio (ndarray), channel 1", "silent"):
        read_channels(wave_SC, sample_rate=RATE)
    # An input with an offset, to which no microphone is connected.
    wave_SC[:, 0] = 500
    with refuses("audio (ndarray), channel 1", "constant", "channel 2 has sound"):
        read_wave(wave_SC, sample_rate=RATE)
    wave_S = read_wave(wave_SC, sample_rate=RATE, channels=2)
    assert len(wave_S) == RATE


def test_channels_that_cancel_each_other(tmp_path: Path, caplog):
    first_S = make_wave(0, 0, 1.0)
    # Also with the noise of the last bit.
    for second_S in (-first_S, 1 - first_S):
        wave_SC = np.stack([first_S, second_S], axis=1)
        for source in as_sources(tmp_path, wave_SC):
            where = audio.name_of(source)
            with refuses(where, "2 channels", "cancel each other", "--channel N"):
                read_wave(source, sample_rate=RATE, channels="mix")
        caplog.clear()
        spool_wave(wave_SC, sample_rate=RATE, channels="mix")
        (line,) = caplog.messages
        assert "cancel each other" in line
    with refuses("audio (ndarray)", "silent, got 0"):
        read_wave(0 * wave_SC, sample_rate=RATE, channels="mix")


@pytest.mark.parametrize("shape", [(8, 16000), (3, 16000), (16000, 8), (32, 4000)])
def test_a_batch_is_not_taken_for_channels(shape):
    rng = np.random.default_rng(0)
    wave_CS = rng.uniform(-0.5, 0.5, shape).astype(np.float32)
    for source in (wave_CS, torch.from_numpy(wave_CS)):
        with refuses(audio.name_of(source), shape) as caught:
            read_wave(source, sample_rate=RATE)
        assert "embed_many(list(x))" in str(caught.value)
        assert "channels=" in str(caught.value)
    expected_S = wave_CS[1] if shape[0] < shape[1] else wave_CS[:, 1]
    wave_S = read_wave(wave_CS, sample_rate=RATE, channels=2)
    assert np.array_equal(wave_S, expected_S)


def test_16_bits_in_int32_are_refused_and_24_bits_reported(caplog):
    wave_S = make_wave(0, 0, 1.0)
    expected_S = read_wave(wave_S, sample_rate=RATE)
    assert caplog.messages == []
    int32_S = wave_S.astype(np.int32)
    for source in (int32_S, torch.from_numpy(int32_S)):
        with refuses(audio.name_of(source), "cast 16-bit values to int16"):
            read_wave(source, sample_rate=RATE)
    with refuses("audio (ndarray)", "scale it to [-1, 1]"):
        read_wave(expected_S / 65536, sample_rate=RATE)

    read_wave(int32_S << 8, sample_rate=RATE)
    (line,) = caplog.messages
    assert "24-bit" in line
    caplog.clear()
    read_wave(wave_S >> 8, sample_rate=RATE)
    (line,) = caplog.messages
    assert "8-bit values in int16" in line
    caplog.clear()
    left_S = read_wave(int32_S << 16, sample_rate=RATE)
    assert np.array_equal(left_S, expected_S)
    assert caplog.messages == []


def test_a_few_milliseconds_are_reported(caplog):
    wave_S = make_wave(0, 0, 1.0)
    read_wave(wave_S[4000:4100], sample_rate=RATE)
    (line,) = caplog.messages
    assert line.startswith("audio (ndarray): lasts 6 ms")
    # Shorter than what is decided from, and so few samples that some are near the peak.
    for num_samples, length in ((800, "50 ms"), (16, "1 ms")):
        caplog.clear()
        read_wave(wave_S[4000 : 4000 + num_samples], sample_rate=RATE)
        (line,) = caplog.messages
        assert line.startswith(f"audio (ndarray): lasts {length}, too short")
    caplog.clear()
    read_wave(wave_S[4000:5600], sample_rate=RATE)
    assert caplog.messages == []


def test_levels_of_files_are_reported(tmp_path: Path, caplog):
    path = tmp_path / "a.flac"
    soundfile.write(path, tone(440, 48000), 48000)
    read_wave(path, sample_rate=RATE)
    (line,) = caplog.messages
    assert line.startswith(f"{path}: is a tone")
    read_wave(path, sample_rate=RATE, check_levels=False)
    assert len(caplog.messages) == 1

    # Near silence, of a recorder that is switched off.
    quiet_S = np.random.default_rng(0).integers(-1, 2, RATE).astype(np.int16)
    soundfile.write(path, quiet_S, RATE)
    with refuses(str(path), "-90 dB"):
        read_wave(path, sample_rate=RATE)
    # A constant stays one at another rate.
    soundfile.write(path, np.full(RATE, 0.25), 48000)
    with refuses(str(path), "is constant, got 0.25"):
        read_wave(path, sample_rate=RATE)
