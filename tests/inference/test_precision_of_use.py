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
    return publish_small(tmp_path / "exp", make_config(), make_embedder())


def cosine(a_D: np.ndarray, b_D: np.ndarray) -> float:
    return float(a_D @ b_D / np.linalg.norm(a_D) / np.linalg.norm(b_D))


def test_bf16_is_near_fp32_and_fp32_is_the_default(exp):
    wave_S = make_wave(0, 0, 1.5)
    names = ("fp32", "bf16", "auto")
    models = {name: speakerlab.load(exp, device="cpu", precision=name) for name in names}
    auto = precision_here("auto").name
    assert [model.precision for model in models.values()] == ["fp32", "bf16", auto]
    embs = {name: model.embed(wave_S, RATE) for name, model in models.items()}
    assert np.array_equal(embs[auto], embs["auto"])
    assert np.array_equal(embs["fp32"], speakerlab.load(exp, device="cpu").embed(wave_S, RATE))
    assert embs["bf16"].dtype == np.float32
    assert 0.999 < cosine(embs["bf16"], embs["fp32"]) < 1 - 1e-8  # bf16 was indeed at work
    # The last layer is fp32: bf16 would leave 16 of the 32 bits zero.
    assert (embs["bf16"].view(np.uint32) & 0xFFFF).any()


def test_the_front_end_stays_fp32(make_embedder):
    embedder = make_embedder()
    wave_BS = make_noise(1.0, rows=2)
    folded = embedder.for_inference(resolve_precision("bf16", "cpu"))
    seen = []
    folded.backbone.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        folded(wave_BS)
        assert torch.equal(seen[0], embedder.fbank(wave_BS))
    assert embedder.precision is None
    assert embedder.for_inference(resolve_precision("fp32", "cpu")).precision is None


def test_embed_records_its_precision(exp, tmp_path):
    audio.write(tmp_path / "a.wav", make_wave(0, 0, 1.0), RATE)
    words = [str(tmp_path / "a.wav"), "--model", str(exp), "--out", str(tmp_path / "e")]
    embed.main([*words, "--device", "cpu", "--precision", "bf16"])
    assert json.loads((tmp_path / "e.json").read_text())["precision"] == "bf16"


def test_extraction_in_another_precision_is_another_table(exp, make_data_dir, capfd):
    data = make_data_dir(speakers=[0, 1])
    words = ["--exp", str(exp), "--data", str(data)]
    stem = exp / "embeddings/train/trained"

    def made(*more: str) -> tuple[np.ndarray, str]:
        extract.main([*words, *more])
        facts = json.loads(stem.with_suffix(".json").read_text())
        return np.load(stem.with_suffix(".npy")), facts["precision"]

    fp32_ND, name = made()
    assert name == "fp32"
    bf16_ND, name = made("--precision", "bf16")
    assert name == "bf16"
    assert not np.array_equal(fp32_ND, bf16_ND)
    cosines = [cosine(a_D, b_D) for a_D, b_D in zip(fp32_ND, bf16_ND)]
    assert min(cosines) > 0.999
    again_ND, name = made("--precision", "auto", "--nproc", "2")
    assert name == precision_here("auto").name
    if not torch.cuda.is_available():
        assert np.array_equal(again_ND, bf16_ND if name == "bf16" else fp32_ND)


@pytest.mark.parametrize("has_used_one", [False, True])
def test_a_process_that_has_used_a_gpu_queries_it_itself(monkeypatch, has_used_one):
    """CUDA cannot be used on both sides of a fork: the driver's calls made up here refuse it."""
    here = os.getpid()

    def capability(_device):
        if (os.getpid() == here) != has_used_one:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return 9, 0

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_used_one)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    assert precision_here("auto").name == "bf16"
