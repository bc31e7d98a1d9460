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

from speakerlab.data import audio, pack, shards
from speakerlab.data.arrays import read_arrays, write_arrays
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
    waves = {}
    for row, utterance in enumerate(manifest.ids):
        num_samples = int(manifest.num_samples_N[row])
        waves[utterance] = manifest.read(row, 0, num_samples)
    return waves


def test_levels_that_no_speech_has_are_a_line_for_each_kind(folder, caplog):
    paths = read_table(folder / "wav.scp")
    rng = np.random.default_rng(0)
    for number, name in enumerate(("spk0-0", "spk1-1", "spk2-1", "spk3-1")):
        num_samples = audio.read_info(paths[name]).num_samples
        noise_S = rng.normal(0, 3000, num_samples).astype(np.int16)
        audio.write(paths[name], (noise_S if number else 0 * noise_S), RATE)
    line = pack_data_dir(folder, layout=PCM)
    assert "12 utterances" in line
    silent, noise = caplog.messages
    assert silent == f"{folder}: 1 of 12 utterances are silent (spk0-0); listen to them"
    assert noise.startswith(f"{folder}: 3 of 12 utterances are noise or tones (spk")
    # Without speakers, they are recordings of noise or rooms.
    caplog.clear()
    (folder / "utt2spk").unlink()
    check_data_dirs([folder])
    pack_data_dir(folder, layout=PCM)
    assert [text for text in caplog.messages if "listen" in text] == []


@every_codec
def test_packed_audio_is_the_audio(folder, layout):
    loose = read_manifest([folder], sample_rate=RATE)
    pack_data_dir(folder, layout=layout)
    packed = read_manifest([folder], sample_rate=RATE)
    assert packed.parts[0].waves is not None
    assert loose.parts[0].waves is None
    assert len(packed.parts[0].waves.shards) == 4
    assert list(packed.ids) == list(loose.ids)
    assert packed.sha256() == loose.sha256()
    rng = np.random.default_rng(0)
    for row, num_samples in enumerate(loose.num_samples_N.tolist()):
        stretches = [
            (0, num_samples),
            (0, 1),
            (num_samples - 1, 1),
            (0, 2 * num_samples),
        ]
        for _ in range(20):
            first, count = sorted(rng.integers(0, num_samples, 2))
            stretches.append((int(first), int(count)))
        for first, count in stretches:
            expected_S = loose.read(row, first, count)
            packed_S = packed.read(row, first, count)
            assert packed_S.dtype == np.int16
            is_equal = np.array_equal(packed_S, expected_S)
            assert is_equal, (first, count)


def test_a_shard_stays_open_while_it_is_read(folder, monkeypatch):
    """Though another thread opens more than are kept, between its opening and its reading."""
    pack_data_dir(folder, layout=PCM)
    expected = waves_of(folder)
    pread = os.pread

    def read_late(*where: int) -> bytes:
        shards.open_shard.cache_clear()
        return pread(*where)

    monkeypatch.setattr(os, "pread", read_late)
    waves = waves_of(folder)
    assert waves.keys() == expected.keys()
    for utterance, wave_S in waves.items():
        assert wave_S.tolist() == expected[utterance].tolist()


@every_codec
def test_shards_are_tar_files_that_any_tool_opens(folder, layout, tmp_path):
    expected = waves_of(folder)
    pack_data_dir(folder, layout=layout)
    shard_folder = folder / "shards"
    pieces: dict[str, list[np.ndarray]] = {}
    for path in sorted(shard_folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path / "out")
            names = archive.getnames()
        for name in names:
            member = tmp_path / "out" / name
            wave_S, rate = soundfile.read(member, dtype="int16")
            assert rate == RATE
            utterance = name.split(".")[0]
            pieces.setdefault(utterance, []).append(wave_S)

    # in the hashed order
    assert list(pieces) == list(expected)
    for utterance, waves in pieces.items():
        joined_S = np.concatenate(waves)
        assert np.array_equal(joined_S, expected[utterance])


