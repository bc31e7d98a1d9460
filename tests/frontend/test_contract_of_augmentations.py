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
# The names of the configuration, such as `noise_prob`.
KEYS = [key for key in AugmentConfig.model_fields if key.endswith("_prob")]
SETTINGS = [f"augment.{key}=0.7" for key in KEYS]
SETTINGS.append(f"data.crop_seconds={S / 16000}")
# Changed voices are refused where the labels are speakers.
SETTINGS += ["task=identification", "data.labels=utt2lang"]
NOISES = []
for noise_number in range(6):
    noise_length = 9000 + 500 * noise_number
    NOISES.append(int16_noise(noise_length, seed=noise_number))

ON_DEVICE = []
for augmentation_name, augmentation in AUGMENTATIONS.items():
    if not augmentation.in_worker:
        ON_DEVICE.append(augmentation_name)
assert ON_DEVICE[0] == "speed", "others change a crop, which speed cuts"

# An augmentation of another package (see outside.py) is tested instead of the registered ones.
if outside.KIND == "augmentation":
    registered = {"name": outside.NAME, "args": outside.ARGS}
    SETTINGS.append(f"augment.more.outside={json.dumps(registered)}")
    OUTSIDE = [pytest.param("more_outside", id="outside")]
    NAMES = pytest.mark.parametrize("name", OUTSIDE)
    APPLIED = pytest.mark.parametrize("name", OUTSIDE)
else:
    NAMES = pytest.mark.parametrize("name", AUGMENTATIONS)
    APPLIED = pytest.mark.parametrize("name", ON_DEVICE)


def make(on_device: bool = True) -> Augment:
    config = load_config([ROOT / "conf/campplus_tiny.yaml"], SETTINGS)
    rooms = []
    for seed in range(3):
        rooms.append(decaying_room(3000, seed=seed, delay=100))
    return build.build_augment(
        config,
        rooms=rooms,
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
    drawn = []
    for key in range(200):
        rng = np.random.default_rng(key)
        draw = augment.draws[name](rng)
        if draw is not None:
            drawn.append(draw)

    groups = [draw.group for draw in drawn]
    largest_group = max(groups, key=groups.count)
    members = [draw for draw in drawn if draw.group == largest_group]
    return members[:count]


def stack(drawn: list[Draw]) -> Draws:
    named_draws = {}
    for row, draw in enumerate(drawn):
        named_draws[row] = {"it": draw}
    # The waves do not matter.
    wave_BS = int16_noise(len(drawn), S, seed=0)
    batch = make_batch(wave_BS, named_draws)
    (draws,) = batch.draws["it"]
    return draws


def rows_for(name: str, count: int) -> torch.Tensor:
    """Waves, or features, of the shape that training has."""
    if name == "speed":
        shape = (round(S * 1.1),)
    elif module_of(make(), name).on_features:
        shape = (48, 80)
    else:
        shape = (S,)
    generator = torch.Generator().manual_seed(5)
    return 0.1 * torch.randn(count, *shape, generator=generator)


def same(a: Draw | None, b: Draw | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.group != b.group:
        return False
    return all(np.array_equal(a.values[key], b.values[key]) for key in a.values)


@NAMES
def test_a_draw_follows_from_its_generator(name):
    draw_from = make().draws[name]
    drawn: list[Draw | None] = []
    for key in range(50):
        draw = draw_from(np.random.default_rng(key))
        repeated = draw_from(np.random.default_rng(key))
        assert same(draw, repeated)
        drawn.append(draw)
        if draw is None:
            continue
        for value in draw.values.values():
            assert isinstance(value, int | float | np.ndarray)
    first = drawn[0]
    assert not all(same(draw, first) for draw in drawn)


NAMES_WITH_PROBABILITY = [key.removesuffix("_prob") for key in KEYS]


@pytest.mark.parametrize("name", NAMES_WITH_PROBABILITY)
def test_it_is_drawn_as_often_as_asked(name):
    draw = make().draws[name]
    rng = np.random.default_rng(0)
    num_drawn = 0
    for _ in range(600):
        if draw(rng) is not None:
            num_drawn += 1
    assert 380 < num_drawn < 460  # 420 and four deviations


@APPLIED
def test_rows_keep_their_shape_type_and_finiteness_and_a_batch_equals_its_rows(name):
    augment = make()
    drawn = draw_until(name, augment, 5)
    x_R = rows_for(name, 5)
    module = module_of(augment, name)

    together = module.apply(x_R.clone(), stack(drawn))
    # Features keep their shape; waves are cut to S samples.
    are_features = x_R.dim() > 2
    expected_shape = x_R.shape if are_features else (5, S)
    assert together.shape == expected_shape
    assert together.dtype == torch.float32
    assert together.isfinite().all()
    num_values = together.shape[1]
    unchanged = x_R[:, :num_values]
    assert not torch.equal(together, unchanged)

    for row, draw in enumerate(drawn):
        row_alone = x_R[row].clone()[None]
        (alone,) = module.apply(row_alone, stack([draw]))
        error = alone - together[row]
        assert error.abs().max() < 1e-5
    assert module.state_dict() == {}


@APPLIED
def test_silence_stays_finite(name):
    augment = make()
    silence = torch.zeros_like(rows_for(name, 4))
    draws = stack(draw_until(name, augment, 4))
    output = module_of(augment, name).apply(silence, draws)
    assert output.isfinite().all()


def test_noise_of_the_host_is_also_drawn_by_key_and_applied():
    host = make(on_device=False)
    device = make()
    for key in range(50):
        host_rng = np.random.default_rng(key)
        device_rng = np.random.default_rng(key)
        host_draw = host.draws["noise"](host_rng)
        device_draw = device.draws["noise"](device_rng)
        assert (host_draw is None) == (device_draw is None)
        if host_draw is None or device_draw is None:
            continue

        # The host cuts the noise itself; the device only gets its place.
        wave_S = host_draw.values["wave"]
        assert wave_S.shape == (S,)
        assert wave_S.dtype == np.int16
        for field in ("noise", "start"):
            host_value = host_draw.values[field]
            device_value = device_draw.values[field]
            assert np.array_equal(host_value, device_value)

        x_R = rows_for("noise", 1)
        on_host = module_of(host, "noise")
        on_device = module_of(device, "noise")
        by_host = on_host.apply(x_R.clone(), stack([host_draw]))
        by_device = on_device.apply(x_R, stack([device_draw]))
        error = by_host - by_device
        assert error.abs().max() < 1e-4


def test_what_has_no_probability_is_not_made():
    settings = [f"augment.{key}=0" for key in KEYS]
    config = load_config([ROOT / "conf/campplus_tiny.yaml"], settings)
    augment = build.build_augment(config)
    assert list(augment.draws) == ["speed", "spec"]
