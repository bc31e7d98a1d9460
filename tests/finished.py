"""Weights of finished trainings."""

import torch
from safetensors.torch import load_file
from torch import Tensor

from speakerlab.experiments import train


def finish(training) -> dict[str, Tensor]:
    """Train to the end; return the weights that are published."""
    train.train(training)
    return load_file(training.exp_dir / "model/embedder.safetensors")


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name
