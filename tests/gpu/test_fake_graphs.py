"""What a CUDA graph captures, on tensors without data: nothing of a single step (fake_gpu.py).

The captured part of every model, head and precision reads nothing, uploads nothing, and launches
the same kernels with the same numbers in each step, though margin and learning rate differ.
"""

import itertools
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import fake_gpu
import launches
from fake_kernels import Fault
from test_fake_gpu import CROPS, every_precision, make, skip_where_torch_differs

from speakerlab.losses import HEADS
from speakerlab.losses.margin import AAMSoftmax
from speakerlab.models import MODELS
from speakerlab.training import graphs
from speakerlab.training.graphs import GraphedTask, why_not

__all__ = ["skip_where_torch_differs"]  # a fixture


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch) -> None:
    monkeypatch.setattr(graphs, "WARM_UP", 1)


def capture(config, precision: str) -> list[list[str]]:
    """Return what the first step launches, and what is captured in the second."""
    task = launches.build_task(config, precision)
    batch = launches.draw_batch(config, task, CROPS)
    feats_BTF = torch.zeros(CROPS, 98, task.embedder.fbank.num_mel_bins)
    batch = batch._replace(feats_BTF=feats_BTF, draws={})
    found = list[list[str]]()
    with fake_gpu.fake_gpu() as gpu:
        fake_gpu.to_gpu(task)
        trainer = launches.build_trainer(config, task, launches.on_host(batch), frozen=0)
        assert not why_not(task, trainer.ranks, trainer.crop_samples)
        trainer.graphed = GraphedTask(task, trainer.updater, accumulation=1)
        graphed = trainer.graphed.graphed
        function = graphed.function

        def record(*inputs):
            found.append([])
            gpu.recorded = found[-1]
            output = function(*inputs)
            gpu.recorded = None
            return output

        graphed.function = record
        for parameter in task.parameters():  # else the first step would not add to them
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(2):
            gpu.begin_step()
            gpu.launches.clear()
            trainer.train_step()
    assert not gpu.launches["step/backward"] and gpu.launches["step/replay"] < 12
    return found


def require_alike(found: list[list[str]]) -> None:
    warm_up, captured = found
    assert len(captured) > 100
    assert warm_up == captured


@every_precision
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"redimnet"}))  # redimnet2 has its blocks
def test_every_model(name, precision):
    require_alike(capture(make(name), precision))


@pytest.mark.parametrize("name", sorted(HEADS))
def test_every_head(name):
    margin = 0.2 if HEADS[name].takes_margin else 0
    config = make("xvector", f"head.name={name}", f"training.margin.final={margin}")
    require_alike(capture(config, "bf16"))


def host_read(self, cos, margin):
    return cos * float(cos.detach().max())


def upload(self, cos, margin):
    return cos * torch.tensor([0.5]).to(cos.device, non_blocking=True)


def memory_in_use(self, cos, margin):
    return cos / max(torch.cuda.memory_allocated(), 1)


def number_on_the_host(self, cos, margin):
    return cos * torch.tensor(0.5)


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (host_read, "host read"),
        (upload, "upload"),
        (memory_in_use, "host read"),
        (number_on_the_host, "capture"),  # without a capture it is allowed
    ],
)
def test_planted_bugs(planted, found, monkeypatch):
    monkeypatch.setattr(AAMSoftmax, "harden", planted)
    with pytest.raises((Fault, ValueError)) as caught:
        capture(make(), "fp32")
    assert f"{found}: " in str(caught.value)


def test_a_number_that_changes_is_found(monkeypatch):
    harden, calls = AAMSoftmax.harden, itertools.count(1)

    def counted(self, cos, margin):
        return harden(self, cos, margin) * next(calls)

    monkeypatch.setattr(AAMSoftmax, "harden", counted)
    with pytest.raises(AssertionError, match="mul"):
        require_alike(capture(make(), "fp32"))
