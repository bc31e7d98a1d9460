"""What a training does to a GPU, observed on a CPU."""

from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speakerlab.checkpoints.published import INITIAL
from speakerlab.experiments import train
from speakerlab.experiments.hardware import start_rank
from speakerlab.training.signals import Signals


class Convolutions(TorchDispatchMode):
    """Counts convolutions by their shapes: those that cuDNN would autotune, and the others."""

    def __init__(self) -> None:
        super().__init__()
        self.found = {
            True: Counter[tuple[str, ...]](),
            False: Counter[tuple[str, ...]](),
        }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if "conv" in name:
            shapes = [str(tuple(arg.shape)) for arg in args if isinstance(arg, Tensor)]
            is_autotuned = torch.backends.cudnn.benchmark
            self.found[is_autotuned][(name, *shapes)] += 1
        return func(*args, **kwargs or {})


def test_convolutions_of_varying_shapes_are_not_autotuned(
    make_config, make_data_dir, tmp_path
):
    """Resampling has another number of rows in each batch, validation another length."""
    folder = make_data_dir(speakers=range(6), seconds=[0.6, 0.7, 0.8])
    sets = [
        f"data.dir={folder.parent}",
        "data.crop_seconds=0.5",
        "data.valid_speakers=2",
    ]
    sets += [
        "training.global_batch=8",
        "training.num_epochs=4",
        "runtime.num_workers=0",
    ]
    sets += ["augment.noise_prob=0", "augment.room_prob=0", "runtime.device=cpu"]
    config = make_config(*sets)
    ranks = start_rank(config)
    training = train.start_training(
        tmp_path / "exp", None, config, ranks, Signals(print)
    )
    with Convolutions() as convolutions:
        train.train(training)
    tuned = convolutions.found[True]
    others = convolutions.found[False]
    assert min(tuned.values()) >= 4  # in every step of the training
    assert len(tuned) > 20
    assert len(others) > 20
    assert not tuned.keys() & others.keys()
    assert torch.backends.cudnn.benchmark


def test_a_new_run_forgets_the_initial_weights_of_an_earlier_one(
    make_config, make_data_dir, tmp_path
):
    """A run with --init that ended before its first checkpoint; the next has no --init."""
    folder = make_data_dir(speakers=range(6), seconds=[0.6, 0.7, 0.8])
    config = make_config(
        f"data.dir={folder.parent}",
        "data.crop_seconds=0.5",
        "data.valid_speakers=2",
        "training.global_batch=8",
        "runtime.num_workers=0",
        "runtime.device=cpu",
        "augment.noise_prob=0",
        "augment.room_prob=0",
    )
    exp = tmp_path / "exp"
    exp.mkdir()
    (exp / INITIAL).touch()
    train.start_training(exp, None, config, start_rank(config), Signals(print))
    assert not (exp / INITIAL).exists()
