"""Variants: the values that a file has under other names, found like files beside it."""

from pathlib import Path

import pytest
from refusals import refuses

from speakerlab.config.layers import (
    CONF,
    Layer,
    find_layer,
    layer_names,
    merge_layers,
    model_names,
)
from speakerlab.config.schema import load_config

FAMILY = """\
model: {name: resnet, args: {depth: 34, embed_dim: 256}}
training: {lr: 0.1, num_epochs: 3}

variants:
  small: {model: {args: {depth: 18}}}  # 4.1 M
  other:
    model: {name: xvector, args: {embed_dim: 64}}
    training: {lr: 0.2}
  wrong: {model: {args: {dept: 18}}}
"""


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A folder that has a file with three variants, and another without any."""
    (tmp_path / "family.yaml").write_text(FAMILY)
    (tmp_path / "plain.yaml").write_text("seed: 1\n")
    return tmp_path


def test_a_file_comes_before_a_variant(family):
    assert find_layer(family / "plain.yaml") == Layer(family / "plain.yaml")
    (family / "small.yaml").write_text("seed: 2\n")
    assert find_layer(family / "small.yaml") == Layer(family / "small.yaml")
    assert find_layer(Path("campplus")) == Layer(CONF / "campplus.yaml")


@pytest.mark.parametrize("given", ["small.yaml", "small"])
def test_a_path_finds_a_variant_in_the_files_of_its_folder(family, given):
    assert find_layer(family / given) == Layer(family / "family.yaml", "small")


def test_a_name_finds_a_variant_in_conf(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resnet101").mkdir()  # an experiment of the user's
    assert find_layer(Path("resnet101")) == Layer(CONF / "resnet.yaml", "resnet101")
    assert find_layer(Path("hardware/gpu_24g")) == Layer(
        CONF / "hardware/gpu.yaml", "gpu_24g"
    )
    # Files that have become variants keep their paths.
    former = CONF / "resnet101.yaml"
    assert find_layer(former) == Layer(CONF / "resnet.yaml", "resnet101")
    monkeypatch.chdir(CONF.parent)
    assert find_layer(Path("conf/resnet101.yaml")).variant == "resnet101"


def test_a_variant_overrides_its_file_as_a_later_layer_does(family):
    base = load_config([family / "family.yaml"])
    small = load_config([family / "small.yaml"])
    assert (base.model.args["depth"], small.model.args["depth"]) == (34, 18)
    assert (small.model.args["embed_dim"], small.training.num_epochs) == (256, 3)
    other = load_config([family / "other.yaml"])
    assert "depth" not in other.model.args  # another name replaces the arguments
    assert (other.model.name, other.training.lr, other.training.num_epochs) == (
        "xvector",
        0.2,
        3,
    )
    above = load_config(
        [family / "other.yaml", family / "plain.yaml"], ["training.lr=0.3"]
    )
    assert (above.seed, above.training.lr) == (1, 0.3)


def test_variants_are_not_in_the_result(family, tmp_path):
    for name in ("family", "small"):
        values, origin = merge_layers([family / f"{name}.yaml"])
        assert list(values) == ["model", "training"]
        assert not any(key.startswith("variants") for key in origin)
    load_config([family / "small.yaml"]).write(tmp_path / "config.yaml")
    assert "variants" not in (tmp_path / "config.yaml").read_text()


def test_an_unknown_key_names_the_file_and_the_variant(family):
    with refuses(f"{family}/family.yaml: variants.wrong: model.args.dept", "depth"):
        load_config([family / "wrong.yaml"])
    load_config([family / "family.yaml"])  # which does not use it


@pytest.mark.parametrize(
    ("table", "where", "value"),
    [
        ("variants:", "variants", "None"),
        ("variants: [small]", "variants", "['small']"),
        ("variants: {small: 18}", "variants.small", "18"),
        ("variants: {small: }", "variants.small", "None"),
        ("variants: {18: {seed: 1}}", "variants.18", "quotes"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path, table, where, value):
    file = tmp_path / "bad.yaml"
    file.write_text(f"seed: 1\n{table}\n")
    with refuses(f"{file}: {where}", value):
        load_config([file])


def test_variants_of_a_variant_and_of_a_setting_are_unknown_keys(tmp_path):
    (tmp_path / "a.yaml").write_text("variants:\n  b: {variants: {c: {}}}\n")
    model = ["model.name=xvector"]
    with refuses(f"{tmp_path}/a.yaml: variants.b: variants", "unknown key"):
        load_config([tmp_path / "b.yaml"], model)
    with refuses("--set variants.b={}", "unknown key"):
        load_config([], [*model, "variants.b={}"])


def test_a_name_that_two_files_have_is_refused(family):
    (family / "more.yaml").write_text(
        "variants:\n  small: {seed: 1}\n  tiny: {seed: 2}\n"
    )
    with refuses(str(family / "small.yaml"), "family.yaml", "more.yaml"):
        find_layer(family / "small.yaml")
    assert find_layer(family / "tiny.yaml").variant == "tiny"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("resnet10", "resnet101"),
        ("ecapa_tdn_1024", "ecapa_tdnn_1024"),
        ("conf/resnet1010.yaml", "resnet101"),
        ("gpu_80", "hardware/gpu_80g"),
        ("finetune/large_margin_wespeak", "finetune/large_margin_wespeaker"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest(given, meant):
    with refuses(given, f"did you mean {meant}?", error=FileNotFoundError) as caught:
        load_config([Path(given)])
    assert "\n" not in str(caught.value)


def test_files_of_other_programs_beside_a_missing_one_do_not_matter(family):
    (family / "broken.yaml").write_text("services: {web: [\n")
    (family / "list.yaml").write_bytes(b"- variants: \xff\n")
    (family / "folder.yaml").mkdir()
    with refuses(
        str(family / "smal.yaml"), "no such configuration", error=FileNotFoundError
    ):
        find_layer(family / "smal.yaml")
    assert find_layer(family / "small.yaml").variant == "small"
    with refuses(str(family / "nowhere/small.yaml"), error=FileNotFoundError):
        find_layer(family / "nowhere/small.yaml")


def test_no_folder_is_searched_if_the_file_exists(family, monkeypatch):
    def search(*_args, **_options):
        raise AssertionError("searched")

    monkeypatch.setattr(Path, "glob", search)
    assert find_layer(family / "plain.yaml").variant is None
    assert find_layer(Path("campplus")).variant is None


def test_names_are_those_of_files_and_variants(family):
    assert layer_names(family) == ["family", "other", "plain", "small", "wrong"]
    names = model_names()
    assert names == sorted(set(names))
    assert {"campplus", "resnet", "resnet34", "redimnet2_b6", "eres2net_large"} <= set(
        names
    )
    assert all(load_config([Path(name)]) for name in names)
