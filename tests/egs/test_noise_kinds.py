"""The table of kinds of noise in the layout of MUSAN."""

from pathlib import Path

import numpy as np

from egs.common.corpus.prepare import write_noise_and_rooms
from speakerlab.data import audio
from speakerlab.data.banks import find_recordings
from speakerlab.data.tables import read_table


def make_noise(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        audio.write(folder / name, np.arange(500, dtype=np.int16), 16000)
    return folder


def test_the_folders_of_musan_are_kinds(tmp_path, capsys):
    names = ["music/fma/a.wav", "noise/free-sound/b.wav", "speech/librivox/c.wav", "car/d.wav"]
    musan = make_noise(tmp_path / "musan", *names, "speech/librivox/e.wav")
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
    assert recordings is not None
    assert recordings.kinds == ("noise", "music", "noise", "speech", "speech")


def test_other_folders_are_noise_and_an_earlier_table_goes(tmp_path):
    musan = make_noise(tmp_path / "musan", "music/a.wav")
    write_noise_and_rooms(tmp_path / "data", noise=musan, rirs=None)
    assert (tmp_path / "data/noise/utt2kind").exists()
    plain = make_noise(tmp_path / "plain", "music.wav", "free-sound/speech/b.wav")
    write_noise_and_rooms(tmp_path / "data", noise=plain, rirs=None)
    assert not (tmp_path / "data/noise/utt2kind").exists()
    recordings = find_recordings(tmp_path / "data/noise", sample_rate=16000)
    assert recordings is not None and recordings.kinds == ("noise", "noise")
