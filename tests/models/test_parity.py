"""The published architectures: parameter names, shapes, counts, and the embeddings they must give.

`tests/parity/NAME.npz` holds the state dict's `names` and `shapes` (in order), `num_parameters`,
`seed`, and `embedding_T` (2, D) for T of 298 and 137 frames. It was made from the names and shapes
in ../shared/data/parity/NAME.json, which are those of the 3D-Speaker project (Apache-2.0): its
published model code was filled by the rule below and run in float64, and the result stored as
float32.

Why float64: with these random weights ERes2Net amplifies rounding. The published code in fp32 is up
to 2e-4 away from itself in float64, and so are the fp32 figures in ../shared. Against exact figures
a wrong detail shows, however small.

Errors here are the largest difference over the largest value.
"""

import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from speakerlab.models import MODELS

PARITY = Path(__file__).parents[1] / "parity"
SHARED = Path(os.environ.get("SPEAKERLAB_SHARED", Path(__file__).parents[3] / "shared"))

# name -> (model, arguments, error allowed in fp32)
PUBLISHED = {
    "campplus": ("campplus", {"embed_dim": 512}, 1e-5),
    "campplus_192": ("campplus", {"embed_dim": 192}, 1e-5),
    "eres2net_base": ("eres2net", {"embed_dim": 192, "m_channels": 32}, 5e-4),
    "eres2net_large": ("eres2net", {"embed_dim": 512, "m_channels": 64}, 5e-4),
}
FRAMES = (298, 137)


def fill(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The weights that the published figures were computed with; each follows from its name."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("num_batches_tracked"):
        return torch.tensor(0)
    if name.endswith("running_var"):
        values = rng.uniform(0.5, 1.5, shape)
    elif name.endswith(("running_mean", "bias")):
        values = 0.1 * rng.standard_normal(shape)
    elif len(shape) > 1:
        values = rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
    else:
        values = rng.uniform(0.8, 1.2, shape)
    return torch.from_numpy(values.astype(np.float32))


def features(frames: int, seed: int) -> Tensor:
    rng = np.random.default_rng([seed, frames])
    return torch.from_numpy(rng.standard_normal((2, frames, 80)).astype(np.float32))


def published_shapes(figures) -> dict[str, tuple[int, ...]]:
    rows = zip(figures["names"].tolist(), figures["shapes"].tolist())
    return {name: tuple(map(int, shape.split())) for name, shape in rows}


def build(name: str) -> nn.Module:
    model, args, _ = PUBLISHED[name]
    return MODELS[model](**args).eval()


def filled(name: str) -> nn.Module:
    figures = np.load(PARITY / f"{name}.npz")
    seed = int(figures["seed"])
    model = build(name)
    model.load_state_dict({k: fill(k, s, seed) for k, s in published_shapes(figures).items()})
    return model


def error(emb_BD: Tensor, expected_BD: np.ndarray) -> float:
    return float(np.abs(emb_BD.numpy() - expected_BD).max() / np.abs(expected_BD).max())


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_shapes_and_count_are_as_published(name):
    figures = np.load(PARITY / f"{name}.npz")
    model = build(name)
    ours = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert list(ours.items()) == list(published_shapes(figures).items())
    assert sum(p.numel() for p in model.parameters()) == figures["num_parameters"]


def test_parameter_counts():
    counts = {name: int(np.load(PARITY / f"{name}.npz")["num_parameters"]) for name in PUBLISHED}
    assert counts == {
        "campplus": 7_176_224,
        "campplus_192": 6_848_544,
        "eres2net_base": 6_610_688,
        "eres2net_large": 29_016_704,
    }


@pytest.mark.parametrize("name", PUBLISHED)
@torch.no_grad()
def test_embeddings_are_as_published(name):
    figures = np.load(PARITY / f"{name}.npz")
    seed = int(figures["seed"])
    model = filled(name)
    for frames in FRAMES:
        emb_BD = model(features(frames, seed))
        assert error(emb_BD, figures[f"embedding_{frames}"]) < PUBLISHED[name][2]
    model.double()
    for frames in FRAMES[1:] if name == "eres2net_large" else FRAMES:  # the long one takes 10 s
        emb_BD = model(features(frames, seed).double())
        assert error(emb_BD, figures[f"embedding_{frames}"]) < 2e-6


@pytest.mark.parametrize("name", PUBLISHED)
def test_stored_figures_are_the_shared_ones(name):
    shared = SHARED / "data" / "parity" / f"{name}.npz"
    if not shared.exists():
        pytest.skip(f"{shared} is not here")
    ours, theirs = np.load(PARITY / f"{name}.npz"), np.load(shared)
    allowed = 1e-6 if name.startswith("campplus") else 2e-4  # rounding of fp32; see the top
    for frames in FRAMES:
        key = f"embedding_{frames}"
        assert error(torch.from_numpy(ours[key]), theirs[key]) < allowed
