"""Self-supervised trainings: views, teacher, labels, bad steps, resume; ranks are in tests/bin."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from finished import assert_same, finish
from refusals import refuses

from speakerlab.experiments import train
from speakerlab.experiments.hardware import start_rank
from speakerlab.training.self_supervised import (
    SelfSupervisedTask,
    Views,
    effective_rank,
)
from speakerlab.training.signals import Signals

DINO = (
    "objective={name: dino, args: {hidden_dim: 16, wide_dim: 16, bottleneck_dim: 8, "
    "num_outputs: 32}}"
)
SDPN = (
    "objective={name: sdpn, args: {hidden_dim: 16, output_dim: 8, num_prototypes: 12}}"
)
OBJECTIVES = {
    "dino": [DINO, "views={long: 2, short: 3, short_seconds: 0.25}"],
    "sdpn": [SDPN, "views={long: 1, short: 4, short_seconds: 0.25, clean: 1}"],
    "simclr": ["objective={name: simclr}", "views={long: 2, short: 0}"],
}
SETTINGS = [
    "task=ssl",
    "data.crop_seconds=0.5",
    "data.valid_speakers=2",
    "training.one_crop_per=utterance",
    "training.global_batch=8",
    "training.num_epochs=3",
    "training.warmup_epochs=1",
    "training.checkpoint_every_steps=2",
    "augment.noise_prob=0",
    "augment.room_prob=0",
    "augment.telephone_prob=0.5",
    "runtime.num_workers=0",
    "runtime.device=cpu",
    "runtime.log_every_steps=1",
    "runtime.precision=fp32",
]


@pytest.fixture
def folder(make_data_dir) -> Path:
    return make_data_dir(speakers=range(6), seconds=[0.6, 0.7, 0.8])


@pytest.fixture
def begin(make_config, folder, tmp_path):
    """begin("exp", "dino", *settings) -> a training that has not begun."""

    def make(name, objective, *options, data=folder.parent):
        settings = [
            *SETTINGS,
            *OBJECTIVES[objective],
            f"data.dir={data}",
            *options,
        ]
        config = make_config(*settings)
        ranks = start_rank(config)
        return train.start_training(
            tmp_path / name,
            None,
            config,
            ranks,
            Signals(print),
        )

    return make


def rows_of(training):
    text = (training.exp_dir / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        row.pop("crops_per_second", None)
        row.pop("data_wait", None)
    return rows


def test_crops_are_cut_into_views():
    views = Views(
        num_long=2,
        num_short=3,
        crop_samples=10,
        short_samples=4,
    )
    assert views.shorts_each == 2
    assert views.crops_each == 4

    # four crops of each of three utterances
    wave_NS = torch.arange(120).view(12, 10)
    long_LBS, short_VBS = views.cut(wave_NS)
    first_long = list(range(40, 50))
    second_long = list(range(50, 60))
    assert long_LBS[:, 1].tolist() == [first_long, second_long]
    assert short_VBS[:, 1].tolist() == [
        [60, 61, 62, 63],
        [64, 65, 66, 67],
        [70, 71, 72, 73],
    ]


def test_effective_rank_counts_dimensions():
    orthogonal = torch.eye(8)[:5]
    assert effective_rank(orthogonal) == pytest.approx(5)
    equal = torch.ones(6, 4)
    assert effective_rank(equal) == pytest.approx(1, abs=1e-6)
    nearly_equal = torch.tensor([[1.0, 0], [1, 0.1], [1, -0.1]])
    assert 1 < effective_rank(nearly_equal) < 1.5


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_resumed_run_is_bit_identical_with_its_teacher(begin, tmp_path, objective):
    whole = begin("whole", objective)
    weights = finish(whole)
    checkpoints = whole.exp_dir / "checkpoints"
    folders = sorted(checkpoints.glob("step_*"))
    cut = tmp_path / "cut"
    shutil.copytree(whole.exp_dir, cut)
    shutil.rmtree(cut / "model")
    for folder in folders[1:]:
        shutil.rmtree(cut / "checkpoints" / folder.name)
    again = begin("cut", objective)
    assert_same(finish(again), weights)
    state = whole.trainer.task.state_dict()
    assert_same(again.trainer.task.state_dict(), state)
    rows = rows_of(whole)
    assert rows_of(again) == rows

    train_rows = [row for row in rows if row["kind"] == "train"]
    assert train_rows[0]["effective_rank"] > 1
    has_prototypes = objective != "simclr"
    assert ("prototypes" in train_rows[0]) == has_prototypes
    eers = [row["eer"] for row in rows if row["kind"] == "valid"]
    assert any(0 <= eer <= 1 for eer in eers)


@pytest.mark.parametrize(
    "objective",
    ["dino", pytest.param("simclr", marks=pytest.mark.slow)],
)
def test_labels_change_nothing(begin, folder, tmp_path, objective):
    """Neither other speakers nor none, in a directory without validation speakers."""
    none = "data.valid_speakers=0"
    weights = finish(begin("labelled", objective, none))
    table = (folder / "utt2spk").read_text().split()
    ids = table[::2]
    speakers = table[1::2]
    mixed = tmp_path / "mixed" / "train"
    shutil.copytree(folder, mixed)
    # every utterance gets the speaker of the next one
    shifted = speakers[1:] + speakers[:1]
    lines = [f"{name} {speaker}\n" for name, speaker in zip(ids, shifted)]
    (mixed / "utt2spk").write_text("".join(lines))
    mixed_up = begin("mixed_up", objective, none, data=mixed.parent)
    assert_same(finish(mixed_up), weights)

    (mixed / "utt2spk").unlink()
    bare = begin(
        "bare",
        objective,
        "data.valid_speakers=null",
        data=mixed.parent,
    )
    assert bare.trainer.after_step.validation is None
    assert_same(finish(bare), weights)


def validation_speakers(training) -> set[str]:
    validation = training.trainer.after_step.validation
    return set(validation.pieces[0].manifest.speakers)


def test_labels_of_training_speakers_change_nothing_beside_validation(
    begin, folder, tmp_path
):
    whole = begin("whole", "simclr")
    held_out = validation_speakers(whole)
    weights = finish(whole)

    table = (folder / "utt2spk").read_text().split()
    ids = table[::2]
    speakers = table[1::2]
    others = [speaker for speaker in speakers if speaker not in held_out]
    turned = iter(others[4:] + others[:4])
    mixed = tmp_path / "mixed" / "train"
    shutil.copytree(folder, mixed)
    lines = []
    for name, speaker in zip(ids, speakers):
        if speaker not in held_out:
            speaker = next(turned)
        lines.append(f"{name} {speaker}\n")
    (mixed / "utt2spk").write_text("".join(lines))

    again = begin("mixed_up", "simclr", data=mixed.parent)
    assert validation_speakers(again) == held_out
    assert_same(finish(again), weights)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_bad_step_moves_nothing(begin, objective):
    """A NaN in one wave: neither student nor teacher, statistics, centre or prototypes move."""
    training = begin("exp", objective)
    trainer = training.trainer
    trainer.start()
    trainer.open()
    for is_bad in (False, True, False):
        before = {}
        for name, tensor in trainer.task.state_dict().items():
            before[name] = tensor.clone()
        make_inputs = trainer.inputs._make

        def poisoned(make_inputs=make_inputs, is_bad=is_bad):
            inputs = make_inputs()
            if is_bad:
                inputs.x_B[0, 0] = torch.nan
            return inputs

        trainer.inputs._make = poisoned
        trainer.train_step()
        trainer.inputs._make = make_inputs

        moved = set()
        parts = set()
        for name, tensor in trainer.task.state_dict().items():
            part = name.split(".")[0]
            parts.add(part)
            if not torch.equal(tensor, before[name]):
                moved.add(part)
        expected = set() if is_bad else parts
        assert moved == expected, moved ^ parts
    trainer.close()


def test_the_teacher_follows_the_student(begin):
    training = begin("exp", "dino")
    task = training.trainer.task
    trainer = training.trainer
    assert isinstance(task, SelfSupervisedTask)
    assert task.student is not None
    trainer.start()
    trainer.open()
    old = [tensor.clone() for tensor in task.embedder.parameters()]
    trainer.train_step()
    # the momentum rises to 1 at the end
    assert task.momentum == 0.996
    teacher = task.embedder.parameters()
    student = task.student.parameters()
    for before, after, of_student in zip(old, teacher, student):
        expected = 0.996 * before + 0.004 * of_student
        torch.testing.assert_close(after, expected)
        assert not after.requires_grad
    trainer.close()

    half = trainer.schedule.total_steps // 2
    task.begin_step(half, trainer.schedule, 0)
    assert 0.996 < task.momentum < 1


def test_accumulation_changes_dino_no_more_than_batchnorm_does(begin):
    """In eval mode the gradients and the centre of two micro-batches are those of the batch."""
    plain = ["objective.args.std_weight=0", "objective.args.cov_weight=0"]
    gradients_of_runs = []
    for size in (8, 4):
        micro_batch = f"runtime.micro_batch={size}"
        training = begin(f"by{size}", "dino", *plain, micro_batch)
        trainer = training.trainer
        trainer.start()
        trainer.open()
        trainer.task.objective.begin_step(0.0)
        trainer.task.eval()
        accumulation = trainer.plan.accumulation
        for _ in range(accumulation):
            inputs = next(trainer.inputs)
            label_B = inputs.batch.label_B
            output = trainer.task(inputs.x_B, label_B, 0.0)
            loss = output.loss / accumulation
            loss.backward()
        objective = trainer.task.objective
        objective.end_step(torch.tensor(0.0))

        gradients = []
        for parameter in trainer.task.parameters():
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        gradients.append(objective.get_buffer("center_K"))
        gradients_of_runs.append(gradients)
        trainer.close()
    whole, accumulated = gradients_of_runs
    assert len(whole) > 20
    torch.testing.assert_close(whole, accumulated, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_compares_a_whole_batch_is_not_accumulated(begin, objective):
    with refuses("runtime.micro_batch", 4, objective, 8):
        begin("exp", objective, "runtime.micro_batch=4")
    training = begin("exp", objective)
    assert training.trainer.plan.micro_batch == 8


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("training.speaker_balance=0.5", ["training.speaker_balance=0"]),
        ("augment.spec.num_time_masks=1", ["augment.spec.num_time_masks=0"]),
        ("views.short_seconds=0.7", ["views.short_seconds=0.5"]),
        ("views.clean=3", ["views.clean=2"]),
        ("data.features=fbank", ["data.features=wave"]),
    ],
)
def test_settings_that_need_labels_or_do_nothing_are_refused(
    make_config, setting, values
):
    with refuses("task", *values):
        make_config(
            *SETTINGS,
            *OBJECTIVES["dino"],
            "augment.telephone_prob=0",
            "augment.speeds=[1.0]",
            setting,
        )


def test_an_objective_is_needed(make_config):
    with refuses("objective"):
        make_config("task=ssl")


def test_a_clean_view_is_not_augmented_and_all_have_one_speed(begin):
    training = begin("exp", "sdpn", "augment.telephone_prob=1")
    source = training.trainer.source
    crops = source.crops_of(attempt=0)
    assert crops.crops_each == 3
    most_starts = 0
    for position in range(40):
        views = []
        for number in range(3):
            views.append(crops.draw((0, 3 * position + number, 0)))
        clean, *others = views
        assert clean.draws.keys() <= {"speed"}
        for view in others:
            assert "telephone" in view.draws

        speeds = set()
        for view in views:
            speed = view.draws.get("speed")
            speeds.add(0 if speed is None else speed.group)
        assert len(speeds) == 1
        starts = {view.first for view in views}
        most_starts = max(most_starts, len(starts))
    # the start of a crop is drawn for each view
    assert most_starts == 3


def test_fine_tuning_begins_with_the_teacher(begin, make_config, folder, tmp_path):
    begun = begin("pre", "dino")
    weights = finish(begun)
    settings = [setting for setting in SETTINGS if setting != "task=ssl"]
    config = make_config(*settings, f"data.dir={folder.parent}")
    ranks = start_rank(config)
    model = begun.exp_dir / "model"
    tuned = train.start_training(
        tmp_path / "tuned",
        model,
        config,
        ranks,
        Signals(print),
    )
    assert_same(tuned.embedder.state_dict(), weights)
    card = json.loads((model / "card.json").read_text())
    assert card["objective"] == "dino"
    assert not (model / "head.safetensors").exists()
