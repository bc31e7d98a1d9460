"""What every augmentation must keep. A new one is tested by its line in the registry.

Each is built from a configuration with all probabilities at 0.7, as training builds it.
"""

import json
from pathlib import Path

import numpy as np
import outside
import pytest
import torch
from batches import S, decaying_room, int16_noise, make_batch

from speakerlab.config import build
from speakerlab.config.schema import AugmentConfig, load_config
from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment import AUGMENTATIONS, Augment, Augmentation

ROOT = Path(__file__).parents[2]
KEYS = [key for key in AugmentConfig.model_fields if key.endswith("_prob")]
SETTINGS = [f"augment.{key}=0.7" for key in KEYS] + [f"data.crop_seconds={S / 16000}"]
NOISES = [int16_noise(9000 + 500 * index, seed=index) for index in range(6)]
ON_DEVICE = [name for name, augmentation in AUGMENTATIONS.items() if not augmentation.in_worker]
assert ON_DEVICE[0] == "speed", "others change a crop, which speed cuts"
MORE = {"name": outside.NAME, "args": outside.ARGS}
OUTSIDE = [pytest.param("more_outside", id="outside")]
if outside.KIND == "augmentation":
    SETTINGS.append(f"augment.more.outside={json.dumps(MORE)}")
NAMES, APPLIED = (
    pytest.mark.parametrize("name", OUTSIDE if outside.KIND == "augmentation" else names)
    for names in (AUGMENTATIONS, ON_DEVICE)
)


def make(on_device: bool = True) -> Augment:
    return build.build_augment(
        load_config([ROOT / "conf/campplus_tiny.yaml"], SETTINGS),
        rooms=[decaying_room(3000, seed=seed, delay=100) for seed in range(3)],
        noises=NOISES,
        noise_kinds=["noise", "music"] + 4 * ["speech"],
        noise_on_device=on_device,
    )


def module_of(augment: Augment, name: str) -> Augmentation:
    module = augment.augmentations[name]
    assert isinstance(module, Augmentation)
    return module


def draw_until(name: str, augment: Augment, count: int) -> list[Draw]:
    """So many draws of the largest group, so that they can be stacked."""
    drawn = [augment.draws[name](np.random.default_rng(key)) for key in range(200)]
    groups = [draw.group for draw in drawn if draw is not None]
    most = max(groups, key=groups.count)
    return [draw for draw in drawn if draw is not None and draw.group == most][:count]


def stack(drawn: list[Draw]) -> Draws:
    named = {row: {"it": draw} for row, draw in enumerate(drawn)}
    (draws,) = make_batch(int16_noise(len(drawn), S, seed=0), named).draws["it"]
    return draws


def rows_for(name: str, count: int) -> torch.Tensor:
    """Waves, or features, of the shape that training has."""
    generator = torch.Generator().manual_seed(5)
    shape = (48, 80) if module_of(make(), name).on_features else (S,)
    if name == "speed":
        shape = (round(S * 1.1),)
    return 0.1 * torch.randn(count, *shape, generator=generator)


def same(a: Draw | None, b: Draw | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.group == b.group and all(np.array_equal(a.values[k], b.values[k]) for k in a.values)


@NAMES
def test_a_draw_follows_from_its_generator(name):
    augment = make()
    drawn: list[Draw | None] = []
    for key in range(50):
        first, again = (augment.draws[name](np.random.default_rng(key)) for _ in range(2))
        assert same(first, again)
        for value in () if first is None else first.values.values():
            assert isinstance(value, int | float | np.ndarray)
        drawn.append(first)
    assert not all(same(draw, drawn[0]) for draw in drawn)


@pytest.mark.parametrize("name", [key.removesuffix("_prob") for key in KEYS])
def test_it_is_drawn_as_often_as_asked(name):
    draw, rng = make().draws[name], np.random.default_rng(0)
    assert 380 < sum(draw(rng) is not None for _ in range(600)) < 460  # 420 and four deviations


@APPLIED
def test_rows_keep_their_shape_type_and_finiteness_and_a_batch_equals_its_rows(name):
    augment = make()
    drawn, x_R = draw_until(name, augment, 5), rows_for(name, 5)
    module = module_of(augment, name)
    together = module.apply(x_R.clone(), stack(drawn))
    assert (
        together.shape == (x_R.shape if x_R.dim() > 2 else (5, S))
        and together.dtype == torch.float32
    )
    assert together.isfinite().all() and not torch.equal(together, x_R[:, : together.shape[1]])
    for row, draw in enumerate(drawn):
        alone = module.apply(x_R[row : row + 1].clone(), stack([draw]))
        assert (alone[0] - together[row]).abs().max() < 1e-5
    assert module.state_dict() == {}


@APPLIED
def test_silence_stays_finite(name):
    augment = make()
    silent = torch.zeros_like(rows_for(name, 4))
    draws = stack(draw_until(name, augment, 4))
    assert module_of(augment, name).apply(silent, draws).isfinite().all()


def test_noise_of_the_host_is_also_drawn_by_key_and_applied():
    host, device = make(on_device=False), make()
    for key in range(50):
        there, here = (a.draws["noise"](np.random.default_rng(key)) for a in (host, device))
        assert (there is None) == (here is None)
        if there is not None and here is not None:
            assert there.values["wave"].shape == (S,) and there.values["wave"].dtype == np.int16
            assert all(np.array_equal(there.values[k], here.values[k]) for k in ("noise", "start"))
            x_R = rows_for("noise", 1)
            cut = module_of(host, "noise").apply(x_R.clone(), stack([there]))
            assert (cut - module_of(device, "noise").apply(x_R, stack([here]))).abs().max() < 1e-4


def test_what_has_no_probability_is_not_made():
    config = load_config([ROOT / "conf/campplus_tiny.yaml"], [f"augment.{key}=0" for key in KEYS])
    assert list(build.build_augment(config).draws) == ["speed", "spec"]
