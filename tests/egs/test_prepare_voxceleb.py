"""VoxCeleb: layouts, conversion, archives, and errors of broken corpora."""

import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from archive_bytes import md5
from refusals import refused, refuses

from egs.voxceleb.layout import find_roots
from speakerlab.data.tables import read_about, read_table
from tests.egs.corpora import (
    META,
    ROOMS,
    VOX1_DEV,
    VOX1_TEST,
    VOX2,
    m4a_samples,
    write_m4a,
    write_vox_list,
    write_voxceleb,
)


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
    data = tmp_path / "data"

    def errors() -> str:
        text = prepare("voxceleb", corpus, data, "--num-jobs", 1, code=1)
        assert not (data / "train").exists()
        return text

    return errors


def speakers_of(names) -> set[str]:
    """Return the first folder of each utterance."""
    return {name.split("/")[0] for name in names}


def test_all_parts_from_the_archives_layout(prepare, corpus, tmp_path):
    data = tmp_path / "data"
    out = prepare("voxceleb", corpus, data, "--num-jobs", 2)
    train = read_table(data / "train/wav.scp")
    test = read_table(data / "test/wav.scp")
    assert len(train) == 48
    assert len(test) == 24
    assert speakers_of(train) == set(VOX2)
    assert speakers_of(test) == {*VOX1_DEV, *VOX1_TEST}
    assert read_about(data / "train")["corpus"] == "VoxCeleb2"
    assert read_about(data / "test") == {}

    # VoxCeleb2 is converted, VoxCeleb1 is used as it is.
    name = "id00012/5r0dWxy17C8/00001.wav"
    assert train[name] == str(data / "wav/id00012/5r0dWxy17C8/00001.flac")
    assert read_table(data / "train/utt2spk")[name] == "id00012"
    info = soundfile.info(train[name])
    assert info.samplerate == 16000
    assert info.channels == 1
    assert info.frames == m4a_samples(24000)
    name = "id10270/-vBNO3AhQRs/00002.wav"
    expected = str(corpus / "voxceleb1/test/wav" / name)
    assert test[name] == expected

    genders = dict(zip(VOX1_DEV, "mfm")) | dict(zip(VOX1_TEST, "fmf"))
    assert read_table(data / "test/spk2gender") == genders

    trials = (data / "test/trials_O").read_text().splitlines()
    first = "id10270/-vBNO3AhQRs/00001.wav id10270/-vBNO3AhQRs/00002.wav target"
    assert trials[0] == first
    assert refused(out, "train", "12 speakers and 48 utterances", "5994 and 1092009")
    assert refused(out, "test", "6 speakers and 24 utterances", "1251 and 153516")
    counts = "18 target and 48 nontarget"
    assert refused(out, "veri_test2.txt", counts, "18802 and 18809")
    # 36 + 240 are all 24 C 2 pairs; the hard list is every other one of them.
    counts = (
        "trials_O 18 target + 48 nontarget",
        "trials_E 36 target + 240",
        "trials_H 18 target + 120",
    )
    assert refused(out, data / "test", *counts)


def test_converted_files_are_used_and_kept(prepare, corpus, tmp_path):
    """A wav tree of another tool beside the m4a; both parts of VoxCeleb1 in one folder."""
    tree = corpus / "wav"
    shutil.move(corpus / "voxceleb1/dev/wav", tree)
    for speaker in VOX1_TEST:
        shutil.move(corpus / f"voxceleb1/test/wav/{speaker}", tree)
    made = corpus / "voxceleb2_wav/dev/aac/id00013/5r0dWxy17C8/00001.wav"
    made.parent.mkdir(parents=True)
    soundfile.write(made, np.full(16000, 0.1), 16000)

    # Neither the test part of VoxCeleb2 nor files that are being unpacked are used.
    speaker = corpus / "voxceleb2_m4a/dev/aac/id00012"
    shutil.copytree(speaker, corpus / "vox2/test/aac/id00099")
    unfinished = corpus / "voxceleb2_m4a/.unpack-vox2_aac.zip/dev/aac"
    shutil.copytree(speaker, unfinished / "id00098")

    data = tmp_path / "data"
    prepare("voxceleb", corpus, data, "--num-jobs", 2)
    train = read_table(data / "train/wav.scp")
    assert train["id00013/5r0dWxy17C8/00001.wav"] == str(made)
    assert len(train) == 48

    converted = data / "wav/id00012/5r0dWxy17C8/00001.flac"
    before = converted.stat().st_ino
    prepare("voxceleb", corpus, data, "--num-jobs", 2)
    assert converted.stat().st_ino == before


@pytest.mark.parametrize(
    ("whose", "num_noises", "room"),
    [
        ("3dspeaker", 1, ROOMS[0]),
        ("wespeaker", 4, ROOMS[2].removeprefix("simulated_rirs/")),
    ],
)
def test_whose_noise_and_rooms(
    prepare, corpus, tmp_path, musan, rirs, whose, num_noises, room
):
    data = tmp_path / "data"
    banks = ("--noise", musan, "--rirs", rirs, "--noise-as", whose)
    prepare("voxceleb", corpus, data, "--num-jobs", 1, *banks)
    assert len(read_table(data / "noise/wav.scp")) == num_noises
    assert list(read_table(data / "rirs/wav.scp")) == [room]


