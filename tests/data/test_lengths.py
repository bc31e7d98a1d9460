"""Recordings whose header states more, less or nothing: read to their end, or refused by name."""

import io
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from refusals import refuses
from voices import make_wave

from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.shards import Layout
from speakerlab.data.tables import read_rejected, read_table, write_data_dir

RATE = 16000
WAVE_S = make_wave(0, 0, 2.0)
NUM_SAMPLES = len(WAVE_S)
NUM_BYTES = 2 * NUM_SAMPLES
# An MP3 decoder may add what the encoder has added: at most so many samples.
MP3_SLACK = 2500
# The first frame of an MP3 file of libsndfile holds the numbers of frames and bytes.
MP3_COUNT = 21
APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(300)


def encoded(
    kind: str, wave_S: np.ndarray = WAVE_S, subtype: str | None = None
) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave_S, RATE, format=kind, subtype=subtype)
    return file.getvalue()


def with_field(content: bytes, position: int, field: bytes) -> bytes:
    return content[:position] + field + content[position + len(field) :]


def with_chunk_size(kind: str, name: bytes, layout: str, size: int) -> bytes:
    """A recording whose chunk `name` states another size; layout: of the number, for struct."""
    content = encoded(kind)
    position = content.index(name) + len(name)
    return with_field(content, position, struct.pack(layout, size))


def with_rf64_size(size: int) -> bytes:
    content = encoded("RF64")
    # Behind the name, the size of the chunk and the size of the file.
    position = content.index(b"ds64") + 16
    return with_field(content, position, struct.pack("<Q", size))


def with_flac_samples(num_samples: int) -> bytes:
    content = encoded("FLAC")
    # The last 36 bits of the first 18 bytes behind the marker and the header of STREAMINFO.
    high = (content[21] & 0xF0) | (num_samples >> 32)
    low = struct.pack(">I", num_samples & 0xFFFFFFFF)
    return with_field(content, 21, bytes([high]) + low)


def without_count(content: bytes) -> bytes:
    """An MP3 file without its first frame, which holds the numbers of frames and bytes."""
    assert b"Xing" in content[:40] or b"Info" in content[:40]
    second_frame = content.index(content[:2], 4)
    return content[second_frame:]


def with_av(kind: str, codec: str, *, rate: int = RATE, **options: str) -> bytes:
    """A recording in a format that libsndfile does not write."""
    file = io.BytesIO()
    frame = av.AudioFrame.from_ndarray(WAVE_S[None], format="s16", layout="mono")
    frame.sample_rate = rate
    with av.open(file, "w", format=kind, options=options) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        # PyAV 19 would keep threads, on which processes that are forked later wait for ever.
        stream.codec_context.thread_count = 1
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def decode(source: Path | bytes) -> np.ndarray:
    with audio.stream(source) as (rate, blocks):
        wave_S = np.concatenate([audio.NO_SAMPLES, *blocks])
    assert rate == RATE
    return wave_S


@pytest.fixture
def put(tmp_path: Path) -> Callable[[bytes], Path]:
    """put(content) -> a file."""

    def write(content: bytes, name: str = "a.bin") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def no_av(monkeypatch):
    """As if PyAV were not installed."""
    monkeypatch.setitem(sys.modules, "av", None)


def check_whole(path: Path, wave_S: np.ndarray = WAVE_S) -> None:
    """All ways to read a recording give the same samples, as many as its info states."""
    info = audio.read_info(path)
    assert info.num_samples == len(wave_S)
    assert np.array_equal(audio.read(path), wave_S)
    assert np.array_equal(audio.read(path, 7000, 900), wave_S[7000:7900])
    assert np.array_equal(decode(path), wave_S)
    assert np.array_equal(decode(path.read_bytes()), wave_S)


