"""3D-Speaker: lists, left-out devices, archives, and errors of broken corpora."""

import shutil

import numpy as np
import pytest
import soundfile
from archive_bytes import md5, store_parts, tar_of
from corpora import write_3dspeaker_split
from refusals import refused, refuses

from speakerlab.data.tables import read_about, read_table

TRAIN = [
    ("00001", 1, "01"),
    ("00001", 1, "09"),
    ("00001", 2, "02"),
    ("00002", 1, "01"),
]
TEST = [
    ("06154", 1, "02"),
    ("06154", 2, "06"),
    ("06154", 3, "09"),
    ("06155", 1, "01"),
]
SETS = {"train": TRAIN, "test": TEST}


def name(speaker, segment, device):
    dialect = f"Dialect{segment % 2:02d}"
    return f"3D_SPK_{speaker}_{segment:03d}_Device{device}_Distance00_{dialect}"


# Utterances of the test set; the one of device 09 is left out.
A = name(*TEST[0])
B = name(*TEST[1])
LEFT_OUT = name(*TEST[2])
C = name(*TEST[3])


@pytest.fixture
def corpus(tmp_path):
    corpus = tmp_path / "3d speaker"
    for split, rows in SETS.items():
        full_rows = []
        for speaker, segment, device in rows:
            full_rows.append((f"3D_SPK_{speaker}", segment, device))
        write_3dspeaker_split(corpus, split, full_rows)
    # Two spellings of the label, with a word and with a number.
    trials = {
        "trials_cross_device": f"{A} {B} target\n{A} {C} nontarget\n",
        "trials_cross_distance": f"{B} {A} 1\n{C} {B} 0\n",
        "trials_cross_dialect": f"{C} {A} nontarget\n",
    }
    for file, text in trials.items():
        (corpus / "files" / file).write_text(text)
    return corpus


def test_every_list(prepare, corpus, tmp_path):
    data = tmp_path / "data"
    (tmp_path / "raw").mkdir()
    corpus = corpus.rename(tmp_path / "raw/3dspeaker")
    out = prepare("3dspeaker", corpus.parent, data)
    for split, rows in SETS.items():
        names = [name(*row) for row in rows if row[2] != "09"]
        speakers = read_table(data / split / "utt2spk")
        wavs = read_table(data / split / "wav.scp")
        assert list(speakers) == names
        assert wavs.keys() == speakers.keys()
        for utterance, speaker in speakers.items():
            assert speaker == utterance[:12]
            path = f"{corpus}/{split}/{speaker}/{utterance}.wav"
            assert wavs[utterance] == path

    test = data / "test"
    trials = {path.name: path.read_text() for path in test.glob("trials*")}
    assert trials == {
        "trials_cross_device": f"{A} {B} target\n{A} {C} nontarget\n",
        "trials_cross_distance": f"{B} {A} target\n{C} {B} nontarget\n",
        "trials_cross_dialect": f"{C} {A} nontarget\n",
    }
    devices = (test / "utt2device").read_text()
    assert devices == f"{A} 02\n{B} 06\n{C} 01\n"
    distances = (test / "utt2distance").read_text()
    assert distances == f"{A} 1.5\n{B} 3.0\n{C} 0.3\n"
    dialects = (test / "utt2dialect").read_text()
    assert dialects == f"{A} Wu_Dialect\n{B} Standard_Mandarin\n{C} Wu_Dialect\n"
    assert not (test / "spk2gender").exists()

    # The licence of the audio is not stated.
    assert "licence" not in read_about(data / "train")
    assert refused(out, "train", "2 speakers and 4 utterances", "10000 and 579013")
    assert refused(out, "test", "2 speakers and 4 utterances", "240 and 18782")
    for split in SETS:
        original = (corpus / f"files/{split}_utt2info.csv").read_bytes()
        assert (data / split / "utt2info.csv").read_bytes() == original
        assert refused(out, data / split, "2 speakers, 3 utterances")
        assert refused(out, data / split, "1 utterance of Device09")


def test_a_missing_piece_names_its_archive(prepare, corpus, tmp_path):
    (corpus / "files/trials_cross_dialect").unlink()
    shutil.rmtree(corpus / "train")
    error = prepare("3dspeaker", corpus, tmp_path / "data", code=1)
    archives = ["3dspeaker_files.tar.gz"]
    archives += [f"train.tar.gz-part-{part}" for part in "abcdef"]
    missing = "no train files/trials_cross_dialect"
    assert refused(error, corpus, missing, *archives)


