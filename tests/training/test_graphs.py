"""Training by CUDA graphs, emulated on a CPU, is training without them, bit for bit."""

import importlib
import itertools
import logging
import threading
from typing import Any

import pytest
import torch
from emulated_graphs import emulate, is_recording
from graphed_training import ACCUMULATION, CPU, STEPS, Trained, make, require_equal
from refusals import refuses
from torch import nn

from speakerlab.config import build
from speakerlab.experiments import setup
from speakerlab.losses import HEADS
from speakerlab.losses.margin import AAMSoftmax
from speakerlab.models import MODELS
from speakerlab.training.distributed import Ranks
from speakerlab.training.graphs import Graphed, graph_task
from speakerlab.training.precision import Precision
from speakerlab.training.rescue import OutOfMemoryStop


@pytest.fixture(autouse=True)
def emulated(monkeypatch, request):
    if not request.node.get_closest_marker("gpu"):
        emulate(monkeypatch)


BACKBONES = sorted(MODELS.keys() - {"redimnet"})  # redimnet2 has its blocks


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "fp32") for name in BACKBONES), ("campplus", "bf16"), ("eres2net", "bf16")],
)
def test_every_model(name, precision):
    trained = Trained(make(name), precision).use_graphs()
    expected = Trained(make(name), precision).run()
    require_equal(trained.run(), expected)
    assert trained.graphed.num_calls == (STEPS - 1) * ACCUMULATION
    assert trained.graphed.graph is not None
    assert len({sums[0] for sums in expected[0]}) == STEPS


@pytest.mark.parametrize("name", sorted(HEADS))
def test_every_head(name):
    margin = 0.3 if HEADS[name].takes_margin else 0
    config = make("xvector", f"head.name={name}", f"training.margin.final={margin}")
    require_equal(Trained(config).use_graphs().run(), Trained(config).run())


def test_with_a_loss_scale():
    trained, plain = (Trained(make(), "fp16") for _ in range(2))
    require_equal(trained.use_graphs().run(), plain.run())
    assert float(plain.trainer.updater.loss_scale) > 1


def bake_the_margin(trained, monkeypatch):
    def add_gradients(feats_BTF, label_B, margin):
        return add(feats_BTF, label_B, float(trained.trainer.schedule.margin_at(trained.step)))

    trained.step, add = 1, trained.trainer.graphed.graphed.function
    trained.trainer.graphed.graphed.function = add_gradients


def count_on_the_host(trained, monkeypatch):
    calls, harden = itertools.count(), AAMSoftmax.harden
    monkeypatch.setattr(AAMSoftmax, "harden", lambda *args: harden(*args) * (1 + next(calls) / 9))


def forget_the_gradients(trained, monkeypatch):
    monkeypatch.setattr(Graphed, "_restore_gradients", lambda self: None)


@pytest.mark.parametrize("plant", [bake_the_margin, count_on_the_host, forget_the_gradients])
def test_planted_bugs(plant, monkeypatch):
    expected = Trained(make()).run()
    trained = Trained(make()).use_graphs()
    plant(trained, monkeypatch)
    with pytest.raises(AssertionError):
        require_equal(trained.run(), expected)
    assert trained.graphed.graph is not None


def test_a_step_with_a_nan_is_skipped():
    """Its gradients are not finite; those of the next step begin at zero again."""
    found = []
    for trained in (Trained(make()).use_graphs(), Trained(make())):
        trained.run(3)
        trained.batches[0].feats_BTF[1, 2, 3] = float("nan")
        trained.run(1)
        trained.batches[0].feats_BTF[1, 2, 3] = 0.0
        found.append((trained.run(2), int(trained.trainer.updater.skipped)))
    require_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == 1


def test_parameters_without_a_gradient_are_not_decayed():
    found = []
    for trained in (Trained(make()), Trained(make())):
        trained.task.embedder.register_parameter("unused", nn.Parameter(torch.ones(3)))
        found.append(trained)
    found[0].use_graphs()
    require_equal(*(trained.run() for trained in found))


def test_a_roll_back_to_frozen_steps(tmp_path):
    """Weights return, and the gradients of all but the head are gone for a step."""
    found = []
    for name in ("graphs", "plain"):
        trained = Trained(make(), folder=tmp_path / name)
        if name == "graphs":
            trained.use_graphs()
        trained.run()
        trained.trainer.state.roll_back()
        assert trained.trainer.state.step == 0
        found.append(trained.run())
    require_equal(*found)


def test_a_resumed_training(tmp_path):
    whole = Trained(make()).run()
    trained = Trained(make(), folder=tmp_path).use_graphs()
    trained.run(3)
    trained.trainer.state.save(scheduled=True, valid=None)
    trained.trainer.state.wait()
    trained = Trained(make(), folder=tmp_path).use_graphs()
    for _ in range(3 * ACCUMULATION):
        next(trained.trainer.inputs.batches)
    sums, state = trained.run(2)
    require_equal((sums, state), (whole[0][3:], whole[1]))


