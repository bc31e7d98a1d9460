"""Packed audio is the audio: in the order of training, resumable, shared by jobs, nothing lost.

Letters: S samples.
"""

import errno
import multiprocessing
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from refusals import refused, refuses

from speakerlab.data import pack, shards
from speakerlab.data.check import check_data_dirs
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import pack_data_dir, shard_bounds
from speakerlab.data.shards import Layout, member_name, read_packed
from speakerlab.data.tables import read_rejected, read_table

RATE = 16000
PCM = Layout.of_waves("pcm", sample_rate=RATE)
FLAC = Layout.of_waves("flac", sample_rate=RATE)
every_codec = pytest.mark.parametrize("layout", [PCM, FLAC], ids=["pcm", "flac"])


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Several shards although there are a few seconds of audio."""
    monkeypatch.setattr(pack, "MIN_SHARD_BYTES", 60000)
    monkeypatch.setattr(pack, "FEWEST_SHARDS", 4)


@pytest.fixture
def folder(make_data_dir) -> Path:
    return make_data_dir(speakers=range(4), seconds=[0.25, 1.0, 4.3])


def waves_of(folder: Path) -> dict[str, np.ndarray]:
    manifest = read_manifest([folder], sample_rate=RATE)
    return {
        u: manifest.read(i, 0, int(manifest.num_samples_N[i])) for i, u in enumerate(manifest.ids)
    }


@every_codec
def test_packed_audio_is_the_audio(folder, layout):
    loose = read_manifest([folder], sample_rate=RATE)
    pack_data_dir(folder, layout=layout)
    packed = read_manifest([folder], sample_rate=RATE)
    assert packed.parts[0].waves is not None and loose.parts[0].waves is None
    assert len(packed.parts[0].waves.shards) == 4
    assert list(packed.ids) == list(loose.ids)
    assert packed.sha256() == loose.sha256()
    rng = np.random.default_rng(0)
    for row, num_samples in enumerate(map(int, loose.num_samples_N)):
        stretches = [(0, num_samples), (0, 1), (num_samples - 1, 1), (0, 2 * num_samples)]
        stretches += [sorted(map(int, rng.integers(0, num_samples, 2))) for _ in range(20)]
        for first, count in stretches:
            wanted_S = loose.read(row, first, count)
            found_S = packed.read(row, first, count)
            assert found_S.dtype == np.int16 and np.array_equal(found_S, wanted_S), (first, count)


def test_a_shard_stays_open_while_it_is_read(folder, monkeypatch):
    """Though another thread opens more than are kept, between its opening and its reading."""
    pack_data_dir(folder, layout=PCM)
    expected, pread = waves_of(folder), os.pread

    def read_late(*where: int) -> bytes:
        shards.open_shard.cache_clear()
        return pread(*where)

    monkeypatch.setattr(os, "pread", read_late)
    assert {u: w.tolist() for u, w in waves_of(folder).items()} == {
        u: w.tolist() for u, w in expected.items()
    }


@every_codec
def test_shards_are_tar_files_that_any_tool_opens(folder, layout, tmp_path):
    wanted = waves_of(folder)
    pack_data_dir(folder, layout=layout)
    joined: dict[str, list[np.ndarray]] = {}
    for path in sorted((folder / "shards").glob("*.tar")):
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path / "out")
            names = archive.getnames()
        for name in names:
            wave_S, rate = soundfile.read(tmp_path / "out" / name, dtype="int16")
            assert rate == RATE
            joined.setdefault(name.split(".")[0], []).append(wave_S)
    assert list(joined) == list(wanted)  # in the hashed order
    for utterance, pieces in joined.items():
        assert np.array_equal(np.concatenate(pieces), wanted[utterance])


def test_any_number_of_jobs_writes_the_same_bytes(folder, tmp_path, make_data_dir):
    other = make_data_dir("other", speakers=range(4), seconds=[0.25, 1.0, 4.3])
    pack_data_dir(folder, layout=PCM)
    for i in (3, 1, 2):
        line = pack_data_dir(other, layout=PCM, part=(i, 3), num_workers=2)
        assert ("left to other jobs" in line) == (i != 2)
    for path in sorted((folder / "shards").glob("*.tar")):
        assert path.read_bytes() == (other / "shards" / path.name).read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in other.iterdir())
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == [".pack.lock"]


def test_a_packing_that_was_stopped_continues(folder, monkeypatch):
    class Stopped(Exception):
        pass

    written: list[int] = []
    write_shard = pack.write_shard

    def write(job, shard):
        if len(written) == stop_after:
            raise Stopped
        written.append(shard)
        return write_shard(job, shard)

    stop_after = 2
    monkeypatch.setattr(pack, "write_shard", write)
    with pytest.raises(Stopped):
        pack_data_dir(folder, layout=PCM)
    assert read_packed(folder / "shards") is None
    assert read_manifest([folder], sample_rate=RATE).parts[0].waves is None
    monkeypatch.setattr(
        pack, "write_shard", lambda job, n: (written.append(n), write_shard(job, n))[1]
    )
    pack_data_dir(folder, layout=PCM)
    assert written == [0, 1, 2, 3]
    assert "already packed" in pack_data_dir(folder, layout=PCM)
    assert "already packed" not in pack_data_dir(folder, layout=FLAC)


def test_what_cannot_be_read_is_listed_and_left_out(folder):
    wavs = {u: Path(p) for u, p in read_table(folder / "wav.scp").items()}
    broken = {name: wavs[name] for name in ("spk0-0", "spk1-2")}  # checked by their headers before
    whole = {path: path.read_bytes() for path in broken.values()}
    for path, content in whole.items():
        path.write_bytes(content[:3000])
    wavs["spk2-0"].unlink()
    with pytest.raises(ValueError) as error:
        pack_data_dir(folder, layout=PCM, allow_rejected=0.1)
    lines = str(error.value).splitlines()
    assert len(lines) == 4 and "spk2-0.wav: no such file" in str(error.value)
    assert refused(lines[-1], str(folder), "10.00%", "3 of 12", folder / "refused.tsv")
    assert read_packed(folder / "shards") is None
    assert len((folder / "refused.tsv").read_text().splitlines()) == 3
    broken["spk0-0"].write_bytes(whole[broken["spk0-0"]])  # repaired: it is tried again
    line = pack_data_dir(folder, layout=PCM, allow_rejected=0.2)
    assert "10 utterances in 4 shards" in line and "2 cannot be read, see" in line
    rejected = read_rejected(folder)
    assert rejected.keys() == {"spk1-2", "spk2-0"}
    assert rejected["spk2-0"][0] == str(wavs["spk2-0"])
    packed = read_manifest([folder], sample_rate=RATE)
    assert len(packed) == 10 and packed.parts[0].waves is not None
    assert "already packed" in pack_data_dir(folder, layout=PCM)


@every_codec
def test_a_wrong_checksum_names_shard_utterance_and_byte(folder, layout):
    pack_data_dir(folder, layout=layout)
    manifest = read_manifest([folder], sample_rate=RATE)
    row = list(manifest.ids).index("spk3-2")
    packed = manifest.parts[0].waves
    assert packed is not None
    shard = packed.folder / packed.shards[packed.shard_N[row]]
    at = int(packed.start_N[row]) + (2 * RATE + 10 if layout is PCM else 10)
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    shard.write_bytes(data)
    block_at = int(packed.start_N[row]) + (2 * RATE if layout is PCM else 0)
    with refuses(str(shard), "the checksum is wrong", "spk3-2", f"byte {block_at}"):
        manifest.read(row, 0, 2 * RATE)
    if layout is PCM:  # a second without the bit is read as before
        assert len(manifest.read(row, 0, RATE)) == RATE


def test_other_tables_than_were_packed_are_read_from_their_files(folder, caplog):
    pack_data_dir(folder, layout=PCM)
    table = read_table(folder / "utt2spk")
    (folder / "utt2spk").write_text("".join(f"{u} {s}x\n" for u, s in table.items()))
    check_data_dirs([folder])
    manifest = read_manifest([folder], sample_rate=RATE)
    assert manifest.parts[0].waves is None
    assert "tables have changed" in caplog.text


def test_segments_are_packed_one_by_one(tmp_path, make_data_dir):
    from speakerlab.data.tables import write_data_dir

    wave_S = (1000 * np.sin(np.arange(5 * RATE) / 9)).astype(np.int16)
    soundfile.write(tmp_path / "long.flac", wave_S, RATE, subtype="PCM_16")
    write_data_dir(
        tmp_path / "d",
        wavs={"rec": tmp_path / "long.flac"},
        speakers={"a": "s1", "b": "s2"},
        segments={"a": ("rec", 0.5, 2.0), "b": ("rec", 1.25, 5.0)},
    )
    check_data_dirs([tmp_path / "d"])
    pack_data_dir(tmp_path / "d", layout=PCM)
    found = waves_of(tmp_path / "d")
    assert np.array_equal(found["a"], wave_S[8000:32000])
    assert np.array_equal(found["b"], wave_S[20000:])


def test_bounds_follow_from_the_lengths_alone():
    num_samples_N = np.full(1000, 16000 * 10)  # 320 MB
    bounds = shard_bounds(num_samples_N)
    assert bounds[0] == 0 and bounds[-1] == 1000
    sizes = np.diff(bounds)
    assert len(sizes) == 4 and sizes.max() - sizes.min() <= 2
    assert shard_bounds(np.array([5])) == (0, 1)


def test_names_of_members_are_plain_and_never_too_long():
    assert member_name("spk1-0") == "spk1-0"
    assert member_name("a/../b\n") == "a%2F..%2Fb%0A"
    long = [member_name(letter * 200) for letter in "日本"]
    assert max(map(len, long)) <= 90 and len(set(long)) == 2


def test_jobs_that_end_at_the_same_time_join_once(folder):
    """Four processes, a shard each, all of which may find that all shards are there."""
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        lines = pool.starmap(pack_part, [(folder, i) for i in range(1, 5)])
    assert sum("12 utterances in 4 shards" in line for line in lines) == 1
    assert read_manifest([folder], sample_rate=RATE).parts[0].waves is not None
    assert len(waves_of(folder)) == 12


def pack_part(folder: Path, number: int) -> str:
    return pack_data_dir(folder, layout=PCM, part=(number, 4))


def test_a_shard_that_was_cut_or_an_index_that_was_damaged_is_packed_again(folder):
    pack_data_dir(folder, layout=PCM)
    wanted = waves_of(folder)
    shard = sorted((folder / "shards").glob("*.tar"))[1]
    shard.write_bytes(shard.read_bytes()[:-12_000])  # up to 10,240 are padding
    assert "12 utterances" in pack_data_dir(folder, layout=PCM)
    index = folder / "shards" / "index.safetensors"
    index.write_bytes(index.read_bytes()[:-10])
    assert "12 utterances" in pack_data_dir(folder, layout=PCM)
    found = waves_of(folder)
    assert all(np.array_equal(found[utterance], wanted[utterance]) for utterance in wanted)
    assert index.stat().st_mode == shard.stat().st_mode  # others may read it as they may the rest


def test_a_full_disk_is_reported_with_the_place(folder, monkeypatch):
    def full(_job, _shard):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pack, "write_shard", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        pack_data_dir(folder, layout=PCM)
    assert error.value.filename == str(folder)
