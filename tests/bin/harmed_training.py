"""`speakerlab train` whose first convolution misbehaves on one rank: run by the tests.

harmed_training.py HARM RANK FIRST LAST <options of speakerlab train>: the steps FIRST to LAST are
hit, of the first attempt only where HARM ends in `-once`. HARM: nan, inf, full (out of memory in
the forward pass), full-back (in the backward pass); in the validation after these steps:
valid-inf, valid-stop (a SIGTERM).
"""

import os
import signal
import sys

import torch

from speakerlab.bin import train as command
from speakerlab.bin.command import run
from speakerlab.experiments import train
from speakerlab.experiments.train import Training, build_training

harm, rank, first, last = sys.argv[1], *map(int, sys.argv[2:5])
is_once, harm = harm.endswith("-once"), harm.removesuffix("-once")


def run_out_of_memory(_gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory, said the test")


def harmed(*args, **more) -> Training:
    training = build_training(*args, **more)
    trainer = training.trainer
    class Now:
        def __getattr__(self, name):
            return getattr(trainer.state if hasattr(trainer, "state") else trainer.keeper.progress, name)
    state = Now()
    before: dict[str, torch.Tensor] = {}

    def watch(module, _inputs):
        """See that bad steps leave weights and statistics as they were."""
        if harm != "nan" or not module.training or state.step not in (first, last + 1):
            return
        now = {**training.embedder.state_dict(), **training.head.state_dict()}
        if state.step == first and not before:
            before.update({name: value.clone() for name, value in now.items()})
        elif state.step > last:
            assert all(torch.equal(value, before[name]) for name, value in now.items())
            before.update(now)

    def hook(module, _inputs, out):
        is_hit = first <= state.step <= last and int(os.environ.get("RANK", 0)) == rank
        is_hit &= not (is_once and state.attempt)
        if not is_hit or module.training == harm.startswith("valid"):
            return out
        if harm in ("nan", "inf"):
            # one crop, at the front: the statistics of every BatchNorm behind it are harmed too
            rows = torch.arange(len(out)).view(-1, *[1] * (out.dim() - 1)) == 0
            return out.masked_fill(rows, float(harm))
        if harm == "valid-inf":
            return out * float("inf")
        if harm == "valid-stop":
            os.kill(os.getpid(), signal.SIGTERM)
        elif harm == "full":
            run_out_of_memory(out)
        else:
            out.register_hook(run_out_of_memory)
        return out

    convolution = next(m for m in training.embedder.modules() if isinstance(m, torch.nn.Conv2d))
    convolution.register_forward_pre_hook(watch)
    convolution.register_forward_hook(hook)
    return training


train.build_training = harmed
try:
    from speakerlab.bin import training as old

    old.build_training = harmed
except ImportError:
    pass
run(command.main, sys.argv[5:])
