"""MUSAN and RIRS_NOISES: the used files, their kinds, and the download in stage 0."""

import hashlib
import tarfile
import zipfile

import numpy as np
import soundfile
from corpora import MUSAN, RIR_LIST, ROOMS, write_short
from refusals import refused, refuses

from egs.common.corpus import fetch
from egs.common.corpus.fetch import download_noise_and_rooms
from egs.common.corpus.noises import ALL_OF_MUSAN, FREE_SOUND, find_noise, find_rooms
from egs.common.corpus.prepare import find_audio, write_noise_and_rooms
from speakerlab.data.banks import find_recordings
from speakerlab.data.tables import read_rejected, read_table


def test_parts_of_musan(musan, tmp_path):
    # The folder itself, or the folder in which it was unpacked.
    for folder in (musan, tmp_path):
        recordings, _ = find_noise(folder, parts=FREE_SOUND)
        assert list(recordings) == ["noise/free-sound/n-0.wav"]
        recordings, _ = find_noise(folder, parts=ALL_OF_MUSAN)
        assert len(recordings) == 4

    written = write_short(tmp_path / "own", ("x/hum.wav",))
    recordings, _ = find_noise(written, parts=FREE_SOUND)
    assert list(recordings) == ["x/hum.wav"]


def test_real_rooms_of_the_list_and_simulated_ones(rirs, tmp_path):
    for folder in (rirs, tmp_path):
        # The noise beside the real rooms is not in their list.
        rooms, _ = find_rooms(folder, simulated=False)
        assert rooms == {ROOMS[0]: rirs / ROOMS[0]}
        rooms, _ = find_rooms(folder, simulated=True)
        assert list(rooms) == ["smallroom/Room001/Room001-00001.wav"]

    written = write_short(tmp_path / "own", ("hall.wav",))
    assert find_rooms(written, simulated=False) == find_audio(written)


def test_an_incomplete_folder_is_refused(musan, rirs):
    real_rooms = rirs / "real_rirs_isotropic_noises"
    (rirs / ROOMS[0]).unlink()
    with refuses(f"{real_rooms}/rir_list:1", RIR_LIST.strip()):
        find_rooms(rirs, simulated=False)
    (real_rooms / "rir_list").unlink()
    with refuses(rirs, "rir_list", "rirs_noises.zip", error=FileNotFoundError):
        find_rooms(rirs, simulated=False)

    noise = musan / MUSAN[1]
    noise.unlink()
    noise.parent.rmdir()
    with refuses(musan, "noise/free-sound", "musan.tar.gz", error=FileNotFoundError):
        find_noise(musan, parts=FREE_SOUND)


def test_stage_0_fetches_what_is_asked_for(
    recipe, musan, rirs, tmp_path, monkeypatch, capsys
):
    store = tmp_path / "store"
    store.mkdir()
    archives = {
        "musan": store / "musan.tar.gz",
        "RIRS_NOISES": store / "rirs_noises.zip",
    }
    with tarfile.open(archives["musan"], "w:gz") as tar:
        tar.add(musan, arcname="musan")
    with zipfile.ZipFile(archives["RIRS_NOISES"], "w") as archive:
        for path in sorted(rirs.rglob("*.*")):
            archive.write(path, path.relative_to(rirs.parent))
    for name, path in archives.items():
        digest = hashlib.md5(path.read_bytes()).hexdigest()
        source = (path.as_uri(), f"md5:{digest}")
        monkeypatch.setitem(fetch.NOISE_ARCHIVES, name, source)

    main = recipe("librispeech").main
    here = tmp_path / "here"
    noise = here / "musan"
    rooms = here / "RIRS_NOISES"
    folders = ["--noise", str(noise), "--rirs", str(rooms)]
    assert main(["--download-noise", *folders]) == 0
    original = (musan / MUSAN[1]).read_bytes()
    assert (noise / MUSAN[1]).read_bytes() == original
    assert (rooms / ROOMS[2]).is_file()

    # Everything exists: nothing is downloaded from the store, which is empty.
    for path in archives.values():
        path.unlink()
    assert main(["--download-noise", *folders]) == 0
    capsys.readouterr()

    misspelled = here / "mussan"
    arguments = ["--download-noise", "--noise", str(misspelled)]
    assert main(arguments) == 1
    errors = capsys.readouterr().err
    assert refused(errors, "--noise", misspelled, "/musan")
    download_noise_and_rooms(noise=None, rirs=None)


def test_the_folders_of_musan_are_kinds(tmp_path, capsys):
    names = (
        "music/fma/a.wav",
        "noise/free-sound/b.wav",
        "speech/librivox/c.wav",
        "car/d.wav",
        "speech/librivox/e.wav",
    )
    musan = write_short(tmp_path / "musan", names)
    write_noise_and_rooms(tmp_path / "data", noise=musan, rirs=None)
    assert read_table(tmp_path / "data/noise/utt2kind") == {
        "car/d.wav": "noise",
        "music/fma/a.wav": "music",
        "noise/free-sound/b.wav": "noise",
        "speech/librivox/c.wav": "speech",
        "speech/librivox/e.wav": "speech",
    }
    assert "noise: by kind, 2 noise, 1 music, 2 speech" in capsys.readouterr().out
    recordings = find_recordings(tmp_path / "data/noise", sample_rate=16000)
    kinds = [recording.kind for recording in recordings]
    assert kinds == ["noise", "music", "noise", "speech", "speech"]


def test_other_folders_are_noise_and_an_earlier_table_goes(tmp_path):
    data = tmp_path / "data"
    musan = write_short(tmp_path / "musan", ("music/a.wav",))
    write_noise_and_rooms(data, noise=musan, rirs=None)
    assert (data / "noise/utt2kind").exists()

    # Only a top folder is a kind: not the file music.wav, nor a folder below another.
    plain = write_short(tmp_path / "plain", ("music.wav", "free-sound/speech/b.wav"))
    write_noise_and_rooms(data, noise=plain, rirs=None)
    assert not (data / "noise/utt2kind").exists()
    recordings = find_recordings(data / "noise", sample_rate=16000)
    assert len(recordings) == 2
    for recording in recordings:
        assert recording.kind == "noise"


def test_noise_in_other_formats_is_converted(tmp_path, capsys):
    data = tmp_path / "data"
    folder = write_short(tmp_path / "noise", ("a.wav", "b.flac"))
    rng = np.random.default_rng(0)
    noise_S = 0.1 * rng.standard_normal(44100)
    for name in ("c.mp3", "d.ogg"):
        soundfile.write(folder / name, noise_S, 44100)
    (folder / "e.mp3").write_text("no audio")
    (folder / "notes.txt").write_text("of the recordings")
    write_noise_and_rooms(data, noise=folder, rirs=folder)
    for name in ("noise", "rirs"):
        recordings = find_recordings(data / name, sample_rate=16000)
        assert [recording.id for recording in recordings] == [
            "a.wav",
            "b.flac",
            "c.mp3",
            "d.ogg",
        ]
        for recording in recordings[2:]:
            assert abs(len(recording) - 16000) < 500
            assert len(recording[5000:6000]) == 1000
        (reason,) = [reason for _, reason in read_rejected(data / name).values()]
        assert refused(reason, folder / "e.mp3")
    lines = capsys.readouterr().out.splitlines()
    assert any("1 file with other endings, 1 .txt" in line for line in lines)
