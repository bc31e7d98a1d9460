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

from speakerlab.embedder import Embedder
from speakerlab.frontend.fbank import Fbank
from speakerlab.inference.export import speech_like, write_onnx
from speakerlab.inference.onnx_model import Facts, OnnxModel
from speakerlab.models import MODELS

# Less than SMALL, where a model can have fewer layers.
ONE_LAYER: dict[str, object] = {"blocks": (1, 1, 1, 1)}
SHALLOW: dict[str, dict[str, object]] = {
    "campplus": {"blocks": (1, 1, 1), "head_blocks": (1, 1)},
    "ecapa_tdnn": {"scale": 2},
    "eres2net": ONE_LAYER,
    "eres2netv2": ONE_LAYER,
    "res2net": ONE_LAYER,
}

# Half a minute each and more, or like another of their kind: in `make test-all`.
SLOW = {
    "redimnet",
    "redimnet2",
    "eres2net",
    "eres2netv2",
    "gemini_dfresnet",
    "simam_resnet",
    "res2net",
    "resnet",
    "ecapa_tdnn",
    "ecapa_tdnn_wespeaker",
    "xvector",
}


def usually() -> list[Any]:
    """Return the names of all models; the slow ones are marked."""
    params = []
    for name in names_of("model", MODELS):
        marks = []
        if name in SLOW:
            marks.append(pytest.mark.slow)
        params.append(pytest.param(name, marks=marks))
    return params


def check(name: str, args: dict[str, object], out: Path) -> None:
    """One wave and three, at the fewest samples and at numbers that were not traced."""
    torch.manual_seed(0)
    backbone = MODELS[name](**args)
    embedder = Embedder(frontend=Fbank(), backbone=backbone)
    # Running statistics that are not the initial ones.
    training_BS = torch.from_numpy(speech_like(4, 24000))
    with torch.no_grad():
        embedder.train()(training_BS)
    facts = Facts(
        sample_rate=16000,
        embed_dim=embedder.embed_dim,
        min_samples=embedder.min_samples,
        max_samples=embedder.max_samples,
        sha256="",
        architecture=name,
        frontend={},
    )
    cosines = write_onnx(embedder, out, facts=facts)
    assert len(cosines) == 7

    model = OnnxModel(out, num_threads=1)
    least = embedder.min_samples
    # Silence shows what keeps a deviation off zero.
    silence_BS = np.zeros((1, 20000), np.float32)
    waves = [
        silence_BS,
        speech_like(1, least),
        speech_like(3, least + 7),
        speech_like(3, 33333),
    ]
    for wave_BS in waves:
        with torch.inference_mode():
            expected = embedder.embed_window(torch.from_numpy(wave_BS))
        expected_BD = expected.numpy()
        emb_BD = model.embed_window(wave_BS)
        shape = (len(wave_BS), embedder.embed_dim)
        assert emb_BD.shape == shape
        assert expected_BD.shape == shape
        error_BD = np.abs(emb_BD - expected_BD)
        largest = np.abs(expected_BD).max()
        assert error_BD.max() < 1e-4 * largest, wave_BS.shape


@pytest.mark.parametrize("name", usually())
def test_the_file_equals_the_model(name, tmp_path):
    args = {**SMALL.get(name, ARGS), **SHALLOW.get(name, {})}
    check(name, args, tmp_path / "model.onnx")


DEEPER = [(small_name, SMALL[small_name]) for small_name in sorted(SHALLOW)]
PUBLISHED = [("campplus", {}), ("eres2net", {})]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "args"), DEEPER + PUBLISHED)
def test_the_file_equals_the_model_with_more_layers(name, args, tmp_path):
    check(name, args, tmp_path / "model.onnx")