def test_any_number_of_jobs_writes_the_same_bytes(folder, tmp_path, make_data_dir):
    other = make_data_dir(
        "other",
        speakers=range(4),
        seconds=[0.25, 1.0, 4.3],
    )
    pack_data_dir(folder, layout=PCM)
    for number in (3, 1, 2):
        line = pack_data_dir(
            other,
            layout=PCM,
            part=(number, 3),
            num_workers=2,
        )
        is_last_job = number == 2
        assert ("left to other jobs" in line) == (not is_last_job)

    shard_folder = folder / "shards"
    for path in sorted(shard_folder.glob("*.tar")):
        other_path = other / "shards" / path.name
        assert path.read_bytes() == other_path.read_bytes()

    # no temporary file remains
    names = sorted(path.name for path in folder.iterdir())
    other_names = sorted(path.name for path in other.iterdir())
    assert names == other_names
    hidden = [name for name in names if name.startswith(".")]
    assert hidden == [".columns", ".pack.lock"]


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
    manifest = read_manifest([folder], sample_rate=RATE)
    assert manifest.parts[0].waves is None

    stop_after = None
    pack_data_dir(folder, layout=PCM)
    assert written == [0, 1, 2, 3]
    assert "already packed" in pack_data_dir(folder, layout=PCM)
    assert "already packed" not in pack_data_dir(folder, layout=FLAC)


def test_what_cannot_be_read_is_listed_and_left_out(folder):
    wavs = {}
    for utterance, path in read_table(folder / "wav.scp").items():
        wavs[utterance] = Path(path)
    # checked by their headers before, so only packing finds that they end too early
    broken = [wavs["spk0-0"], wavs["spk1-2"]]
    whole = {path: path.read_bytes() for path in broken}
    for path, content in whole.items():
        path.write_bytes(content[:3000])
    wavs["spk2-0"].unlink()

    with pytest.raises(ValueError) as error:
        pack_data_dir(folder, layout=PCM, allow_rejected=0.1)
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    assert "spk2-0.wav: no such file" in str(error.value)
    list_path = folder / "refused.tsv"
    assert refused(
        lines[-1],
        str(folder),
        "10.00%",
        "3 of 12",
        list_path,
    )
    assert read_packed(folder / "shards") is None
    refused_lines = list_path.read_text().splitlines()
    assert len(refused_lines) == 3

    # a repaired recording is read again
    repaired = wavs["spk0-0"]
    repaired.write_bytes(whole[repaired])
    line = pack_data_dir(folder, layout=PCM, allow_rejected=0.2)
    assert "10 utterances in 4 shards" in line
    assert "2 cannot be read, see" in line
    rejected = read_rejected(folder)
    assert rejected.keys() == {"spk1-2", "spk2-0"}
    rejected_path = rejected["spk2-0"][0]
    assert rejected_path == str(wavs["spk2-0"])
    packed = read_manifest([folder], sample_rate=RATE)
    assert len(packed) == 10
    assert packed.parts[0].waves is not None
    assert "already packed" in pack_data_dir(folder, layout=PCM)


@every_codec
def test_a_wrong_checksum_names_shard_utterance_and_byte(folder, layout):
    pack_data_dir(folder, layout=layout)
    manifest = read_manifest([folder], sample_rate=RATE)
    row = list(manifest.ids).index("spk3-2")
    packed = manifest.parts[0].waves
    assert packed is not None
    shard = packed.folder / packed.shards[packed.shard_N[row]]
    # pcm has a checksum for each second of audio, and here the second one is damaged
    start = int(packed.start_N[row])
    block_at = start + 2 * RATE if layout is PCM else start
    data = bytearray(shard.read_bytes())
    data[block_at + 10] ^= 1
    shard.write_bytes(data)
    with refuses(
        str(shard),
        "the checksum is wrong",
        "spk3-2",
        f"byte {block_at}",
    ):
        manifest.read(row, 0, 2 * RATE)
    if layout is PCM:
        # a second without the bit is read as before
        wave_S = manifest.read(row, 0, RATE)
        assert len(wave_S) == RATE