def test_out_of_memory_beside_a_graph_saves_the_state_before_the_step(tmp_path):
    expected = Trained(make()).run(4)
    trained = Trained(make(), folder=tmp_path).use_graphs()
    trained.run(4)
    trained.trainer.rescue.exp_dir = tmp_path
    features, calls = trained.task.features, itertools.count()

    def too_large(*args):
        if next(calls) == 1:  # the statistics have moved
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return features(*args)

    trained.task.features = too_large
    with pytest.raises(OutOfMemoryStop):
        trained.run(1)
    resumed = Trained(make(), folder=tmp_path)
    assert resumed.trainer.state.step == 4
    require_equal(([], resumed.task.state_dict()), ([], expected[1]))


@pytest.mark.parametrize("error", [RuntimeError("not permitted"), MemoryError("out of memory")])
def test_a_capture_that_fails_ends_the_training(error, monkeypatch):
    def refuse(*args):
        if is_recording():
            raise error
        return harden(*args)

    harden = AAMSoftmax.harden
    monkeypatch.setattr(AAMSoftmax, "harden", refuse)
    with refuses("runtime.cuda_graph", str(error)):
        Trained(make()).use_graphs().run()


def test_a_host_read_fails_the_capture(monkeypatch):
    def read(self, cos, margin):
        assert float(cos.detach().max()) < 2
        return harden(self, cos, margin)

    harden = AAMSoftmax.harden
    monkeypatch.setattr(AAMSoftmax, "harden", read)
    with refuses("runtime.cuda_graph", "stream is capturing"):
        Trained(make()).use_graphs().run()


@pytest.mark.parametrize(
    ("words", "where", "reason"),
    [
        ([], {"device": "cpu"}, "no GPU"),
        ([], {"world_size": 2}, "ranks"),
        (["training.sampled_share=0.5"], {}, "samples classes"),
        (["runtime.split_head=on"], {}, "split"),
        (["runtime.compile=true"], {}, "runtime.compile"),
        (["model.max_seconds=0.4"], {}, "max_seconds"),
        ([], {}, ""),
    ],
)
def test_why_not(words, where, reason, caplog, monkeypatch):
    """`auto` logs the reason in one line, `on` refuses."""
    caplog.set_level(logging.INFO)
    config = make("campplus", *words)
    values = {"rank": 0, "world_size": 1, "local_size": 1, "device": "cuda", **where}
    ranks = Ranks(**{**values, "device": torch.device(values["device"])})
    alone = Ranks(0, 1, 1, CPU)
    task = build.build_task(
        config,
        num_classes=10,
        precision=Precision("fp32", "cpu", "tested"),
        shards=alone if build.is_head_split(config, 1, 10) else None,
    )
    setup.choose_kernels(config, task)
    updater: Any = None
    how = {"accumulation": 1, "crop_samples": build.crop_samples(config)}
    assert graph_task("off", task, updater, ranks, **how) is None and not caplog.records
    graphed = graph_task("auto", task, updater, ranks, **how)
    assert (graphed is None) == bool(reason)
    (record,) = caplog.records
    assert record.levelname == "INFO" and reason in record.message
    if reason:
        with refuses("runtime.cuda_graph", "on"):
            graph_task("on", task, updater, ranks, **how)
    else:
        assert graph_task("on", task, updater, ranks, **how) is not None


def test_the_benchmark_of_models():
    """It has steps of its own, with which speed is measured."""
    found, models = [], importlib.import_module("models")
    for uses_graph in (False, True):
        words = ["model.args.blocks=[1,1,1]", "runtime.cuda_graph=on"]
        ours = models.Ours("campplus", -1, "cpu", (2, 40), words)
        ours.prepare("train", "bf16")
        assert not isinstance(ours.add_gradients, Graphed)  # on a CPU
        if uses_graph:
            parameters = [*ours.model.parameters(), ours.head_CD]
            ours.add_gradients = Graphed(ours.compute_gradients, parameters)
        for _ in range(6):
            ours.step("train", "bf16")
        found.append(ours.head_CD.clone())
        assert not uses_graph or ours.add_gradients.graph
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(("campplus", precision) for precision in ("fp32", "bf16", "fp16")),
        *(("eres2net", "bf16"), ("ecapa_tdnn", "bf16")),
    ],
)
def test_on_a_gpu(name, precision):
    """Another thread allocates meanwhile, as the one that pins batches does."""
    ended = threading.Event()

    def pin() -> None:
        for size in itertools.count(1):
            torch.empty(size << 12, pin_memory=True)
            if ended.wait(0.001):
                break

    gpu = torch.device("cuda", 0)
    flags = {"enabled": True, "benchmark": False, "deterministic": True, "allow_tf32": False}
    with torch.backends.cudnn.flags(**flags):
        expected = Trained(make(name), precision, device=gpu).run(8)
        trained = Trained(make(name), precision, device=gpu).use_graphs()
        thread = threading.Thread(target=pin)
        thread.start()
        found = trained.run(8)
        ended.set()
        thread.join()
    assert trained.graphed.graph is not None
    losses = [[sums[0] for sums in steps] for steps, _ in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
