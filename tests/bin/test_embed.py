"""`speakerlab embed`: every format read back, ids, files that cannot be read, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import kaldiio
import numpy as np
import pytest
from full_disk import cannot_write
from refusals import refused, refuses
from safetensors import safe_open
from voices import RATE, make_wave

import speakerlab
from speakerlab.bin import embed
from speakerlab.data import audio
from speakerlab.scoring.embeddings import EmbeddingTable

IDS = ["b", "a", "c_d"]


@pytest.fixture
def exp(make_exp) -> Path:
    return make_exp("exp")


@pytest.fixture
def wavs(tmp_path: Path) -> list[Path]:
    """b.wav, a.wav and "c d.flac", of 1, 1.3 and 1 s."""
    names = ("b.wav", "a.wav", "c d.flac")
    paths = [tmp_path / name for name in names]
    for take, path in enumerate(paths):
        seconds = 1.0 + 0.3 * (take % 2)
        audio.write(path, make_wave(take, 0, seconds), RATE)
    return paths


@pytest.fixture
def wanted_ND(exp, wavs) -> np.ndarray:
    model = speakerlab.load(exp, device="cpu")
    embeddings = [model.embed(path) for path in wavs]
    return np.stack(embeddings)


def embed_all(exp: Path, out: Path, *arguments: object) -> None:
    places = ("--model", exp, "--out", out, "--device", "cpu")
    embed.main([str(argument) for argument in (*arguments, *places)])


def read_npy(out: Path):
    table = EmbeddingTable.load(out)
    return table.ids, table.emb_ND


def read_ark(out: Path):
    by_scp = kaldiio.load_scp(f"{out}.scp")
    ids = []
    embeddings = []
    for name, emb_D in kaldiio.load_ark(f"{out}.ark"):
        assert np.array_equal(by_scp[name], emb_D)
        ids.append(name)
        embeddings.append(emb_D)
    assert list(by_scp) == ids
    return ids, np.stack(embeddings)


def read_safetensors(out: Path):
    with safe_open(f"{out}.safetensors", framework="numpy") as file:
        metadata = file.metadata()
        assert len(metadata["model_sha256"]) == 64
        ids = json.loads(metadata["ids"])
        return ids, file.get_tensor("emb_ND")


def read_jsonl(out: Path):
    lines = Path(f"{out}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    ids = [row["id"] for row in rows]
    embeddings = [row["embedding"] for row in rows]
    return ids, np.float32(embeddings)


READERS = [read_npy, read_ark, read_safetensors, read_jsonl]
READERS_BY_NAME = {reader.__name__.removeprefix("read_"): reader for reader in READERS}


@pytest.mark.parametrize("read", READERS)
def test_every_format_keeps_ids_and_every_bit(exp, wavs, wanted_ND, tmp_path, read):
    out = tmp_path / "new folder/v1.0"
    name = read.__name__.removeprefix("read_")
    embed_all(exp, out, *wavs, "--format", name)
    ids, emb_ND = read(out)
    assert ids == IDS
    assert emb_ND.dtype == np.float32
    assert np.allclose(emb_ND, wanted_ND, rtol=1e-5, atol=1e-6)

    # Every format has the bits of the first one.
    embed_all(exp, tmp_path / "npy", *wavs)
    _, emb_of_npy_ND = read_npy(tmp_path / "npy")
    assert np.array_equal(emb_ND, emb_of_npy_ND)
    assert not Path(f"{out}.rejected.tsv").exists()


def test_files_from_a_list_and_from_wav_scp(exp, wavs, wanted_ND, tmp_path, caplog):
    path = tmp_path / "list"
    lines = [f"{wav}\n" for wav in wavs]
    path.write_text("".join(lines) + "\n")
    embed_all(exp, tmp_path / "one", "--list", path)
    ids, _ = read_npy(tmp_path / "one")
    assert ids == IDS

    (tmp_path / "wav.scp").write_text(f"z {wavs[0]}\ny {wavs[2]}\n")
    embed_all(exp, tmp_path / "two", "--wav-scp", tmp_path / "wav.scp")
    ids, emb_ND = read_npy(tmp_path / "two")
    assert ids == ["z", "y"]
    expected_ND = wanted_ND[[0, 2]]
    assert np.allclose(emb_ND, expected_ND, rtol=1e-5, atol=1e-6)
    assert "segments" not in caplog.text

    (tmp_path / "segments").write_text("u1 z 0 1\n")
    embed_all(exp, tmp_path / "three", "--wav-scp", tmp_path / "wav.scp")
    assert f"{tmp_path}/segments: is not read here" in caplog.text


@pytest.mark.parametrize(
    ("paths", "ids"),
    [
        (["x/a.wav", "y/b.v2.wav"], ["a", "b.v2"]),
        (
            ["c/s1/001.wav", "c/s2/001.wav", "c/s2/my 2.wav"],
            ["s1/001", "s2/001", "s2/my_2"],
        ),
        (["001.wav", "s2/001.flac"], ["001", "s2/001"]),
        (
            ["../s1/001.wav", "/s2/001.wav"],
            [f"{Path.cwd().parent}/s1/001"[1:], "s2/001"],
        ),
        (
            ["x/rec 1.wav", "x/rec 1.flac", "x/b.wav"],
            ["rec_1.wav", "rec_1.flac", "b"],
        ),
        (["x/1.wav", "x/1.flac", "y/1.wav"], ["x/1.wav", "x/1.flac", "y/1"]),
        # The ending makes the id of the first file equal to the last one's.
        (["a.wav", "a.flac", "a.wav.mp3"], ["a.wav", "a.flac", "a.wav.mp3"]),
        ([" a\nb\u2028c.wav", "d|.wav", "e "], ["_a_b_c", "d|", "e_"]),
        (["\x1b.wav", "caf\udce9.wav"], ["\\x1b", "caf\\udce9"]),
        (["录音 1.wav"], ["录音_1"]),
        # Blanks are escaped where the ids would be equal.
        (["a b.wav", "a_b.wav", "c d.wav"], ["a\\x20b.wav", "a_b.wav", "c_d"]),
        (["a\tb.wav", "a\u3000b.wav"], ["a\\x09b.wav", "a\\u3000b.wav"]),
        (["x/a b.wav", "x y/a_b.wav"], ["a\\x20b.wav", "a_b.wav"]),
        (["a b/1.wav", "a_b/1.wav"], ["a\\x20b/1.wav", "a_b/1.wav"]),
    ],
)
def test_ids_are_names_or_relative_paths(paths, ids):
    names = embed.name_files([Path(path) for path in paths])
    assert names == ids


@pytest.mark.parametrize(
    ("arguments", "subject", "value"),
    [
        ([], "embed", 0),
        (["a.wav", "--list", "x"], "embed", 2),
        (["a.wav", "--runtime", "onnx"], "--runtime", "onnx"),
        (["b/a.wav", "c/a.wav", "./b/a.wav"], "b/a.wav", "b/a"),
    ],
)
def test_refusals(exp, tmp_path, arguments, subject, value):
    with refuses(subject, value):
        embed_all(exp, tmp_path / "out", *arguments)


def test_unreadable_files_are_listed_and_the_rest_is_embedded(exp, wavs, tmp_path, run):
    broken = tmp_path / "broken.wav"
    gone = tmp_path / "gone.wav"
    out = tmp_path / "out"
    broken.write_bytes(b"RIFF")
    files = [wavs[0], broken, gone, wavs[1]]
    rejected = Path(f"{out}.rejected.tsv")
    arguments = ["embed", *files, "--model", exp, "--out", out, "--device", "cpu"]
    finished = run("-m", "speakerlab", *arguments, code=1)
    assert refused(finished.stderr, str(broken))
    assert refused(finished.stderr, str(gone), "no such file")
    assert "2 of 4 files" in finished.stderr
    ids, _ = read_npy(out)
    assert ids == ["b", "a"]
    first, second = rejected.read_text().splitlines()
    assert first.startswith(f"broken\t{broken}\t")
    assert second.startswith(f"gone\t{gone}\t")

    # Half of the files may be rejected.
    embed_all(exp, out, *files, "--allow-rejected", "0.5")
    assert rejected.exists()
    embed_all(exp, out, *wavs)
    assert not rejected.exists()


def write_voice(path: Path, take: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Opened here, because soundfile takes no name that is not UTF-8.
    content = audio.encode(make_wave(take, 0, 0.6), RATE, "FLAC")
    path.write_bytes(content)
    return path


def test_a_folder_is_searched_for_recordings(exp, tmp_path, caplog):
    corpus = tmp_path / "corpus"
    write_voice(corpus / "a.wav")
    write_voice(corpus / "b/c d.FLAC")
    loose = write_voice(tmp_path / "e.flac")
    for name in ("._a.wav", ".DS_Store", "notes.txt", "@eaDir/a.wav", "b/a.txt"):
        path = corpus / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\x00\x05\x16\x07")
    with caplog.at_level("INFO"):
        embed_all(exp, tmp_path / "out", corpus, loose, corpus / "._a.wav")
    ids, _ = read_npy(tmp_path / "out")
    assert ids == ["a", "c_d", "e"]
    # Before a folder, and between two.
    other = write_voice(tmp_path / "other/f.wav").parent
    embed_all(exp, tmp_path / "more", loose, corpus, other)
    assert read_npy(tmp_path / "more")[0] == ["e", "a", "c_d", "f"]
    (line,) = [text for text in caplog.messages if text.startswith(f"{corpus}:")]
    assert "2 recordings" in line
    assert "files of other endings: 2 (2 .txt)" in line
    assert "3 files and folders of systems" in line
    (line,) = [text for text in caplog.messages if text.startswith("skipped 1 file of")]
    assert "._a.wav" in line

    empty = tmp_path / "empty"
    empty.mkdir()
    with refuses(str(empty), "is empty"):
        embed_all(exp, tmp_path / "out", empty)
    (empty / "a.txt").touch()
    with refuses(str(empty), "files of other endings: 1 (1 .txt)", "flac"):
        embed_all(exp, tmp_path / "out", loose, empty)


ODD_NAMES = {
    b"ok.flac": "ok",
    b"caf\xe9.flac": "caf\\udce9",
    b"two\nlines.flac": "two_lines",
    b" blank .flac": "_blank_",
    b"pipe|": "pipe|",
    "录音 1.flac".encode(): "录音_1",
    b"n" * 250 + b".flac": "n" * 250,
}


@pytest.mark.parametrize("read", READERS)
def test_odd_file_names_are_embedded_under_ids_of_utf_8(exp, tmp_path, read, capsys):
    files = []
    for name in ODD_NAMES:
        files.append(write_voice(tmp_path / "in" / os.fsdecode(name)))
    broken = tmp_path / "in" / os.fsdecode(b"b\xe9\n.flac")
    broken.write_bytes(b"RIFF")
    out = tmp_path / "out"
    options = ["--format", read.__name__.removeprefix("read_")]
    embed_all(exp, out, *files, broken, *options, "--allow-rejected", "0.5")
    ids, emb_ND = read(out)
    assert ids == list(ODD_NAMES.values())
    assert len(emb_ND) == len(ids)
    # One line on the terminal, and one in the file.
    assert "b\\udce9\\n.flac: is not readable audio" in capsys.readouterr().err
    (line,) = Path(f"{out}.rejected.tsv").read_text(encoding="utf-8").splitlines()
    assert line.startswith("b\\udce9_\t")


@pytest.mark.slow
@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}], ids=["C", "ascii"]
)
def test_ids_and_lists_do_not_depend_on_the_locale(exp, tmp_path, locale, environment):
    files = []
    for name in ODD_NAMES:
        files.append(write_voice(tmp_path / "in" / os.fsdecode(name)))
    paths = [os.fsencode(path) for path in files if b"\n" not in os.fsencode(path)]
    (tmp_path / "list").write_bytes(b"\n".join(paths))
    (tmp_path / "wav.scp").write_bytes("录 ".encode() + paths[-2])
    options = ["--model", exp, "--device", "cpu"]
    for number, source in enumerate(
        [
            [tmp_path / "in"],
            ["--list", tmp_path / "list"],
            ["--wav-scp", tmp_path / "wav.scp"],
        ]
    ):
        out = tmp_path / f"out{number}"
        command = [sys.executable, "-m", "speakerlab", "embed", *source, *options]
        finished = subprocess.run(
            [*command, "--out", out],
            env={**environment, "PYTHONCOERCECLOCALE": "0", **locale},
            capture_output=True,
        )
        assert finished.returncode == 0, finished.stderr
    # A walk takes only files with the ending of a recording.
    wanted = sorted(set(ODD_NAMES.values()) - {"pipe|"})
    assert sorted(read_npy(tmp_path / "out0")[0]) == wanted
    wanted = [name for name in ODD_NAMES.values() if name != "two_lines"]
    assert read_npy(tmp_path / "out1")[0] == wanted
    assert read_npy(tmp_path / "out2")[0] == ["录"]


def test_lists_of_other_systems_are_read(exp, tmp_path):
    odd = write_voice(tmp_path / os.fsdecode(b"caf\xe9.flac"))
    blank = write_voice(tmp_path / "a b.flac")
    path = tmp_path / "list"
    marked = b"\xef\xbb\xbf%s\r\n\r\n%s\r\n"
    path.write_bytes(marked % (os.fsencode(odd), os.fsencode(blank)))
    embed_all(exp, tmp_path / "out", "--list", path)
    assert read_npy(tmp_path / "out")[0] == ["caf\\udce9", "a_b"]
    path.write_bytes(
        marked % (b"u1 " + os.fsencode(blank), b"u2 " + os.fsencode(blank))
    )
    embed_all(exp, tmp_path / "out", "--wav-scp", path)
    assert read_npy(tmp_path / "out")[0] == ["u1", "u2"]

    path.write_bytes(str(blank).encode("utf-16"))
    embed_all(exp, tmp_path / "out", "--list", path)
    assert read_npy(tmp_path / "out")[0] == ["a_b"]
    # Names in Latin-1 of files that have their names in UTF-8.
    path.write_bytes(b"ok.flac\nm\xfcller.flac\n")
    with refuses(f"{path}:2", "m\\udcfcller.flac", "UTF-8"):
        embed_all(exp, tmp_path / "out", "--list", path)
    path.write_bytes(b"\xef\xbb\xbf\r\n")
    with refuses(str(path), "no recordings"):
        embed_all(exp, tmp_path / "out", "--list", path)


def test_a_scp_file_that_could_not_name_its_ark_is_refused_first(exp, wavs, tmp_path):
    out = tmp_path / os.fsdecode(b"caf\xe9") / "out"
    with refuses("--out", "caf\\udce9/out"):
        embed_all(exp, out, wavs[0], "--format", "ark")
    embed_all(exp, out, wavs[0])
    assert read_npy(out)[0] == ["b"]


def test_channels_are_chosen_mixed_or_apart(exp, wavs, tmp_path, caplog):
    first_S = make_wave(0, 0, 1.0)
    second_S = make_wave(3, 0, 1.0)
    mixed_S = ((first_S.astype(np.int32) + second_S) // 2).astype(np.int16)
    stereo = tmp_path / "call.wav"
    audio.write(stereo, np.stack([first_S, second_S], axis=1), RATE)
    half_silent = tmp_path / "half.wav"
    audio.write(half_silent, np.stack([first_S, 0 * second_S], axis=1), RATE)
    model = speakerlab.load(exp, device="cpu")
    waves = (first_S, second_S, mixed_S)
    first_D, second_D, mixed_D = model.embed_many([*waves])

    for channel, expected_D in (("1", first_D), ("2", second_D), ("mix", mixed_D)):
        embed_all(exp, tmp_path / "out", stereo, "--channel", channel)
        ids, emb_ND = read_npy(tmp_path / "out")
        assert ids == ["call"]
        assert np.allclose(emb_ND[0], expected_D, rtol=1e-2, atol=1e-3)
    assert "channels that differ" not in caplog.text
    embed_all(exp, tmp_path / "out", stereo)
    assert caplog.text.count("channels that differ") == 1

    # Of a call with a silent channel, the other one is embedded.
    files = [stereo, half_silent, wavs[0]]
    options = ["--channel", "each", "--allow-rejected", "0.5"]
    embed_all(exp, tmp_path / "out", *files, *options)
    ids, emb_ND = read_npy(tmp_path / "out")
    assert ids == ["call-1", "call-2", "half-1", "b-1"]
    expected_ND = np.stack([first_D, second_D, first_D])
    assert np.allclose(emb_ND[:3], expected_ND, rtol=1e-4, atol=1e-5)
    rejected = (tmp_path / "out.rejected.tsv").read_text()
    assert rejected.startswith(f"half-2\t{half_silent}\t")
    assert "channel 2: is silent" in rejected


def times_of(out: Path, name: str) -> list[tuple[str, float, float]]:
    """(recording, start, end) of each window, from the files of a format."""
    if name == "jsonl":
        rows = map(json.loads, Path(f"{out}.jsonl").read_text().splitlines())
        return [(row["recording"], row["start"], row["end"]) for row in rows]
    if name == "safetensors":
        with safe_open(f"{out}.safetensors", framework="numpy") as file:
            recordings = json.loads(file.metadata()["recordings"])
            times_N2 = file.get_tensor("times_N2")
        assert times_N2.dtype == np.float64
        return [(r, *times) for r, times in zip(recordings, times_N2.tolist())]
    ids = []
    windows = []
    for line in Path(f"{out}.segments").read_text().splitlines():
        utterance, recording, start, end = line.split()
        ids.append(utterance)
        windows.append((recording, float(start), float(end)))
    assert ids == READERS_BY_NAME[name](out)[0]
    return windows


@pytest.mark.parametrize("name", ["npy", "ark", "safetensors", "jsonl"])
def test_windows_have_their_times_in_every_format(exp, wavs, tmp_path, name):
    out = tmp_path / "windows"
    lengths = ("--window", "0.6", "--step", "0.5")
    embed_all(exp, out, *wavs, *lengths, "--format", name)
    ids, emb_ND = READERS_BY_NAME[name](out)
    assert times_of(out, name) == [
        ("b", 0.0, 0.6),
        ("b", 0.4, 1.0),
        ("a", 0.0, 0.6),
        ("a", 0.5, 1.1),
        ("a", 0.7, 1.3),
        ("c_d", 0.0, 0.6),
        ("c_d", 0.4, 1.0),
    ]
    assert ids[:3] == ["b-000001", "b-000002", "a-000001"]
    model = speakerlab.load(exp, device="cpu")
    _, of_second_WD = model.embed_windows(wavs[1], window=0.6, step=0.5)
    assert np.array_equal(emb_ND[2:5], of_second_WD)

    # Whole recordings of a later run have no times.
    embed_all(exp, out, *wavs, "--format", name)
    assert not Path(f"{out}.segments").exists()
    assert READERS_BY_NAME[name](out)[0] == IDS


def test_windows_of_channels_and_files_that_cannot_be_read(exp, wavs, tmp_path, capsys):
    call = tmp_path / "call.wav"
    first_S = make_wave(0, 0, 2.0)
    silence_S = np.zeros_like(first_S)
    stereo_SC = np.stack([first_S, silence_S, make_wave(1, 0, 2.0)], axis=1)
    audio.write(call, stereo_SC, RATE)
    out = tmp_path / "calls"
    missing = tmp_path / "missing.wav"
    each = ("--channel", "each", "--window", "1", "--allow-rejected", "0.5")
    embed_all(exp, out, call, missing, *each)
    # The second channel is digital silence.
    ids, _ = read_npy(out)
    assert ids == [f"call-{n}-00000{w}" for n in (1, 3) for w in (1, 2, 3)]
    assert refused(capsys.readouterr().err, str(missing))
    assert str(missing) in Path(f"{out}.rejected.tsv").read_text()

    facts = json.loads(Path(f"{out}.json").read_text())
    assert (facts["window"], facts["step"]) == (1.0, 0.75)
    audio.write(call, silence_S, RATE)
    with refuses(f"{out}.rejected.tsv", "1 of 1 files"):
        embed_all(exp, out, call, "--window", "1")
    assert not Path(f"{out}.segments").exists()


@pytest.mark.parametrize(
    ("options", "subject", "value"),
    [
        (["--step", "1"], "--step", "--window"),
        (["--window", "0"], "--window", "0"),
        (["--window", "nan"], "--window", "nan"),
        (["--window", "1", "--step", "-1"], "--step", "-1"),
        (["--window", "0.5"], "--step", "0.75 s"),
    ],
)
def test_windows_that_cannot_be_are_refused(
    exp, wavs, tmp_path, options, subject, value
):
    with refuses(subject, value):
        embed_all(exp, tmp_path / "out", *wavs, *options)


def test_a_channel_that_is_missing_is_rejected(exp, wavs, tmp_path, capsys):
    options = ["--channel", "2", "--allow-rejected", "1"]
    with refuses(str(tmp_path / "out.rejected.tsv"), "1 of 1"):
        embed_all(exp, tmp_path / "out", wavs[0], *options)
    assert refused(capsys.readouterr().err, str(wavs[0]), "1 channel")
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("share", ["0", "1"])
def test_no_earlier_embeddings_remain_if_all_files_are_rejected(
    exp, wavs, tmp_path, read, share
):
    out = tmp_path / "new/out"
    options = ["--format", read.__name__.removeprefix("read_")]
    embed_all(exp, out, wavs[0], *options)
    wavs[0].write_bytes(b"RIFF")
    with refuses(f"{out}.rejected.tsv", "1 of 1 files"):
        embed_all(exp, out, wavs[0], *options, "--allow-rejected", share)
    assert [path.name for path in out.parent.iterdir()] == ["out.rejected.tsv"]


def test_earlier_embeddings_are_removed_before_rejections_are_written(
    exp, wavs, tmp_path, capsys
):
    out = tmp_path / "new/out"
    embed_all(exp, out, *wavs)
    wavs[0].write_bytes(b"RIFF")
    options = ["--allow-rejected", "0.5"]
    with cannot_write(f"{out}.rejected.tsv"):
        embed_all(exp, out, *wavs, *options)
    assert refused(capsys.readouterr().err, str(wavs[0]))
    assert list(out.parent.iterdir()) == []
    embed_all(exp, out, *wavs, *options)
    assert read_npy(out)[0] == IDS[1:]


def test_a_folder_is_no_name_of_the_files(exp, wavs, tmp_path, capsys):
    folder = f"{tmp_path}/new/"
    arguments = ["--model", str(exp), "--out", folder]
    with pytest.raises(SystemExit):
        embed.main([*arguments, str(wavs[0])])
    assert refused(capsys.readouterr().err, "speakerlab embed", folder)
    assert not Path(f"{tmp_path}/new.npy").exists()


@pytest.mark.parametrize("read", READERS)
def test_a_full_disk_is_an_error_of_the_output(exp, wavs, tmp_path, read):
    name = read.__name__.removeprefix("read_")
    with cannot_write(tmp_path / f"out.{name}"):
        embed_all(exp, tmp_path / "out", *wavs, "--format", name)


def test_a_command_in_wav_scp_is_named(exp, tmp_path):
    table = tmp_path / "wav.scp"
    table.write_text("a sox a.flac -t wav - |\n")
    with refuses(str(table), "a is a command", "sox a.flac -t wav - > a.wav"):
        embed_all(exp, tmp_path / "out", "--wav-scp", table)