def test_other_tables_than_were_packed_are_read_from_their_files(folder, caplog):
    pack_data_dir(folder, layout=PCM)
    table = read_table(folder / "utt2spk")
    lines = [f"{utt} {speaker}x\n" for utt, speaker in table.items()]
    (folder / "utt2spk").write_text("".join(lines))
    check_data_dirs([folder])
    manifest = read_manifest([folder], sample_rate=RATE)
    assert manifest.parts[0].waves is None
    assert "tables have changed" in caplog.text


def test_segments_are_packed_one_by_one(tmp_path, make_data_dir):
    from speakerlab.data.tables import write_data_dir

    phase_S = np.arange(5 * RATE) / 9
    wave_S = 1000 * np.sin(phase_S)
    wave_S = wave_S.astype(np.int16)
    recording = tmp_path / "long.flac"
    soundfile.write(recording, wave_S, RATE, subtype="PCM_16")
    write_data_dir(
        tmp_path / "d",
        wavs={"rec": recording},
        speakers={"a": "s1", "b": "s2"},
        segments={
            "a": ("rec", 0.5, 2.0),
            "b": ("rec", 1.25, 5.0),
        },
    )
    check_data_dirs([tmp_path / "d"])
    pack_data_dir(tmp_path / "d", layout=PCM)
    waves = waves_of(tmp_path / "d")
    first_S = wave_S[8000:32000]
    assert np.array_equal(waves["a"], first_S)
    second_S = wave_S[20000:]
    assert np.array_equal(waves["b"], second_S)


def test_bounds_follow_from_the_lengths_alone():
    num_samples_N = np.full(1000, 16000 * 10)  # 320 MB
    bounds = shard_bounds(num_samples_N)
    assert bounds[0] == 0
    assert bounds[-1] == 1000
    sizes = np.diff(bounds)
    assert len(sizes) == 4
    assert sizes.max() - sizes.min() <= 2

    short_N = np.array([5])
    assert shard_bounds(short_N) == (0, 1)


def test_names_of_members_are_plain_and_never_too_long():
    assert member_name("spk1-0") == "spk1-0"
    assert member_name("a/../b\n") == "a%2F..%2Fb%0A"
    first = member_name("日" * 200)
    second = member_name("本" * 200)
    assert len(first) <= 90
    assert len(second) <= 90
    assert first != second


def test_jobs_that_end_at_the_same_time_join_once(folder):
    """Four processes, a shard each, all of which may find that all shards are there."""
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        arguments = [(folder, number) for number in range(1, 5)]
        lines = pool.starmap(pack_part, arguments)
    num_joins = sum("12 utterances in 4 shards" in line for line in lines)
    assert num_joins == 1
    manifest = read_manifest([folder], sample_rate=RATE)
    assert manifest.parts[0].waves is not None
    assert len(waves_of(folder)) == 12


def pack_part(folder: Path, number: int) -> str:
    return pack_data_dir(folder, layout=PCM, part=(number, 4))


def test_a_shard_that_was_cut_or_an_index_that_was_damaged_is_packed_again(folder):
    pack_data_dir(folder, layout=PCM)
    expected = waves_of(folder)
    shards = sorted((folder / "shards").glob("*.tar"))
    shard = shards[1]
    # up to 10,240 bytes at the end are padding
    content = shard.read_bytes()
    shard.write_bytes(content[:-12_000])
    assert "12 utterances" in pack_data_dir(folder, layout=PCM)

    index = folder / "shards" / "index.safetensors"
    content = index.read_bytes()
    index.write_bytes(content[:-10])
    assert "12 utterances" in pack_data_dir(folder, layout=PCM)

    waves = waves_of(folder)
    for utterance, expected_S in expected.items():
        assert np.array_equal(waves[utterance], expected_S)
    # others may read the index as they may the shards
    assert index.stat().st_mode == shard.stat().st_mode


