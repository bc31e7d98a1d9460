"""CN-Celeb: what is joined from what, both ways to enrol, and what a broken corpus is told."""

import hashlib
import io
import shutil
import tarfile

import numpy as np
import pytest
from cnceleb_corpus import NOT_LISTED, ONE, TWO, make_cnceleb

from egs.cnceleb import prepare
from egs.cnceleb.joining import group_short
from speakerlab.data import audio
from speakerlab.data.tables import read_table


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The corpus as it is published, which no test may change."""
    folder = tmp_path_factory.mktemp("cnceleb")
    make_cnceleb(folder)
    return folder


@pytest.fixture
def corpus(made, tmp_path):
    return shutil.copytree(made, tmp_path / "cn celeb")


def main(corpus, data, *more) -> int:
    options = ["--corpus", str(corpus), "--data", str(data), "--num-jobs", "1", *more]
    return prepare.main(options)


@pytest.mark.parametrize(
    ("seconds_U", "runs"),
    [
        ([6.0, 5.0, 8.0], [1, 1, 1]),
        ([1.0, 2.0], [2]),  # nobody else is there
        ([1.0, 6.0, 7.0], [2, 1]),  # the first has no neighbour before it
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


def test_short_utterances_are_joined_by_speaker_and_genre(made, tmp_path):
    data = tmp_path / "data"
    assert main(made, data) == 0
    wavs = read_table(data / "train/wav.scp")
    table = read_table(data / "joined/utt2utts")
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


def test_what_was_joined_is_not_joined_again(corpus, tmp_path):
    data = tmp_path / "data"
    assert main(corpus, data) == 0
    files = sorted((data / "joined").rglob("*.flac"))
    before = {path: path.stat().st_mtime_ns for path in files}
    files[0].unlink()
    audio.write(files[1], np.zeros(800, np.int16), 16000)  # not what it should be made of
    other = files[2].with_name("interview-01-001-comb9.flac")  # from another state of the corpus
    shutil.copy(files[2], other)
    files[3].write_bytes(b"fLaC, and then the disk was full")
    assert main(corpus, data) == 0
    after = {path: path.stat().st_mtime_ns for path in sorted((data / "joined").rglob("*.flac"))}
    assert list(after) == files
    assert [path for path in files if after[path] != before[path]] == [*files[:2], files[3]]
    assert audio.read_info(files[1]).seconds == 7.5


def test_joining_may_be_left_out(made, tmp_path):
    data = tmp_path / "data"
    assert main(made, data, "--join-seconds", "0") == 0
    wavs = read_table(data / "train/wav.scp")
    assert len(wavs) == 12 * 6
    assert not list((data / "joined").rglob("*.flac"))
    assert all(path.startswith(str(made)) for path in wavs.values())


def test_a_broken_recording_stands_alone(corpus, tmp_path, capsys):
    data, place = tmp_path / "data", corpus / TWO / "data/id10000"
    (place / "interview-01-002.flac").write_bytes(b"no audio")
    with (place / "live_broadcast-01-001.flac").open("r+b") as file:
        file.truncate(5000)  # its header is whole
    assert main(corpus, data) == 0
    table = read_table(data / "joined/utt2utts")
    # Without the second, 1.5 + 3.0 s are joined, and the first one with them.
    assert [name for name in table if "id10000" in name] == ["id10000/interview-01-001-comb3"]
    wavs = read_table(data / "train/wav.scp")
    for name in ("interview-01-002", "live_broadcast-01-001", "live_broadcast-01-002"):
        assert wavs[f"id10000/{name}"] == str(place / f"{name}.flac")
    told = [line for line in capsys.readouterr().out.splitlines() if "not joined" in line]
    assert [str(place) in line for line in told] == [True, True]


def test_both_ways_to_enrol(made, tmp_path, capsys):
    data = tmp_path / "data"
    assert main(made, data) == 0
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
    source = "github.com/Evildoersudo/camplusplus at ebe57e6"
    verdict = "not the whole corpus, or another version of it"
    out = capsys.readouterr().out.splitlines()
    assert out[:4] == [
        "test: 5 enrolments and 18 test utterances are listed, published are 196 and 17777 "
        f"({source}): {verdict}",
        "trials.lst: 15 target and 75 nontarget trials are listed, published are 17755 and "
        f"3466537 ({source}): {verdict}",
        f"{made}/{TWO}/data: not in the lists of the corpus and left out, got {NOT_LISTED}",
        "train: 12 speakers are listed, published are 2793 "
        "(github.com/modelscope/3D-Speaker, egs/cnceleb): not the whole of both corpora",
    ]


def test_a_missing_archive_is_named(corpus, tmp_path, capsys):
    shutil.rmtree(corpus / TWO)
    assert main(corpus, tmp_path / "data") == 1
    parts = " ".join(f"cn-celeb2_v2.tar.gza{part}" for part in "abc")
    assert capsys.readouterr().err == (
        f"{corpus}: not CN-Celeb 1 and 2, got no CN-Celeb2_flac/data CN-Celeb2_flac/spk.lst; get "
        f"{parts} from https://www.openslr.org/resources/82 (stage 0 does) and unpack there\n"
    )


def test_an_extra_file_is_left_out_and_said(corpus, tmp_path, capsys):
    for name in ("data/id00003/notes.txt", "data/id00003/id00003.flac", "eval/test/new.flac"):
        shutil.copy(corpus / ONE / "eval/enroll/id00800-enroll.flac", corpus / ONE / name)
    assert main(corpus, tmp_path / "data") == 0
    out = capsys.readouterr().out.splitlines()
    left_out = "not in the lists of the corpus and left out, got"
    assert f"{corpus}/{ONE}/eval/test: {left_out} new.flac" in out
    assert f"{corpus}/{ONE}/data/id00003: {left_out} id00003.flac and 1 more" in out
    assert len(read_table(tmp_path / "data/train/wav.scp")) == 36


def cut_a_speaker(corpus):
    shutil.rmtree(corpus / TWO / "data/id10004")
    return (
        f"{corpus}/{TWO}/data/id10004: a speaker of spk.lst must have recordings, got none; unpack "
        "cn-celeb2_v2.tar.gzaa cn-celeb2_v2.tar.gzab cn-celeb2_v2.tar.gzac again"
    )


def cut_a_test(corpus):
    path = corpus / ONE / "eval/test/id00800-drama-02-004.flac"
    path.unlink()
    return f"{path}: is in eval/lists and is missing, got no such file; " + AGAIN


def cut_an_enrolment(corpus):
    path = corpus / ONE / "data/id00802/singing-01-002.flac"
    path.unlink()
    return f"{path}: is in eval/lists and is missing, got no such file; " + AGAIN


def take_another_list(corpus):
    path = corpus / ONE / "eval/lists/trials.lst"
    path.write_text("id00800-enroll test/id00999-singing-01-001.wav 0\n")
    return (
        f"{path}:1: no such test utterance, got test/id00999-singing-01-001; "
        "remove the trial or complete the corpus"
    )


def take_other_labels(corpus):
    path = corpus / ONE / "eval/lists/trials.lst"
    path.write_text("id00800-enroll test/id00801-drama-02-002.wav 1\n")
    return (
        f"{path}: a label must follow from the speakers, got target for id00800-enroll "
        f"test/id00801-drama-02-002; {AGAIN}"
    )


def take_another_map(corpus):
    path = corpus / ONE / "eval/lists/enroll.map"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    return (
        f"{path.parent}: enroll.lst and enroll.map must name the same models, got id00800-enroll "
        f"in one; {AGAIN}"
    )


def train_on_a_tested_speaker(corpus):
    listing = corpus / ONE / "dev/dev.lst"
    listing.write_text(listing.read_text() + "id00802\n")
    return f"{corpus}: a speaker is in train and test, got id00802; keep one of the two"


AGAIN = "unpack cn-celeb_v2.tar.gz again"
HARMS = (
    cut_a_speaker,
    cut_a_test,
    cut_an_enrolment,
    take_another_list,
    take_other_labels,
    take_another_map,
    train_on_a_tested_speaker,
)


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_faults_are_one_line_each(harm, corpus, tmp_path, capsys):
    line = harm(corpus)
    assert main(corpus, tmp_path / "data") == 1
    assert line in capsys.readouterr().err.splitlines()
    assert not (tmp_path / "data").exists()


def test_download_joins_the_parts(made, tmp_path, monkeypatch):
    store, copy = tmp_path / "store", tmp_path / "copy"
    store.mkdir()
    archives = {}
    for folder, (names, _) in prepare.ARCHIVES.items():
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
            tar.add(made / folder / prepare.SPEAKER_LISTS[folder], arcname=f"{folder}/speakers")
        body = buffer.getvalue()
        step = -(-len(body) // len(names))
        for i, name in enumerate(names):
            (store / name).write_bytes(body[i * step : (i + 1) * step])
        archives[folder] = (names, f"md5:{hashlib.md5(body).hexdigest()}")
    monkeypatch.setattr(prepare, "ARCHIVES", archives)
    prepare.download_corpus(copy, url=store.as_uri())
    assert (copy / TWO / "speakers").read_bytes() == (made / TWO / "spk.lst").read_bytes()
    shutil.rmtree(store)
    prepare.download_corpus(copy, url=store.as_uri())  # everything is there: nothing is fetched
    shutil.rmtree(copy / TWO)
    (copy / "cn-celeb2_v2.tar.gzac").write_bytes(b"of another version")
    with pytest.raises(ValueError, match=r"cn-celeb2_v2\.tar\.gzac: wrong md5, got .* delete"):
        prepare.download_corpus(copy, url=store.as_uri())
