"""VoxCeleb: layouts, conversion, archives, and errors of broken corpora."""

import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from archive_bytes import md5
from refusals import refused, refuses

from speakerlab.data.tables import read_about, read_table
from tests.egs.corpora import (
    META,
    ROOMS,
    VOX1_DEV,
    VOX1_TEST,
    VOX2,
    write_m4a,
    write_vox_list,
    write_voxceleb,
)

NUM_SAMPLES = 25 * 1024  # 1.5 s take 24 frames of AAC, and its encoder begins with one more


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    corpus = tmp_path_factory.mktemp("vox") / "celeb 1 and 2"
    write_voxceleb(corpus)
    return corpus


@pytest.fixture
def corpus(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "corpus"))


@pytest.fixture
def refusal(prepare, corpus, tmp_path):
    """Return a function that runs stage 1, which must fail, and returns its errors."""

    def errors() -> str:
        text = prepare("voxceleb", corpus, tmp_path / "data", "--num-jobs", 1, code=1)
        assert not (tmp_path / "data/train").exists()
        return text

    return errors


def test_all_parts_from_the_archives_layout(prepare, corpus, tmp_path):
    data = tmp_path / "data"
    out = prepare("voxceleb", corpus, data, "--num-jobs", 2)
    train, test = read_table(data / "train/wav.scp"), read_table(data / "test/wav.scp")
    assert {name.split("/")[0] for name in train} == set(VOX2)
    assert {name.split("/")[0] for name in test} == {*VOX1_DEV, *VOX1_TEST}
    assert (len(train), len(test)) == (48, 24)
    assert read_about(data / "train")["corpus"] == "VoxCeleb2"
    assert read_about(data / "test") == {}
    name = "id00012/5r0dWxy17C8/00001.wav"
    assert train[name] == str(data / "wav/id00012/5r0dWxy17C8/00001.flac")
    assert test["id10270/-vBNO3AhQRs/00002.wav"] == str(
        corpus / "voxceleb1/test/wav/id10270/-vBNO3AhQRs/00002.wav"
    )
    assert read_table(data / "train/utt2spk")[name] == "id00012"
    info = soundfile.info(train[name])
    assert (info.samplerate, info.channels, info.frames) == (16000, 1, NUM_SAMPLES)
    assert read_table(data / "test/spk2gender") == {
        **dict(zip(VOX1_DEV, "mfm")),
        **dict(zip(VOX1_TEST, "fmf")),
    }
    first = (data / "test/trials_O").read_text().splitlines()[0]
    assert first == "id10270/-vBNO3AhQRs/00001.wav id10270/-vBNO3AhQRs/00002.wav target"
    assert refused(out, "train", "12 speakers and 48 utterances", "5994 and 1092009")
    assert refused(out, "test", "6 speakers and 24 utterances", "1251 and 153516")
    assert refused(out, "veri_test2.txt", "18 target and 48 nontarget", "18802 and 18809")
    # 36 + 240 are all 24 C 2 pairs; the hard list is every other one of them.
    counts = ("O 18 target + 48 nontarget", "E 36 target + 240", "H 18 target + 120")
    assert refused(out, data / "test", *(f"trials_{count}" for count in counts))


def test_converted_files_are_used_and_kept(prepare, corpus, tmp_path):
    """A wav tree of another tool beside the m4a; both parts of VoxCeleb1 in one folder."""
    shutil.move(corpus / "voxceleb1/dev/wav", corpus / "wav")
    for speaker in VOX1_TEST:
        shutil.move(corpus / f"voxceleb1/test/wav/{speaker}", corpus / "wav")
    made = corpus / "voxceleb2_wav/dev/aac/id00013/5r0dWxy17C8/00001.wav"
    made.parent.mkdir(parents=True)
    soundfile.write(made, np.full(16000, 0.1), 16000)
    shutil.copytree(corpus / "voxceleb2_m4a/dev/aac/id00012", corpus / "vox2/test/aac/id00099")
    unfinished = corpus / "voxceleb2_m4a/.unpack-vox2_aac.zip/dev/aac"
    shutil.copytree(corpus / "voxceleb2_m4a/dev/aac/id00012", unfinished / "id00098")
    data = tmp_path / "data"
    prepare("voxceleb", corpus, data, "--num-jobs", 2)
    train = read_table(data / "train/wav.scp")
    assert train["id00013/5r0dWxy17C8/00001.wav"] == str(made)
    assert len(train) == 48  # neither the test part of VoxCeleb2 nor files being unpacked
    again = data / "wav/id00012/5r0dWxy17C8/00001.flac"
    before = again.stat().st_ino
    prepare("voxceleb", corpus, data, "--num-jobs", 2)
    assert again.stat().st_ino == before


@pytest.mark.parametrize(
    ("whose", "num_noises", "room"),
    [("3dspeaker", 1, ROOMS[0]), ("wespeaker", 4, ROOMS[2].removeprefix("simulated_rirs/"))],
)
def test_whose_noise_and_rooms(prepare, corpus, tmp_path, musan, rirs, whose, num_noises, room):
    more = ("--num-jobs", 1, "--noise", musan, "--rirs", rirs, "--noise-as", whose)
    prepare("voxceleb", corpus, tmp_path / "data", *more)
    assert len(read_table(tmp_path / "data/noise/wav.scp")) == num_noises
    assert list(read_table(tmp_path / "data/rirs/wav.scp")) == [room]


