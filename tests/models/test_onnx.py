"""Every registered model can be exported to ONNX, with its front end: the embeddings are the same.

Exporting takes seconds per layer. `make test` therefore takes models with as few layers as they can
have, except for the `SLOW` ones; `make test-all` every model, and two as they are published.

Letters: B batch, S samples, D embedding.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from members import SMALL
from outside import ARGS, names_of

from speakerlab.config.embedder import Embedder
from speakerlab.frontend.fbank import Fbank
from speakerlab.inference.export import speech_like, write_onnx
from speakerlab.inference.onnx_model import Facts, OnnxModel
from speakerlab.models import MODELS

# Less than SMALL, where a model can have fewer layers.
SHALLOW: dict[str, dict[str, object]] = {
    "campplus": {"blocks": (1, 1, 1), "head_blocks": (1, 1)},
    "ecapa_tdnn": {"scale": 2},
    "eres2net": {"blocks": (1, 1, 1, 1)},
    "eres2netv2": {"blocks": (1, 1, 1, 1)},
    "res2net": {"blocks": (1, 1, 1, 1)},
}

# Half a minute each and more, or like another of their kind: in `make test-all`.
SLOW = {
    *("redimnet", "redimnet2", "eres2netv2", "gemini_dfresnet", "simam_resnet"),
    *("res2net", "ecapa_tdnn", "ecapa_tdnn_wespeaker"),
}


def usually() -> list[Any]:
    """Return the names of all models; the slow ones are marked."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in names_of("model", MODELS)
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
    assert len(write_onnx(embedder, out, facts=facts)) == 7
    model, least = OnnxModel(out, num_threads=1), embedder.min_samples
    silence_BS = np.zeros((1, 20000), np.float32)  # shows what keeps a deviation off zero
    waves = [silence_BS, *(speech_like(rows, least + more) for rows, more in ((1, 0), (3, 7)))]
    for wave_BS in [*waves, speech_like(3, 33333)]:
        with torch.inference_mode():
            wanted_BD = embedder.embed_window(torch.from_numpy(wave_BS)).numpy()
        found_BD = model.embed_window(wave_BS)
        assert found_BD.shape == wanted_BD.shape == (len(wave_BS), embedder.embed_dim)
        assert np.abs(found_BD - wanted_BD).max() < 1e-4 * np.abs(wanted_BD).max(), wave_BS.shape


@pytest.mark.parametrize("name", usually())
def test_the_file_equals_the_model(name, tmp_path):
    check(name, SMALL.get(name, ARGS) | SHALLOW.get(name, {}), tmp_path / "model.onnx")


PUBLISHED = [("campplus", {}), ("eres2net", {})]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "args"), [*((n, SMALL[n]) for n in sorted(SHALLOW)), *PUBLISHED])
def test_the_file_equals_the_model_with_more_layers(name, args, tmp_path):
    check(name, args, tmp_path / "model.onnx")
