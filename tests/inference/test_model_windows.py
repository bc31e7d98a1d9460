"""Windows of a recording by the API: each has the embedding of its samples alone."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from models_on_disk import publish_small, publish_xvector
from refusals import refuses
from voices import RATE, make_wave

import speakerlab
from speakerlab.data import audio

# Prints the number of windows, the end of the last one, and the most bytes needed meanwhile.
AN_HOUR = """
import sys, threading
import numpy as np
import speakerlab

def private_bytes():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    # Without the pages of the temporary file, which the kernel takes back at any time.
    return int(status["RssAnon"].split()[0]) * 1024

model = speakerlab.load(sys.argv[1], device="cpu")
model.embed_windows(np.arange(160000) % 70 / 500)
before = private_bytes()
sizes = []
is_done = threading.Event()

def watch():
    while not is_done.wait(0.02):
        sizes.append(private_bytes())

thread = threading.Thread(target=watch)
thread.start()
times_W2, emb_WD = model.embed_windows(sys.argv[2])
is_done.set()
thread.join()
print(len(times_W2), times_W2[-1, 1], max(sizes) - before)
"""


@pytest.fixture
def open_small(tmp_path: Path, make_config, make_embedder):
    """open_small("vad={}", ...) -> the model at `tmp_path/exp`, by the API."""

    def make(*overrides: str):
        config = make_config(*overrides)
        embedder = make_embedder(*overrides)
        exp = publish_small(tmp_path / "exp", config, embedder)
        return speakerlab.load(exp, device="cpu")

    return make


def check_each_alone(model, wave_S: np.ndarray, times_W2, emb_WD) -> None:
    """The times are those of whole samples, and each row is the embedding of these alone."""
    assert times_W2.dtype == np.float64
    assert times_W2.shape == (len(emb_WD), 2)
    assert emb_WD.dtype == np.float32
    assert emb_WD.shape == (len(times_W2), model.embed_dim)
    samples_W2 = times_W2 * model.sample_rate
    bounds_W2 = samples_W2.round().astype(int)
    assert samples_W2 == pytest.approx(bounds_W2, abs=1e-6)
    for (first, end), emb_D in zip(bounds_W2, emb_WD):
        alone_D = model.embed(wave_S[first:end])
        largest_error = np.abs(emb_D - alone_D).max()
        assert largest_error < 1e-5 * np.abs(alone_D).max()


@pytest.mark.parametrize("overrides", [(), ("vad={}",), ("model.max_seconds=0.5",)])
def test_each_is_as_its_samples_alone(open_small, tmp_path, overrides):
    model = open_small(*overrides)
    wave_S = make_wave(0, 0, 4.1)
    wave_S[10_000:14_000] //= 1000  # silence, for the VAD
    path = tmp_path / "a.wav"
    audio.write(path, wave_S, RATE)
    times_W2, emb_WD = model.embed_windows(path)
    starts = [0, 0.75, 1.5, 2.25, 2.6]
    assert times_W2[:, 0] == pytest.approx(starts)
    assert times_W2[:, 1] == pytest.approx(np.add(starts, 1.5))
    check_each_alone(model, wave_S, times_W2, emb_WD)
    # Windows differ by more than rounding.
    assert np.abs(emb_WD[0] - emb_WD[-1]).max() > 1e-3


def test_an_array_of_another_rate_is_read_as_for_embed(open_small):
    model = open_small()
    wave_S = make_wave(0, 0, 3.0, 48000) / 2**15
    times_W2, _ = model.embed_windows(wave_S, 48000, window=1.0, step=1.0)
    assert times_W2[:, 1].tolist() == [1, 2, 3]
    # One window of the whole recording.
    times_12, emb_1D = model.embed_windows(wave_S, 48000, window=3.0, step=3.0)
    assert times_12.tolist() == [[0, 3]]
    whole_D = model.embed(wave_S, 48000)
    assert np.allclose(emb_1D[0], whole_D, rtol=1e-5, atol=1e-6)


def test_digits_that_16_bits_do_not_have_count_too(open_small):
    model = open_small()
    wave_S = make_wave(0, 0, 2.0) / 2**15 + 1e-6
    times_W2, emb_WD = model.embed_windows(wave_S)
    check_each_alone(model, wave_S, times_W2, emb_WD)


def test_a_short_recording_is_one_shorter_window(open_small):
    model = open_small()
    for seconds in (0.01, 0.7, 1.5):
        wave_S = make_wave(0, 0, seconds)
        times_W2, emb_WD = model.embed_windows(wave_S)
        assert times_W2.tolist() == [[0, seconds]]
        check_each_alone(model, wave_S, times_W2, emb_WD)


@pytest.mark.parametrize("rate", [8000, 16000, 22050])
@pytest.mark.parametrize("lengths", [(1.5, 0.75), (0.3333, 0.1111), (1.0, 1.0)])
def test_every_sample_is_in_a_window(open_small, rate, lengths):
    window, step = lengths
    model = open_small(f"frontend.sample_rate={rate}")
    for num_samples in (rate, 2 * rate, 2 * rate + 1, 3 * rate - 1):
        wave_S = make_wave(1, 0, num_samples / rate, rate)
        times_W2, _ = model.embed_windows(wave_S, window=window, step=step)
        bounds_W2 = (times_W2 * rate).round().astype(int)
        assert bounds_W2[0, 0] == 0
        assert bounds_W2[-1, 1] == len(wave_S)
        assert (bounds_W2[1:, 0] <= bounds_W2[:-1, 1]).all()
        lengths_W = bounds_W2[:, 1] - bounds_W2[:, 0]
        assert (lengths_W == min(round(window * rate), len(wave_S))).all()


def test_digital_silence_has_no_window(open_small, tmp_path):
    model = open_small()
    voice_S = make_wave(0, 0, 2.0)
    silence_S = np.zeros(3 * RATE, dtype=np.int16)
    wave_S = np.concatenate([voice_S, silence_S, voice_S])
    times_W2, emb_WD = model.embed_windows(wave_S, window=1.0, step=0.5)
    # All but those within seconds 2 to 5.
    assert times_W2[:, 0].tolist() == [0, 0.5, 1, 1.5, 4.5, 5, 5.5, 6]
    check_each_alone(model, wave_S, times_W2, emb_WD)
    with refuses("audio (ndarray)", "silent"):
        model.embed_windows(silence_S)
    path = tmp_path / "silent.wav"
    audio.write(path, silence_S, RATE)
    with refuses(str(path), "silent"):
        model.embed_windows(path)


def test_channels_are_those_of_embed(open_small, tmp_path):
    model = open_small()
    first_S = make_wave(0, 0, 2.0)
    second_S = make_wave(3, 0, 2.0)
    path = tmp_path / "a.wav"
    soundfile.write(path, np.stack([first_S, second_S], axis=1), RATE)
    for channels, wave_S in ((1, first_S), (2, second_S)):
        times_W2, emb_WD = model.embed_windows(path, channels=channels)
        check_each_alone(model, wave_S, times_W2, emb_WD)
    mixed_S = (first_S / 2**15 + second_S / 2**15) / 2
    _, emb_WD = model.embed_windows(path, channels="mix")
    _, of_mix_WD = model.embed_windows(mixed_S)
    assert np.allclose(emb_WD, of_mix_WD, rtol=1e-2, atol=1e-3)

    (first, second) = model.embed_windows(path, channels="each")
    check_each_alone(model, first_S, *first)
    check_each_alone(model, second_S, *second)
    # Silence on one side of a call is no error.
    silent_CS = np.stack([first_S, np.zeros_like(first_S)])
    (_, (times_W2, emb_WD)) = model.embed_windows(silent_CS, channels="each")
    assert times_W2.shape == (0, 2)
    assert emb_WD.shape == (0, model.embed_dim)
    with refuses("channels", "'left'"):
        model.embed_windows(path, channels="left")


@pytest.mark.parametrize("value", [0, -1.5, float("nan"), float("inf"), "1.5", None])
def test_lengths_are_seconds(open_small, value):
    model = open_small()
    wave_S = make_wave(0, 0, 1.0)
    with refuses("window", repr(value)):
        model.embed_windows(wave_S, window=value)
    with refuses("step", repr(value)):
        model.embed_windows(wave_S, step=value)


def test_windows_leave_no_gaps(open_small):
    model = open_small()
    with refuses("step", "1 s", "2 s"):
        model.embed_windows(make_wave(0, 0, 3.0), window=1.0, step=2.0)


@pytest.mark.slow
def test_an_hour_needs_little_memory(tmp_path):
    exp = publish_xvector(tmp_path / "exp")
    path = tmp_path / "hour.wav"
    minute_S = np.tile(make_wave(0, 0, 10.0), 6)
    with soundfile.SoundFile(path, "w", RATE, 1, subtype="PCM_16") as file:
        for _ in range(60):
            file.write(minute_S)
    arguments = [sys.executable, "-c", AN_HOUR, str(exp), str(path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    num_windows, end, num_bytes = done.stdout.split()
    assert int(num_windows) == 4799
    assert float(end) == 3600
    # In memory, the hour would take 230 MB, its windows twice as much.
    assert int(num_bytes) < 100e6, f"{int(num_bytes) / 1e6:.0f} MB"