def test_a_broken_and_an_extra_m4a_are_listed(prepare, corpus, tmp_path):
    path = corpus / "voxceleb2_m4a/dev/aac/id00012/5r0dWxy17C8/00001.m4a"
    path.write_bytes(path.read_bytes()[:200])
    extra = path.parents[1] / "00001.m4a"
    write_m4a(extra, np.zeros(2000, np.int16))
    data = tmp_path / "data"
    prepare("voxceleb", corpus, data, "--num-jobs", 2)
    assert len(read_table(data / "train/wav.scp")) == 47
    lines = (data / "train/rejected.tsv").read_text().splitlines()
    assert {line.split("\t")[1] for line in lines} >= {str(path)} and len(lines) == 2
    assert any(refused(line.split("\t")[2], extra) for line in lines)


def test_a_missing_archive(refusal, corpus):
    shutil.rmtree(corpus / "voxceleb1/dev")
    parts = " ".join(f"vox1_dev_wav_parta{letter}" for letter in "abcd")
    assert refused(refusal(), corpus, parts, "https://mm.kaist.ac.kr/datasets/voxceleb/")


def test_a_missing_list(refusal, corpus):
    (corpus / "meta/list_test_all2.txt").unlink()
    assert refused(refusal(), corpus, "list_test_all2.txt", "https://", corpus / "meta")


def test_a_list_of_another_version(refusal, recipe, corpus, tmp_path, capsys):
    path, here = corpus / "meta/veri_test2.txt", "id10270/5r0dWxy17C8/00001.wav"
    write_vox_list(path, [(here, "id10270/5r0dWxy17C8/00009.wav", True)])
    assert refused(refusal(), f"{path}:1", "id10270/5r0dWxy17C8/00009.wav")
    vox = recipe("voxceleb")
    vox.UNCLEANED.add((1, 0))
    write_vox_list(path, [(here, "id10270/5r0dWxy17C8/00002.wav", True)])
    args = ["--corpus", str(corpus), "--data", str(tmp_path / "data"), "--num-jobs", "1"]
    assert vox.main(args) == 0
    assert refused(capsys.readouterr().out, path.name, "18809", "uncleaned")


def test_a_half_extracted_tree(refusal, corpus):
    for speaker in VOX2[-2:]:
        shutil.rmtree(corpus / f"voxceleb2_m4a/dev/aac/{speaker}")
        (corpus / f"voxceleb2_m4a/dev/aac/{speaker}/5r0dWxy17C8").mkdir(parents=True)
    assert refused(refusal(), corpus / "voxceleb2_m4a/dev/aac", "2 speakers", "vox2_aac.zip")


def test_genders_without_their_column_are_refused(refusal, corpus):
    (corpus / "meta/vox1_meta.csv").write_text(META.replace("Gender", "Sex") + "\n")
    assert refused(refusal(), corpus / "meta/vox1_meta.csv", "Gender", "Sex")


def test_stage_0_unpacks_archives_and_names_missing_ones(
    recipe, prepare, original, tmp_path, monkeypatch, capsys
):
    vox = recipe("voxceleb")
    corpus, url = tmp_path / "corpus", (original / "meta").as_uri()
    corpus.mkdir()
    whole = corpus / "vox2_aac.zip"
    pack(original / "voxceleb2_m4a", whole)
    body = whole.read_bytes()
    monkeypatch.setitem(
        vox.ARCHIVES, "vox2_dev", ("voxceleb2_m4a", whole.name, md5(body), {"x_partaa": ""})
    )
    pack(original / "voxceleb1/dev", corpus / "all.zip")
    body = (corpus / "all.zip").read_bytes()
    half = len(body) // 2
    pieces = {"vox1_partaa": md5(body[:half]), "vox1_partab": md5(body[half:])}
    (corpus / "vox1_partaa").write_bytes(body[:half])
    monkeypatch.setitem(vox.ARCHIVES, "vox1_dev", ("voxceleb1/dev", "vox1.zip", md5(body), pieces))
    with refuses(corpus, "vox1_test_wav.zip vox1_partab", error=FileNotFoundError):
        vox.download_corpus(corpus, url=url)
    assert (corpus / "voxceleb2_m4a/dev/aac/id00012/5r0dWxy17C8/00001.m4a").is_file()
    assert sorted(path.name for path in (corpus / "meta").iterdir()) == [
        *("list_test_all2.txt", "list_test_hard2.txt", "veri_test2.txt", "vox1_meta.csv")
    ]
    shutil.copytree(original / "voxceleb1/test", corpus / "voxceleb1/test")
    (corpus / "vox1_partab").write_bytes(body[half:-1])
    with refuses(corpus / "vox1_partab", "wrong md5"):
        vox.download_corpus(corpus, url=url)
    (corpus / "vox1_partab").write_bytes(body[half:])
    capsys.readouterr()
    vox.download_corpus(corpus, url=url)
    assert (corpus / "voxceleb1/dev/wav/id10001/5r0dWxy17C8/00001.wav").is_file()
    assert capsys.readouterr().out.count("already exists") == 2
    prepare("voxceleb", corpus, tmp_path / "data", "--num-jobs", 2)


def pack(folder: Path, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*.*")):
            archive.write(file, file.relative_to(folder))