@pytest.mark.parametrize("changes_riff", [False, True])
@pytest.mark.parametrize(
    "stated",
    [
        0xFFFFFFFF,
        0xFFFFFFFF - 36,
        0xFFFFFFFF - 100,
        0x80000000,
        0x7FFFFFFF - 36,
        0x7FFFF000,
        0x7FFF0000,
        0x7F000000,
        2_000_000_000,
        2_000_000_000 - 44,
        1_000_000_000,
        100_000_000 - 36,
        1 << 30,
        (1 << 30) - 44,
        0x0FFFFFFF,
        1_234_567_890,
        NUM_BYTES + 1,
    ],
)
def test_a_placeholder_in_a_wav_header_is_no_length(
    put, no_av, stated: int, changes_riff: bool
):
    content = with_chunk_size("WAV", b"data", "<I", stated)
    if changes_riff:
        content = with_field(
            content, 4, struct.pack("<I", min(stated + 36, 0xFFFFFFFF))
        )
    check_whole(put(content))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(with_chunk_size("AIFF", b"SSND", ">I", 0), id="aiff 0"),
        pytest.param(with_chunk_size("AIFF", b"SSND", ">I", 0xFFFFFFFF), id="aiff -1"),
        # The number of frames is behind the size and the number of channels.
        pytest.param(
            with_chunk_size("AIFF", b"COMM\0\0\0\x12\0\1", ">I", 0), id="aiff frames"
        ),
        pytest.param(
            with_chunk_size("AU", b".snd\0\0\0\x18", ">I", 0xFFFFFFFF), id="au -1"
        ),
        pytest.param(with_chunk_size("AU", b".snd\0\0\0\x18", ">I", 0), id="au 0"),
        pytest.param(with_rf64_size(0), id="rf64 0"),
        pytest.param(with_chunk_size("AIFF", b"SSND", ">I", 0), id="aiff sound"),
        pytest.param(with_flac_samples(0), id="flac 0"),
        pytest.param(
            encoded("NIST").replace(b"sample_count -i 32000", b"sample_count -i 00000"),
            id="sphere 0",
        ),
        pytest.param(
            encoded("NIST").replace(b"sample_count -i 32000", b"sample_tally -i 32000"),
            id="sphere without",
        ),
        pytest.param(encoded("WAV") + bytes(100_000), id="wav and zeros"),
        pytest.param(
            encoded("WAV") + b"LIST" + struct.pack("<I", 20_000) + b"INFO" * 5000,
            id="wav and a list",
        ),
        pytest.param(encoded("FLAC") + b"TAG" + bytes(125), id="flac and a tag"),
    ],
)
def test_other_headers_without_a_length_need_no_pyav(put, no_av, content: bytes):
    check_whole(put(content))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(with_chunk_size("WAV", b"data", "<I", 0), id="wav 0"),
        pytest.param(with_chunk_size("CAF", b"data", ">q", -1), id="caf -1"),
        pytest.param(
            with_chunk_size("AU", b".snd\0\0\0\x18", ">I", 32000), id="au less"
        ),
        pytest.param(with_flac_samples(16000), id="flac less"),
    ],
)
def test_pyav_reads_what_is_behind_the_stated_length(put, monkeypatch, content: bytes):
    path = put(content)
    check_whole(path)
    assert not audio.read_info(path).has_index
    monkeypatch.setitem(sys.modules, "av", None)
    for read in (audio.read_info, audio.read, decode):
        with refuses(str(path), "pip install av"):
            read(path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(with_chunk_size("WAV", b"data", "<I", 32000), id="wav"),
        pytest.param(with_rf64_size(32000), id="rf64"),
        pytest.param(with_chunk_size("CAF", b"data", ">q", 32004), id="caf"),
        pytest.param(encoded("WAV") + encoded("WAV"), id="two"),
    ],
)
def test_bytes_behind_the_sound_that_may_be_sound_are_refused(put, content: bytes):
    path = put(content)
    with refuses(str(path), "more bytes behind"):
        decode(path)
    with refuses(str(path), "more bytes behind"):
        audio.read_info(path)


