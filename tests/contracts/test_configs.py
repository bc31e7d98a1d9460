"""Every YAML and every registered component: found by itself, loaded in each combination, built.

The numbers of published recipes are compared in test_published_training.py.
"""

import re
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from pretrained_models import write_pretrained
from refusals import refuses

from speakerlab.config import build
from speakerlab.config.layers import (
    CONF,
    find_layer,
    layer_names,
    merge_layers,
    model_names,
    parse_yaml,
)
from speakerlab.config.schema import NAMED, load_config, takes_layers

ROOT = Path(__file__).parents[2]
# Files, and variants as paths of files that do not exist: `load_config` finds both.
MODELS = [ROOT / "conf" / f"{name}.yaml" for name in model_names()]
RECIPES = [None, *sorted(ROOT.glob("egs/*/conf.yaml"))]
OVERLAYS = [None, *sorted(ROOT.glob("conf/finetune/*.yaml"))]
METHODS = sorted(ROOT.glob("conf/ssl/*.yaml"))
HARDWARE = [
    ROOT / "conf/hardware" / f"{name}.yaml"
    for name in layer_names(ROOT / "conf/hardware")
]

# The variant of conf/finetune/large_margin.yaml for a model in a recipe; the file itself for
# all others.
PUBLISHED_RECIPES = ("3dspeaker", "cnceleb", "voxblink2", "voxceleb")
WESPEAKER_MODELS = ("ecapa_tdnn", "ecapa_tdnn_1024", "ecapa_tdnn_wespeaker", "resnet34")
LARGE_MARGIN = {
    **dict.fromkeys(
        product(PUBLISHED_RECIPES, WESPEAKER_MODELS), "large_margin_wespeaker"
    ),
    **dict.fromkeys(
        product(PUBLISHED_RECIPES, ["eres2netv2"]), "large_margin_eres2netv2"
    ),
    ("voxceleb", "redimnet2_b6"): "large_margin_redimnet2",
    ("voxblink2", "redimnet2_b6"): "large_margin_redimnet2",
    ("voxblink2", "simam_resnet34"): "large_margin_wespeaker",
}


# Model over a pretrained one -> a small one of the same kind, of tests/pretrained_models.py.
PRETRAINED = {
    "w2vbert2_mfa": "w2v_bert",
    "wavlm_large_ecapa": "wavlm_large",
    "wavlm_base_plus_mhfa": "wavlm",
    "whisper_pmfa": "whisper",
}


@pytest.fixture(autouse=True, scope="module")
def read_each_file_once():
    """Parse every YAML once: thousands of combinations of few files are loaded here."""
    parse_once = cache(parse_yaml)

    def parse(text, where):
        return deepcopy(parse_once(text, where))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speakerlab.config.layers.parse_yaml", parse)
        yield


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_every_self_supervised_method_loads_on_every_model_in_every_recipe(path):
    alone = [(model, None) for model in MODELS if model.stem not in PRETRAINED]
    for model, recipe in [
        *alone,
        *product([ROOT / "conf/campplus_tiny.yaml"], RECIPES),
    ]:
        layers = layers_of(model, recipe, path)
        config = load_config(layers)
        assert config.task == "ssl"
        assert config.objective is not None
        assert config.objective.name == path.stem  # `--method` names both
        assert build.crops_each(config) in (2, 3, 4)
        assert config.training.global_batch % 16 == 0
        tuned = load_config([*layers, ROOT / "conf/finetune/own_data.yaml"])
        assert (tuned.task, tuned.objective) == ("verification", None)


def test_distillation_loads_on_every_model_in_every_recipe():
    distil = ROOT / "conf/distil.yaml"
    alone = [(model, None) for model in MODELS]
    recipes = product([ROOT / "conf/campplus_tiny.yaml"], RECIPES)
    for model, recipe in [*alone, *recipes]:
        layers = layers_of(model, recipe, distil)
        config = load_config(layers)
        assert config.task == "distil"
        assert not config.has_head
        # Each model may get the dimensions of its teacher.
        sized = load_config(layers, ["model.args.embed_dim=192"])
        assert sized.model.args["embed_dim"] == 192
        tuned = load_config([*layers, ROOT / "conf/finetune/own_data.yaml"])
        assert tuned.task == "verification"


