"""Language identification with 3D-Speaker: the sixth column is the class."""

import pytest
from corpora import write_3dspeaker_split
from refusals import refused

from speakerlab.data.tables import read_table

# (speaker, segment, device): an odd segment is in dialect Wu. The last speaker is in no list of
# languages.
SETS = {
    "train": [
        ("3D_SPK_00001", 0, "01"),
        ("3D_SPK_00002", 1, "01"),
        ("3D_SPK_00003", 0, "01"),
    ],
    "test": [
        ("3D_SPK_06154", 1, "01"),
        ("3D_SPK_06155", 0, "01"),
        ("3D_SPK_06156", 1, "01"),
    ],
}


def name(who, segment):
    return f"3D_SPK_{who}_{segment:03d}_Device01_Distance00_Dialect{segment:02d}"


A = name("00001", 0)
B = name("00002", 1)
C = name("06154", 1)
D = name("06155", 0)


@pytest.fixture
def corpus(tmp_path):
    corpus = tmp_path / "3d speaker"
    for split, rows in SETS.items():
        write_3dspeaker_split(corpus, split, rows)
        paths = read_table(corpus / f"files/{split}_wav.scp")
        # The last one is left out.
        listed = sorted(paths.items())[:-1]
        lines = [f"{name} {path}\n" for name, path in listed]
        (corpus / f"files/lid_{split}_wav.scp").write_text("".join(lines))
    return corpus


def test_the_sixth_column_is_the_class(prepare, corpus, tmp_path):
    corpus = corpus.rename(tmp_path / "3dspeaker")
    prepare("3dspeaker/lid", tmp_path, tmp_path / "d")
    data = tmp_path / "d"
    train_languages = read_table(data / "train/utt2lang")
    test_languages = read_table(data / "test/utt2lang")
    assert train_languages == {A: "Standard_Mandarin", B: "Wu_Dialect"}
    assert test_languages == {C: "Wu_Dialect", D: "Standard_Mandarin"}
    assert read_table(data / "train/utt2spk") == {A: A[:12], B: B[:12]}
    wav = read_table(data / "test/wav.scp")[C]
    assert wav == f"{corpus.resolve()}/test/{C[:12]}/{C}.wav"


@pytest.mark.parametrize(
    ("file", "old", "new", "subject", "value"),
    [
        ("lid_test_wav.scp", None, None, "{corpus}", "files/lid_test_wav.scp"),
        ("train_utt2info.csv", "Wu Dialect", "", "{path}", B),
        ("test_utt2spk", f"{C}\t{C[:12]}", f"{C}\t{A[:12]}", "{corpus}", A[:12]),
    ],
)
def test_broken_lists_are_refused(
    prepare, corpus, tmp_path, file, old, new, subject, value
):
    path = corpus / "files" / file
    if old is None:
        path.unlink()
    else:
        text = path.read_text()
        path.write_text(text.replace(old, new))
    error = prepare("3dspeaker/lid", corpus, tmp_path / "d", code=1)
    assert not list((tmp_path / "d").glob("*/wav.scp"))
    subject = subject.format(path=path, corpus=corpus)
    assert refused(error, subject, value)
