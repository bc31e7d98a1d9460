"""CN-Celeb: joined utterances, both ways to enrol, archives, and errors of broken corpora."""

import shutil

import numpy as np
import pytest
from archive_bytes import md5, store_parts, tar_bytes
from cnceleb_corpus import NOT_LISTED, ONE, TWO, make_cnceleb
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

    def run(corpus, *more, code=0) -> str:
        return prepare("cnceleb", corpus, tmp_path / "data", "--num-jobs", 1, *more, code=code)

    return run


@pytest.mark.parametrize(
    ("seconds_U", "runs"),
    [
        ([6.0, 5.0, 8.0], [1, 1, 1]),
        ([1.0, 2.0], [2]),  # no other neighbour
        ([1.0, 6.0, 7.0], [2, 1]),  # no neighbour before it
        ([6.0, 7.0, 1.0], [1, 2]),
        ([7.0, 1.0, 6.0], [2, 1]),  # the next one is longer than needed
        ([6.0, 2.5, 1.5, 3.0], [1, 3]),  # from the end: 1.5 + 3.0 first, then 2.5 with them
        ([4.0, 3.0, 4.5], [3]),  # 3.0 + 4.5 first, and 4.0 has no other neighbour
        ([9.0, 1.0, 5.0], [1, 2]),  # the next one just long enough, and shorter
        ([4.5, 1.0, 5.0], [2, 1]),  # the one before is shorter
        ([3.0, 1.0, 5.0, 9.0], [3, 1]),  # 1.0 + 5.0, as 3.0 + 1.0 would be too short
    ],
)
def test_short_utterances_find_neighbours(seconds_U, runs):
    assert [len(run) for run in group_short(seconds_U, min_seconds=5.0)] == runs


def test_short_utterances_are_joined_by_speaker_and_genre(main, made, tmp_path):
    data = tmp_path / "data"
    main(made)
    wavs = read_table(data / "train/wav.scp")
    table = read_table(data / "joined/utt2utts")
    assert read_about(data / "train")["licence"] == "CC BY-SA 4.0"
    speaker = "id10004"
    assert {name for name in wavs if name.startswith(speaker)} == {
        f"{speaker}/interview-01-001",
        f"{speaker}/interview-01-002-comb3",
        f"{speaker}/live_broadcast-01-001-comb2",
    }
    name = f"{speaker}/interview-01-002-comb3"
    assert table[name].split() == [f"{speaker}/interview-01-00{k}" for k in (2, 3, 4)]
    place = made / TWO / "data"
    parts = [audio.read(place / f"{part}.flac") for part in table[name].split()]
    assert wavs[name] == str(data / f"joined/{name}.flac")
    np.testing.assert_array_equal(audio.read(wavs[name]), np.concatenate(parts))
    assert wavs[f"{speaker}/interview-01-001"] == str(place / speaker / "interview-01-001.flac")
    assert read_table(data / "train/utt2genre")[f"{speaker}/live_broadcast-01-001-comb2"] == (
        "live_broadcast"
    )
    assert (len(wavs), len(table)) == (36, 24)
    assert set(read_table(data / "train/utt2spk").values()) == {
        *(f"id0000{k}" for k in range(7)),
        *(f"id1000{k}" for k in range(5)),
    }


def test_complete_joined_files_are_kept(main, corpus, tmp_path):
    data = tmp_path / "data"
    main(corpus)
    files = sorted((data / "joined").rglob("*.flac"))
    before = {path: path.stat().st_mtime_ns for path in files}
    files[0].unlink()
    audio.write(files[1], np.zeros(800, np.int16), 16000)  # not the joined audio
    other = files[2].with_name("interview-01-001-comb9.flac")  # left from an earlier corpus
    shutil.copy(files[2], other)
    files[3].write_bytes(b"fLaC, and then the disk was full")
    main(corpus)
    after = {path: path.stat().st_mtime_ns for path in sorted((data / "joined").rglob("*.flac"))}
    assert list(after) == files
    assert [path for path in files if after[path] != before[path]] == [*files[:2], files[3]]
    assert audio.read_info(files[1]).seconds == 7.5


def test_joining_is_optional(main, made, tmp_path):
    data = tmp_path / "data"
    main(made, "--join-seconds", 0)
    wavs = read_table(data / "train/wav.scp")
    assert len(wavs) == 12 * 6
    assert not list((data / "joined").rglob("*.flac"))
    assert all(path.startswith(str(made)) for path in wavs.values())


