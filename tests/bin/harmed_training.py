"""`speakerlab train` whose first convolution misbehaves on one rank: run by the tests.

harmed_training.py HARM RANK FIRST LAST <options of speakerlab train>: the steps FIRST to LAST are
hit, of the first attempt only where HARM ends in `-once`. HARM: nan, inf, full (out of memory in
the forward pass), full-back (in the backward pass); in the validation after these steps:
valid-full, valid-inf, valid-stop (a SIGTERM).
"""

import os
import signal
import sys

import torch

from speakerlab.bin import train as command
from speakerlab.bin.command import run
from speakerlab.experiments import train
from speakerlab.experiments.train import Training, start_training

harm: str
rank: int
first: int
last: int
is_once: bool


def run_out_of_memory(_gradient: torch.Tensor) -> None:
    if torch.cuda.is_available():  # nothing is left from here on
        torch.cuda.set_per_process_memory_fraction(0.0)
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    raise torch.OutOfMemoryError("CUDA out of memory, made up by a test")


def poison(out: torch.Tensor) -> torch.Tensor:
    """Harm one crop, at the front: the statistics of every BatchNorm behind it are harmed too."""
    rows = torch.arange(len(out)).view(-1, *[1] * (out.dim() - 1)) == 0
    return out.masked_fill(rows, float(harm))


def stop(out: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


HARMS = {
    "nan": poison,
    "inf": poison,
    "full": run_out_of_memory,
    "full-back": lambda out: out.register_hook(run_out_of_memory) and None,
    "valid-full": run_out_of_memory,
    "valid-inf": lambda out: out * float("inf"),
    "valid-stop": stop,
}


def harmed(*args, **options) -> Training:
    training = start_training(*args, **options)
    state = training.trainer.state

    def change(module, _inputs, out):
        is_on_rank = int(os.environ.get("RANK", 0)) == rank
        is_in_range = first <= state.step <= last
        is_too_late = is_once and state.attempt > 0
        has_begun = hasattr(training.trainer, "inputs")
        is_in_phase = module.training != harm.startswith("valid")
        is_hit = is_on_rank and is_in_range and has_begun and is_in_phase
        if is_hit and not is_too_late:
            return HARMS[harm](out)
        return None

    modules = training.embedder.backbone.modules()
    kinds = (torch.nn.Conv1d, torch.nn.Conv2d)
    convolutions = [m for m in modules if isinstance(m, kinds)]
    convolutions[0].register_forward_hook(change)
    return training


def install(harm_name: str, on_rank: str, from_step: str, to_step: str) -> None:
    """Harm the trainings of this process."""
    global harm, rank, first, last, is_once
    harm = harm_name.removesuffix("-once")
    is_once = harm_name.endswith("-once")
    rank = int(on_rank)
    first = int(from_step)
    last = int(to_step)
    train.start_training = harmed


if __name__ == "__main__":
    install(*sys.argv[1:5])
    run(command.main, sys.argv[5:])
