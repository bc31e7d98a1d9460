"""Small pretrained models with random weights, as Hugging Face stores them."""

from pathlib import Path
from typing import Any

import pytest
import torch

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
CONVOLUTIONS: dict[str, Any] = {
    "conv_dim": (16, 16, 16, 16, 16, 16, 16),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
# As Large models have it: each layer normalises its input.
STABLE: dict[str, Any] = {
    **CONVOLUTIONS,
    "do_stable_layer_norm": True,
    "feat_extract_norm": "layer",
}
WHISPER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# Name -> class of transformers, and its arguments.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "wav2vec2": ("Wav2Vec2", {**SMALL, **CONVOLUTIONS}),
    "wav2vec2_large": ("Wav2Vec2", {**SMALL, **STABLE}),
    "hubert": ("Hubert", {**SMALL, **CONVOLUTIONS}),
    "hubert_large": ("Hubert", {**SMALL, **STABLE}),
    "wavlm": ("WavLM", {**SMALL, **CONVOLUTIONS}),
    "wavlm_large": ("WavLM", {**SMALL, **STABLE}),
    "w2v_bert": ("Wav2Vec2Bert", SMALL),
    "whisper": ("Whisper", WHISPER),
}
LARGE = ("wav2vec2_large", "hubert_large", "wavlm_large")


def write_pretrained(folder: Path, name: str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a model of `MODELS` with random weights; return its folder."""
    transformers = pytest.importorskip("transformers")
    kind, args = MODELS[name]
    torch.manual_seed(seed)
    settings = getattr(transformers, f"{kind}Config")(**{**args, **changes})
    model = getattr(transformers, f"{kind}Model")(settings)
    # Random weights of transformers are so small that every layer would compute nearly nothing.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5 / parameter[0].numel() ** 0.5)
    model.save_pretrained(folder)

    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=name in LARGE)
    if name == "w2v_bert":
        extractor = transformers.SeamlessM4TFeatureExtractor()
    if name == "whisper":
        extractor = transformers.WhisperFeatureExtractor()
    extractor.save_pretrained(folder)
    return folder
