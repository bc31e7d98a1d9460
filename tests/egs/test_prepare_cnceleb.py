"""CN-Celeb: joined utterances, both ways to enrol, archives, and errors of broken corpora."""

import shutil

import numpy as np
import pytest
from archive_bytes import md5, store_parts, tar_bytes
from cnceleb_corpus import DEV, NOT_LISTED, ONE, SECOND, TWO, make_cnceleb
from refusals import refused

from egs.cnceleb import prepare as cnceleb
from egs.cnceleb.joining import group_short
from speakerlab.data import audio
from speakerlab.data.tables import read_about, read_table


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The corpus in the published layout; tests must not change it."""
    folder = tmp_path_factory.mktemp("cnceleb")
    make_cnceleb(folder)
    return folder


@pytest.fixture
def corpus(made, tmp_path):
    return shutil.copytree(made, tmp_path / "cn celeb")


@pytest.fixture
def main(prepare, tmp_path):
    """main(corpus, *options, code=0) -> what stage 1 writes beside `tmp_path/data`."""

    def run(corpus, *options, code=0) -> str:
        options = ("--num-jobs", 1, *options)
        return prepare("cnceleb", corpus, tmp_path / "data", *options, code=code)

    return run


@pytest.mark.parametrize(
    ("seconds_U", "runs"),
    [
        ([6.0, 5.0, 8.0], [1, 1, 1]),
        ([1.0, 2.0], [2]),  # no other neighbour
        ([1.0, 6.0, 7.0], [2, 1]),  # no neighbour before it
        ([6.0, 7.0, 1.0], [1, 2]),
        ([7.0, 1.0, 6.0], [2, 1]),  # the next one is longer than needed
        # From the end: 1.5 + 3.0 first, then 2.5 with them.
        ([6.0, 2.5, 1.5, 3.0], [1, 3]),
        ([4.0, 3.0, 4.5], [3]),  # 3.0 + 4.5 first, and 4.0 has no other neighbour
        ([9.0, 1.0, 5.0], [1, 2]),  # the next one just long enough, and shorter
        ([4.5, 1.0, 5.0], [2, 1]),  # the one before is shorter
        ([3.0, 1.0, 5.0, 9.0], [3, 1]),  # 1.0 + 5.0, as 3.0 + 1.0 would be too short
    ],
)
def test_short_utterances_find_neighbours(seconds_U, runs):
    groups = group_short(seconds_U, min_seconds=5.0)
    assert [len(group) for group in groups] == runs


def test_short_utterances_are_joined_by_speaker_and_genre(main, made, tmp_path):
    data = tmp_path / "data"
    main(made)
    wavs = read_table(data / "train/wav.scp")
    table = read_table(data / "joined/utt2utts")
    assert len(wavs) == 36
    assert len(table) == 24
    assert read_about(data / "train")["licence"] == "CC BY-SA 4.0"

    speaker = "id10004"
    whole = f"{speaker}/interview-01-001"
    joined = f"{speaker}/interview-01-002-comb3"
    live = f"{speaker}/live_broadcast-01-001-comb2"
    names = {name for name in wavs if name.startswith(speaker)}
    assert names == {whole, joined, live}

    place = made / TWO / "data"
    parts = table[joined].split()
    assert parts == [f"{speaker}/interview-01-00{take}" for take in (2, 3, 4)]
    waves = [audio.read(place / f"{part}.flac") for part in parts]
    assert wavs[joined] == str(data / f"joined/{joined}.flac")
    joined_S = audio.read(wavs[joined])
    np.testing.assert_array_equal(joined_S, np.concatenate(waves))
    assert wavs[whole] == str(place / f"{whole}.flac")

    genres = read_table(data / "train/utt2genre")
    assert genres[live] == "live_broadcast"
    speakers = read_table(data / "train/utt2spk")
    expected = {*DEV, *SECOND}
    assert set(speakers.values()) == expected


def test_complete_joined_files_are_kept(main, corpus, tmp_path):
    data = tmp_path / "data"
    joined = data / "joined"
    main(corpus)
    files = sorted(joined.rglob("*.flac"))
    before = {path: path.stat().st_mtime_ns for path in files}

    missing, other_audio, complete, broken = files[:4]
    missing.unlink()
    audio.write(other_audio, np.zeros(800, np.int16), 16000)
    from_an_earlier_corpus = complete.with_name("interview-01-001-comb9.flac")
    shutil.copy(complete, from_an_earlier_corpus)
    broken.write_bytes(b"fLaC, and then the disk was full")
    main(corpus)

    paths = sorted(joined.rglob("*.flac"))
    after = {path: path.stat().st_mtime_ns for path in paths}
    assert paths == files
    written = [path for path in files if after[path] != before[path]]
    assert written == [missing, other_audio, broken]
    assert audio.read_info(other_audio).seconds == 7.5


def test_joining_is_optional(main, made, tmp_path):
    data = tmp_path / "data"
    main(made, "--join-seconds", 0)
    wavs = read_table(data / "train/wav.scp")
    assert len(wavs) == 12 * 6
    assert not list((data / "joined").rglob("*.flac"))
    for path in wavs.values():
        assert path.startswith(str(made))


def test_a_broken_recording_is_not_joined(main, corpus, tmp_path):
    data = tmp_path / "data"
    place = corpus / TWO / "data/id10000"
    (place / "interview-01-002.flac").write_bytes(b"no audio")
    with (place / "live_broadcast-01-001.flac").open("r+b") as file:
        file.truncate(5000)  # its header is whole
    out = main(corpus)
    table = read_table(data / "joined/utt2utts")
    # Without the second, 1.5 + 3.0 s are joined, and the first one with them.
    names = [name for name in table if "id10000" in name]
    assert names == ["id10000/interview-01-001-comb3"]
    wavs = read_table(data / "train/wav.scp")
    for name in ("interview-01-002", "live_broadcast-01-001", "live_broadcast-01-002"):
        assert wavs[f"id10000/{name}"] == str(place / f"{name}.flac")
    first, second = [line for line in out.splitlines() if "not joined" in line]
    assert str(place) in first
    assert str(place) in second


def test_both_ways_to_enrol(main, made, tmp_path):
    data = tmp_path / "data"
    out = main(made)
    test = data / "test"
    concat = (test / "trials_concat").read_text().splitlines()
    average = (test / "trials_average").read_text().splitlines()
    assert len(concat) == len(average) == 5 * 18
    trial = "id00800-enroll test/id00800-drama-02-004 target"
    assert average[0] == trial
    assert concat[0] == f"enroll/{trial}"
    last_trial = "id00804-enroll test/id00805-drama-02-003 nontarget"
    assert concat[-1] == f"enroll/{last_trial}"

    speaker = "id00802"
    models = read_table(test / "enroll.map")
    enrolled = models[f"{speaker}-enroll"].split()
    assert enrolled == [
        f"{speaker}/interview-01-001",
        f"{speaker}/singing-01-002",
    ]
    speakers = read_table(test / "utt2spk")
    for name in (*enrolled, f"enroll/{speaker}-enroll"):
        assert speakers[name] == speaker
    assert speakers["test/id00805-drama-02-001"] == "id00805"

    wavs = read_table(test / "wav.scp")
    genres = read_table(test / "utt2genre")
    name = "test/id00800-drama-02-004"
    assert wavs[name] == f"{made}/{ONE}/eval/{name}.flac"
    assert genres[name] == "drama"
    name = f"{speaker}/singing-01-002"
    assert wavs[name] == f"{made}/{ONE}/data/{name}.flac"
    assert genres[name] == "singing"
    # A model of one utterance has its genre; a model of two genres has none.
    assert genres["enroll/id00801-enroll"] == "interview"
    assert f"enroll/{speaker}-enroll" not in genres

    assert refused(out, "test", "5 enrolments and 18 test utterances", "196 and 17777")
    assert refused(out, "trials.lst", "15 target and 75 nontarget", "17755 and 3466537")
    assert refused(out, made / TWO / "data", NOT_LISTED)
    assert refused(out, "train", "12 speakers", 2793)


def test_unlisted_files_are_ignored(main, corpus, tmp_path):
    folder = corpus / ONE
    recording = folder / "eval/enroll/id00800-enroll.flac"
    for name in (
        "data/id00003/notes.txt",
        "data/id00003/id00003.flac",
        "eval/test/new.flac",
    ):
        shutil.copy(recording, folder / name)
    out = main(corpus)
    assert refused(out, corpus / ONE / "eval/test", "new.flac")
    assert refused(out, corpus / ONE / "data/id00003", "id00003.flac and 1 more")
    assert len(read_table(tmp_path / "data/train/wav.scp")) == 36


# What is broken: (a file, a function of its text or None to remove it, the subject, the value).
LISTS = f"{ONE}/eval/lists"
LISTS_IN_ONE = "eval/lists"
BROKEN = {
    "no archive": (
        TWO,
        None,
        "{corpus}",
        "cn-celeb2_v2.tar.gzaa cn-celeb2_v2.tar.gzab",
    ),
    "no recordings of a speaker": (f"{TWO}/data/id10004", None, "{path}", "spk.lst"),
    "no test recording": (
        f"{ONE}/eval/test/id00800-drama-02-004.flac",
        None,
        "{path}",
        LISTS_IN_ONE,
    ),
    "no enrolment": (
        f"{ONE}/data/id00802/singing-01-002.flac",
        None,
        "{path}",
        LISTS_IN_ONE,
    ),
    "unknown utterance": (
        f"{LISTS}/trials.lst",
        lambda text: "id00800-enroll test/id00999-singing-01-001.wav 0\n",
        "{path}:1",
        "test/id00999-singing-01-001",
    ),
    "wrong label": (
        f"{LISTS}/trials.lst",
        lambda text: "id00800-enroll test/id00801-drama-02-002.wav 1\n",
        "{path}",
        "id00800-enroll test/id00801-drama-02-002",
    ),
    "model in one list": (
        f"{LISTS}/enroll.map",
        lambda text: text.partition("\n")[2],
        "{path.parent}",
        "id00800-enroll",
    ),
    "test speaker in training": (
        f"{ONE}/dev/dev.lst",
        lambda text: text + "id00802\n",
        "{corpus}",
        "id00802",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_corpus_is_refused(main, case, corpus, tmp_path):
    name, change, subject, value = BROKEN[case]
    path = corpus / name
    if change is not None:
        path.write_text(change(path.read_text()))
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    errors = main(corpus, code=1)
    subject = subject.format(path=path, corpus=corpus)
    assert refused(errors, subject, value), errors
    assert not list((tmp_path / "data").glob("*/wav.scp"))


def test_download_joins_the_parts(made, tmp_path, monkeypatch):
    store = tmp_path / "store"
    copy = tmp_path / "copy"
    archives = {}
    for folder, (names, _) in cnceleb.ARCHIVES.items():
        path = made / folder / cnceleb.SPEAKER_LISTS[folder]
        body = tar_bytes({f"{folder}/speakers": path.read_bytes()})
        store_parts(body, store, names)
        archives[folder] = (names, md5(body))
    monkeypatch.setattr(cnceleb, "ARCHIVES", archives)
    cnceleb.download_corpus(copy, url=store.as_uri())
    speakers = (made / TWO / "spk.lst").read_bytes()
    assert (copy / TWO / "speakers").read_bytes() == speakers

    # Everything exists: nothing is downloaded from the store, which is gone.
    shutil.rmtree(store)
    cnceleb.download_corpus(copy, url=store.as_uri())
