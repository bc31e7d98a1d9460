"""VoxConverse and AMI in small: layouts of the archives, true turns, regions, missing audio."""

from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from egs.ami.diar.prepare import FOLDER
from speakerlab.data import audio
from speakerlab.data.tables import read_table
from speakerlab.diarization.regions import Turn, read_rttm, read_uem

LINE = "SPEAKER {} 1 0.400000 0.600000 <NA> <NA> spk00 <NA> <NA>\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_wav(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    audio.write(path, np.arange(32000, dtype=np.int16), 16000)


def write_voxconverse(corpus: Path) -> None:
    for part, folder in (("dev", "audio"), ("test", "voxconverse_test_wav")):
        for name in (f"{part}aaaaa", f"{part}bbbbb"):
            write_wav(corpus / f"audio/{part}/{folder}/{name}.wav")
            turns = corpus / f"turns/voxconverse-x/{part}/{name}.rttm"
            write(turns, LINE.format(name))


def write_ami(corpus: Path) -> None:
    setup = corpus / FOLDER
    for split, name in (("dev", "ES2011a"), ("test", "EN2002a")):
        write(setup / f"lists/{split}.meetings.txt", f"{name}\n")
        write(setup / f"only_words/rttms/{split}/{name}.rttm", LINE.format(name))
        write(setup / f"uems/{split}/{name}.uem", f"{name} 1 0.000 1.500\n")
        write_wav(corpus / f"amicorpus/{name}/audio/{name}.Mix-Headset.wav")


# Name -> function that writes the corpus, its test recordings, end of the scored region.
CORPORA = {
    "voxconverse": (write_voxconverse, ["testaaaaa", "testbbbbb"], 2.0),
    "ami": (write_ami, ["EN2002a"], 1.5),
}


@pytest.mark.parametrize("name", CORPORA)
def test_the_original_layout(prepare, tmp_path, name):
    make, recordings, end = CORPORA[name]
    corpus = tmp_path / "corpus"
    test = tmp_path / "data/test"
    make(corpus)
    out = prepare(f"{name}/diar", corpus, tmp_path / "data")
    assert list(read_table(test / "wav.scp")) == recordings
    turns = [Turn(0.4, 1.0, "spk00")]
    assert read_rttm(test / "ref.rttm") == dict.fromkeys(recordings, turns)
    regions = [(0.0, end)]
    assert read_uem(test / "ref.uem") == dict.fromkeys(recordings, regions)
    if name == "voxconverse":
        # The counts of the published corpus are reported beside those of this one.
        counts = ("2 recordings and 2 turns", "232 and 19479")
        assert refused(out, "voxconverse test", *counts)


@pytest.mark.parametrize("name", CORPORA)
def test_missing_audio_is_named(prepare, tmp_path, name):
    make, (recording, *_), _ = CORPORA[name]
    corpus = tmp_path / "corpus"
    make(corpus)
    (path,) = corpus.rglob(f"{recording}*.wav")
    path.unlink()
    text = prepare(f"{name}/diar", corpus, tmp_path / "data", code=1)
    assert refused(text, corpus, recording)
