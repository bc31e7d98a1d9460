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
    lines = [line.split() for line in bytes(stored["state"]).decode().splitlines()]
    return Figures(
        shapes={key: tuple(map(int, sizes)) for key, *sizes in lines},
        num_parameters=int(stored["num_parameters"]),
        seed=int(stored["seed"]),
        embedding={frames: stored[f"embedding_{frames}"] for frames in FRAMES},
    )


def write_figures(name: str, figures: Figures, *, folder: Path = PARITY) -> None:
    lines = [" ".join([key, *map(str, shape)]) for key, shape in figures.shapes.items()]
    np.savez_compressed(
        folder / f"{name}.npz",
        state=np.frombuffer("\n".join(lines).encode(), np.uint8),
        num_parameters=figures.num_parameters,
        seed=figures.seed,
        embedding_298=figures.embedding[298],
        embedding_137=figures.embedding[137],
    )


def fill(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw the weights of the reference values; each is determined by its name."""
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
    return torch.from_numpy(np.asarray(values, np.float32))


def features(frames: int, seed: int, *, feat_dim: int = 80) -> Tensor:
    """Draw features (2, T, F)."""
    rng = np.random.default_rng([seed, frames])
    return torch.from_numpy(rng.standard_normal((2, frames, feat_dim)).astype(np.float32))


def error(emb_BD: Tensor, expected_BD: np.ndarray) -> float:
    """Return the largest difference over the largest value."""
    return float(np.abs(emb_BD.numpy() - expected_BD).max() / np.abs(expected_BD).max())
