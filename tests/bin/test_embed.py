"""`speakerlab embed`: every format read back, ids, files that cannot be read, exit codes."""

import json
from pathlib import Path

import kaldiio
import numpy as np
import pytest
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


def test_files_from_a_list_and_from_wav_scp(exp, wavs, wanted_ND, tmp_path):
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
        (["a.wav", "a.flac"], "a.flac", "a.wav"),  # both have the id "a"
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
