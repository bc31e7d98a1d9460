"""Training steps on tensors without data: what a GPU would reject or wait for (fake_gpu.py).

Every model, head and precision takes steps in the trainer, with every augmentation.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[1] / "models"))

import fake_gpu
import launches
from fake_backward import Hooks
from fake_gpu import GPU
from fake_kernels import Fault, Kernels, list_launches
from members import SMALL

from speakerlab.config.schema import Config, load_config
from speakerlab.frontend.augment import AUGMENTATIONS
from speakerlab.frontend.augment.codec import Codec
from speakerlab.frontend.augment.specaugment import SpecAugment
from speakerlab.frontend.augment.telephone import Telephone
from speakerlab.losses import HEADS
from speakerlab.losses.margin import AAMSoftmax
from speakerlab.models import MODELS
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import DTYPES
from speakerlab.training.sync_batchnorm import join_batchnorms
from speakerlab.training.task import Inputs
from speakerlab.training.update import OPTIMIZERS, Updater

CROPS = 8
ONE_LAYER = {"blocks": (1, 1, 1, 1)}
TINY = {name: ONE_LAYER for name in ("eres2net", "eres2netv2", "res2net")}
TINY["campplus"] = {"blocks": (2, 1, 1)}
every_precision = pytest.mark.parametrize("precision", DTYPES)


@pytest.fixture(autouse=True, scope="module")
def skip_where_torch_differs() -> None:
    reason = fake_gpu.why_not()
    if reason is not None:
        pytest.skip(reason)


def make(model: str = "xvector", *overrides: str, **args: object) -> Config:
    """Return the configuration of a small model with short crops and every augmentation."""
    args = {**SMALL[model], **TINY.get(model, {}), **args}
    args.pop("feat_dim", None)  # the front end's
    component = json.dumps({"name": model, "args": args})
    words = [f"model={component}", "data.crop_seconds=1", "augment.babble_voices=[3, 3]"]
    return load_config([], [*launches.ALL_ON, *words, *overrides])


def train(
    config: Config,
    precision: str = "fp32",
    *,
    accumulation: int = 2,
    frozen: int = 1,
    join: bool = False,
    stored: bool = False,
    **more: Any,
) -> Kernels:
    """Take so many steps of the head alone, then a whole one; return what was counted.

    join: BatchNorm as for several ranks; stored: features instead of waves; more: of `build_task`.
    """
    task = launches.build_task(config, precision, **more)
    if join:
        join_batchnorms(task, Ranks(0, 1, 1, GPU))
    batch = launches.draw_batch(config, task, CROPS)
    assert batch.draws.keys() == {n for n, part in AUGMENTATIONS.items() if not part.in_worker}
    if stored:
        feats_BTF = torch.zeros(CROPS, 98, task.embedder.fbank.num_mel_bins)
        batch = batch._replace(feats_BTF=feats_BTF, draws={"spec": batch.draws["spec"]})
    with fake_gpu.fake_gpu() as gpu:
        fake_gpu.to_gpu(task)
        how = {"accumulation": accumulation, "frozen": frozen}
        trainer = launches.build_trainer(config, task, launches.on_host(batch), **how)
        for _ in range(frozen + 1):
            gpu.begin_step()
            trainer.train_step()
    assert trainer.state.step == frozen + 1 and gpu.launches["step/backward"]
    assert gpu.uploads and all("/batch.py:" in place for place in gpu.uploads)
    return gpu


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model(name):
    """From features on, test_fake_graphs.py does the same in every precision."""
    train(make(name))


@every_precision
@pytest.mark.parametrize("name", sorted(HEADS))
def test_every_head(name, precision):
    margin = 0.2 if HEADS[name].takes_margin else 0
    config = make("xvector", f"head.name={name}", f"training.margin.final={margin}")
    train(config, precision, accumulation=1)


@pytest.mark.parametrize("share", [1, 0.5])
@every_precision
def test_a_split_head(share, precision):
    config = make("xvector", f"training.sampled_share={share}", "runtime.split_head=on")
    train(config, precision, accumulation=1, shards=Ranks(0, 1, 1, GPU))


def test_joined_norms():
    train(make("campplus"), "bf16", join=True)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer(name):
    train(make("xvector", f"optimizer.name={name}"))


@pytest.mark.parametrize("how", [{"noise_on_device": False}, {"stored": True}])
def test_other_batches(how):
    train(make(), **how)


def test_settings_that_take_other_ways():
    train(make("campplus", "frontend.dither=1"), "bf16")


def verdict_of_this_step(patch):
    patch.setattr(Updater, "_on_host", lambda self, step, values: (step, values.tolist()))


def verdict_before_it_arrives(patch):
    def read(self, step, values):
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return step, host.copy_(values, non_blocking=True).tolist()

    patch.setattr(Updater, "_on_host", read)


def event_of_this_step(patch):
    def wait(self, step, values):
        event = torch.cuda.Event()
        event.record()
        event.synchronize()

    patch.setattr(Updater, "_on_host", wait)


def indices_on_the_host(patch):
    apply = SpecAugment.apply

    def masked(self, x_R, draws):
        return apply(self, x_R, draws).masked_fill(torch.arange(x_R.shape[2]) < 1, 0.0)

    patch.setattr(SpecAugment, "apply", masked)


def boolean_index(patch):
    patch.setattr(Codec, "apply", lambda self, x_R, draws: x_R - x_R[x_R > 1].sum())


def number_of_a_tensor(patch):
    patch.setattr(AAMSoftmax, "harden", lambda self, x, margin: x - float(x.detach().max()))


def constant_in_each_step(patch):
    half = [0.5]
    patch.setattr(Telephone, "apply", lambda self, x, draws: x * torch.tensor(half, device=GPU))


def streams_that_do_not_wait(patch):
    patch.setattr(Inputs, "__next__", Inputs._make)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (verdict_of_this_step, "host read"),
        (verdict_before_it_arrives, "host read"),
        (event_of_this_step, "host read"),
        (indices_on_the_host, "device mix"),
        (boolean_index, "host read"),
        (number_of_a_tensor, "host read"),
        (constant_in_each_step, "upload"),
        (streams_that_do_not_wait, None),  # the order between streams needs a GPU
    ],
)
def test_planted_bugs(plant, found, monkeypatch):
    plant(monkeypatch)
    if found is None:
        train(make())
    else:
        with pytest.raises(Fault, match=rf"^{found}: .* at speakerlab/\w+/.*\.py:\d+$"):
            train(make())


@pytest.mark.parametrize("name", ["campplus", "eres2net", "ecapa_tdnn"])
def test_gradients_are_those_of_torch(name):
    """In fact bit for bit: a sum of three gradients depends on their order."""
    torch.manual_seed(0)
    model = MODELS[name](**SMALL[name]).train()
    feats_BTF, weight_BD = torch.randn(4, 60, 80), torch.randn(4, 12)
    found = []
    for backward in (torch.Tensor.backward, Hooks().backward):
        model.zero_grad()
        backward((model(feats_BTF) * weight_BD).sum())
        found.append({key: p.grad for key, p in model.named_parameters()})
    assert all(torch.equal(grad, found[1][key]) for key, grad in found[0].items())


def test_launches_of_lists():
    """Kernels for lists take 110 tensors of one type, or 64 pairs."""
    count, small, whole = list_launches, torch.ones(2), torch.ones(2, dtype=torch.int64)
    assert count("_foreach_zero_", [[small] * 110]) == 1
    assert count("_foreach_zero_", [[small] * 111]) == 2
    assert count("_foreach_add_", [[small] * 65, [small] * 65]) == 2
    assert count("_foreach_copy_", [[small, whole] * 4, [small, whole] * 4]) == 8


def test_parts_of_a_step():
    """Only what a model computes differs between models."""
    a, b = (launches.count_step(make(name), "bf16", crops=CROPS) for name in ("xvector", "resnet"))
    assert list(a) == [*launches.PARTS, "all"] and min(a.values()) > 0
    assert a["all"] > sum(a[part] for part in launches.PARTS)
    assert (a["guard"], a["frontend"]) == (b["guard"], b["frontend"])
    assert a["guard"] <= 12 and a["frontend"] <= 70
    assert a["forward"] < b["forward"] and a["backward"] < b["backward"]


def test_a_version_of_torch_without_a_name_is_reported(monkeypatch):
    monkeypatch.setattr(fake_gpu, "PRIVATE", [*fake_gpu.PRIVATE, ("torch.cuda.amp.common", "gone")])
    assert fake_gpu.why_not() == f"torch {torch.__version__} has no torch.cuda.amp.common.gone"
