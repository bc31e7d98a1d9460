"""Layout, compilation and split heads change no loss beyond rounding: 20 steps in float64."""

import shutil

import pytest
import torch

from speakerlab.config import build
from speakerlab.experiments.corpus import Corpus
from speakerlab.experiments.hardware import choose_kernels
from speakerlab.experiments.train import build_task
from speakerlab.training.distributed import start_ranks
from speakerlab.training.precision import resolve_precision
from speakerlab.training.update import Updater

STEPS = 20
ROWS = 4
FRAMES = 40
CLASSES = 6
# larger, and rounding alone grows tenfold each step
LR = 1e-4


def losses(config) -> list[float]:
    """Return the losses of 20 steps on random features and labels."""
    ranks = start_ranks(timeout_minutes=1)
    corpus = Corpus(None, None, (), ())  # pyright: ignore[reportArgumentType]
    precision = resolve_precision("fp32", ranks.device)
    task = build_task(config, corpus, precision, ranks, num_classes=CLASSES)
    task.double().train()
    choose_kernels(config, task)
    optimizer = torch.optim.SGD(
        task.parameters(),
        lr=LR,
        momentum=0.9,
        fused=True,
    )
    updater = Updater(
        task,
        optimizer,
        device=ranks.device,
        clip_norm=50.0,
        scale_loss=False,
    )
    generator = torch.Generator().manual_seed(0)
    losses_of_steps = []
    for _ in range(STEPS):
        feats_BTF = torch.randn(
            ROWS,
            FRAMES,
            80,
            dtype=torch.float64,
            generator=generator,
        )
        label_B = torch.randint(CLASSES, (ROWS,), generator=generator)
        updater.before_step()
        output = task(feats_BTF, label_B, 0.1)
        output.loss.backward()
        updater.step(LR)
        losses_of_steps.append(output.loss.item())
    return losses_of_steps


@pytest.mark.parametrize(
    "setting",
    [
        "runtime.channels_last=true",
        pytest.param("runtime.split_head=on", marks=pytest.mark.slow),
        pytest.param(
            "runtime.compile=true",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    shutil.which("g++") is None, reason="needs a C++ compiler"
                ),
            ],
        ),
    ],
)
def test_losses_stay_the_same(make_config, setting):
    plain = losses(make_config())
    other = losses(make_config(setting))
    assert len(set(plain)) == STEPS
    assert other == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize(("channels", "is_last"), [(8, False), (16, True)])
def test_on_a_cpu_few_channels_are_not_last(make_config, channels, is_last):
    config = make_config(f"model.args.head_channels={channels}")
    precision = resolve_precision("fp32", "cpu")
    task = build.build_task(config, num_classes=CLASSES, precision=precision)
    choose_kernels(config, task)
    weights = []
    for parameter in task.parameters():
        # a weight with one channel is in both layouts
        if parameter.dim() == 4 and min(parameter.shape) > 1:
            weights.append(parameter)
    assert weights
    for weight in weights:
        assert weight.is_contiguous(memory_format=torch.channels_last) == is_last
