"""Language identification with 3D-Speaker: the sixth column is the class."""

import numpy as np
import pytest
import soundfile
from refusals import refused

HEADER = "Utt-id,Spk-id,Seg-id,Device,Distance,Dialect"
# utterance -> dialect; the last of each set is not in the list of languages
SETS = {
    "train": {"A1": "Standard Mandarin", "A2": "Standard Mandarin", "B1": "Wu dialect", "C1": "x"},
    "test": {"D1": "Wu dialect", "E1": "Standard Mandarin", "F1": "y"},
}


@pytest.fixture
def corpus(tmp_path):
    corpus = tmp_path / "3d speaker"
    for split, dialects in SETS.items():
        (corpus / split).mkdir(parents=True)
        files = corpus / "files"
        files.mkdir(exist_ok=True)
        rows = [f"{u},{u[0]},1,1,0.3,{dialect}\r\n" for u, dialect in dialects.items()]
        (files / f"{split}_utt2info.csv").write_text(HEADER + "\r\n" + "".join(rows))
        (files / f"{split}_utt2spk").write_text("".join(f"{u} {u[0]}\n" for u in dialects))
        listed = list(dialects)[:-1]
        paths = [f"{u} {split}/{u}.wav\n" for u in listed]
        (files / f"lid_{split}_wav.scp").write_text("".join(paths))
        for utterance in listed:
            soundfile.write(corpus / split / f"{utterance}.wav", np.full(1600, 0.1), 16000)
    return corpus


def test_the_sixth_column_is_the_class(prepare, corpus, tmp_path):
    corpus = corpus.rename(tmp_path / "3dspeaker")
    prepare("3dspeaker/lid", tmp_path, tmp_path / "d")
    assert (tmp_path / "d/train/utt2lang").read_text() == (
        "A1 Standard_Mandarin\nA2 Standard_Mandarin\nB1 Wu_dialect\n"
    )
    assert (tmp_path / "d/test/utt2lang").read_text() == "D1 Wu_dialect\nE1 Standard_Mandarin\n"
    assert (tmp_path / "d/train/utt2spk").read_text() == "A1 A\nA2 A\nB1 B\n"
    wav = (tmp_path / "d/test/wav.scp").read_text().splitlines()[0]
    assert wav == f"D1 {corpus.resolve()}/test/D1.wav"


@pytest.mark.parametrize(
    ("file", "old", "new", "subject", "value"),
    [
        ("lid_test_wav.scp", None, None, "{corpus}", "files/lid_test_wav.scp"),
        ("train_utt2info.csv", "Wu dialect", "", "{path}", "B1"),
        ("test_utt2spk", "D1 D", "D1 A", "{corpus}", "speaker A "),
    ],
)
def test_broken_lists_are_refused(prepare, corpus, tmp_path, file, old, new, subject, value):
    path = corpus / "files" / file
    path.unlink() if old is None else path.write_text(path.read_text().replace(old, new))
    error = prepare("3dspeaker/lid", corpus, tmp_path / "d", code=1)
    assert not (tmp_path / "d").exists()
    assert refused(error, subject.format(path=path, corpus=corpus), value)