def test_a_full_disk_is_reported_with_the_place(folder, monkeypatch):
    def full(_job, _shard):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pack, "write_shard", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        pack_data_dir(folder, layout=PCM)
    assert error.value.filename == str(folder)


@pytest.mark.parametrize("kind", ["pcm", "flac", "fbank"])
def test_a_done_packing_and_its_jobs_say_so(folder, kind):
    layouts = {
        "pcm": PCM,
        "flac": FLAC,
        "fbank": Layout("fbank", RATE, 100, 40),
    }
    layout = layouts[kind]
    features = None if kind != "fbank" else frames_of
    for number in (1, 3, 2):
        line = pack_data_dir(
            folder,
            layout=layout,
            features=features,
            part=(number, 3),
        )
        assert "already packed" not in line

    index = folder / layout.folder / "index.safetensors"
    written_at = index.stat().st_mtime_ns
    for part in ((1, 1), (2, 3)):
        line = pack_data_dir(
            folder,
            layout=layout,
            features=features,
            part=part,
        )
        assert line == f"{folder}: already packed"
    assert index.stat().st_mtime_ns == written_at

    (folder / "utt2dur").unlink()
    with refuses(
        str(folder), f"run `speakerlab check {folder}`", error=FileNotFoundError
    ):
        pack_data_dir(folder, layout=layout, features=features)


def test_a_recording_that_was_replaced_is_packed_again(folder):
    """By one of the same length, so that no table changes."""
    pack_data_dir(folder, layout=PCM)
    waves = waves_of(folder)
    first, wave_S = next(iter(waves.items()))
    path = Path(read_table(folder / "wav.scp")[first])
    audio.write(path, wave_S // 2, RATE)
    assert "already packed" not in pack_data_dir(folder, layout=PCM)
    assert pack_data_dir(folder, layout=PCM) == f"{folder}: already packed"


def test_shards_that_do_not_say_how_their_recordings_were_are_kept(folder, monkeypatch):
    """Those of earlier versions."""
    with monkeypatch.context() as patch:
        patch.setattr(pack, "recordings_digest", lambda _: "")
        pack_data_dir(folder, layout=PCM)
    index = folder / "shards/index.safetensors"
    arrays, facts = read_arrays(index)
    del facts["facts"]["recordings"]
    write_arrays(index, arrays, facts)
    assert pack_data_dir(folder, layout=PCM) == f"{folder}: already packed"


def frames_of(wave_S: np.ndarray) -> np.ndarray:
    """Return ten values a frame of 10 ms."""
    num_frames = max(1, len(wave_S) // 160)
    frames_TF = np.resize(wave_S, (num_frames, 10))
    return frames_TF.astype(np.float32)


def test_a_shard_that_another_packing_replaces_is_missing(make_data_dir, monkeypatch):
    """It may vanish after the question whether it exists; then it is packed again."""
    folder = make_data_dir()
    pack_data_dir(folder, layout=PCM)
    first, *_ = sorted((folder / PCM.folder).glob("*.tar"))
    packed = read_packed(folder / PCM.folder)
    content = first.read_bytes()
    first.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: True)
        assert list(packed.cut_short()) == [first]
    pack_data_dir(folder, layout=PCM)
    assert first.read_bytes() == content


def test_a_done_file_that_comes_after_another_packing_destroys_nothing(
    make_data_dir, monkeypatch
):
    """It creates the folder of the packing again, which has no shard to put in their place."""
    folder = make_data_dir()
    write = pack.write_arrays

    def write_late(path, *arguments):
        # The other packing joins after this one has written its shard.
        monkeypatch.setattr(pack, "write_arrays", write)
        pack_data_dir(folder, layout=PCM)
        write(path, *arguments)

    monkeypatch.setattr(pack, "write_arrays", write_late)
    line = pack_data_dir(folder, layout=PCM)
    assert line == f"{folder}: packed by another process meanwhile"
    packed = read_packed(folder / PCM.folder)
    assert not list(packed.cut_short())
    assert not list(folder.glob(f".{PCM.folder}-*"))
