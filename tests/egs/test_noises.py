"""MUSAN and RIRS_NOISES: the used files, their kinds, and the download in stage 0."""

import hashlib
import tarfile
import zipfile

from corpora import MUSAN, RIR_LIST, ROOMS, write_short
from refusals import refused, refuses

from egs.common.corpus import fetch
from egs.common.corpus.fetch import download_noise_and_rooms
from egs.common.corpus.noises import ALL_OF_MUSAN, FREE_SOUND, find_noise, find_rooms
from egs.common.corpus.prepare import find_audio, write_noise_and_rooms
from speakerlab.data.banks import find_recordings
from speakerlab.data.tables import read_table


def test_parts_of_musan(musan, tmp_path):
    for folder in (musan, tmp_path):  # itself, or where it was unpacked
        assert list(find_noise(folder, parts=FREE_SOUND)[0]) == ["noise/free-sound/n-0.wav"]
        assert len(find_noise(folder, parts=ALL_OF_MUSAN)[0]) == 4
    own = write_short(tmp_path / "own", ("x/hum.wav",))
    assert list(find_noise(own, parts=FREE_SOUND)[0]) == ["x/hum.wav"]


def test_real_rooms_of_the_list_and_simulated_ones(rirs, tmp_path):
    for folder in (rirs, tmp_path):
        rooms, _ = find_rooms(folder, simulated=False)
        assert rooms == {ROOMS[0]: rirs / ROOMS[0]}  # the noise beside it is not listed
        assert list(find_rooms(folder, simulated=True)[0]) == [
            "smallroom/Room001/Room001-00001.wav"
        ]
    own = write_short(tmp_path / "own", ("hall.wav",))
    assert find_rooms(own, simulated=False) == find_audio(own)


def test_an_incomplete_folder_is_refused(musan, rirs):
    (rirs / ROOMS[0]).unlink()
    with refuses(f"{rirs}/real_rirs_isotropic_noises/rir_list:1", RIR_LIST.strip()):
        find_rooms(rirs, simulated=False)
    (rirs / "real_rirs_isotropic_noises/rir_list").unlink()
    with refuses(rirs, "rir_list", "rirs_noises.zip", error=FileNotFoundError):
        find_rooms(rirs, simulated=False)
    (musan / MUSAN[1]).unlink()
    (musan / MUSAN[1]).parent.rmdir()
    with refuses(musan, "noise/free-sound", "musan.tar.gz", error=FileNotFoundError):
        find_noise(musan, parts=FREE_SOUND)


def test_stage_0_fetches_what_is_asked_for(recipe, musan, rirs, tmp_path, monkeypatch, capsys):
    store = tmp_path / "store"
    store.mkdir()
    with tarfile.open(store / "musan.tar.gz", "w:gz") as tar:
        tar.add(musan, arcname="musan")
    with zipfile.ZipFile(store / "rirs_noises.zip", "w") as archive:
        for path in sorted(rirs.rglob("*.*")):
            archive.write(path, path.relative_to(rirs.parent))
    for name, file in (("musan", "musan.tar.gz"), ("RIRS_NOISES", "rirs_noises.zip")):
        digest = hashlib.md5((store / file).read_bytes()).hexdigest()
        monkeypatch.setitem(fetch.NOISE_ARCHIVES, name, ((store / file).as_uri(), f"md5:{digest}"))
    here = tmp_path / "here"
    args = ["--noise", str(here / "musan"), "--rirs", str(here / "RIRS_NOISES")]
    assert recipe("librispeech").main(["--download-noise", *args]) == 0
    assert (here / "musan" / MUSAN[1]).read_bytes() == (musan / MUSAN[1]).read_bytes()
    assert (here / "RIRS_NOISES" / ROOMS[2]).is_file()
    for file in store.iterdir():
        file.unlink()
    assert recipe("librispeech").main(["--download-noise", *args]) == 0  # everything exists
    capsys.readouterr()
    assert recipe("librispeech").main(["--download-noise", "--noise", str(here / "mussan")]) == 1
    assert refused(capsys.readouterr().err, "--noise", here / "mussan", "/musan")
    download_noise_and_rooms(noise=None, rirs=None)


def test_the_folders_of_musan_are_kinds(tmp_path, capsys):
    names = ["music/fma/a.wav", "noise/free-sound/b.wav", "speech/librivox/c.wav", "car/d.wav"]
    musan = write_short(tmp_path / "musan", (*names, "speech/librivox/e.wav"))
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
    musan = write_short(tmp_path / "musan", ("music/a.wav",))
    write_noise_and_rooms(tmp_path / "data", noise=musan, rirs=None)
    assert (tmp_path / "data/noise/utt2kind").exists()
    plain = write_short(tmp_path / "plain", ("music.wav", "free-sound/speech/b.wav"))
    write_noise_and_rooms(tmp_path / "data", noise=plain, rirs=None)
    assert not (tmp_path / "data/noise/utt2kind").exists()
    recordings = find_recordings(tmp_path / "data/noise", sample_rate=16000)
    assert [recording.kind for recording in recordings] == ["noise", "noise"]
