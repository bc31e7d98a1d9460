"""Names of experiments: one for each set of settings, and the same for the same settings."""

import re
from itertools import combinations
from pathlib import Path

import pytest
from refusals import refuses

from speakerlab.experiments.naming import (
    MAX_NAME,
    experiment_name,
    labels_of,
    value_text,
)

CAMPPLUS = [Path("campplus")]
SWEEP = ["training.lr=0.05", "training.margin.final=0.3"]


def name_of(*overrides, layers=CAMPPLUS, init=None):
    return experiment_name(layers, overrides, init)


def test_a_name_has_configuration_seed_and_settings():
    assert name_of() == "campplus_s0"
    assert name_of(*SWEEP) == "campplus_s0_lr0.05_margin0.3"
    text = ["optimizer.name=adamw", "augment.speeds=[1.0]", "data.noise=null"]
    # `augment.kind_odds.noise` is another setting.
    name = "campplus_s3_data.noise=null_optimizer=adamw_speeds=1,"
    assert name_of(*text, "seed=3") == name


@pytest.mark.parametrize(
    "overrides",
    [
        SWEEP[::-1],
        ["training={margin: {final: .30}, lr: 5e-2}"],
        ["training.lr=1", *SWEEP],
        [*SWEEP, "runtime.precision=fp32", "data.dir=/other", "seed=0"],
        [*SWEEP, "training.checkpoint_every_steps=7", "training.valid_every_epochs=2"],
    ],
    ids=["order", "notation", "overridden", "not learned", "when to save"],
)
def test_the_same_training_has_the_same_name(overrides):
    assert name_of(*overrides) == name_of(*SWEEP)


def test_different_settings_have_different_names(tmp_path):
    long = "x" * 300
    sets = [
        [],
        ["seed=1"],
        ["training.lr=0.05"],
        ["training.lr=0.005"],
        ["training.final_lr=0.005"],
        ["training.margin.initial=0.05"],
        ["training.margin.final=0.05"],
        # The length and the published weights are changed in the same experiment only on purpose.
        ["training.num_epochs=5"],
        ["training.average_checkpoints=5"],
        ["training.keep_better=false"],
        ["head.args.scale=20"],
        ["augment.speeds=[1.0]"],
        ["augment.speeds=[1.0,0.9]"],
        ["data.noise=null"],
        ['data.noise="null"'],
        ["data.noise=a/b"],
        ["data.noise=a-b"],
        ["data.noise=A-b c"],
        [f"data.noise={long}"],
        [f"data.noise={long}y"],
        ["data.train=[a]"],
        ["data.train=['a,b']"],
        ["data.train=[a,b]"],
        ["data.train=[{dir: a, share: 0.5}]"],
        ["model.name=xvector"],
        ["model.name=ecapa_tdnn"],
    ]
    names = [name_of(*overrides) for overrides in sets]
    names += [name_of(init=Path(path)) for path in ("a/model", "a-model", "b/a/model")]
    own = [tmp_path / "a/conf.yaml", tmp_path / "b/conf.yaml"]
    for path in own:
        path.parent.mkdir()
        path.write_text("training: {lr: 0.1}\n")
        names.append(name_of(layers=[*CAMPPLUS, path]))
    for first, second in combinations(names, 2):
        assert first != second
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.,=+~-]*", name)
        assert len(name) <= MAX_NAME


def test_many_settings_are_abbreviated():
    kinds = ("noise", "room", "telephone", "codec", "reencode")
    settings = [f"augment.{kind}_prob=0.125" for kind in kinds]
    settings += [f"training.{key}=3" for key in ("clip_norm", "warmup_epochs")]
    settings += ["training.final_lr=0.00012345", "training.on_divergence=stop"]
    name = name_of(*settings)
    assert len(name) == MAX_NAME
    assert name.startswith("campplus_s0_clip-norm3_codec-prob0.125_")
    # The part that differs is cut off.
    assert name_of(*settings, "training.warmup_epochs=4") != name


def test_layers_of_the_machine_are_left_out():
    """Resuming on other hardware finds the same experiment."""
    layers = [*CAMPPLUS, Path("hardware/gpu"), Path("finetune/large_margin")]
    name = "campplus+finetune.large_margin_s0"
    assert experiment_name(layers, []) == name
    assert experiment_name(layers[::2], []) == name
    # A variant in conf/resnet.yaml.
    assert experiment_name([Path("resnet101")], []) == "resnet101_s0"
    # The same file by its path.
    repository = Path(__file__).parents[2]
    given = [repository / "conf/campplus.yaml"]
    assert experiment_name(given, []) == "campplus_s0"


def test_an_argument_of_a_replaced_model_is_no_setting():
    name = name_of("model.args.growth_rate=8", "model.name=xvector")
    assert name == "campplus_s0_model=xvector"


def test_a_wrong_setting_is_refused():
    with refuses("--set training.lrr=1", "training.lr"):
        name_of("training.lrr=1")


def test_labels_are_the_shortest_that_no_other_key_has():
    keys = ["training.lr", "head.args.scale", "frontend.scale", "head.name", "seed"]
    labels = labels_of([*keys, "x.init"], reserved=["init"])
    assert list(labels.values()) == [
        "lr",
        "head.scale",
        "frontend.scale",
        "head",
        "seed",
        "x.init",
    ]


def test_values_of_different_types_have_different_texts():
    values = [1, "1", [1], ["1"], "1,", [1, 2], "1,2", None, "null", True, "true", []]
    values += [{}, "", "-1", -1, 1e20, "1e20", [[1], 2], "a", ["a"], "a\u00e9", "a b"]
    texts = [value_text(value) for value in values]
    assert len(set(texts)) == len(values)
    assert value_text(1e20) == "1e20"
    assert value_text(0.30) == "0.3"
    assert value_text("exp/teacher_t/model").startswith("teacher-t~")
