"""3D-Speaker: lists, left-out devices, archives, and errors of broken corpora."""

import shutil

import numpy as np
import pytest
import soundfile
from archive_bytes import md5, store_parts, tar_of
from corpora import write_3dspeaker_split
from refusals import refused, refuses

from speakerlab.data.tables import read_about, read_table

TRAIN = [("00001", 1, "01"), ("00001", 1, "09"), ("00001", 2, "02"), ("00002", 1, "01")]
TEST = [("06154", 1, "02"), ("06154", 2, "06"), ("06154", 3, "09"), ("06155", 1, "01")]
SETS = {"train": TRAIN, "test": TEST}


def name(speaker, segment, device):
    dialect = f"Dialect{segment % 2:02d}"
    return f"3D_SPK_{speaker}_{segment:03d}_Device{device}_Distance00_{dialect}"


A = name(*TEST[0])


@pytest.fixture
def corpus(tmp_path):
    corpus = tmp_path / "3d speaker"
    for split, rows in SETS.items():
        full = [(f"3D_SPK_{who}", segment, device) for who, segment, device in rows]
        write_3dspeaker_split(corpus, split, full)
    a, b, c = name(*TEST[0]), name(*TEST[1]), name(*TEST[3])
    (corpus / "files/trials_cross_device").write_text(f"{a} {b} target\n{a} {c} nontarget\n")
    (corpus / "files/trials_cross_distance").write_text(f"{b} {a} 1\n{c} {b} 0\n")
    (corpus / "files/trials_cross_dialect").write_text(f"{c} {a} nontarget\n")
    return corpus


def test_every_list(prepare, corpus, tmp_path):
    data = tmp_path / "data"
    (tmp_path / "raw").mkdir()
    corpus = corpus.rename(tmp_path / "raw/3dspeaker")
    out = prepare("3dspeaker", corpus.parent, data)
    kept = {split: [name(*row) for row in rows if row[2] != "09"] for split, rows in SETS.items()}
    for split, names in kept.items():
        speakers = read_table(data / split / "utt2spk")
        assert speakers == {utterance: utterance[:12] for utterance in names}
        assert read_table(data / split / "wav.scp") == {
            utterance: f"{corpus}/{split}/{who}/{utterance}.wav"
            for utterance, who in speakers.items()
        }
    a, b, c = kept["test"]
    trials = {path.name: path.read_text() for path in (data / "test").glob("trials*")}
    assert trials == {
        "trials_cross_device": f"{a} {b} target\n{a} {c} nontarget\n",
        "trials_cross_distance": f"{b} {a} target\n{c} {b} nontarget\n",
        "trials_cross_dialect": f"{c} {a} nontarget\n",
    }
    assert (data / "test/utt2device").read_text() == f"{a} 02\n{b} 06\n{c} 01\n"
    assert (data / "test/utt2distance").read_text() == f"{a} 1.5\n{b} 3.0\n{c} 0.3\n"
    dialects = (data / "test/utt2dialect").read_text()
    assert dialects == f"{a} Wu_Dialect\n{b} Standard_Mandarin\n{c} Wu_Dialect\n"
    assert not (data / "test/spk2gender").exists()
    for split in ("train", "test"):
        original = (corpus / f"files/{split}_utt2info.csv").read_bytes()
        assert (data / split / "utt2info.csv").read_bytes() == original
    assert "licence" not in read_about(data / "train")  # that of the audio is not stated
    assert refused(out, "train", "2 speakers and 4 utterances", "10000 and 579013")
    assert refused(out, "test", "2 speakers and 4 utterances", "240 and 18782")
    for split in ("train", "test"):
        assert refused(out, data / split, "2 speakers, 3 utterances")
        assert refused(out, data / split, "1 utterances of Device09")


def test_a_missing_piece_names_its_archive(prepare, corpus, tmp_path):
    (corpus / "files/trials_cross_dialect").unlink()
    shutil.rmtree(corpus / "train")
    error = prepare("3dspeaker", corpus, tmp_path / "data", code=1)
    parts = "3dspeaker_files.tar.gz", *(f"train.tar.gz-part-{part}" for part in "abcdef")
    missing = "no train files/trials_cross_dialect"
    assert refused(error, corpus, missing, *parts)


