"""Trainings over a pretrained model: frozen, with adapters, joint; ranks are in tests/bin."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from finished import assert_same, finish
from pretrained_models import write_pretrained
from refusals import refuses

from speakerlab.checkpoints.published import load_initial, load_published
from speakerlab.config.schema import load_config
from speakerlab.experiments import train
from speakerlab.experiments.averaging import publish_average
from speakerlab.experiments.consistency import load_same_config
from speakerlab.experiments.hardware import start_rank
from speakerlab.training.signals import Signals

SETTINGS = [
    "model={name: adapter_mfa, args: {embed_dim: 16, adapter_dim: 8}}",
    "data.crop_seconds=0.5",
    "data.valid_speakers=2",
    "training.global_batch=8",
    "training.num_epochs=3",
    "training.warmup_epochs=1",
    "training.checkpoint_every_steps=2",
    "optimizer={name: adamw}",
    "training.lr=0.01",
    "augment.noise_prob=0",
    "augment.room_prob=0",
    "augment.speeds=[1.0]",
    "runtime.num_workers=0",
    "runtime.device=cpu",
    "runtime.log_every_steps=1",
    "runtime.precision=fp32",
]
LORA = "frontend.lora={rank: 4, alpha: 8.0, targets: [linear_q, linear_v]}"
FROZEN = "training.freeze=[frontend]"
JOINT = "training.pretrained_lr=0.1"
SUM = "model={name: ecapa_tdnn_wespeaker, args: {embed_dim: 16, channels: 32}}"
STAGES = {"lora": [LORA], "frozen": [FROZEN], "joint": [JOINT], "sum": [SUM, JOINT]}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_pretrained(tmp_path_factory.mktemp("base") / "w2v_bert", "w2v_bert")


@pytest.fixture
def begin(make_data_dir, base, tmp_path, monkeypatch):
    """begin("exp", *settings) -> a training that has not begun."""
    monkeypatch.chdir(tmp_path)
    folder = make_data_dir(speakers=range(6), seconds=[0.6, 0.7, 0.8])

    def make(name, *options, init=None, model=base):
        settings = [f"data.dir={folder.parent}", *SETTINGS]
        if model is not None:
            settings += ["frontend.name=ssl", f"frontend.model={model}"]
        settings += options
        exp = tmp_path / name
        config = load_same_config(exp, [], settings, init=init)
        ranks = start_rank(config)
        return train.start_training(exp, init, config, ranks, Signals(print))

    return make


def rows_of(training, kind):
    text = (training.exp_dir / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return [row for row in rows if row["kind"] == kind]


def encoder_of(training) -> dict[str, torch.Tensor]:
    """All tensors of the pretrained model, also those that are saved elsewhere."""
    encoder = training.embedder.frontend.encoder
    return {name: value.detach().clone() for name, value in encoder.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_is_bit_identical_in_every_stage(begin, tmp_path, stage):
    options = STAGES[stage]
    whole = begin("whole", *options)
    before = encoder_of(whole)
    finish(whole)
    after = encoder_of(whole)
    for name, value in before.items():
        is_trained = stage in ("joint", "sum") or ".lora_" in name
        # A bias of keys has no effect on attention.
        if is_trained and "linear_k.bias" not in name:
            assert not torch.equal(after[name], value), name
        if not is_trained:
            assert torch.equal(after[name], value), name

    folders = sorted((whole.exp_dir / "checkpoints").glob("step_*"))
    cut = tmp_path / "cut"
    shutil.copytree(whole.exp_dir, cut)
    shutil.rmtree(cut / "model")
    for checkpoint in folders[1:]:
        shutil.rmtree(cut / "checkpoints" / checkpoint.name)
    again = begin("cut", *options)
    finish(again)
    assert_same(encoder_of(again), after)
    assert_same(again.trainer.task.state_dict(), whole.trainer.task.state_dict())
    losses = [row["loss"] for row in rows_of(whole, "train")]
    assert [row["loss"] for row in rows_of(again, "train")] == losses


@pytest.mark.parametrize("stage", ["lora", "frozen"])
def test_a_checkpoint_holds_what_is_trained(begin, base, stage):
    training = begin("exp", *STAGES[stage])
    finish(training)
    state = torch.load(
        max(training.exp_dir.glob("checkpoints/step_*")) / "state.pt",
        weights_only=True,
    )
    names = {name for name in state["task"] if "frontend.encoder" in name}
    assert all(".lora_" in name for name in names)
    assert len(names) == (12 if stage == "lora" else 0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_whole_model_needs_no_base_and_an_adapter_only_its_own(
    begin, base, tmp_path, stage
):
    wave_BS = 0.1 * torch.randn(2, 16000)
    own_base = tmp_path / "own_base"
    shutil.copytree(base, own_base)
    whole = begin("whole", *STAGES[stage], model=own_base)
    finish(whole)
    trained = whole.embedder.eval()
    adapter = begin(
        "adapter", *STAGES[stage], "frontend.publish=adapter", model=own_base
    )
    finish(adapter)
    with torch.inference_mode():
        expected_BD = trained(wave_BS)
        loaded = load_published(adapter.exp_dir).embedder
        assert torch.allclose(loaded(wave_BS), expected_BD, atol=1e-5)

    shutil.rmtree(own_base)
    published = load_published(whole.exp_dir)
    with torch.inference_mode():
        assert torch.allclose(published.embedder(wave_BS), expected_BD, atol=1e-5)
    fast = published.embedder.for_inference()
    with torch.inference_mode():
        assert torch.allclose(fast(wave_BS), expected_BD, atol=1e-4)
    # A published model that holds all that is trained needs its base for the rest.
    if stage in ("lora", "frozen"):
        settings = adapter.exp_dir / "model/config.yaml"
        with refuses(f"{settings}", own_base, "does not exist"):
            load_published(adapter.exp_dir)
        write_pretrained(own_base, "w2v_bert", seed=1)
        with refuses(f"{settings}", own_base, "is another model"):
            load_published(adapter.exp_dir)


def test_the_mean_of_checkpoints_can_be_published(begin, tmp_path):
    training = begin("exp", LORA)
    finish(training)
    steps, _ = publish_average(training.exp_dir, 2, tmp_path / "mean")
    assert len(steps) == 2
    load_published(tmp_path / "mean")


def test_stages_follow_each_other_from_the_published_model(begin, tmp_path):
    lora = begin("lora", LORA, "training.keep_better=false")
    finish(lora)
    joint = begin("joint", JOINT, "training.keep_better=false", init=tmp_path / "lora")
    start = load_published(tmp_path / "lora").embedder.state_dict()
    assert_same(joint.embedder.state_dict(), start)
    finish(joint)
    margin = ["training.margin={initial: 0.5, final: 0.5}", "data.crop_seconds=0.6"]
    last = begin("last", *margin, init=tmp_path / "joint")
    finish(last)
    assert_same(
        last.embedder.state_dict(),
        load_published(tmp_path / "last").embedder.state_dict(),
    )

    # Adapters on a whole model: its weights are frozen, and of no base, so all are saved.
    again = begin("again", LORA, init=tmp_path / "joint")
    finish(again)
    assert len(again.embedder.state_dict()) > len(lora.embedder.state_dict())
    begin("again", LORA, init=tmp_path / "joint")  # and resumes


def test_learning_rates_fall_from_layer_to_layer(begin):
    training = begin("exp", "training={pretrained_lr: 0.1, layer_decay: 0.5}")
    optimizer = training.trainer.state.updater.optimizer
    scale_of = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            scale_of[id(parameter)] = group["lr_scale"]
    scales = {
        name: scale_of[id(parameter)]
        for name, parameter in training.embedder.named_parameters()
    }
    layers = "frontend.encoder.encoder.layers"
    for name, scale in scales.items():
        if name.startswith("backbone"):
            assert scale == 1
        elif name.startswith(layers):
            index = int(name.removeprefix(layers)[1])
            assert scale == pytest.approx(0.1 * 0.5 ** (2 - index))
        else:
            assert scale == pytest.approx(0.1 * 0.5**3)
    # The rate of a step is scaled in each group.
    finish(training)
    rates = {group["lr_scale"]: group["lr"] for group in optimizer.param_groups}
    for scale, rate in rates.items():
        assert rate == pytest.approx(scale * rates[1.0])


def test_recomputing_layers_changes_no_weight(begin):
    stored = begin("stored", LORA, "runtime.checkpoint_layers=false")
    recomputed = begin("recomputed", LORA, "runtime.checkpoint_layers=true")
    assert recomputed.embedder.frontend.recomputes_layers
    assert not stored.embedder.frontend.recomputes_layers
    finish(stored)
    finish(recomputed)
    assert_same(recomputed.embedder.state_dict(), stored.embedder.state_dict())


@pytest.mark.parametrize("dropout", [False, True])
def test_steps_leave_the_pretrained_model_in_eval_mode(begin, dropout):
    """The trainer sets modes by itself; with dropout, the model is in training mode."""
    training = begin("exp", LORA, f"frontend.dropout={str(dropout).lower()}")
    modes = set()

    def note_mode(module, args):
        if torch.is_grad_enabled():
            modes.update(part.training for part in module.modules())

    training.embedder.frontend.encoder.feature_projection.register_forward_pre_hook(
        note_mode
    )
    finish(training)
    assert modes == {dropout}


def test_an_initial_model_brings_its_own_base(begin, base, tmp_path):
    finish(begin("lora", LORA))
    other = write_pretrained(tmp_path / "other", "w2v_bert", seed=1)
    joint = begin("joint", JOINT, init=tmp_path / "lora", model=other)
    assert joint.config.frontend["model"] == str(base)
    start = load_published(tmp_path / "lora").embedder.state_dict()
    assert_same(joint.embedder.state_dict(), start)
    with refuses("frontend.sha256"):
        begin("pinned", "frontend.sha256=0123", init=tmp_path / "lora")
    with refuses(f"{tmp_path / 'lora/model'}", "another shape"):
        begin(
            "wider",
            "model={name: adapter_mfa, args: {embed_dim: 20, adapter_dim: 8}}",
            init=tmp_path / "lora",
        )


def test_the_untrained_model_has_the_weights_of_its_base(begin):
    training = begin("exp", JOINT)
    before = {key: v.clone() for key, v in training.embedder.state_dict().items()}
    finish(training)
    published = load_published(training.exp_dir).config
    untrained = load_initial(training.exp_dir, published)
    assert_same(untrained.state_dict(), before)


def test_a_bad_batch_moves_nothing(begin):
    training = begin("exp", LORA)
    # A scale of the input that overflows every layer.
    training.embedder.frontend.inputs.fbank.scale = float("nan")
    before = {
        key: value.clone() for key, value in training.embedder.state_dict().items()
    }
    trainer = training.trainer
    state = trainer.state
    state.updater.before_step()
    wave_BS = torch.randn(8, 8000)
    label_B = torch.zeros(8, dtype=torch.int64)
    trainer.task.train()
    output = trainer.task(wave_BS, label_B, 0.0)
    output.loss.backward()
    update = state.updater.step(0.1)
    assert update.is_bad
    assert_same(training.embedder.state_dict(), before)


@pytest.mark.parametrize(
    ("subject", "settings"),
    [
        ("data.features", ["data.features=fbank"]),
        ("augment.spec", ["augment.spec.num_time_masks=1"]),
        ("training.freeze", ["training.freeze=[front]"]),
        ("frontend.mean_norm", ["frontend.mean_norm=true"]),
        ("frontend.sha256", ["frontend.sha256=0123"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(begin, subject, settings):
    with refuses(subject):
        begin("exp", *settings)


def test_networks_over_layers_need_a_pretrained_model():
    with refuses("model.name", "mhfa", "frontend.name=ssl"):
        load_config([], ["model.name=mhfa"])
    with refuses("training.pretrained_lr and training.layer_decay", "frontend.name"):
        load_config([], ["model.name=xvector", "training.layer_decay=0.9"])
    with refuses("--set frontend.name=wavlm", "unknown frontend"):
        load_config([], ["model.name=xvector", "frontend.name=wavlm"])


def test_a_front_end_of_another_kind_is_no_start(begin, tmp_path, publish_to):
    folder, _, _ = publish_to("campplus")
    with refuses(f"{folder}", "was trained on other features"):
        begin("exp", LORA, init=folder)


@pytest.mark.parametrize("stage", ["lora", "joint"])
def test_a_model_over_a_pretrained_one_teaches_with_its_frames(begin, tmp_path, stage):
    teacher = begin("teacher", *STAGES[stage])
    finish(teacher)
    student = begin(
        "student",
        "task=distil",
        f"distil.teachers=[{teacher.exp_dir}]",
        "distil.frame_weight=3.0",
        "model={name: campplus, args: {embed_dim: 16, init_channels: 16,"
        " growth_rate: 4, blocks: [1, 1, 1], head_channels: 4}}",
        model=None,
    )
    finish(student)
    assert student.config.distil.target_dim == 16
    rows = rows_of(student, "valid")
    assert rows[-1]["teacher_distance"] < 1.5
