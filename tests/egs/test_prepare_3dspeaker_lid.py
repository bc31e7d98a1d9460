"""Language identification with 3D-Speaker: the sixth column is the class."""

import pytest
from corpora import write_3dspeaker_split
from refusals import refused

from speakerlab.data.tables import read_table

# (speaker, segment, device): an odd segment is in dialect Wu; no list of languages has the last
SETS = {
    "train": [("3D_SPK_00001", 0, "01"), ("3D_SPK_00002", 1, "01"), ("3D_SPK_00003", 0, "01")],
    "test": [("3D_SPK_06154", 1, "01"), ("3D_SPK_06155", 0, "01"), ("3D_SPK_06156", 1, "01")],
}


def name(who, segment):
    return f"3D_SPK_{who}_{segment:03d}_Device01_Distance00_Dialect{segment:02d}"


A, B, C, D = name("00001", 0), name("00002", 1), name("06154", 1), name("06155", 0)


@pytest.fixture
def corpus(tmp_path):
    corpus = tmp_path / "3d speaker"
    for split, rows in SETS.items():
        write_3dspeaker_split(corpus, split, rows)
        paths = read_table(corpus / f"files/{split}_wav.scp")
        lines = [f"{name} {path}\n" for name, path in sorted(paths.items())[:-1]]
        (corpus / f"files/lid_{split}_wav.scp").write_text("".join(lines))
    return corpus


def test_the_sixth_column_is_the_class(prepare, corpus, tmp_path):
    corpus = corpus.rename(tmp_path / "3dspeaker")
    prepare("3dspeaker/lid", tmp_path, tmp_path / "d")
    languages = [read_table(tmp_path / f"d/{split}/utt2lang") for split in SETS]
    assert languages[0] == {A: "Standard_Mandarin", B: "Wu_Dialect"}
    assert languages[1] == {C: "Wu_Dialect", D: "Standard_Mandarin"}
    assert read_table(tmp_path / "d/train/utt2spk") == {A: A[:12], B: B[:12]}
    wav = read_table(tmp_path / "d/test/wav.scp")[C]
    assert wav == f"{corpus.resolve()}/test/{C[:12]}/{C}.wav"


@pytest.mark.parametrize(
    ("file", "old", "new", "subject", "value"),
    [
        ("lid_test_wav.scp", None, None, "{corpus}", "files/lid_test_wav.scp"),
        ("train_utt2info.csv", "Wu Dialect", "", "{path}", B),
        ("test_utt2spk", f"{C}\t{C[:12]}", f"{C}\t{A[:12]}", "{corpus}", A[:12]),
    ],
)
def test_broken_lists_are_refused(prepare, corpus, tmp_path, file, old, new, subject, value):
    path = corpus / "files" / file
    path.unlink() if old is None else path.write_text(path.read_text().replace(old, new))
    error = prepare("3dspeaker/lid", corpus, tmp_path / "d", code=1)
    assert not (tmp_path / "d").exists()
    assert refused(error, subject.format(path=path, corpus=corpus), value)
