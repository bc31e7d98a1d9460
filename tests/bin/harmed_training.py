"""`speakerlab train` with harm done in the forward or backward pass of one rank: run by the tests.

harmed_training.py HARM RANK FIRST LAST <words of speakerlab train>: the steps FIRST to LAST are
hit, of the first attempt only where HARM ends in `-once`. HARM: nan, inf, full (out of memory in
the forward pass), full-back (in the backward pass).
"""

import os
import sys

import torch

from speakerlab.bin import train
from speakerlab.bin import training as train_run
from speakerlab.bin.command import run
from speakerlab.experiments.train import Training, build_training

harm, rank, first, last = sys.argv[1], *map(int, sys.argv[2:5])
harm = harm.removesuffix("-once")
VALUES = {"nan": float("nan"), "inf": float("inf")}


def refuse(_gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory, said the test")


def harmed(*args, **more) -> Training:
    """A training whose first convolution does what was asked for."""
    training = build_training(*args, **more)
    trainer = training.trainer

    def hook(module, _inputs, out):
        progress = trainer.keeper.progress
        is_hit = first <= progress.step <= last and int(os.environ.get("RANK", 0)) == rank
        if not module.training or not is_hit or ("-once" in sys.argv[1] and progress.attempt):
            return out
        if harm in VALUES:
            # one crop, at the front: the statistics of every BatchNorm behind it are poisoned too
            rows = torch.arange(len(out)).view(-1, *[1] * (out.dim() - 1)) == 0
            return out.masked_fill(rows, VALUES[harm])
        if harm == "full":
            refuse(out)
        out.register_hook(refuse)
        return out

    convolution = next(m for m in training.embedder.modules() if isinstance(m, torch.nn.Conv2d))
    convolution.register_forward_hook(hook)
    return training


train_run.build_training = harmed
run(train.main, sys.argv[5:])