@pytest.mark.parametrize("name", PRETRAINED)
def test_a_pretrained_model_is_not_trained_without_labels(name):
    with refuses("task", "ssl"):
        load_config([ROOT / f"conf/{name}.yaml", ROOT / "conf/ssl/dino.yaml"])


def test_every_stage_loads_on_every_model_over_a_pretrained_one():
    for name, stage in product(PRETRAINED, layer_names(CONF / "pretrained")):
        layers = [ROOT / f"conf/{name}.yaml", CONF / "pretrained" / f"{stage}.yaml"]
        config = load_config(layers)
        assert config.frontend["lora"] is None
        assert config.training.freeze == ()
        assert config.training.global_batch % 16 == 0


def test_every_model_over_a_pretrained_one_is_in_the_table():
    names = [path.stem for path in MODELS if load_config([path]).is_pretrained]
    assert sorted(PRETRAINED) == sorted(names)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """pretrained("wavlm") -> the folder of a small pretrained model."""
    root = tmp_path_factory.mktemp("pretrained")

    @cache
    def make(name):
        layers = {"encoder_layers": 24} if name == "whisper" else {}
        return write_pretrained(root / name, name, **layers)

    return make


def names_of(paths):
    return [path.stem for path in paths]


def test_files_are_found():
    files = {"campplus", "campplus_tiny", "eres2net", "resnet"}
    variants = {"resnet34", "redimnet2_b6", "eres2net_large", "ecapa_tdnn_1024"}
    assert files | variants <= set(names_of(MODELS))
    assert {"cpu", "gpu", "gpu_11g", "gpu_80g"} <= set(names_of(HARDWARE))
    assert len(RECIPES) > 3
    assert len(OVERLAYS) > 1


@pytest.mark.parametrize(
    ("section", "name"),
    [(s, name) for s, (registry, _) in NAMED.items() for name in registry],
)
def test_every_registered_component_is_built_by_its_name(section, name, pretrained):
    no_margin = [
        "training.margin.initial=0",
        "training.margin.final=0",
    ]  # not for every head
    component = f"{section}={{name: {name}, args: {{}}}}"
    settings = [component, *no_margin]
    layers = [ROOT / "conf/campplus_tiny.yaml"]
    if section == "model" and takes_layers(name):
        layers = []  # whose front end has mel features
        settings.append(f"frontend={{name: ssl, model: {pretrained('w2v_bert')}}}")
    config = load_config(layers, settings)
    if section == "objective":
        parts = build.build_objective(config, embed_dim=8).parameters()
        if name == "simclr":  # which has none of its own
            return
    elif section == "model":
        _, backbone = build.build_network(config)
        parts = backbone.parameters()
    else:
        parts = build.build_head(config, embed_dim=8, num_classes=3).parameters()
    assert build.build_optimizer(config, parts, lr=0.5).param_groups[0]["lr"] == 0.5
    assert build.build_learning_rate(config, steps_per_epoch=10)(1) > 0


def combinations_of(model):
    """All for a tiny model; for others each recipe with each overlay, and each card once."""
    if model.stem == "campplus_tiny":
        yield from product(RECIPES, OVERLAYS, [None, *HARDWARE])
    else:
        yield from product(RECIPES, OVERLAYS, [None])
        yield from product([None], [None], HARDWARE)


def layers_of(model, recipe, overlay, hardware=None):
    """Return the layers that run.sh uses, in the order in which they are merged.

    model, recipe, overlay, hardware: paths of configurations; None: without.
    """
    layers = [model]
    if recipe is not None:
        layers += [recipe, *existing(recipe, model.stem)]
    if overlay is not None and overlay.stem == "large_margin":
        layers.append(large_margin_of(recipe, model))
    elif overlay is not None:
        layers.append(overlay)
        names = [overlay.stem, f"{model.stem}_{overlay.stem}"]
        if overlay in METHODS:
            names = ["ssl", *names]
        if recipe is not None:
            layers += existing(recipe, *names)
    if hardware is not None:
        layers.append(hardware)
    return layers


