"""Trainings with a teacher: targets, labels, bad steps, resume; ranks are in tests/bin."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from finished import assert_same, finish
from refusals import refuses

from speakerlab.checkpoints.model_files import read_card, space_of
from speakerlab.core import directions
from speakerlab.experiments import train
from speakerlab.experiments.consistency import load_same_config
from speakerlab.experiments.hardware import start_rank
from speakerlab.experiments.teachers import load_teacher
from speakerlab.experiments.validation import PairValidation, TeacherValidation
from speakerlab.frontend.augment.speed import resampler
from speakerlab.inference import extraction
from speakerlab.models import frames
from speakerlab.training.signals import Signals

SETTINGS = [
    "task=distil",
    "data.crop_seconds=0.5",
    "data.valid_speakers=4",
    "training.global_batch=8",
    "training.num_epochs=3",
    "training.warmup_epochs=1",
    "training.checkpoint_every_steps=2",
    "augment.noise_prob=0",
    "augment.room_prob=0",
    "augment.telephone_prob=0.5",
    "augment.speeds=[1.0]",
    "runtime.num_workers=0",
    "runtime.device=cpu",
    "runtime.log_every_steps=1",
    "runtime.precision=fp32",
]
UTTERANCE = "distil.targets=utterance"
CLEAN = "distil.targets=crop"
AUGMENTED = "distil={targets: crop, hears: augmented}"
FRAMES = "distil={targets: crop, views: 2, frame_weight: 3.0}"
STORED = "distil={targets: utterance, frame_weight: 3.0}"
LABELS = "distil.label_weight=0.5"
# Its smallest value is not 0, but the entropy of the teacher.
WITHOUT_CONTRAST = "distil.losses={cosine: 1, relations: 4, contrast: 0}"
# Another size, other features and another number of dimensions than the student.
TEACHER = [
    "seed=5",
    "frontend.num_mel_bins=40",
    "model.args.embed_dim=24",
]


@pytest.fixture
def folder(make_data_dir) -> Path:
    return make_data_dir(speakers=range(6), seconds=[0.6, 0.7, 0.8])


@pytest.fixture
def teacher(publish_to) -> Path:
    path, _, _ = publish_to("teacher", *TEACHER)
    return path


@pytest.fixture
def begin(folder, teacher, tmp_path, monkeypatch):
    """begin("exp", *settings) -> a training that has not begun."""
    monkeypatch.chdir(tmp_path)
    small = tmp_path / "small.yaml"
    small.write_text(
        "model: {name: campplus, args: {embed_dim: 16, head_channels: 4,"
        " init_channels: 16, growth_rate: 4, blocks: [1, 1, 1]}}\n"
    )

    def make(name, *options, data=folder.parent, teachers=(teacher,), init=None):
        names = json.dumps([str(path) for path in teachers])
        settings = [
            *SETTINGS,
            f"data.dir={data}",
            f"distil.teachers={names}",
            *options,
        ]
        exp = tmp_path / name
        config = load_same_config(exp, [small], settings)
        ranks = start_rank(config)
        return train.start_training(exp, init, config, ranks, Signals(print))

    return make


def rows_of(training, kind):
    text = (training.exp_dir / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.parametrize(
    "options",
    [
        [UTTERANCE],
        [AUGMENTED, "distil.projection=drop"],
        [FRAMES, "augment.pitch_prob=0.5"],
        pytest.param([CLEAN, LABELS], marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_bit_identical_with_its_projection(begin, tmp_path, options):
    whole = begin("whole", *options)
    weights = finish(whole)
    folders = sorted((whole.exp_dir / "checkpoints").glob("step_*"))
    cut = tmp_path / "cut"
    shutil.copytree(whole.exp_dir, cut)
    shutil.rmtree(cut / "model")
    for checkpoint in folders[1:]:
        shutil.rmtree(cut / "checkpoints" / checkpoint.name)
    again = begin("cut", *options)
    assert_same(finish(again), weights)
    state = whole.trainer.task.state_dict()
    assert_same(again.trainer.task.state_dict(), state)

    losses = [row["loss"] for row in rows_of(whole, "train")]
    assert [row["loss"] for row in rows_of(again, "train")] == losses
    has_projection = "distance.projection.weight" in state
    assert has_projection == ("distil.projection=drop" in options)


def test_the_student_comes_closer_to_its_teacher(begin, monkeypatch):
    # The embeddings of a teacher that has learned nothing differ along one direction alone.
    monkeypatch.setattr(directions, "STANDS_OUT", np.inf)
    options = ["optimizer={name: adamw}", "training.lr=0.1", "training.num_epochs=25"]
    training = begin("exp", UTTERANCE, WITHOUT_CONTRAST, *options)
    finish(training)
    distances = [row["teacher_distance"] for row in rows_of(training, "valid")]
    assert distances[-1] < 0.9 * distances[0]
    losses = [row["loss"] for row in rows_of(training, "train")]
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])


def move_labels(folder: Path, copy: Path) -> None:
    """Copy a data directory; in the copy, each utterance has the speaker of another one."""
    ids_and_speakers = (folder / "utt2spk").read_text().split()
    ids = ids_and_speakers[::2]
    speakers = ids_and_speakers[1::2]
    shifted_speakers = speakers[1:] + speakers[:1]
    lines = [f"{name} {speaker}\n" for name, speaker in zip(ids, shifted_speakers)]
    shutil.copytree(folder, copy)
    (copy / "utt2spk").write_text("".join(lines))


@pytest.mark.parametrize("targets", [UTTERANCE, CLEAN])
def test_labels_change_no_bit(begin, folder, tmp_path, targets):
    """Neither other speakers nor none, although the labelled run validates with the EER, too."""
    # Enough utterances for two of one speaker.
    several = "data.valid_speakers=7"
    labelled = begin("labelled", targets, several)
    weights = finish(labelled)
    assert "eer" in rows_of(labelled, "valid")[-1]

    mixed = tmp_path / "mixed" / "train"
    move_labels(folder, mixed)
    mixed_up = begin("mixed_up", targets, several, data=mixed.parent)
    assert_same(finish(mixed_up), weights)

    (mixed / "utt2spk").unlink()
    bare = begin("bare", targets, several, data=mixed.parent)
    assert_same(finish(bare), weights)
    assert "eer" not in rows_of(bare, "valid")[-1]
    card = read_card(bare.exp_dir)
    assert card["classes"] == 0
    assert not (bare.exp_dir / "model/calibration.json").exists()


def test_labels_add_a_head_and_hold_out_speakers(begin, folder):
    labelled = begin("exp", UTTERANCE, LABELS)
    assert isinstance(labelled.validation, PairValidation)
    assert "head.weight_CD" in labelled.trainer.task.state_dict()
    assert isinstance(begin("bare", UTTERANCE).validation, TeacherValidation)

    (folder / "utt2spk").unlink()
    with refuses(str(folder / "utt2spk"), "no such file; training needs speakers"):
        begin("none", UTTERANCE, LABELS)


@pytest.mark.parametrize("targets", [UTTERANCE, CLEAN, FRAMES, STORED])
def test_a_bad_step_moves_nothing(begin, targets):
    """A NaN in a target: neither student, statistics nor projection move."""
    training = begin("exp", targets, "distil.projection=drop")
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
                inputs.batch.target_BD[0, 0] = torch.nan
            return inputs

        trainer.inputs._make = poisoned
        trainer.train_step()
        trainer.inputs._make = make_inputs
        moved = set()
        for name, tensor in trainer.task.state_dict().items():
            if not torch.equal(tensor, before[name]):
                moved.add(name.split(".")[0])
        learning = {"embedder", "distance"}
        if targets in (FRAMES, STORED):
            learning.add("frame_distance")
        assert moved == (set() if is_bad else learning)
    trainer.close()


def test_a_student_has_nothing_of_what_its_teachers_embeddings_have_in_common(
    begin, teacher
):
    """Also before it has learned."""
    training = begin("exp", UTTERANCE)
    train_set = training.source.corpus.train
    (target_ND,) = training.source.target_VND
    assert len(target_ND) == len(train_set)
    wave_BS = torch.randn(3, 8000)
    emb_BD = training.embedder.eval()(wave_BS).detach().numpy()
    np.testing.assert_allclose(emb_BD @ target_ND.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(emb_BD, axis=1), 1, rtol=1e-5)


def first_inputs(training):
    training.trainer.open()
    inputs = next(training.trainer.inputs)
    training.trainer.close()
    return inputs


def test_the_teacher_hears_the_drawn_voice_without_the_channel(begin):
    options = ["augment.speeds=[1.0,0.8,1.25]", "augment.telephone_prob=1"]
    clean = first_inputs(begin("clean", CLEAN, *options))
    augmented = first_inputs(begin("augmented", AUGMENTED, *options))
    voice_only = ["augment.speeds=[1.0,0.8,1.25]", "augment.telephone_prob=0"]
    voice = first_inputs(begin("voice", AUGMENTED, *voice_only))
    # The same crops: the draws of an augmentation do not depend on the others.
    assert torch.equal(clean.batch.row_B, voice.batch.row_B)
    assert torch.equal(clean.x_B, augmented.x_B)
    assert torch.equal(clean.batch.target_BD, voice.batch.target_BD)
    assert not torch.equal(clean.batch.target_BD, augmented.batch.target_BD)


@pytest.mark.parametrize("targets", [UTTERANCE, STORED])
def test_an_utterance_has_a_target_for_each_speed(begin, teacher, targets):
    import speakerlab

    speeds = [1.0, 0.8, 1.25]
    training = begin("exp", targets, f"augment.speeds={speeds}")
    train_set = training.source.corpus.train
    model = speakerlab.load(teacher)
    for number, speed in enumerate(speeds):
        wave_S = train_set.read(0, 0, int(train_set.num_samples_N[0]))
        played_1S = resampler(speed)(torch.from_numpy(wave_S)[None].float() / 32768)
        emb_D = model.embed(played_1S[0].numpy())
        target_D = training.source.target_VND[number, 0]
        np.testing.assert_allclose(target_D, emb_D / np.linalg.norm(emb_D), atol=1e-4)

    batch = first_inputs(training).batch
    speed_B = speed_indices(batch)
    assert set(speed_B) == {0, 1, 2}
    expected_BD = training.source.target_VND[speed_B, batch.row_B]
    assert np.array_equal(batch.target_BD, expected_BD)


def test_frames_at_a_speed_are_those_of_what_the_student_hears(begin, teacher):
    # Played at 1.25, an utterance of 0.8 s is as long as a crop: its frames are all in the crop.
    options = ["augment.telephone_prob=0", "augment.speeds=[1.0,1.25]"]
    training = begin("exp", STORED, *options, "data.crop_seconds=0.64")
    batch = first_inputs(training).batch
    wave_BS = training.trainer.task.augment.voices(batch)
    seconds_B = training.source.corpus.train.num_samples_N[batch.row_B] / 16000
    rows: list[int] = []
    for row, speed in enumerate(speed_indices(batch)):
        if speed == 1 and seconds_B[row] == 0.8:
            rows.append(row)
    assert rows

    embedder = load_teacher(str(teacher)).embedder.eval()
    with torch.no_grad(), embedder.noting_frames() as noted:
        embedder(wave_BS[rows])
    frames_RCT = noted.take()
    error = (batch.target_BCT[rows].float() - frames_RCT).abs().max()
    assert error < 2e-3 * frames_RCT.abs().max()


def speed_indices(batch) -> list[int]:
    """Return the index of the speed of each row."""
    speed_B = [0] * len(batch.row_B)
    for draws in batch.draws["speed"]:
        for row in draws.rows.tolist():
            speed_B[row] = draws.group
    return speed_B


def test_the_views_of_a_crop_share_its_place_its_voice_and_its_target(begin):
    options = ["augment.speeds=[1.0,0.8,1.25]", "augment.pitch_prob=0.5"]
    inputs = first_inputs(begin("views", CLEAN, "distil.views=4", *options))
    batch = inputs.batch
    # Compare with a batch of the same two crops that have one view each.
    settings = ["training.global_batch=2", "distil.losses={cosine: 1}"]
    alone = first_inputs(begin("alone", CLEAN, *settings, *options)).batch
    row_CV = batch.row_B.unflatten(0, (2, 4))
    target_CVD = batch.target_BD.unflatten(0, (2, 4))
    assert torch.equal(row_CV[:, 0], alone.row_B)
    assert (row_CV == row_CV[:, :1]).all()
    assert (target_CVD == target_CVD[:, :1]).all()
    assert not torch.equal(target_CVD[0, 0], target_CVD[1, 0])
    # The telephone is drawn for each view.
    x_CVS = inputs.x_B.unflatten(0, (2, 4))
    differs_CV = (x_CVS != x_CVS[:, :1]).any(dim=2)
    assert differs_CV.any()

    # Without an augmentation of their own, they are one crop.
    plain = ["augment.telephone_prob=0", *options]
    inputs = first_inputs(begin("plain", CLEAN, "distil.views=4", *plain))
    x_CVS = inputs.x_B.unflatten(0, (2, 4))
    assert torch.equal(x_CVS, x_CVS[:, :1].expand_as(x_CVS))


def test_the_frames_of_a_crop_are_those_that_its_teacher_pools(
    begin, teacher, monkeypatch
):
    thinned_BCT = first_inputs(begin("thinned", FRAMES)).batch.target_BCT
    monkeypatch.setattr(frames, "FRAME_STEP", 1)
    batch = first_inputs(begin("frames", FRAMES)).batch
    assert torch.equal(batch.target_BCT[::2], batch.target_BCT[1::2])
    assert torch.equal(batch.target_BCT[..., ::2], thinned_BCT)

    # The layers from the pooling on make the teacher's embedding of them.
    emb = batch.target_BCT
    layers = load_teacher(teacher).embedder.eval().backbone.xvector.named_children()
    has_pooled = False
    for name, layer in layers:
        has_pooled = has_pooled or name == "stats"
        if has_pooled:
            emb = layer(emb)
    emb_BD = torch.nn.functional.normalize(emb.squeeze(2), dim=1)
    torch.testing.assert_close(emb_BD, batch.target_BD, rtol=1e-4, atol=1e-4)


def test_stored_frames_are_those_of_the_whole_utterance_where_the_crop_is(
    begin, teacher
):
    training = begin("stored", STORED)
    batch = first_inputs(training).batch
    train_set = training.source.corpus.train
    crops = training.source.crops_of(attempt=0)
    slots = zip(batch.position_B.tolist(), batch.row_B.tolist())
    firsts = [crops.draw((0, position, row)).first for position, row in slots]
    assert max(firsts) > 0

    embedder = load_teacher(teacher).embedder.eval()
    rows = batch.row_B.tolist()
    for row, first, target_CT in zip(rows, firsts, batch.target_BCT, strict=True):
        num_samples = int(train_set.num_samples_N[row])
        wave_S = torch.from_numpy(train_set.read(row, 0, num_samples)) / 32768
        with embedder.noting_frames() as noted, torch.no_grad():
            embedder(wave_S[None])
        whole_CT = noted.take()[0]
        num_frames = whole_CT.shape[1]
        start = round(first / num_samples * num_frames)
        start = min(start, num_frames - target_CT.shape[1])
        expected_CT = whole_CT[:, start : start + target_CT.shape[1]]
        torch.testing.assert_close(target_CT.float(), expected_CT, rtol=2e-3, atol=2e-3)


def test_embeddings_beside_stored_frames_are_the_same(begin):
    alone = first_inputs(begin("alone", UTTERANCE)).batch
    stored = first_inputs(begin("stored", STORED)).batch
    assert torch.equal(stored.row_B, alone.row_B)
    torch.testing.assert_close(stored.target_BD, alone.target_BD, rtol=1e-5, atol=1e-6)


def frame_files(folder: Path) -> dict[Path, int]:
    """Return the time of each file of frames."""
    files = (folder.parent / "targets").glob("*/*.safetensors")
    return {path: path.stat().st_mtime_ns for path in files}


def test_stored_frames_are_kept_while_teacher_and_data_are_the_same(
    begin, folder, publish_to, monkeypatch
):
    monkeypatch.setattr(extraction, "MIN_CHUNK_SECONDS", 3.0)
    training = begin("first", STORED)
    stored = frame_files(folder)
    assert len(stored) > 2
    begin("second", STORED, "seed=3")
    assert frame_files(folder) == stored
    # A training with other utterances may run at the same time, and leaves them alone.
    begin("others", STORED, "data.valid_speakers=5")
    with_others = frame_files(folder)
    assert {path: with_others[path] for path in stored} == stored
    num_others = len(with_others) - len(stored)
    assert num_others > 0

    # An interrupted computation leaves some files; a damaged file counts as missing.
    missing, damaged, *intact = sorted(stored)
    missing.unlink()
    damaged.write_bytes(damaged.read_bytes()[:100])
    begin("third", STORED)
    again = {path: frame_files(folder)[path] for path in stored}
    changed = {path for path in stored if again[path] != stored[path]}
    assert changed == {missing, damaged}
    assert intact

    other, _, _ = publish_to("other", "seed=6")
    begin("fourth", STORED, teachers=[other])
    assert len(frame_files(folder)) == 2 * len(stored) + num_others

    # Other recordings under the same names.
    wave_path = training.source.corpus.train.paths[0]
    samples, sample_rate = soundfile.read(wave_path, dtype="int16")
    soundfile.write(wave_path, samples[::-1], sample_rate)
    begin("fifth", STORED)
    last = frame_files(folder)
    assert all(last[path] != again[path] for path in again)


def test_frames_of_long_utterances_follow_window_by_window(begin, publish_to, folder):
    windowed, _, _ = publish_to("windowed", *TEACHER, "model.max_seconds=0.5")
    training = begin("exp", STORED, teachers=[windowed])
    (frames,) = training.source.target_frames
    (whole,) = begin("whole", STORED).source.target_frames
    # At the end of a window, a frame may be lost; the first of each window is kept.
    num_lost_N = whole.num_frames_N - frames.num_frames_N
    assert set(num_lost_N.tolist()) <= {-1, 0, 1}


def test_frames_that_cannot_be_stored_are_refused(
    begin, teacher, publish_to, folder, monkeypatch
):
    silent, _, _ = publish_to("silent", *TEACHER, "vad={}")
    with refuses("distil.frame_weight", "removes silence"):
        begin("a", STORED, teachers=[silent])
    disk = shutil._ntuple_diskusage(10**9, 10**9, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    without_pooling = "model={name: simam_resnet, args: {m_channels: 4}}"
    with refuses("SimAMResNet", "has no `Pooling`", "distil.frame_weight=0"):
        begin("no pooling", STORED, without_pooling)
    weights = read_card(teacher)["sha256"][:12]
    train_set = begin("without frames", UTTERANCE).source.corpus.train
    utterances = train_set.sha256()[:8]
    frames = folder.parent / "targets" / f"train-frames-{weights}-{utterances}"
    with refuses(str(frames), "the teacher's frames need", "1e-06 GB are free"):
        begin("b", STORED)


def test_frames_are_learned_in_units_of_their_deviation(begin):
    training = begin("frames", FRAMES, WITHOUT_CONTRAST)
    distance = training.trainer.task.frame_distance
    assert distance.deviation_C.min() >= 0.29 * distance.deviation_C.median()
    finish(training)
    with_frames = np.mean([row["loss"] for row in rows_of(training, "train")])

    silent = begin("silent", FRAMES, WITHOUT_CONTRAST, "distil.frame_weight=1e-9")
    finish(silent)
    without_frames = np.mean([row["loss"] for row in rows_of(silent, "train")])
    # The distance of frames is about 1, the mean square of their units, times the weight of 3. Of
    # so few steps, single losses depend on rounding.
    assert without_frames + 1.5 < with_frames < without_frames + 4.5


def test_an_utterance_has_one_target_whatever_its_crop(begin, teacher):
    import speakerlab

    training = begin("exp", UTTERANCE)
    batch = first_inputs(training).batch
    train_set = training.source.corpus.train
    model = speakerlab.load(teacher)
    for target_D, row in zip(batch.target_BD, batch.row_B.tolist(), strict=True):
        emb_D = model.embed(train_set.paths[row])
        expected = torch.from_numpy(emb_D / np.linalg.norm(emb_D))
        torch.testing.assert_close(target_D, expected, rtol=1e-4, atol=1e-5)


def targets_of(folder: Path) -> dict[str, int]:
    """Return the time of each table of targets."""
    tables = (folder.parent / "targets").glob("*.npy")
    return {path.name: path.stat().st_mtime_ns for path in tables}


def test_stored_targets_are_kept_while_teacher_and_data_are_the_same(
    begin, folder, publish_to
):
    begin("first", UTTERANCE)
    stored = targets_of(folder)
    assert len(stored) == 2
    begin("second", UTTERANCE, "seed=3")
    assert targets_of(folder) == stored

    other, _, _ = publish_to("other", "seed=6")
    begin("third", UTTERANCE, teachers=[other])
    assert len(targets_of(folder)) == 4

    # Another validation set: the tables of other utterances are beside these.
    begin("fourth", UTTERANCE, "data.valid_speakers=5")
    with_others = targets_of(folder)
    assert len(with_others) == 6
    assert {name: with_others[name] for name in stored} == stored


def test_a_student_lives_in_its_teachers_space(begin, teacher, tmp_path):
    """Also a student of a student; one whose projection is dropped has its own."""
    finish(begin("student", UTTERANCE))
    card = read_card(tmp_path / "student")
    teacher_sha256 = read_card(teacher)["sha256"]
    assert card["embed_dim"] == 24
    assert space_of(card) == teacher_sha256
    assert card["teachers"][0]["sha256"] == teacher_sha256

    finish(begin("grandchild", UTTERANCE, teachers=[tmp_path / "student"]))
    card = read_card(tmp_path / "grandchild")
    assert space_of(card) == teacher_sha256

    finish(begin("other", UTTERANCE, "distil.projection=drop"))
    card = read_card(tmp_path / "other")
    assert card["embed_dim"] == 16
    assert space_of(card) == card["sha256"]


def test_several_teachers_make_one_target(begin, teacher, publish_to):
    second, _, _ = publish_to("second", "seed=7")
    speeds = "augment.speeds=[1.0,1.25]"
    training = begin("exp", UTTERANCE, speeds, teachers=[teacher, second])
    batch = first_inputs(training).batch
    assert batch.target_BD.shape == (8, 24 + 16)
    first_norm_B = batch.target_BD[:, :24].norm(dim=1)
    second_norm_B = batch.target_BD[:, 24:].norm(dim=1)
    torch.testing.assert_close(first_norm_B, torch.ones(8))
    torch.testing.assert_close(second_norm_B, torch.ones(8))
    finish(training)
    card = read_card(training.exp_dir)
    assert (card["embed_dim"], card["space"]) == (16, None)


@pytest.mark.slow
def test_an_exported_teacher_gives_the_same_targets(begin, teacher, tmp_path):
    pytest.importorskip("onnxscript")
    from speakerlab.inference.export import export_onnx

    file = tmp_path / "teacher.onnx"
    export_onnx(teacher, file)
    speeds = "augment.speeds=[1.0,1.25]"
    for number, targets in enumerate((UTTERANCE, CLEAN)):
        ours = first_inputs(begin(f"ours{number}", targets, speeds)).batch
        # The tables of both are of one sha256: computed again for the file.
        shutil.rmtree(tmp_path / "targets", ignore_errors=True)
        from_file = begin(f"file{number}", targets, speeds, teachers=[file])
        exported = first_inputs(from_file).batch
        torch.testing.assert_close(
            exported.target_BD, ours.target_BD, rtol=1e-3, atol=1e-4
        )


def test_teachers_that_do_not_fit_are_one_line(begin, publish_to, tmp_path):
    with refuses("distil.teachers", "is missing; add --teacher MODEL"):
        begin("a", teachers=[])
    with pytest.raises(FileNotFoundError, match=r"no_model: does not exist"):
        begin("b", teachers=[tmp_path / "no_model"])
    with pytest.raises(FileNotFoundError, match=r"no.onnx: no such model"):
        begin("c", "distil.projection=drop", teachers=[tmp_path / "no.onnx"])
    slow, _, _ = publish_to("slow", "frontend.sample_rate=8000")
    with refuses("distil.teachers", "slow hears 8000 Hz, the student 16000 Hz"):
        begin("d", teachers=[slow])
    # The weights of a teacher, deleted or damaged.
    broken, _, _ = publish_to("broken", "seed=9")
    weights = broken / "embedder.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with refuses("distil.teachers", "broken", "sha256 is"):
        begin("f", teachers=[broken])


def test_a_resumed_run_keeps_its_teacher(begin, teacher, publish_to, tmp_path):
    finish(begin("exp", UTTERANCE))
    # The same weights elsewhere are the same teacher.
    moved = tmp_path / "moved"
    shutil.copytree(teacher, moved)
    begin("exp", UTTERANCE, teachers=[moved])
    other, _, _ = publish_to("other", *TEACHER, "seed=6")
    with refuses(
        str(tmp_path / "exp/run.json"), "a resumed run must keep its teachers: sha256"
    ):
        begin("exp", UTTERANCE, teachers=[other])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["distil.losses={cosinus: 1}"], "unknown loss 'cosinus'; use cosine"),
        (["distil.losses={cosine: 0}"], "all weights are 0"),
        (["training.freeze_epochs=1"], "without a head"),
        (["training.speaker_balance=0.5"], "labels are not used"),
        (["distil.views=2"], "distil.targets=crop"),
        (["distil.views=3", CLEAN], "training.global_batch, 8"),
        (["distil.frame_weight=1", CLEAN, "runtime.compile=true"], "runtime.compile"),
        (
            [
                "distil.views=4",
                CLEAN,
                "runtime.micro_batch=2",
                "distil.losses={cosine: 1}",
            ],
            "micro-batch, 2",
        ),
    ],
)
def test_settings_that_do_nothing_are_refused(begin, options, line):
    key, _, _ = options[0].partition("=")
    with refuses(key, line):
        begin("exp", UTTERANCE, *options)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ([UTTERANCE, "augment.pitch_prob=0.5"], "augment.pitch_prob"),
        ([CLEAN, LABELS, "augment.formants_prob=0.5"], "augment.formants_prob"),
        (["task=verification", "augment.pitch_prob=0.5"], "augment.pitch_prob"),
    ],
)
def test_a_changed_voice_needs_a_target_of_its_own(begin, options, key):
    with refuses(key, "voice"):
        begin("exp", *options)


def test_the_teacher_hears_a_changed_pitch(begin):
    options = ["augment.pitch_prob=1", "augment.formants_prob=1"]
    changed = first_inputs(begin("changed", CLEAN, *options)).batch
    plain = first_inputs(begin("plain", CLEAN)).batch
    assert torch.equal(changed.row_B, plain.row_B)
    assert not torch.allclose(changed.target_BD, plain.target_BD, atol=1e-3)


@pytest.mark.slow
def test_an_exported_student_stays_in_its_teachers_space(begin, teacher, tmp_path):
    pytest.importorskip("onnxscript")
    import speakerlab
    from speakerlab.checkpoints.foreign import export_3dspeaker
    from speakerlab.inference.export import export_onnx

    finish(begin("student", UTTERANCE))
    file = tmp_path / "student.onnx"
    export_onnx(tmp_path / "student", file)
    exported = speakerlab.load(file)
    assert exported.space == read_card(teacher)["sha256"]
    wave_S = np.random.default_rng(0).standard_normal(8000).astype("f4") / 10
    np.testing.assert_allclose(
        exported.embed(wave_S),
        speakerlab.load(tmp_path / "student").embed(wave_S),
        atol=1e-4,
    )
    with refuses(str(tmp_path / "student"), "has no place for the projection"):
        export_3dspeaker(tmp_path / "student", tmp_path / "student.ckpt")


def test_a_student_begins_with_a_model_without_a_projection(
    begin, publish_to, folder, tmp_path
):
    """Also later: a student is fine-tuned with its projection."""
    initial, embedder, _ = publish_to("initial", "seed=8")
    training = begin("exp", UTTERANCE, init=initial)
    assert_same(training.embedder.backbone.state_dict(), embedder.backbone.state_dict())
    weights = finish(training)
    tuned = ["task=verification", "training.num_epochs=1", "seed=4"]
    after = begin("tuned", *tuned, "distil.target_dim=24", init=tmp_path / "exp")
    name = "projection.linear.weight"
    assert torch.equal(after.embedder.state_dict()[name], weights[name])
