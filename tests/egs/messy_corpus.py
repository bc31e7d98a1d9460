"""A corpus as people have it: what systems leave, many formats, and recordings of no use."""

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from voices import RATE, make_wave

from speakerlab.data import audio
from tests.egs.corpora import write_m4a

# Beside the folders of speakers and in them.
LEFTOVERS = (
    ".Trash-1000",
    "#recycle",
    "@Recycle",
    "$RECYCLE.BIN",
    "@eaDir",
    "__MACOSX",
    ".ipynb_checkpoints",
    "System Volume Information",
    "lost+found",
    "who 0.bak",
)


def bad_recordings() -> dict[str, np.ndarray]:
    """Kind -> wave_S or wave_SC of a recording that teaches nothing."""
    wave_S = make_wave(0, 7, 1.0)
    dither_S = np.random.default_rng(0).integers(-1, 2, RATE)
    return {
        "silent": np.zeros(RATE, dtype=np.int16),
        "dither": dither_S.astype(np.int16),
        "constant": np.full(RATE, 500, dtype=np.int16),
        "silent-stereo": np.zeros((RATE, 2), dtype=np.int16),
        "short": wave_S[:1600],
        "empty": wave_S[:0],
        "clipped": np.clip(wave_S * 12.0, -32768, 32767).astype(np.int16),
        "clipped-quiet": np.clip(wave_S, -3000, 3000),
    }


def write_as_people_have_it(corpus: Path) -> dict[str, np.ndarray]:
    """Write a corpus of 20 speakers; return utterance -> wave_S of lossless recordings."""
    soundfile = pytest.importorskip("soundfile")
    clean: dict[str, np.ndarray] = {}
    for speaker in range(20):
        folder = corpus / f"张 三{speaker}"
        folder.mkdir(parents=True)
        for take in range(3):
            wave_S = make_wave(speaker, take, 0.5)
            audio.write(folder / f"录音\u3000{take}.wav", wave_S, RATE)
            clean[f"张_三{speaker}/录音_{take}"] = wave_S
            # A Mac leaves a file beside each one.
            (folder / f"._录音\u3000{take}.wav").write_bytes(b"\0\5\x16\7")
        (folder / ".DS_Store").write_bytes(b"\0")

    folders = [corpus / f"张 三{speaker}" for speaker in range(20)]
    for number, name in enumerate(LEFTOVERS):
        (corpus / name).mkdir()
        audio.write(corpus / name / "old.wav", make_wave(30, number, 0.5), RATE)
    (folders[3] / "notes.txt").touch()

    voice_S = make_wave(1, 9, 1.0, 44100) / 32768
    soundfile.write(folders[1] / "a.mp3", voice_S, 44100)
    tagged = folders[1] / "tagged.mp3"
    soundfile.write(tagged, make_wave(1, 8, 1.0, 44100) / 32768, 44100)
    tag = b"ID3\3\0\0\0\0\0\x0a" + bytes(10)
    tagged.write_bytes(tag + tagged.read_bytes())
    soundfile.write(folders[2] / "b.mp3", np.stack([voice_S, voice_S], 1), 44100)
    write_m4a(folders[3] / "c.m4a", make_wave(3, 9, 1.0), rate=RATE)
    soundfile.write(folders[4] / "phone.wav", make_wave(4, 9, 1.0, 8000), 8000)

    stereo_S = make_wave(5, 9, 1.0)
    stereo = np.stack([stereo_S, 0 * stereo_S], axis=1)
    soundfile.write(folders[5] / "stereo.wav", stereo, RATE)
    clean["张_三5/stereo"] = stereo_S
    for kind in ("clipped", "silent", "short"):
        audio.write(folders[6] / f"{kind}.wav", bad_recordings()[kind], RATE)
    shutil.copy(folders[7] / "录音\u30000.wav", folders[7] / "录音 copy.wav")

    # A program that writes into a pipe does not know the length.
    stream_S = make_wave(8, 9, 1.0)
    path = folders[8] / "stream.wav"
    audio.write(path, stream_S, RATE)
    header = bytearray(path.read_bytes())
    place = header.index(b"data") + 4
    header[4:8] = header[place : place + 4] = struct.pack("<I", 0xFFFFFFFF)
    path.write_bytes(header)
    clean["张_三8/stream"] = stream_S
    return clean
