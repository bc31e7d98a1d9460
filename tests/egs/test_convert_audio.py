"""Files in any format as FLAC: the samples, what is kept, what is left out."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses
from voices import make_wave

from egs.common.corpus import convert_audio
from egs.common.corpus.convert_audio import (
    convert_all,
    convert_coded,
    require_decoder,
)
from speakerlab.data import audio
from tests.egs.corpora import m4a_samples, write_m4a


@pytest.fixture
def m4a(tmp_path) -> Path:
    path = tmp_path / "in" / "spoken.m4a"
    write_m4a(path, make_wave(1, 0, 2.0))
    return path


def test_samples_are_those_of_the_ffmpeg_command(m4a, tmp_path):
    made, left_out = convert_all({"s/v/1": m4a}, tmp_path / "out", num_jobs=1)
    assert made == {"s/v/1": tmp_path / "out/s/v/1.flac"}
    assert left_out == {}
    wave_S = audio.read(made["s/v/1"])
    assert len(wave_S) == m4a_samples(32000)
    if shutil.which("ffmpeg") is None:
        pytest.skip("needs ffmpeg")
    decoded = tmp_path / "by.wav"
    command = ["ffmpeg", "-v", "error", "-i", m4a]
    command += ["-acodec", "pcm_s16le", decoded]
    subprocess.run(command, check=True)
    theirs_S = audio.read(decoded)
    # Another version of FFmpeg may leave out what the encoder added at the end.
    num_samples = min(len(theirs_S), len(wave_S))
    assert num_samples >= 32000
    # Decoders of two versions differ in the last bit, here and there.
    error_S = np.abs(theirs_S[:num_samples].astype(int) - wave_S[:num_samples])
    assert error_S.max() <= 1
    assert (error_S > 0).mean() < 0.01


def test_finished_files_stay_and_changed_sources_are_converted_again(m4a, tmp_path):
    wavs = {"a": m4a}
    out = tmp_path / "out"
    made, _ = convert_all(wavs, out, num_jobs=1)
    before = made["a"].stat().st_ino
    assert convert_all(wavs, out, num_jobs=1) == (made, {})
    assert made["a"].stat().st_ino == before
    write_m4a(m4a, make_wave(2, 0, 1.0))
    convert_all(wavs, out, num_jobs=1)
    assert len(audio.read(made["a"])) == m4a_samples(16000)


def test_processes_keep_order_and_list_what_is_broken(m4a, tmp_path):
    wavs = {}
    for number in range(40):
        wavs[f"s{number:02d}/{number}"] = tmp_path / f"in/{number}.m4a"
    for path in wavs.values():
        shutil.copy(m4a, path)
    broken = wavs["s07/7"]
    broken.write_bytes(m4a.read_bytes()[:300])
    made, left_out = convert_all(wavs, tmp_path / "out", num_jobs=2)
    expected = [name for name in wavs if name != "s07/7"]
    assert list(made) == expected
    assert list(left_out) == [broken]
    assert left_out[broken].startswith(f"{broken}: ")
    assert not list((tmp_path / "out").rglob("*.partial"))
    assert not (tmp_path / "out/s07/7.flac").exists()
    # Fewer files would be converted without a pool of processes.
    assert len(wavs) >= convert_audio.MIN_FILES_FOR_POOL


def test_without_pyav_one_line_names_the_package(m4a, tmp_path, monkeypatch):
    wav = tmp_path / "a.wav"
    require_decoder([wav, m4a], where=tmp_path)
    monkeypatch.setitem(sys.modules, "av", None)
    with refuses(tmp_path, ".m4a", "pip install av"):
        require_decoder([wav, m4a], where=tmp_path)
    require_decoder([wav], where=tmp_path)


def test_only_files_of_which_ranges_can_be_read_are_used_as_they_are(tmp_path):
    wave_S = make_wave(0, 0, 2.0)
    content = audio.encode(wave_S, 16000, "WAV")
    position = content.index(b"data") + 4
    contents = {
        "whole": content,
        "placeholder": content[:position] + b"\0\0\0\x7f" + content[position + 4 :],
        "streamed": content[:position] + bytes(4) + content[position + 4 :],
        "phone": audio.encode(wave_S, 16000, "WAV", subtype="GSM610"),
        "cut": content[:40000],
    }
    wavs = {}
    for name, data in contents.items():
        wavs[name] = tmp_path / f"{name}.wav"
        wavs[name].write_bytes(data)
    made, left_out = convert_all(wavs, tmp_path / "out", num_jobs=1)
    assert list(left_out) == [wavs["cut"]]
    used_as_they_are = {name for name, path in made.items() if path == wavs[name]}
    assert used_as_they_are == {"whole", "placeholder"}
    for name, path in made.items():
        info = audio.read_info(path)
        assert info.num_samples == len(wave_S), name
        assert info.has_index
    assert np.array_equal(audio.read(made["streamed"]), wave_S)


def test_only_other_formats_than_wav_and_flac_are_converted(m4a, tmp_path):
    wav = tmp_path / "a.wav"
    audio.write(wav, make_wave(0, 0, 1.0, 8000), 8000)
    broken = tmp_path / "c.mp3"
    broken.write_text("no audio")
    out = tmp_path / "out"
    files, left_out = convert_coded({"a": wav, "b": m4a, "c": broken}, out, num_jobs=1)
    assert files == {"a": wav, "b": out / "b.flac"}
    assert list(left_out) == [broken]
    assert convert_coded({"a": wav}, out, num_jobs=1) == ({"a": wav}, {})
