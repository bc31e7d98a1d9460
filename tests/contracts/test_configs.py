"""Every YAML and every registered component: found by itself, loaded in each combination, built.

The numbers of published recipes are compared in test_published_training.py.
"""

from itertools import product
from pathlib import Path

import pytest
import torch

from speakerlab.config import build
from speakerlab.config.layers import merge_layers
from speakerlab.config.schema import NAMED, load_config

ROOT = Path(__file__).parents[2]
MODELS = sorted(ROOT.glob("conf/*.yaml"))
RECIPES = [None, *sorted(ROOT.glob("egs/*/conf.yaml"))]
OVERLAYS = [None, *sorted(ROOT.glob("conf/finetune/*.yaml"))]
METHODS = sorted(ROOT.glob("conf/ssl/*.yaml"))
HARDWARE = sorted(ROOT.glob("conf/hardware/*.yaml"))


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_every_self_supervised_method_loads_on_every_model_in_every_recipe(path):
    alone = [(model, None) for model in MODELS]
    for model, recipe in [*alone, *product([ROOT / "conf/campplus_tiny.yaml"], RECIPES)]:
        layers = layers_of(model, recipe, path)
        config = load_config(layers)
        assert config.task == "ssl" and config.objective is not None
        assert config.objective.name == path.stem  # `--method` names both
        assert build.crops_each(config) in (2, 3, 4)
        assert config.training.global_batch % 16 == 0
        tuned = load_config([*layers, ROOT / "conf/finetune/own_data.yaml"])
        assert (tuned.task, tuned.objective) == ("verification", None)


def names_of(paths):
    return [path.stem for path in paths]


def test_files_are_found():
    assert {"campplus", "campplus_tiny", "eres2net"} <= set(names_of(MODELS))
    assert {"cpu", "gpu_11g", "gpu_80g"} <= set(names_of(HARDWARE))
    assert len(RECIPES) > 3 and len(OVERLAYS) > 1


@pytest.mark.parametrize(
    ("section", "name"), [(s, name) for s, (registry, _) in NAMED.items() for name in registry]
)
def test_every_registered_component_is_built_by_its_name(section, name):
    no_margin = ["training.margin.initial=0", "training.margin.final=0"]  # not for every head
    component = f"{section}={{name: {name}, args: {{}}}}"
    config = load_config([ROOT / "conf/campplus_tiny.yaml"], [component, *no_margin])
    if section == "objective":
        parts = build.build_objective(config, embed_dim=8).parameters()
        if name == "simclr":  # which has none of its own
            return
    elif section == "model":
        parts = build.build_embedder(config).backbone.parameters()
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
    """Return the layers that egs/common/stages.sh uses: a recipe may have its own for a model."""
    names = [model.stem] if overlay is None else [overlay.stem, f"{model.stem}_{overlay.stem}"]
    names = ["ssl", *names] if overlay in METHODS else names
    own = [] if recipe is None else [recipe.parent / "conf" / f"{name}.yaml" for name in names]
    below = [] if overlay is None else layers_of(model, recipe, None)
    above = [model, recipe] if overlay is None else [overlay]
    layers = [*below, *above, *(path for path in own if path.is_file()), hardware]
    return [layer for layer in layers if layer is not None]


@pytest.mark.parametrize("model", MODELS, ids=names_of(MODELS))
def test_every_combination_loads(model):
    for above in combinations_of(model):
        layers = layers_of(model, *above)
        config = load_config(layers)
        assert config.training.global_batch % 16 == 0, layers


def test_every_layer_of_a_recipe_belongs_to_a_model_or_an_overlay():
    overlays = ["ssl", *names_of(layer for layer in [*OVERLAYS, *METHODS] if layer)]
    models = names_of(MODELS)
    known = {*models, *overlays, *(f"{m}_{o}" for m, o in product(models, overlays))}
    found = sorted(ROOT.glob("egs/*/conf/*.yaml"))
    assert len(found) > 20
    assert [path for path in found if path.stem not in known] == []


@pytest.mark.parametrize("model", MODELS, ids=names_of(MODELS))
def test_every_model_builds_with_its_head_and_optimizer(model):
    config = load_config([model])
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
    known = {merge_layers([model])[0]["model"]["name"] for model in MODELS}
    assert set(sizes) <= known
    assert all(16 <= size <= 128 for size in sizes.values())
