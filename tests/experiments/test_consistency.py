"""What a run may change in an experiment's folder, and that it runs alone there."""

import json
import subprocess
import sys

import pytest
import torch
from refusals import refuses
from voices import write_voices

from speakerlab.config.schema import load_config
from speakerlab.experiments.consistency import (
    check_training_data,
    is_choice_published,
    load_same_config,
    lock_experiment,
    new_run,
    record_config,
)
from speakerlab.experiments.corpus import read_corpus
from speakerlab.training.distributed import Ranks

ONE_RANK = Ranks(rank=0, world_size=1, local_size=1, device=torch.device("cpu"))
BARE = ("augment.noise_prob=0", "augment.room_prob=0", "data.valid_speakers=0")

HOLD = """
import sys, time
from pathlib import Path
from speakerlab.experiments.consistency import lock_experiment
lock = lock_experiment(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with refuses(str(tmp_path), f"process {holder.pid} on"):
            lock_experiment(tmp_path)
    finally:
        holder.kill()
        holder.wait()
    lock_experiment(tmp_path).close()


def begin(exp, config, **facts):
    """Leave what a run of this configuration leaves after its first checkpoint."""
    (exp / "checkpoints/step_00000002").mkdir(parents=True)
    config.write(exp / "config.yaml")
    (exp / "run.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("other", ["more recordings", "other voices"])
def test_a_resumed_run_keeps_its_recordings_also_of_the_same_speakers(
    make_config, tmp_path, other
):
    """Two corpora may both call their speakers 1, 2 and 3."""
    exp = tmp_path / "exp"
    data = tmp_path / "data"
    config = make_config(*BARE, f"data.dir={data}")
    write_voices(data / "train", seconds=[0.5, 0.6])
    corpus = read_corpus(config)
    begin(exp, config, train_sha256=corpus.train.sha256())
    check_training_data(config, corpus, exp)

    seconds = [0.5, 0.6, 0.7] if other == "more recordings" else [0.8, 0.9]
    write_voices(data / "train", seconds=seconds)
    changed = read_corpus(config)
    assert changed.train.speakers == corpus.train.speakers
    with refuses(f"{exp}/run.json", "training data", f"{data}/train", f"{exp}-2"):
        check_training_data(config, changed, exp)
    # A new experiment has nothing to keep.
    check_training_data(config, changed, tmp_path / "new")


def test_other_settings_of_an_experiment_name_both_choices(
    make_config, publish_to, tmp_path
):
    exp = tmp_path / "exp"
    begin(exp, make_config("training.lr=0.1"))
    file = exp / "config.yaml"
    changed = ["training.lr=0.2"]
    # Without a model, there is nothing to start from.
    with refuses(str(file), "training.lr: 0.1 -> 0.2", f"--exp, such as {exp}-2"):
        load_same_config(exp, [file], changed)

    publish_to("exp/model")
    choices = (f"--exp {exp}-2 to train again", f"--exp {exp}-2 --init {exp}")
    with refuses(str(file), "training.lr: 0.1 -> 0.2", *choices):
        load_same_config(exp, [file], changed)
    # An experiment that exists is never proposed.
    (tmp_path / "exp-2").mkdir()
    assert f"--exp {exp}-3 --init {exp}" in new_run(exp)
    # The weights fit no other model.
    assert "--init" not in new_run(exp, ["model.args.embed_dim: 16 -> 8"])


@pytest.mark.parametrize(
    "setting", ["training.keep_better=false", "runtime.num_threads=3"]
)
def test_a_setting_that_changes_nothing_learned_may_change(
    make_config, tmp_path, setting
):
    exp = tmp_path / "exp"
    begin(exp, make_config())
    load_same_config(exp, [exp / "config.yaml"], [setting])


def test_a_new_run_has_no_history_of_the_run_it_starts_from(make_config, tmp_path):
    layer = tmp_path / "other/config.yaml"
    make_config("training.extended=[[24, 4]]", "training.num_epochs=5").write(layer)
    config = load_config([layer])
    assert config.training.extended == ((24, 4),)
    exp = tmp_path / "exp"
    new = record_config(config, 6, exp, ONE_RANK)
    assert new.training.extended == ()
    assert load_config([exp / "config.yaml"]).training.extended == ()


@pytest.mark.parametrize(
    ("facts", "keep_better", "expected"),
    [
        # Kept because training did not help, and now the trained weights are wanted.
        ({"init_sha256": "a", "eers": (0.1, 0.2), "kept": True}, True, True),
        ({"init_sha256": "a", "eers": (0.1, 0.2), "kept": True}, False, False),
        ({"init_sha256": "a", "eers": (0.1, 0.2), "kept": False}, False, True),
        ({"init_sha256": "a", "eers": (0.1, 0.2), "kept": False}, True, False),
        # Training helped: both settings mean the trained weights.
        ({"init_sha256": "a", "eers": (0.2, 0.1), "kept": False}, False, True),
        ({"init_sha256": "a", "eers": (0.2, 0.1), "kept": False}, True, True),
        # From random weights, or without validation speakers, there is no choice.
        ({"init_sha256": None, "eers": (0.1, 0.2), "kept": False}, True, True),
        ({"init_sha256": "a"}, False, True),
    ],
)
def test_a_finished_run_publishes_again_if_it_would_choose_other_weights(
    publish_to, make_config, tmp_path, facts, keep_better, expected
):
    publish_to("exp/model")
    path = tmp_path / "exp/model/card.json"
    card = json.loads(path.read_text())
    card["init_sha256"] = facts["init_sha256"]
    if "eers" in facts:
        card["valid_eer_initial"], card["valid_eer_trained"] = facts["eers"]
        card["kept_initial"] = facts["kept"]
    path.write_text(json.dumps(card))
    config = make_config(f"training.keep_better={str(keep_better).lower()}")
    assert is_choice_published(tmp_path / "exp", config) == expected
