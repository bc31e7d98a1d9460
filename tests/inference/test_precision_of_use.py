"""Inference in bf16: near fp32, recorded in tables and files, never confused with it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from models_on_disk import publish_small
from voices import RATE, make_noise, make_wave

import speakerlab
from speakerlab.bin import embed, extract
from speakerlab.data import audio
from speakerlab.inference.workers import precision_here
from speakerlab.training.precision import resolve_precision


@pytest.fixture
def exp(tmp_path: Path, make_config, make_embedder) -> Path:
    config = make_config()
    embedder = make_embedder()
    return publish_small(tmp_path / "exp", config, embedder)


def cosine(a_D: np.ndarray, b_D: np.ndarray) -> float:
    lengths = np.linalg.norm(a_D) * np.linalg.norm(b_D)
    return float(a_D @ b_D / lengths)


def test_bf16_is_near_fp32_and_fp32_is_the_default(exp):
    wave_S = make_wave(0, 0, 1.5)
    auto = precision_here("auto").name
    embs = {}
    for precision in ("fp32", "bf16", "auto"):
        model = speakerlab.load(exp, device="cpu", precision=precision)
        expected = auto if precision == "auto" else precision
        assert model.precision == expected
        embs[precision] = model.embed(wave_S, RATE)
    assert np.array_equal(embs[auto], embs["auto"])

    by_default = speakerlab.load(exp, device="cpu")
    by_default_D = by_default.embed(wave_S, RATE)
    assert np.array_equal(embs["fp32"], by_default_D)

    # Near, but not equal: bf16 was indeed at work.
    bf16_D = embs["bf16"]
    assert bf16_D.dtype == np.float32
    assert 0.999 < cosine(bf16_D, embs["fp32"]) < 1 - 1e-8

    # The last layer is fp32: bf16 would leave 16 of the 32 bits zero.
    low_bits_D = bf16_D.view(np.uint32) & 0xFFFF
    assert low_bits_D.any()


def test_the_front_end_stays_fp32(make_embedder):
    embedder = make_embedder()
    wave_BS = make_noise(1.0, rows=2)
    in_bf16 = embedder.for_inference(resolve_precision("bf16", "cpu"))
    in_fp32 = embedder.for_inference(resolve_precision("fp32", "cpu"))
    seen = []

    def note_features(_module, inputs):
        (feats_BTF,) = inputs
        seen.append(feats_BTF)

    in_bf16.backbone.register_forward_pre_hook(note_features)
    with torch.inference_mode():
        in_bf16(wave_BS)
        expected_BTF = embedder.frontend(wave_BS)
    assert torch.equal(seen[0], expected_BTF)
    assert embedder.precision is None
    assert in_fp32.precision is None


def test_embed_records_its_precision(exp, tmp_path):
    path = tmp_path / "a.wav"
    audio.write(path, make_wave(0, 0, 1.0), RATE)
    arguments = [
        str(path),
        "--model",
        str(exp),
        "--out",
        str(tmp_path / "e"),
        "--device",
        "cpu",
        "--precision",
        "bf16",
    ]
    embed.main(arguments)
    facts = json.loads((tmp_path / "e.json").read_text())
    assert facts["precision"] == "bf16"


def test_extraction_in_another_precision_is_another_table(exp, make_data_dir, capfd):
    data = make_data_dir(speakers=[0, 1])
    arguments = ["--exp", str(exp), "--data", str(data)]
    stem = exp / "embeddings/train/trained"

    def made(*options: str) -> tuple[np.ndarray, str]:
        """Return the embeddings and the precision recorded with them."""
        extract.main([*arguments, *options])
        text = stem.with_suffix(".json").read_text()
        emb_ND = np.load(stem.with_suffix(".npy"))
        return emb_ND, json.loads(text)["precision"]

    fp32_ND, name = made()
    assert name == "fp32"
    bf16_ND, name = made("--precision", "bf16")
    assert name == "bf16"
    assert not np.array_equal(fp32_ND, bf16_ND)
    cosines = [cosine(a_D, b_D) for a_D, b_D in zip(fp32_ND, bf16_ND)]
    assert min(cosines) > 0.999

    auto_ND, name = made("--precision", "auto", "--nproc", "2")
    assert name == precision_here("auto").name
    # A GPU rounds in another way.
    if not torch.cuda.is_available():
        expected_ND = bf16_ND if name == "bf16" else fp32_ND
        assert np.array_equal(auto_ND, expected_ND)


@pytest.mark.parametrize("has_used_one", [False, True])
def test_a_process_that_has_used_a_gpu_queries_it_itself(monkeypatch, has_used_one):
    """CUDA cannot be used on both sides of a fork: the driver's calls made up here refuse it."""
    here = os.getpid()

    def capability(_device):
        is_child = os.getpid() != here
        if is_child == has_used_one:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return 9, 0

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_used_one)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    assert precision_here("auto").name == "bf16"
