"""Checkpoints of other toolkits over small pretrained models: their settings, and the figures."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import fill
from pretrained_models import write_pretrained

FIGURES = Path(__file__).with_name("over_pretrained.npz")
ECAPA = {"feat_dim": -1, "embed_dim": 16, "pooling_func": "ASTP"}


def settings(front_end: str, model: str, model_args: dict, **data: Any) -> dict:
    """WeSpeaker's config.yaml."""
    return {
        "dataset_args": {"frontend": front_end, "resample_rate": 16000, **data},
        "model": model,
        "model_args": model_args,
        "projection_args": {"project_type": "arc_margin"},
    }


W2VBERT = settings(
    "w2vbert",
    "W2VBert_Adapter_MFA",
    {"feat_dim": 32, "embed_dim": 16},
    cmvn=False,
    w2vbert_args={"lora_config_args": {"r": 4, "lora_alpha": 8}},
)
# Case -> small model of tests/pretrained_models.py, its changes, WeSpeaker's config.yaml if any.
CASES: dict[str, tuple[str, dict[str, Any], dict | None]] = {
    "w2vbert_lora": ("w2v_bert", {"apply_spec_augment": False}, W2VBERT),
    "w2vbert": ("w2v_bert", {"apply_spec_augment": False}, W2VBERT),
    "whisper": (
        "whisper",
        {"encoder_ffn_dim": 128, "encoder_layers": 4},
        settings(
            "whisper_encoder",
            "Whisper_PMFA_large_v2",
            {"embed_dim": 16},
            whisper_encoder_args={"layer_st": 1, "layer_ed": 2},
        ),
    ),
    "wavlm": (
        "wavlm_large",
        {},
        settings("s3prl", "ECAPA_TDNN_GLOB_c512", ECAPA, cmvn=True),
    ),
    "unispeech_wavlm": ("wavlm_large", {}, None),
    "unispeech_hubert": ("hubert_large", {}, None),
    "w2vbert_authors": ("w2v_bert", {"apply_spec_augment": False}, None),
}
# Case -> (keys around its tensors, a tensor of its head).
AROUND = {
    "unispeech_wavlm": (("model",), "loss_calculator.projection.weight"),
    "unispeech_hubert": (("model",), "feature_extract.model.final_proj.weight"),
    "w2vbert_authors": (("modules", "spk_model"), None),
}


def write_base(folder: Path, case: str) -> Path:
    """Write the pretrained model of a case; its weights do not matter."""
    name, changes, _ = CASES[case]
    return write_pretrained(folder / "base", name, **changes)


def waves() -> torch.Tensor:
    """Noise (2, S); its frames of 10 ms are even in number."""
    generator = np.random.default_rng(0)
    wave_BS = 0.1 * generator.standard_normal((2, 16000))
    return torch.from_numpy(wave_BS.astype(np.float32))


def checkpoint_of(case: str, **changes: torch.Tensor) -> dict[str, Any]:
    """The checkpoint that the figures of a case were computed with, and a head."""
    stored = np.load(FIGURES)
    keys, head = AROUND.get(case, ((), "projection.weight"))
    tensors = {} if head is None else {head: torch.zeros(5, 16)}
    for line in bytes(stored[f"{case}_state"]).decode().splitlines():
        key, *sizes = line.split()
        tensors[key] = fill(key, tuple(map(int, sizes)), 0)
    content: dict[str, Any] = {**tensors, **changes}
    for key in reversed(keys):
        content = {key: content, "epoch": 3}
    return content


def embeddings_of(case: str) -> torch.Tensor:
    return torch.from_numpy(np.load(FIGURES)[f"{case}_embedding"])
