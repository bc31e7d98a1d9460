"""Reference values of the published architectures, and the rule that their weights follow.

`tests/parity/NAME.npz`, written by `tests/parity/make.py`, holds the output of the published code
for the member NAME of members.py: `state`, its state dict in order, a line `name size size ...` per
tensor, as UTF-8 bytes; `num_parameters`; `seed`; and for T of 298 and 137 frames `embedding_T` (2,
D), computed in float64 from the weights of `fill` and the input of `features`. Names are the
published ones, and the weights are drawn by them.

Letters: B batch, T frames, F mel bins, D embedding.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PARITY = Path(__file__).parents[1] / "parity"
FRAMES = (298, 137)

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Figures:
    shapes: Shapes  # published name -> shape, in the published order
    num_parameters: int
    seed: int
    embedding: dict[int, np.ndarray]  # frames -> (2, D)


def read_figures(name: str, *, folder: Path = PARITY) -> Figures:
    stored = np.load(folder / f"{name}.npz")
    shapes = {}
    state = bytes(stored["state"]).decode()
    for line in state.splitlines():
        key, *sizes = line.split()
        shapes[key] = tuple(int(size) for size in sizes)
    embedding = {frames: stored[f"embedding_{frames}"] for frames in FRAMES}
    return Figures(
        shapes=shapes,
        num_parameters=int(stored["num_parameters"]),
        seed=int(stored["seed"]),
        embedding=embedding,
    )


def write_figures(name: str, figures: Figures, *, folder: Path = PARITY) -> None:
    lines = []
    for key, shape in figures.shapes.items():
        fields = [key, *map(str, shape)]
        lines.append(" ".join(fields))
    state = "\n".join(lines).encode()
    np.savez_compressed(
        folder / f"{name}.npz",
        state=np.frombuffer(state, np.uint8),
        num_parameters=figures.num_parameters,
        seed=figures.seed,
        embedding_298=figures.embedding[298],
        embedding_137=figures.embedding[137],
    )


def fill(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw the weights of the reference values; each is determined by its name."""
    hash_of_name = zlib.crc32(name.encode())
    rng = np.random.default_rng([seed, hash_of_name])
    if name.endswith("num_batches_tracked"):
        return torch.tensor(0)
    if name.endswith("running_var"):
        values = rng.uniform(0.5, 1.5, shape)
    elif name.endswith(("running_mean", "bias")):
        values = 0.1 * rng.standard_normal(shape)
    elif len(shape) > 1:
        # Kaiming's deviation for ReLU: the square root of 2 / fan-in.
        fan_in = np.prod(shape[1:])
        deviation = np.sqrt(2 / fan_in)
        values = rng.standard_normal(shape) * deviation
    else:
        values = rng.uniform(0.8, 1.2, shape)
    values = np.asarray(values, np.float32)
    return torch.from_numpy(values)


def features(frames: int, seed: int, *, feat_dim: int = 80) -> Tensor:
    """Draw features (2, T, F)."""
    rng = np.random.default_rng([seed, frames])
    feats_BTF = rng.standard_normal((2, frames, feat_dim))
    feats_BTF = feats_BTF.astype(np.float32)
    return torch.from_numpy(feats_BTF)


def error(emb_BD: Tensor, expected_BD: np.ndarray) -> float:
    """Return the largest difference over the largest value."""
    difference = np.abs(emb_BD.numpy() - expected_BD)
    largest = np.abs(expected_BD).max()
    return float(difference.max() / largest)