INCOMPLETE_SPEAKERS = [f"{name(*row)} 3D_SPK_{row[0]}\n" for row in TEST[1:]]
TEST_SPEAKER_IN_TRAINING = [f"{name(*row)} 3D_SPK_06155\n" for row in TRAIN]


@pytest.mark.parametrize(
    ("file", "text", "subject", "value"),
    [
        ("trials_cross_device", f"{A} {LEFT_OUT} target\n", "{path}:1", LEFT_OUT),
        ("trials_cross_distance", "a b same\n", "{path}:1", "a b same"),
        ("test_utt2spk", "".join(INCOMPLETE_SPEAKERS), "{path}", A),
        ("train_wav.scp", f"{A} train/a.wav\n{A} train/b.wav\n", "{path}:2", A),
        (
            "train_utt2spk",
            "".join(TEST_SPEAKER_IN_TRAINING),
            "{corpus}",
            "3D_SPK_06155",
        ),
    ],
)
def test_broken_lists_are_refused(
    prepare, corpus, tmp_path, file, text, subject, value
):
    path = corpus / "files" / file
    path.write_text(text)
    error = prepare("3dspeaker", corpus, tmp_path / "data", code=1)
    subject = subject.format(path=path, corpus=corpus)
    assert refused(error, subject, value)
    assert not list((tmp_path / "data").glob("*/wav.scp"))


def test_a_half_extracted_tree_and_an_extra_file(prepare, corpus, tmp_path):
    where = ("3dspeaker", corpus, tmp_path / "data")
    train = corpus / "train"
    extra = corpus / "test/3D_SPK_06154/more.wav"
    soundfile.write(extra, np.full(1600, 0.1), 16000)
    assert refused(prepare(*where), "test", "1 unlisted", extra)

    # Recordings of device 09 are not needed.
    (train / f"3D_SPK_00001/{name(*TRAIN[1])}.wav").unlink()
    prepare(*where)

    shutil.rmtree(train / "3D_SPK_00001")
    missing, _ = prepare(*where, code=1).splitlines()
    first = name(*TRAIN[0])
    assert refused(missing, train, "2 of 3", first, "train.tar.gz-part-a")


def test_gender_and_dialect_without_a_header(prepare, corpus, tmp_path):
    """The column of gender is optional; the dialect is the sixth column."""
    where = ("3dspeaker", corpus, tmp_path / "data")
    info = corpus / "files/test_utt2info.csv"
    header, *rows = info.read_text().splitlines()
    rows_with_gender = [f"{row},Female" for row in rows]
    info.write_text("\n".join([f"{header},Gender", *rows_with_gender]))
    prepare(*where)
    genders = (tmp_path / "data/test/spk2gender").read_text()
    assert genders == "3D_SPK_06154 f\n3D_SPK_06155 f\n"

    info.write_text("\n".join(rows) + "\n")
    prepare(*where)
    tables = {path.name for path in (tmp_path / "data/test").glob("*2*")}
    assert tables == {"utt2spk", "utt2dialect", "utt2info.csv"}


def test_download_joins_the_parts(recipe, corpus, tmp_path, monkeypatch):
    threed = recipe("3dspeaker")
    store = tmp_path / "store"
    archives = {}
    for folder, names in threed.ARCHIVES.items():
        body = tar_of(corpus / folder)
        archives[folder] = store_parts(body, store, list(names))
    monkeypatch.setattr(threed, "ARCHIVES", archives)
    copy = tmp_path / "copy"
    threed.download_corpus(copy, url=store.as_uri())
    for path in corpus.rglob("*"):
        if path.is_file():
            copied = copy / path.relative_to(corpus)
            assert copied.read_bytes() == path.read_bytes()

    # Everything exists: nothing is downloaded from the store, which is gone.
    shutil.rmtree(store)
    threed.download_corpus(copy, url=store.as_uri())

    # Parts that the user has joined are one archive.
    shutil.rmtree(copy / "train")
    for part in archives["train"]:
        (copy / part).unlink()
    body = tar_of(corpus / "train")
    joined = copy / "train.tar.gz"
    joined.write_bytes(body)
    with refuses(joined, "wrong md5"):
        threed.download_corpus(copy, url=store.as_uri())
    monkeypatch.setitem(threed.WHOLE, "train", (joined.name, md5(body)))
    threed.download_corpus(copy, url=store.as_uri())
    assert (copy / "train/3D_SPK_00001").is_dir()
