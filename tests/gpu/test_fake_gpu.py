"""Training steps on tensors without data: what a GPU would reject or wait for (fake_gpu.py).

Every model, head and precision takes steps in the trainer, with every augmentation.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "models"))

import fake_gpu
import launches
from fake_backward import Hooks
from fake_gpu import GPU
from fake_kernels import Fault, Kernels, list_launches
from members import SMALL

from speakerlab.config.schema import Config, load_config, takes_layers
from speakerlab.frontend.augment import AUGMENTATIONS
from speakerlab.frontend.augment.codec import Codec
from speakerlab.frontend.augment.specaugment import SpecAugment
from speakerlab.frontend.augment.telephone import Telephone
from speakerlab.losses import HEADS
from speakerlab.losses.margin import AAMSoftmax
from speakerlab.models import MODELS
from speakerlab.training.distributed import Ranks
from speakerlab.training.optimizers import OPTIMIZERS
from speakerlab.training.precision import DTYPES
from speakerlab.training.sync_batchnorm import join_batchnorms
from speakerlab.training.task import Inputs
from speakerlab.training.update import Updater

CROPS = 8
# Fewer blocks than SMALL, for speed: every block has the same operations.
ONE_LAYER = {"blocks": (1, 1, 1, 1)}
TINY = {
    "campplus": {"blocks": (2, 1, 1)},
    "eres2net": ONE_LAYER,
    "eres2netv2": ONE_LAYER,
    "res2net": ONE_LAYER,
}
ONE_RANK = Ranks(0, 1, 1, GPU)
LAYERED = {name for name in MODELS if takes_layers(name)}
LARGE = ("redimnet2", "gemini_dfresnet", "eres2netv2")  # they take longest
every_precision = pytest.mark.parametrize("precision", DTYPES)


@pytest.fixture(autouse=True, scope="module")
def skip_where_torch_differs() -> None:
    reason = fake_gpu.why_not()
    if reason is not None:
        pytest.skip(reason)


def make(model: str = "xvector", *overrides: str, **args: object) -> Config:
    """Return the configuration of a small model with short crops and every augmentation."""
    model_args = {**SMALL[model], **TINY.get(model, {}), **args}
    model_args.pop("feat_dim", None)  # set by the front end
    component = json.dumps({"name": model, "args": model_args})
    settings = [
        *launches.ALL_ON,
        f"model={component}",
        "data.crop_seconds=1",
        "augment.babble_voices=[3, 3]",
        *overrides,
    ]
    return load_config([], settings)


def train(
    config: Config,
    precision: str = "fp32",
    *,
    accumulation: int = 2,
    frozen: int = 1,
    join: bool = False,
    stored: bool = False,
    shards: Ranks | None = None,
    noise_on_device: bool = True,
) -> Kernels:
    """Take `frozen` steps of the head alone, then a whole one; return what was counted.

    join: BatchNorm as for several ranks; stored: features instead of waves.
    """
    task = launches.build_task(
        config,
        precision,
        shards=shards,
        noise_on_device=noise_on_device,
    )
    if join:
        join_batchnorms(task, ONE_RANK)
    batch = launches.draw_batch(config, task, CROPS)
    on_device = set()
    for name, augmentation in AUGMENTATIONS.items():
        # Changed voices are refused where the labels are speakers.
        is_new_voice = name in ("pitch", "formants")
        if not augmentation.in_worker and not is_new_voice:
            on_device.add(name)
    assert batch.draws.keys() == on_device
    if stored:
        num_mel_bins = task.embedder.frontend.num_mel_bins
        feats_BTF = torch.zeros(CROPS, 98, num_mel_bins)
        spec_draws = {"spec": batch.draws["spec"]}
        batch = batch._replace(feats_BTF=feats_BTF, draws=spec_draws)
    with fake_gpu.fake_gpu() as gpu:
        fake_gpu.to_gpu(task)
        trainer = launches.build_trainer(
            config,
            task,
            launches.on_host(batch),
            accumulation=accumulation,
            frozen=frozen,
        )
        for _ in range(frozen + 1):
            gpu.begin_step()
            trainer.train_step()
    assert trainer.state.step == frozen + 1
    assert gpu.launches["step/backward"]

    # Only batches are uploaded in a step.
    assert gpu.uploads
    for place in gpu.uploads:
        assert "/batch.py:" in place
    return gpu


@pytest.mark.parametrize(
    "precision",
    [
        "bf16",
        pytest.param("fp32", marks=pytest.mark.slow),
        pytest.param("fp16", marks=pytest.mark.slow),
    ],
)
# Networks over a pretrained model, of ordinary layers, cannot be built without one.
# redimnet2 has the blocks of redimnet, ecapa_tdnn_wespeaker the layers of ecapa_tdnn.
@pytest.mark.parametrize(
    "name",
    [
        *sorted(MODELS.keys() - {"redimnet", "ecapa_tdnn_wespeaker", *LARGE, *LAYERED}),
        *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE),
    ],
)
def test_every_model(name, precision):
    # Accumulation and frozen steps do not depend on the model: other tests have them.
    train(make(name), precision, accumulation=1, frozen=0)


@every_precision
@pytest.mark.parametrize("name", sorted(HEADS))
def test_every_head(name, precision):
    margin = 0.2 if HEADS[name].takes_margin else 0
    config = make(
        "xvector",
        f"head.name={name}",
        f"training.margin.final={margin}",
    )
    train(config, precision, accumulation=1)


@pytest.mark.parametrize("share", [1, 0.5])
@every_precision
def test_a_split_head(share, precision):
    config = make(
        "xvector",
        f"training.sampled_share={share}",
        "runtime.split_head=on",
    )
    train(config, precision, accumulation=1, shards=ONE_RANK)


def test_joined_norms():
    train(make("campplus"), "bf16", join=True)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer(name):
    train(make("xvector", f"optimizer.name={name}"))


def test_noise_from_the_host():
    train(make(), noise_on_device=False)


def test_stored_features():
    train(make(), stored=True)


def test_settings_that_take_other_ways():
    train(make("campplus", "frontend.dither=1"), "bf16")


def verdict_of_this_step(patch):
    def read(self, step, values):
        return step, values.tolist()

    patch.setattr(Updater, "_copy_to_host", read)


def verdict_before_it_arrives(patch):
    def read(self, step, values):
        host = torch.empty(
            values.shape,
            dtype=values.dtype,
            pin_memory=True,
        )
        host.copy_(values, non_blocking=True)
        return step, host.tolist()

    patch.setattr(Updater, "_copy_to_host", read)


def event_of_this_step(patch):
    def wait(self, step, values):
        event = torch.cuda.Event()
        event.record()
        event.synchronize()

    patch.setattr(Updater, "_copy_to_host", wait)


def indices_on_the_host(patch):
    apply = SpecAugment.apply

    def masked(self, x_R, draws):
        masked_R = apply(self, x_R, draws)
        is_first = torch.arange(x_R.shape[2]) < 1
        return masked_R.masked_fill(is_first, 0.0)

    patch.setattr(SpecAugment, "apply", masked)


def boolean_index(patch):
    def subtract_peaks(self, x_R, draws):
        peaks = x_R[x_R > 1]
        return x_R - peaks.sum()

    patch.setattr(Codec, "apply", subtract_peaks)


def number_of_a_tensor(patch):
    def subtract_largest(self, x, margin):
        largest = float(x.detach().max())
        return x - largest

    patch.setattr(AAMSoftmax, "harden", subtract_largest)


def constant_in_each_step(patch):
    half = [0.5]

    def halve(self, x, draws):
        return x * torch.tensor(half, device=GPU)

    patch.setattr(Telephone, "apply", halve)


def streams_that_do_not_wait(patch):
    patch.setattr(Inputs, "__next__", Inputs._make)


@pytest.mark.parametrize(
    ("plant", "kind"),
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
def test_planted_bugs(plant, kind, monkeypatch):
    plant(monkeypatch)
    if kind is None:
        train(make())
    else:
        with pytest.raises(Fault, match=rf"^{kind}: .* at speakerlab/\w+/.*\.py:\d+$"):
            train(make())


@pytest.mark.parametrize("name", ["campplus", "eres2net", "ecapa_tdnn"])
def test_gradients_are_those_of_torch(name):
    """In fact bit for bit: a sum of three gradients depends on their order."""
    torch.manual_seed(0)
    model = MODELS[name](**SMALL[name])
    model.train()
    feats_BTF = torch.randn(4, 60, 80)
    weight_BD = torch.randn(4, 12)
    gradients = []
    for backward in (torch.Tensor.backward, Hooks().backward):
        model.zero_grad()
        emb_BD = model(feats_BTF)
        backward((emb_BD * weight_BD).sum())
        gradients.append({key: p.grad for key, p in model.named_parameters()})
    theirs, ours = gradients
    for key, gradient in theirs.items():
        assert torch.equal(gradient, ours[key]), key


def test_launches_of_lists():
    """Kernels for lists take 110 tensors of one type, or 64 pairs."""
    small = torch.ones(2)
    whole = torch.ones(2, dtype=torch.int64)
    full_list = 110 * [small]
    longer_list = 111 * [small]
    pairs = [65 * [small], 65 * [small]]
    mixed = 4 * [small, whole]
    assert list_launches("_foreach_zero_", [full_list]) == 1
    assert list_launches("_foreach_zero_", [longer_list]) == 2
    assert list_launches("_foreach_add_", pairs) == 2
    # Of mixed types, each pair is copied by itself.
    assert list_launches("_foreach_copy_", [mixed, mixed]) == 8


def test_parts_of_a_step():
    """Only what a model computes differs between models."""
    xvector = launches.count_step(make("xvector"), "bf16", crops=CROPS)
    resnet = launches.count_step(make("resnet"), "bf16", crops=CROPS)
    assert list(xvector) == [*launches.PARTS, "all"]
    assert min(xvector.values()) > 0
    sum_of_parts = sum(xvector[part] for part in launches.PARTS)
    assert xvector["all"] > sum_of_parts

    assert xvector["guard"] == resnet["guard"]
    assert xvector["guard"] <= 12
    assert xvector["frontend"] == resnet["frontend"]
    assert xvector["frontend"] <= 70
    assert xvector["forward"] < resnet["forward"]
    assert xvector["backward"] < resnet["backward"]


def test_a_version_of_torch_without_a_name_is_reported(monkeypatch):
    missing = ("torch.cuda.amp.common", "gone")
    private = [*fake_gpu.PRIVATE, missing]
    monkeypatch.setattr(fake_gpu, "PRIVATE", private)
    reason = f"torch {torch.__version__} has no torch.cuda.amp.common.gone"
    assert fake_gpu.why_not() == reason
