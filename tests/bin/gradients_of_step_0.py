"""Write the gradients of step 0 of a training to a file: run by the tests, alone or by torchrun.

gradients_of_step_0.py OUT EXP --config YAML --set key=value ...
"""

import sys
from pathlib import Path

import numpy as np

from speakerlab.bin import train
from speakerlab.core.process import leave
from speakerlab.experiments.consistency import load
from speakerlab.experiments.train import build_training
from speakerlab.training.distributed import start_ranks
from speakerlab.training.signals import Signals


def main() -> None:
    out, exp = map(Path, sys.argv[1:3])
    args = train.parse(["--exp", str(exp), *sys.argv[3:]])
    exp.mkdir(parents=True, exist_ok=True)
    config = load(exp, args.config, args.set)
    ranks = start_ranks(timeout_minutes=1)
    trainer = build_training(exp, None, config, ranks, Signals(leave)).trainer
    gradients = trainer.gradients
    gradients.join(trainer.updater.guard)
    gradients.make(0, trainer.inputs(0), margin=0.2)
    parameters = dict(gradients.task.named_parameters())
    grads = {name: p.grad.numpy() for name, p in parameters.items() if p.grad is not None}
    if ranks.is_first:
        np.savez(out, **grads)
    ranks.barrier("written")
    leave(0)


if __name__ == "__main__":
    main()