def test_a_broken_recording_is_not_joined(main, corpus, tmp_path):
    data, place = tmp_path / "data", corpus / TWO / "data/id10000"
    (place / "interview-01-002.flac").write_bytes(b"no audio")
    with (place / "live_broadcast-01-001.flac").open("r+b") as file:
        file.truncate(5000)  # its header is whole
    out = main(corpus)
    table = read_table(data / "joined/utt2utts")
    # Without the second, 1.5 + 3.0 s are joined, and the first one with them.
    assert [name for name in table if "id10000" in name] == ["id10000/interview-01-001-comb3"]
    wavs = read_table(data / "train/wav.scp")
    for name in ("interview-01-002", "live_broadcast-01-001", "live_broadcast-01-002"):
        assert wavs[f"id10000/{name}"] == str(place / f"{name}.flac")
    lines = [line for line in out.splitlines() if "not joined" in line]
    assert [str(place) in line for line in lines] == [True, True]


def test_both_ways_to_enrol(main, made, tmp_path):
    data = tmp_path / "data"
    out = main(made)
    test = data / "test"
    lines = {n: (test / f"trials_{n}").read_text().splitlines() for n in ("concat", "average")}
    assert len(lines["concat"]) == len(lines["average"]) == 5 * 18
    assert lines["average"][0] == "id00800-enroll test/id00800-drama-02-004 target"
    assert lines["concat"][0] == "enroll/id00800-enroll test/id00800-drama-02-004 target"
    assert lines["concat"][-1] == "enroll/id00804-enroll test/id00805-drama-02-003 nontarget"
    models = read_table(test / "enroll.map")
    assert models["id00802-enroll"].split() == [
        "id00802/interview-01-001",
        "id00802/singing-01-002",
    ]
    speakers = read_table(test / "utt2spk")
    assert {
        speakers[name] for name in (*models["id00802-enroll"].split(), "enroll/id00802-enroll")
    } == {"id00802"}
    assert speakers["test/id00805-drama-02-001"] == "id00805"
    wavs = read_table(test / "wav.scp")
    assert wavs["test/id00800-drama-02-004"] == (
        f"{made}/{ONE}/eval/test/id00800-drama-02-004.flac"
    )
    assert wavs["id00802/singing-01-002"] == f"{made}/{ONE}/data/id00802/singing-01-002.flac"
    genres = read_table(test / "utt2genre")
    assert genres["test/id00800-drama-02-004"] == "drama"
    assert genres["id00802/singing-01-002"] == "singing"
    assert genres["enroll/id00801-enroll"] == "interview"  # the only one of its utterance
    assert "enroll/id00802-enroll" not in genres  # of two
    assert refused(out, "test", "5 enrolments and 18 test utterances", "196 and 17777")
    assert refused(out, "trials.lst", "15 target and 75 nontarget", "17755 and 3466537")
    assert refused(out, made / TWO / "data", NOT_LISTED)
    assert refused(out, "train", "12 speakers", 2793)


def test_unlisted_files_are_ignored(main, corpus, tmp_path):
    for name in ("data/id00003/notes.txt", "data/id00003/id00003.flac", "eval/test/new.flac"):
        shutil.copy(corpus / ONE / "eval/enroll/id00800-enroll.flac", corpus / ONE / name)
    out = main(corpus)
    assert refused(out, corpus / ONE / "eval/test", "new.flac")
    assert refused(out, corpus / ONE / "data/id00003", "id00003.flac and 1 more")
    assert len(read_table(tmp_path / "data/train/wav.scp")) == 36


# What is broken: (a file, a function of its text or None to remove it, the subject, the value).
LISTS = f"{ONE}/eval/lists"
BROKEN = {
    "no archive": (TWO, None, "{corpus}", "cn-celeb2_v2.tar.gzaa cn-celeb2_v2.tar.gzab"),
    "no recordings of a speaker": (f"{TWO}/data/id10004", None, "{path}", "spk.lst"),
    "no test recording": (f"{ONE}/eval/test/id00800-drama-02-004.flac", None, "{path}", LISTS[14:]),
    "no enrolment": (f"{ONE}/data/id00802/singing-01-002.flac", None, "{path}", LISTS[14:]),
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
    assert refused(errors, subject.format(path=path, corpus=corpus), value), errors
    assert not (tmp_path / "data").exists()


def test_download_joins_the_parts(made, tmp_path, monkeypatch):
    store, copy = tmp_path / "store", tmp_path / "copy"
    archives = {}
    for folder, (names, _) in cnceleb.ARCHIVES.items():
        speakers = (made / folder / cnceleb.SPEAKER_LISTS[folder]).read_bytes()
        body = tar_bytes({f"{folder}/speakers": speakers})
        store_parts(body, store, names)
        archives[folder] = (names, md5(body))
    monkeypatch.setattr(cnceleb, "ARCHIVES", archives)
    cnceleb.download_corpus(copy, url=store.as_uri())
    assert (copy / TWO / "speakers").read_bytes() == (made / TWO / "spk.lst").read_bytes()
    shutil.rmtree(store)
    cnceleb.download_corpus(copy, url=store.as_uri())  # everything exists: no download
