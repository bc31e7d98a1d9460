"""What every registered model must show that leaves as ONNX: it gives the same embeddings.

Letters: B batch, S samples, D embedding.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speakerlab.config.embedder import Embedder
from speakerlab.frontend.fbank import Fbank
from speakerlab.inference.export import speech_like, write_onnx
from speakerlab.inference.onnx_model import Facts, OnnxModel
from speakerlab.models import MODELS

# Less than SMALL, where a model can have fewer layers.
SHALLOW: dict[str, dict[str, object]] = {
    "campplus": {"blocks": (1, 1, 1), "head_blocks": (1, 1)},
    "ecapa_tdnn": {"scale": 2},
    "ecapa_tdnn_wespeaker": {},
    "eres2net": {"blocks": (1, 1, 1, 1)},
    "eres2netv2": {"blocks": (1, 1, 1, 1)},
    "gemini_dfresnet": {},
    "redimnet": {},
    "res2net": {"blocks": (1, 1, 1, 1)},
    "resnet": {},
    "simam_resnet": {},
    "xvector": {},
}

# Exported in turn by another process than the rest.
RESIDUAL = {"eres2net", "eres2netv2", "gemini_dfresnet", "res2net", "simam_resnet"}

# Half a minute each and more, or like another of their kind: in `make test-all`.
SLOW = {
    *("redimnet", "eres2netv2", "gemini_dfresnet", "simam_resnet"),
    *("res2net", "ecapa_tdnn", "ecapa_tdnn_wespeaker"),
}


def usually(names: Iterable[str]) -> list[Any]:
    """Parameters of a test over the names, in order."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in sorted(names)
    ]


def check(name: str, args: dict[str, object], out: Path) -> None:
    """One wave and three, at the fewest samples and at numbers that were not traced."""
    torch.manual_seed(0)
    embedder = Embedder(fbank=Fbank(), backbone=MODELS[name](**args))
    with torch.no_grad():  # running statistics that are not the initial ones
        embedder.train()(torch.from_numpy(speech_like(4, 24000)))
    facts = Facts(
        sample_rate=16000,
        embed_dim=embedder.embed_dim,
        min_samples=embedder.min_samples,
        max_samples=embedder.max_samples,
        sha256="",
        architecture=name,
        frontend={},
    )
    compared = write_onnx(embedder, out, facts=facts)
    assert compared[0].num_samples == embedder.min_samples and len(compared) >= 6
    assert max(row.error for row in compared) < 1e-4
    model, least = OnnxModel(out, num_threads=1), embedder.min_samples
    silence_BS = np.zeros((1, 20000), np.float32)  # shows what keeps a deviation off zero
    waves = [silence_BS, *(speech_like(rows, least + more) for rows, more in ((1, 0), (3, 7)))]
    for wave_BS in [*waves, speech_like(3, 33333)]:
        with torch.inference_mode():
            wanted_BD = embedder.embed_window(torch.from_numpy(wave_BS)).numpy()
        found_BD = model.embed_window(wave_BS)
        assert found_BD.shape == wanted_BD.shape == (len(wave_BS), embedder.embed_dim)
        assert np.abs(found_BD - wanted_BD).max() < 1e-4 * np.abs(wanted_BD).max(), wave_BS.shape
