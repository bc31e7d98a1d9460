"""Self-supervised trainings: views, teacher, labels, bad steps, resume; ranks are in tests/bin."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from refusals import refuses
from safetensors.torch import load_file
from torch import Tensor

from speakerlab.experiments import setup, train
from speakerlab.training.self_supervised import SelfSupervisedTask, Views, effective_rank
from speakerlab.training.signals import Signals

DINO = (
    "objective={name: dino, args: {hidden_dim: 16, wide_dim: 16, bottleneck_dim: 8, "
    "num_outputs: 32}}"
)
SDPN = "objective={name: sdpn, args: {hidden_dim: 16, output_dim: 8, num_prototypes: 12}}"
OBJECTIVES = {
    "dino": [DINO, "views={long: 2, short: 3, short_seconds: 0.25}"],
    "sdpn": [SDPN, "views={long: 1, short: 4, short_seconds: 0.25, clean: 1}"],
    "simclr": ["objective={name: simclr}", "views={long: 2, short: 0}"],
}
SETTINGS = [
    "task=ssl",
    *("data.crop_seconds=0.5", "data.valid_speakers=2", "training.one_crop_per=utterance"),
    *("training.global_batch=8", "training.num_epochs=3", "training.warmup_epochs=1"),
    *("training.checkpoint_every_steps=2", "augment.noise_prob=0", "augment.room_prob=0"),
    *("augment.telephone_prob=0.5", "runtime.num_workers=0", "runtime.device=cpu"),
    *("runtime.log_every_steps=1", "runtime.precision=fp32"),
]


@pytest.fixture
def folder(make_data_dir) -> Path:
    return make_data_dir(speakers=range(6), seconds=[0.6, 0.7, 0.8])


@pytest.fixture
def begin(make_config, folder, tmp_path):
    """begin("exp", "dino", *settings) -> a training that has not begun."""

    def make(name, objective, *more, data=folder.parent):
        sets = [*SETTINGS, *OBJECTIVES[objective], f"data.dir={data}", *more]
        config = make_config(*sets)
        ranks = setup.start_rank(config)
        return train.build_training(tmp_path / name, None, config, ranks, Signals(print))

    return make


def finish(training) -> dict[str, Tensor]:
    """Train to the end; return the weights that are published."""
    train.train(training)
    return load_file(training.exp_dir / "model/embedder.safetensors")


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rows_of(training):
    lines = (training.exp_dir / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    for row in found:
        row.pop("crops_per_second", None)
        row.pop("data_wait", None)
    return found


def test_crops_are_cut_into_views():
    views = Views(num_long=2, num_short=3, crop_samples=10, short_samples=4)
    assert (views.shorts_each, views.crops_each) == (2, 4)
    wave_NS = torch.arange(3 * 4 * 10).view(12, 10)
    long_LBS, short_VBS = views.cut(wave_NS)
    assert long_LBS[:, 1].tolist() == [list(range(40, 50)), list(range(50, 60))]
    expected = [[60, 61, 62, 63], [64, 65, 66, 67], [70, 71, 72, 73]]
    assert short_VBS[:, 1].tolist() == expected


def test_effective_rank_counts_dimensions():
    assert effective_rank(torch.eye(8)[:5]) == pytest.approx(5)
    assert effective_rank(torch.ones(6, 4)) == pytest.approx(1, abs=1e-6)
    assert 1 < effective_rank(torch.tensor([[1.0, 0], [1, 0.1], [1, -0.1]])) < 1.5


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_resumed_run_is_bit_identical_with_its_teacher(begin, tmp_path, objective):
    whole = begin("whole", objective)
    weights = finish(whole)
    folders = sorted((whole.exp_dir / "checkpoints").glob("step_*"))
    cut = tmp_path / "cut"
    shutil.copytree(whole.exp_dir, cut)
    shutil.rmtree(cut / "model")
    for one in folders[1:]:
        shutil.rmtree(cut / "checkpoints" / one.name)
    again = begin("cut", objective)
    assert same(finish(again), weights)
    assert same(again.trainer.task.state_dict(), whole.trainer.task.state_dict())
    assert rows_of(again) == rows_of(whole)
    row = next(row for row in rows_of(whole) if row["kind"] == "train")
    assert row["effective_rank"] > 1 and ("prototypes" in row) == (objective != "simclr")
    assert any(row["kind"] == "valid" and 0 <= row["eer"] <= 1 for row in rows_of(whole))


@pytest.mark.parametrize("objective", ["dino", pytest.param("simclr", marks=pytest.mark.slow)])
def test_labels_change_nothing(begin, folder, tmp_path, objective):
    """Neither other speakers nor none, in a directory without validation speakers."""
    none = "data.valid_speakers=0"
    weights = finish(begin("labelled", objective, none))
    lines = (folder / "utt2spk").read_text().split()
    ids, speakers = lines[::2], lines[1::2]
    mixed = tmp_path / "mixed" / "train"
    shutil.copytree(folder, mixed)
    table = [f"{name} {speaker}\n" for name, speaker in zip(ids, speakers[1:] + speakers[:1])]
    (mixed / "utt2spk").write_text("".join(table))
    assert same(finish(begin("mixed_up", objective, none, data=mixed.parent)), weights)
    (mixed / "utt2spk").unlink()
    bare = begin("bare", objective, "data.valid_speakers=null", data=mixed.parent)
    assert bare.trainer.validation is None and same(finish(bare), weights)


def test_labels_of_training_speakers_change_nothing_beside_validation(begin, folder, tmp_path):
    whole = begin("whole", "simclr")
    held = set(whole.trainer.validation.pieces[0].manifest.speakers)
    weights = finish(whole)
    lines = [line.split() for line in (folder / "utt2spk").read_text().splitlines()]
    others = [speaker for _, speaker in lines if speaker not in held]
    mixed = tmp_path / "mixed" / "train"
    shutil.copytree(folder, mixed)
    turned = iter(others[4:] + others[:4])
    table = [f"{name} {one if one in held else next(turned)}\n" for name, one in lines]
    (mixed / "utt2spk").write_text("".join(table))
    again = begin("mixed_up", "simclr", data=mixed.parent)
    assert set(again.trainer.validation.pieces[0].manifest.speakers) == held
    assert same(finish(again), weights)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_bad_step_moves_nothing(begin, objective):
    """A NaN in one wave: neither student nor teacher, statistics, centre or prototypes move."""
    training = begin("exp", objective)
    trainer = training.trainer
    trainer.start()
    trainer.open()
    for is_bad in (False, True, False):
        before = {name: t.clone() for name, t in trainer.task.state_dict().items()}
        made = trainer.inputs._make

        def poisoned(made=made, is_bad=is_bad):
            inputs = made()
            inputs.x_B[0, 0] = torch.nan if is_bad else inputs.x_B[0, 0]
            return inputs

        trainer.inputs._make = poisoned
        trainer.train_step()
        trainer.inputs._make = made
        after = trainer.task.state_dict()
        moved = {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])}
        groups = {name.split(".")[0] for name in after}
        assert moved == (set() if is_bad else groups), moved ^ groups
    trainer.close()


def test_the_teacher_follows_the_student(begin):
    training = begin("exp", "dino")
    task, trainer = training.trainer.task, training.trainer
    assert isinstance(task, SelfSupervisedTask) and task.student is not None
    trainer.start()
    trainer.open()
    old = [p.clone() for p in task.embedder.parameters()]
    trainer.train_step()
    assert task.momentum == 0.996  # rises to 1 at the end
    for before, now, student in zip(old, task.embedder.parameters(), task.student.parameters()):
        torch.testing.assert_close(now, 0.996 * before + 0.004 * student)
        assert not now.requires_grad
    trainer.close()
    task.begin_step(trainer.schedule.total_steps // 2, trainer.schedule, 0)
    assert 0.996 < task.momentum < 1


def test_accumulation_changes_dino_no_more_than_batchnorm_does(begin):
    """In eval mode the gradients and the centre of two micro-batches are those of the batch."""
    plain = ["objective.args.std_weight=0", "objective.args.cov_weight=0"]
    found = []
    for size in (8, 4):
        trainer = begin(f"by{size}", "dino", *plain, f"runtime.micro_batch={size}").trainer
        trainer.start()
        trainer.open()
        trainer.task.objective.begin_step(0.0)
        trainer.task.eval()
        for _ in range(trainer.plan.accumulation):
            inputs = next(trainer.inputs)
            output = trainer.task(inputs.x_B, inputs.batch.label_B, 0.0)
            (output.loss / trainer.plan.accumulation).backward()
        trainer.task.objective.end_step(torch.tensor(0.0))
        gradients = [p.grad for p in trainer.task.parameters() if p.grad is not None]
        found.append([*gradients, trainer.task.objective.get_buffer("center_K")])
        trainer.close()
    assert len(found[0]) > 20
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_compares_a_whole_batch_is_not_accumulated(begin, objective):
    with refuses("runtime.micro_batch", 4, objective, 8):
        begin("exp", objective, "runtime.micro_batch=4")
    assert begin("exp", objective).trainer.plan.micro_batch == 8


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
def test_settings_that_need_labels_or_do_nothing_are_refused(make_config, setting, values):
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
    source = begin("exp", "sdpn", "augment.telephone_prob=1").trainer.source
    crops = source.crops_of(attempt=0)
    assert crops.crops_each == 3
    drawn = [[crops.draw((0, 3 * p + i, 0)) for i in range(3)] for p in range(40)]
    for clean, *others in drawn:
        assert clean.draws.keys() <= {"speed"}
        assert all("telephone" in other.draws for other in others)
        groups = {
            one.draws["speed"].group if "speed" in one.draws else 0 for one in (clean, *others)
        }
        assert len(groups) == 1
    firsts = [len({one.first for one in crops_of}) for crops_of in drawn]
    assert max(firsts) == 3  # drawn for each view


def test_fine_tuning_begins_with_the_teacher(begin, make_config, folder, tmp_path):
    begun = begin("pre", "dino")
    weights = finish(begun)
    sets = [s for s in SETTINGS if s != "task=ssl"]
    config = make_config(*sets, f"data.dir={folder.parent}")
    ranks = setup.start_rank(config)
    tuned = train.build_training(
        tmp_path / "tuned", begun.exp_dir / "model", config, ranks, Signals(print)
    )
    assert same({k: v.contiguous() for k, v in tuned.embedder.state_dict().items()}, weights)
    card = json.loads((begun.exp_dir / "model/card.json").read_text())
    assert card["objective"] == "dino" and not (begun.exp_dir / "model/head.safetensors").exists()