@pytest.mark.parametrize(
    ("file", "text", "subject", "value"),
    [
        # of device 09, which is left out
        ("trials_cross_device", f"{A} {name(*TEST[2])} target\n", "{path}:1", name(*TEST[2])),
        ("trials_cross_distance", "a b same\n", "{path}:1", "a b same"),
        (
            "test_utt2spk",
            "".join(f"{name(*row)} 3D_SPK_{row[0]}\n" for row in TEST[1:]),
            "{path}",
            A,
        ),
        ("train_wav.scp", f"{A} train/a.wav\n{A} train/b.wav\n", "{path}:2", A),
        (
            "train_utt2spk",
            "".join(f"{name(*row)} 3D_SPK_06155\n" for row in TRAIN),
            "{corpus}",
            "3D_SPK_06155",
        ),
    ],
)
def test_broken_lists_are_refused(prepare, corpus, tmp_path, file, text, subject, value):
    path = corpus / "files" / file
    path.write_text(text)
    error = prepare("3dspeaker", corpus, tmp_path / "data", code=1)
    assert refused(error, subject.format(path=path, corpus=corpus), value)
    assert not (tmp_path / "data").exists()


def test_a_half_extracted_tree_and_an_extra_file(prepare, corpus, tmp_path):
    where = ("3dspeaker", corpus, tmp_path / "data")
    extra = corpus / "test/3D_SPK_06154/more.wav"
    soundfile.write(extra, np.full(1600, 0.1), 16000)
    assert refused(prepare(*where), "test", "1 unlisted", extra)
    (corpus / f"train/3D_SPK_00001/{name(*TRAIN[1])}.wav").unlink()  # device 09 is not needed
    prepare(*where)
    shutil.rmtree(corpus / "train/3D_SPK_00001")
    missing, _ = prepare(*where, code=1).splitlines()
    assert refused(missing, corpus / "train", "2 of 3", name(*TRAIN[0]), "train.tar.gz-part-a")


def test_gender_and_dialect_without_a_header(prepare, corpus, tmp_path):
    """The column of gender is optional; the dialect is the sixth column."""
    where = ("3dspeaker", corpus, tmp_path / "data")
    info = corpus / "files/test_utt2info.csv"
    lines = info.read_text().splitlines()
    info.write_text(
        "\n".join(f"{line},{'Gender' if not i else 'Female'}" for i, line in enumerate(lines))
    )
    prepare(*where)
    genders = (tmp_path / "data/test/spk2gender").read_text()
    assert genders == "3D_SPK_06154 f\n3D_SPK_06155 f\n"
    info.write_text("\n".join(lines[1:]) + "\n")
    prepare(*where)
    kept = {path.name for path in (tmp_path / "data/test").glob("*2*")}
    assert kept == {"utt2spk", "utt2dialect", "utt2info.csv"}


def test_download_joins_the_parts(recipe, corpus, tmp_path, monkeypatch):
    threed = recipe("3dspeaker")
    store = tmp_path / "store"
    archives = {
        folder: store_parts(tar_of(corpus / folder), store, list(names))
        for folder, names in threed.ARCHIVES.items()
    }
    monkeypatch.setattr(threed, "ARCHIVES", archives)
    copy = tmp_path / "copy"
    threed.download_corpus(copy, url=store.as_uri())
    for path in corpus.rglob("*"):
        if path.is_file():
            assert (copy / path.relative_to(corpus)).read_bytes() == path.read_bytes()
    shutil.rmtree(store)
    threed.download_corpus(copy, url=store.as_uri())  # everything exists: no download

    shutil.rmtree(copy / "train")
    for part in archives["train"]:
        (copy / part).unlink()
    whole = tar_of(corpus / "train")
    (copy / "train.tar.gz").write_bytes(whole)
    with refuses(copy / "train.tar.gz", "wrong md5"):
        threed.download_corpus(copy, url=store.as_uri())
    digest = md5(whole)
    monkeypatch.setitem(threed.WHOLE, "train", ("train.tar.gz", digest))
    threed.download_corpus(copy, url=store.as_uri())  # parts that the user has joined
    assert (copy / "train/3D_SPK_00001").is_dir()
