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
    paths = [tmp_path / name for name in ("b.wav", "a.wav", "c d.flac")]
    for take, path in enumerate(paths):
        audio.write(path, make_wave(take, 0, 1.0 + 0.3 * (take % 2)), RATE)
    return paths


@pytest.fixture
def wanted_ND(exp, wavs) -> np.ndarray:
    model = speakerlab.load(exp, device="cpu")
    return np.stack([model.embed(path) for path in wavs])


def embed_all(exp: Path, out: Path, *words: object) -> None:
    embed.main([*map(str, words), "--model", str(exp), "--out", str(out), "--device", "cpu"])


def read_npy(out: Path):
    table = EmbeddingTable.load(out)
    return table.ids, table.emb_ND


def read_ark(out: Path):
    by_scp = kaldiio.load_scp(f"{out}.scp")
    in_order = list(kaldiio.load_ark(f"{out}.ark"))
    assert [name for name, _ in in_order] == list(by_scp)
    for name, emb_D in in_order:
        assert np.array_equal(by_scp[name], emb_D)
    return list(by_scp), np.stack([emb_D for _, emb_D in in_order])


def read_safetensors(out: Path):
    with safe_open(f"{out}.safetensors", framework="numpy") as file:
        assert len(file.metadata()["model_sha256"]) == 64
        return json.loads(file.metadata()["ids"]), file.get_tensor("emb_ND")


def read_jsonl(out: Path):
    rows = [json.loads(line) for line in Path(f"{out}.jsonl").read_text().splitlines()]
    return [row["id"] for row in rows], np.float32([row["embedding"] for row in rows])


@pytest.mark.parametrize("read", [read_npy, read_ark, read_safetensors, read_jsonl])
def test_every_format_keeps_ids_and_every_bit(exp, wavs, wanted_ND, tmp_path, read):
    out = tmp_path / "new folder/v1.0"
    embed_all(exp, out, *wavs, "--format", read.__name__.removeprefix("read_"))
    embed_all(exp, tmp_path / "npy", *wavs)
    ids, emb_ND = read(out)
    assert ids == IDS and emb_ND.dtype == np.float32
    assert np.allclose(emb_ND, wanted_ND, rtol=1e-5, atol=1e-6)
    assert np.array_equal(emb_ND, read_npy(tmp_path / "npy")[1])
    assert not Path(f"{out}.rejected.tsv").exists()


def test_files_from_a_list_and_from_wav_scp(exp, wavs, wanted_ND, tmp_path):
    (tmp_path / "list").write_text("".join(f"{path}\n" for path in wavs) + "\n")
    embed_all(exp, tmp_path / "one", "--list", tmp_path / "list")
    assert read_npy(tmp_path / "one")[0] == IDS
    (tmp_path / "wav.scp").write_text(f"z {wavs[0]}\ny {wavs[2]}\n")
    embed_all(exp, tmp_path / "two", "--wav-scp", tmp_path / "wav.scp")
    ids, emb_ND = read_npy(tmp_path / "two")
    assert ids == ["z", "y"]
    assert np.allclose(emb_ND, wanted_ND[[0, 2]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("paths", "ids"),
    [
        (["x/a.wav", "y/b.v2.wav"], ["a", "b.v2"]),
        (["c/s1/001.wav", "c/s2/001.wav", "c/s2/my 2.wav"], ["s1/001", "s2/001", "s2/my_2"]),
        (["001.wav", "s2/001.flac"], ["001", "s2/001"]),
        (["../s1/001.wav", "/s2/001.wav"], [f"{Path.cwd().parent}/s1/001"[1:], "s2/001"]),
    ],
)
def test_ids_are_names_or_relative_paths(paths, ids):
    assert embed.name_files([Path(path) for path in paths]) == ids


@pytest.mark.parametrize(
    ("words", "subject", "value"),
    [
        ([], "embed", 0),
        (["a.wav", "--list", "x"], "embed", 2),
        (["a.wav", "--runtime", "onnx"], "--runtime", "onnx"),
        (["a.wav", "a.flac"], "a.flac", "a.wav"),  # both have the id "a"
        (["b/a.wav", "c/a.wav", "./b/a.wav"], "b/a.wav", "b/a"),
    ],
)
def test_refusals(exp, tmp_path, words, subject, value):
    with refuses(subject, value):
        embed_all(exp, tmp_path / "out", *words)


def test_unreadable_files_are_listed_and_the_rest_is_embedded(exp, wavs, tmp_path, run):
    broken, gone, out = tmp_path / "broken.wav", tmp_path / "gone.wav", tmp_path / "out"
    broken.write_bytes(b"RIFF")
    files = [wavs[0], broken, gone, wavs[1]]
    words = ["embed", *files, "--model", exp, "--out", out, "--device", "cpu"]
    found = run("-m", "speakerlab", *words, code=1)
    assert refused(found.stderr, str(broken)) and refused(found.stderr, str(gone), "no such file")
    assert "2 of 4 files" in found.stderr
    assert read_npy(out)[0] == ["b", "a"]
    rows = [line.split("\t") for line in Path(f"{out}.rejected.tsv").read_text().splitlines()]
    assert [row[:2] for row in rows] == [["broken", str(broken)], ["gone", str(gone)]]
    embed_all(exp, out, *files, "--allow-rejected", "0.5")  # returns: so many may be
    assert Path(f"{out}.rejected.tsv").exists()
    embed_all(exp, out, *wavs)
    assert not Path(f"{out}.rejected.tsv").exists()