def existing(recipe, *names):
    """Return the overlays of a recipe that exist."""
    paths = [recipe.parent / "conf" / f"{name}.yaml" for name in names]
    return [path for path in paths if path.is_file()]


def large_margin_of(recipe, model):
    """Return the large-margin overlay of a model in a recipe."""
    name = "large_margin"
    if recipe is not None:
        name = LARGE_MARGIN.get((recipe.parent.name, model.stem), name)
    return ROOT / "conf/finetune" / f"{name}.yaml"


@pytest.mark.parametrize("model", MODELS, ids=names_of(MODELS))
def test_every_combination_loads(model):
    for above in combinations_of(model):
        layers = layers_of(model, *above)
        config = load_config(layers)
        assert config.training.global_batch % 16 == 0, layers


def test_every_large_margin_variant_is_used_by_a_known_model():
    used = set(LARGE_MARGIN.values())
    assert used == {
        name for name in layer_names(CONF / "finetune") if "large_margin_" in name
    }
    recipes = {path.parent.name for path in RECIPES if path}
    for recipe, model in LARGE_MARGIN:
        assert recipe in recipes
        assert model in model_names()


def test_variants_are_the_last_section_with_a_name_at_the_start_of_a_line():
    """The recipes list the names with sed, which knows no YAML."""
    for folder in (CONF, *(path for path in CONF.iterdir() if path.is_dir())):
        for name in layer_names(folder):
            layer = find_layer(folder / f"{name}.yaml")
            if layer.variant is not None:
                _, _, table = layer.file.read_text().partition("\nvariants:\n")
                assert re.search(rf"^  {name}:", table, re.M), name
                assert not re.search(r"^\w", table, re.M), (
                    f"{layer.file}: variants are not last"
                )


@pytest.mark.parametrize(
    ("family", "base"),
    [
        ("resnet", "resnet34"),
        ("redimnet", "redimnet_b2"),
        ("redimnet2", "redimnet2_b6"),
    ],
)
def test_the_base_of_a_family_is_one_of_its_variants(family, base):
    assert load_config([Path(family)]) == load_config([Path(base)])


def test_every_layer_of_a_recipe_belongs_to_a_model_or_an_overlay():
    overlays = ["ssl", *names_of(layer for layer in [*OVERLAYS, *METHODS] if layer)]
    models = names_of(MODELS)
    names = {*models, *overlays, *(f"{m}_{o}" for m, o in product(models, overlays))}
    layers = sorted(ROOT.glob("egs/*/conf/*.yaml"))
    assert len(layers) > 10
    assert [path for path in layers if path.stem not in names] == []


@pytest.mark.parametrize("model", MODELS, ids=names_of(MODELS))
def test_every_model_builds_with_its_head_and_optimizer(model, pretrained):
    settings = []
    if model.stem in PRETRAINED:
        # A small model of the same kind, whose layers the configuration chooses from.
        folder = pretrained(PRETRAINED[model.stem])
        settings.append(f"frontend.model={folder}")
    config = load_config([model], settings)
    embedder = build.build_embedder(config).eval()
    assert embedder.embed_dim == config.model.args["embed_dim"]
    head = build.build_head(config, embed_dim=embedder.embed_dim, num_classes=3)
    optimizer = build.build_optimizer(config, head.parameters(), lr=0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5
    augment = build.build_augment(config)
    assert augment.num_samples == round(config.data.crop_seconds * 16000)
    with torch.inference_mode():
        emb_BD = embedder(torch.randn(1, 16000) / 10)
    assert emb_BD.shape == (1, embedder.embed_dim)
    assert emb_BD.isfinite().all()


@pytest.mark.parametrize("path", HARDWARE, ids=names_of(HARDWARE))
def test_hardware_sets_the_section_runtime_only(path):
    values, _ = merge_layers([path])
    assert list(values) == ["runtime"]
    sizes = values["runtime"].get("micro_batch", "auto")
    if not isinstance(sizes, dict):
        sizes = {} if sizes == "auto" else {"campplus": sizes}
    models = {merge_layers([model])[0]["model"]["name"] for model in MODELS}
    assert set(sizes) <= models
    assert all(16 <= size <= 128 for size in sizes.values())