def test_a_broken_and_an_extra_m4a_are_listed(prepare, corpus, tmp_path):
    path = corpus / "voxceleb2_m4a/dev/aac/id00012/5r0dWxy17C8/00001.m4a"
    path.write_bytes(path.read_bytes()[:200])
    extra = path.parents[1] / "00001.m4a"
    write_m4a(extra, np.zeros(2000, np.int16))
    data = tmp_path / "data"
    prepare("voxceleb", corpus, data, "--num-jobs", 2)
    assert len(read_table(data / "train/wav.scp")) == 47
    lines = (data / "train/rejected.tsv").read_text().splitlines()
    assert len(lines) == 2
    paths = set()
    reasons = []
    for line in lines:
        _, rejected, reason = line.split("\t")[:3]
        paths.add(rejected)
        reasons.append(reason)
    assert str(path) in paths
    assert any(refused(reason, extra) for reason in reasons)


def test_a_missing_archive(refusal, corpus):
    shutil.rmtree(corpus / "voxceleb1/dev")
    parts = " ".join(f"vox1_dev_wav_parta{letter}" for letter in "abcd")
    page = "https://mm.kaist.ac.kr/datasets/voxceleb/"
    assert refused(refusal(), corpus, parts, page)


def test_a_missing_list(refusal, corpus):
    (corpus / "meta/list_test_all2.txt").unlink()
    error = refusal()
    assert refused(error, corpus, "list_test_all2.txt", "https://", corpus / "meta")


def test_a_list_of_another_version(refusal, recipe, corpus, tmp_path, capsys):
    path = corpus / "meta/veri_test2.txt"
    first = "id10270/5r0dWxy17C8/00001.wav"
    unknown = "id10270/5r0dWxy17C8/00009.wav"
    write_vox_list(path, [(first, unknown, True)])
    assert refused(refusal(), f"{path}:1", unknown)

    # The counts of the uncleaned list are recognized.
    vox = recipe("voxceleb")
    vox.UNCLEANED.add((1, 0))
    write_vox_list(path, [(first, "id10270/5r0dWxy17C8/00002.wav", True)])
    folders = ["--corpus", str(corpus), "--data", str(tmp_path / "data")]
    assert vox.main([*folders, "--num-jobs", "1"]) == 0
    assert refused(capsys.readouterr().out, path.name, "18809", "uncleaned")


def test_a_half_extracted_tree(refusal, corpus):
    tree = corpus / "voxceleb2_m4a/dev/aac"
    for speaker in VOX2[-2:]:
        shutil.rmtree(tree / speaker)
        (tree / f"{speaker}/5r0dWxy17C8").mkdir(parents=True)
    assert refused(refusal(), tree, "2 speakers", "vox2_aac.zip")


def test_genders_without_their_column_are_refused(refusal, corpus):
    path = corpus / "meta/vox1_meta.csv"
    path.write_text(META.replace("Gender", "Sex") + "\n")
    assert refused(refusal(), path, "Gender", "Sex")


def test_stage_0_unpacks_archives_and_names_missing_ones(
    recipe, prepare, original, tmp_path, monkeypatch, capsys
):
    vox = recipe("voxceleb")
    corpus = tmp_path / "corpus"
    url = (original / "meta").as_uri()
    corpus.mkdir()
    archive = corpus / "vox2_aac.zip"
    pack(original / "voxceleb2_m4a", archive)
    digest = md5(archive.read_bytes())
    vox2 = ("voxceleb2_m4a", archive.name, digest, {"x_partaa": ""})
    monkeypatch.setitem(vox.ARCHIVES, "vox2_dev", vox2)

    # Of VoxCeleb1, there is one of two parts.
    pack(original / "voxceleb1/dev", corpus / "all.zip")
    body = (corpus / "all.zip").read_bytes()
    half = len(body) // 2
    digests = {"vox1_partaa": md5(body[:half]), "vox1_partab": md5(body[half:])}
    vox1 = ("voxceleb1/dev", "vox1.zip", md5(body), digests)
    monkeypatch.setitem(vox.ARCHIVES, "vox1_dev", vox1)
    (corpus / "vox1_partaa").write_bytes(body[:half])
    with refuses(corpus, "vox1_test_wav.zip vox1_partab", error=FileNotFoundError):
        vox.download_corpus(corpus, url=url)
    assert (corpus / "voxceleb2_m4a/dev/aac/id00012/5r0dWxy17C8/00001.m4a").is_file()
    lists = sorted(path.name for path in (corpus / "meta").iterdir())
    assert lists == [
        "list_test_all2.txt",
        "list_test_hard2.txt",
        "veri_test2.txt",
        "vox1_meta.csv",
    ]

    shutil.copytree(original / "voxceleb1/test", corpus / "voxceleb1/test")
    second_part = corpus / "vox1_partab"
    second_part.write_bytes(body[half:-1])
    with refuses(second_part, "wrong md5"):
        vox.download_corpus(corpus, url=url)
    second_part.write_bytes(body[half:])
    capsys.readouterr()
    vox.download_corpus(corpus, url=url)
    assert (corpus / "voxceleb1/dev/wav/id10001/5r0dWxy17C8/00001.wav").is_file()
    output = capsys.readouterr().out
    assert output.count("already exists") == 2
    prepare("voxceleb", corpus, tmp_path / "data", "--num-jobs", 2)


def pack(folder: Path, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*.*")):
            archive.write(file, file.relative_to(folder))


def test_folders_of_systems_hold_no_speakers(tmp_path):
    for place in ("wav", "__MACOSX/wav", ".Trash-1000/wav", "@eaDir", "wav.bak"):
        (tmp_path / place / "id10001").mkdir(parents=True)
    assert list(find_roots(tmp_path)) == [tmp_path / "wav"]