CUT = {
    "wav": encoded("WAV"),
    "wav of 24 bits": encoded("WAV", subtype="PCM_24"),
    "wav of mu-law": encoded("WAV", subtype="ULAW"),
    "wav of gsm": encoded("WAV", subtype="GSM610"),
    "wav of g722": with_av("wav", "g722"),
    "wav of mp3": with_av("wav", "mp3"),
    "wav of aac": with_av("wav", "aac"),
    "rf64": encoded("RF64"),
    "w64": encoded("W64"),
    "aiff": encoded("AIFF"),
    "au": encoded("AU"),
    "caf": encoded("CAF"),
    "sphere": encoded("NIST"),
    "voc": encoded("VOC"),
    "voc of mu-law": encoded("VOC", subtype="ULAW"),
    "flac": encoded("FLAC"),
    "mp3": encoded("MP3"),
    "m4a": with_av("mp4", "aac"),
    "fragments": with_av("mp4", "aac", movflags="frag_keyframe+empty_moov"),
    "matroska": with_av("matroska", "libopus"),
    "ogg": encoded("OGG"),
    "opus": with_av("ogg", "libopus"),
}


@pytest.mark.parametrize("kind", CUT)
def test_a_recording_that_was_cut_is_refused_by_its_header(put, kind: str):
    content = CUT[kind]
    whole = put(content, "whole.bin")
    num_samples = audio.read_info(whole).num_samples
    assert abs(num_samples / audio.read_info(whole).sample_rate - 2.0) < 0.2
    path = put(content[: len(content) * 6 // 10], "cut.bin")
    for read in (audio.read_info, audio.read, decode):
        with refuses(str(path)):
            read(path)


@pytest.mark.parametrize(
    "kind", ["AVR", "IRCAM", "MAT4", "MAT5", "MPC2K", "PAF", "PVF", "WVE", "XI"]
)
def test_a_format_in_which_a_cut_is_not_noticed_is_refused_by_name(put, kind: str):
    subtype = {"WVE": "ALAW", "XI": "DPCM_16"}.get(kind, "PCM_16")
    rate = 8000 if kind == "WVE" else RATE
    file = io.BytesIO()
    soundfile.write(file, WAVE_S, rate, format=kind, subtype=subtype)
    path = put(file.getvalue(), "a.bin")
    for read in (audio.read_info, audio.read, decode):
        with refuses(str(path), soundfile.available_formats()[kind], "convert it"):
            read(path)


@pytest.mark.parametrize(
    "content",
    [
        with_chunk_size("WAV", b"data", "<I", 2 * NUM_BYTES),
        with_chunk_size("AIFF", b"SSND", ">I", 2 * NUM_BYTES + 8),
        encoded("NIST").replace(b"sample_count -i 32000", b"sample_count -i 64000"),
        with_flac_samples(64000),
    ],
    ids=["wav", "aiff", "sphere", "flac"],
)
def test_a_plausible_length_that_is_too_long_means_a_cut(put, content: bytes):
    path = put(content)
    for read in (audio.read_info, audio.read, decode):
        with refuses(str(path), "copy it again"):
            read(path)


LOUD = encoded("MP3")
SOFT = encoded("MP3", (WAVE_S // 400).astype(np.int16))
ID3 = b"ID3\3\0\0\0\0\x40\0" + bytes(8192)


@pytest.mark.parametrize(
    ("content", "num_samples"),
    [
        pytest.param(LOUD, NUM_SAMPLES, id="with a count"),
        pytest.param(without_count(LOUD), NUM_SAMPLES, id="without"),
        # libsndfile estimates the length from the first frames.
        pytest.param(
            without_count(LOUD) + without_count(SOFT), 2 * NUM_SAMPLES, id="soft"
        ),
        pytest.param(
            without_count(SOFT) + without_count(LOUD), 2 * NUM_SAMPLES, id="loud"
        ),
        pytest.param(ID3 + LOUD, NUM_SAMPLES, id="picture"),
        pytest.param(ID3 + ID3 + without_count(LOUD), NUM_SAMPLES, id="two pictures"),
        pytest.param(without_count(LOUD) + b"TAG" + bytes(125), NUM_SAMPLES, id="tag"),
        pytest.param(LOUD + b"APETAGEX" + bytes(20_000), NUM_SAMPLES, id="long tag"),
        pytest.param(LOUD + b"\xc3garbage\x95" * 30, NUM_SAMPLES, id="garbage"),
        pytest.param(LOUD + b"\xc3garbage\x95" * 600, NUM_SAMPLES, id="much garbage"),
        pytest.param(without_count(LOUD)[:-100], NUM_SAMPLES, id="last frame"),
        pytest.param(LOUD + LOUD, 2 * NUM_SAMPLES, id="two"),
        pytest.param(ID3 + LOUD + ID3 + LOUD, 2 * NUM_SAMPLES, id="two with pictures"),
        pytest.param(
            with_field(LOUD, MP3_COUNT, struct.pack(">I", 20)), NUM_SAMPLES, id="less"
        ),
        pytest.param(
            with_field(LOUD, MP3_COUNT, struct.pack(">I", 200)), NUM_SAMPLES, id="more"
        ),
        pytest.param(
            with_field(LOUD, MP3_COUNT, struct.pack(">I", 0)), NUM_SAMPLES, id="zero"
        ),
        pytest.param(bytes(3000) + LOUD, NUM_SAMPLES, id="zeros before"),
    ],
)
def test_an_mp3_file_is_read_to_its_end(put, content: bytes, num_samples: int):
    path = put(content, "a.mp3")
    wave_S = decode(path)
    assert abs(len(wave_S) - num_samples) < MP3_SLACK * num_samples / NUM_SAMPLES
    info = audio.read_info(path)
    assert info.num_samples == len(wave_S)
    assert np.array_equal(audio.read(path), wave_S)
    if not info.has_index:
        assert np.array_equal(audio.read(path, 9000, 700), wave_S[9000:9700])


def test_a_long_mp3_file_without_a_count_is_read_to_its_last_frame(put):
    """Decoded in large blocks, except for its end."""
    content = without_count(encoded("MP3", np.tile(WAVE_S, 40)))
    whole_S = decode(put(content, "whole.mp3"))
    assert abs(len(whole_S) - 40 * NUM_SAMPLES) < MP3_SLACK
    cut_S = decode(put(content[:-10], "cut.mp3"))
    num_missing = len(whole_S) - len(cut_S)
    assert 0 <= num_missing <= 576
    assert np.array_equal(cut_S, whole_S[: len(cut_S)])


def test_an_mp3_file_that_changes_its_rate_is_refused(put):
    other = io.BytesIO()
    soundfile.write(other, WAVE_S, 44100, format="MP3")
    for content in (LOUD, without_count(LOUD)):
        path = put(content + other.getvalue(), "a.mp3")
        with refuses(str(path), "cannot be decoded"):
            decode(path)


def test_an_mp3_file_that_ends_before_its_count_is_refused(put):
    path = put(LOUD[: len(LOUD) // 2], "a.mp3")
    for read in (audio.read_info, audio.read, decode):
        with refuses(str(path), NUM_SAMPLES):
            read(path)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_ogg_is_read_to_its_end(put, subtype: str):
    content = encoded("OGG", subtype=subtype)
    check_whole(put(content), decode(content))
    # Two streams, one behind the other, as radio stations make them.
    path = put(content + content)
    info = audio.read_info(path)
    assert abs(info.seconds - 4.0) < 0.1
    assert len(audio.read(path)) == info.num_samples
    # A header has no length: whole pages, as of a program that was stopped, are a recording.
    last_page = content.rindex(b"OggS")
    path = put(content[:last_page])
    info = audio.read_info(path)
    assert 0.3 < info.seconds < 2.0
    assert len(decode(path)) == info.num_samples
    # Within the header of a page, and within its sound.
    for end in (last_page + 5, last_page + 26, last_page + 40, len(content) - 1):
        path = put(content[:end])
        with refuses(str(path), "is cut short, within"):
            audio.read(path)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("wav", with_av("wav", "g722")),
        ("wav", with_av("wav", "aac")),
        ("wav", with_av("wav", "mp3")),
        ("wv", with_av("wv", "wavpack")),
        ("tta", with_av("tta", "tta")),
        ("m4a", with_av("ipod", "alac")),
        ("avi", with_av("avi", "mp3")),
        ("latm", with_av("latm", "aac")),
        ("ec3", with_av("eac3", "eac3", rate=48000)),
    ],
)
def test_pyav_is_asked_where_libsndfile_fails(
    put, monkeypatch, kind: str, content: bytes
):
    path = put(content, f"a.{kind}")
    info = audio.read_info(path)
    assert abs(info.num_samples - NUM_SAMPLES) < MP3_SLACK
    assert not info.has_index
    wave_S = audio.read(path)
    assert len(wave_S) == info.num_samples
    assert np.array_equal(audio.read(path, 5000, 300), wave_S[5000:5300])
    with refuses(str(path), "after 100 of 200 samples"):
        audio.read(path, len(wave_S) - 100, 200)
    monkeypatch.setitem(sys.modules, "av", None)
    with refuses(str(path), "pip install av"):
        audio.read(path)


def test_a_format_that_is_not_listed_is_refused_by_name(put):
    path = put(with_av("nut", "aac"), "a.wav")
    for read in (audio.read_info, audio.read, decode):
        with refuses(str(path), "format that is not read", "convert it"):
            read(path)


def test_pyav_reads_many_channels(put, tmp_path: Path):
    channels = [WAVE_S // divisor for divisor in range(1, 13)]
    wave_SC = np.stack(channels, axis=1)
    whole = tmp_path / "whole.wav"
    soundfile.write(whole, wave_SC, RATE, subtype="PCM_16")
    content = whole.read_bytes()
    # A size of 0 behind the name of the chunk: libsndfile reads nothing.
    size_position = content.index(b"data") + 4
    path = put(with_field(content, size_position, bytes(4)))
    assert audio.read_info(path).num_channels == 12
    with audio.stream(path, all_channels=True) as (_, blocks):
        assert np.array_equal(np.concatenate(list(blocks)), wave_SC)
    assert np.array_equal(audio.read(path), WAVE_S)


def test_amr_is_read(put):
    """No program here encodes it: 50 frames of 20 ms at 12.2 kb/s with random content."""
    rng = np.random.default_rng(0)
    content = b"#!AMR\n"
    for _ in range(50):
        content += b"\x3c" + rng.bytes(31)
    info = audio.read_info(put(content, "a.amr"))
    assert (info.num_samples, info.sample_rate) == (8000, 8000)


@pytest.mark.parametrize("ending", [".gsm", ".vox"])
def test_formats_without_a_header_are_known_by_their_ending(put, ending: str):
    subtype = {".gsm": "GSM610", ".vox": "VOX_ADPCM"}[ending]
    content = encoded("RAW", subtype=subtype)
    info = audio.read_info(put(content, f"a{ending}"))
    assert info.sample_rate == 8000
    assert abs(info.num_samples - NUM_SAMPLES) < 400
    with refuses(str(put(content, "a.bin"))):
        audio.read_info(put(content, "a.bin"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.m4a", with_av("ipod", "aac")),
        ("a.mp3", without_count(LOUD)),
        ("a.mp3", LOUD),
        ("a.wav", encoded("WAV")),
        ("a.amr", with_av("wav", "g722")),
    ],
)
@pytest.mark.parametrize("attributes", [APPLE_DOUBLE, b"", b"anything"])
def test_a_file_of_macos_beside_a_recording_changes_nothing(
    put, name: str, content: bytes, attributes: bytes
):
    path = put(content, name)
    wave_S = audio.read(path)
    assert abs(len(wave_S) - NUM_SAMPLES) < MP3_SLACK
    put(attributes, f"._{name}")
    assert np.array_equal(audio.read(path), wave_S)
    assert audio.read_info(path).num_samples == len(wave_S)


def test_check_and_pack_agree(tmp_path: Path):
    """On which recordings are good and how long they are, with and without decoding."""
    contents = {
        "wav": encoded("WAV"),
        "streamed": with_chunk_size("WAV", b"data", "<I", 0),
        "placeholder": with_chunk_size("WAV", b"data", "<I", 2_000_000_000),
        "piped": with_flac_samples(0),
        "uncounted": without_count(SOFT) + without_count(LOUD),
        "two": LOUD + LOUD,
        "gsm": encoded("WAV", subtype="GSM610"),
        "m4a": with_av("ipod", "aac"),
        "g722": with_av("wav", "g722"),
        "cut wav": encoded("WAV")[:40000],
        "cut flac": encoded("FLAC")[:20000],
        "cut sphere": encoded("NIST")[:40000],
        "cut m4a": with_av("mp4", "aac")[:9000],
        "less": with_chunk_size("WAV", b"data", "<I", 32000),
    }
    wavs = {}
    for name, content in contents.items():
        utterance = name.replace(" ", "-")
        wavs[utterance] = tmp_path / f"{utterance}.bin"
        wavs[utterance].write_bytes(content)
    bad = {"cut-wav", "cut-flac", "cut-sphere", "cut-m4a", "less"}
    lengths = []
    for decodes in (False, True):
        folder = tmp_path / f"decode-{decodes}"
        write_data_dir(folder, wavs=wavs, speakers={name: name for name in wavs})
        check_data_dirs([folder], decode=decodes, allow_rejected=0.5)
        assert read_rejected(folder).keys() == bad
        lengths.append(read_table(folder / "utt2dur"))
    assert lengths[0] == lengths[1]

    pack_data_dir(folder, layout=Layout.of_waves("pcm", sample_rate=RATE))
    assert read_rejected(folder).keys() == bad
    manifest = read_manifest([folder], sample_rate=RATE)
    assert set(manifest.ids) == wavs.keys() - bad
    for row, name in enumerate(manifest.ids):
        num_samples = int(manifest.num_samples_N[row])
        wave_S = audio.read(wavs[name])
        assert num_samples == len(wave_S), name
        assert np.array_equal(manifest.read(row, 0, num_samples), wave_S), name


def test_check_notes_recordings_that_are_decoded_from_their_start(tmp_path: Path):
    wavs = {}
    for name, content in (("a", LOUD), ("b", with_av("ipod", "aac"))):
        wavs[name] = tmp_path / name
        wavs[name].write_bytes(content)
    write_data_dir(tmp_path / "d", wavs=wavs, speakers={"a": "a", "b": "b"})
    note, _ = check_data_dirs([tmp_path / "d"])
    assert note.startswith(f"{tmp_path}/d: 1 recording to decode from the start")
    assert ": b;" in note


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_a_crop_of_training_decodes_nothing_else(put, monkeypatch, kind: str):
    path = put(encoded(kind, np.tile(WAVE_S, 20)))
    decoded = []
    read = soundfile.SoundFile.read

    def count(self, frames: int, **options):
        decoded.append(frames)
        return read(self, frames, **options)

    monkeypatch.setattr(soundfile.SoundFile, "read", count)
    audio.read(path, 15 * NUM_SAMPLES, 1000)
    assert decoded == [1000]


def test_permission_is_named(put):
    path = put(encoded("WAV"))
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root may read everything")
    with refuses(str(path), "Permission denied"):
        audio.read_info(path)
