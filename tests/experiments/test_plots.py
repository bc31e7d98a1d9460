"""The pictures: real PNGs that show what they should, read back as pixels."""

import numpy as np
import pytest

from speakerlab.experiments.plots import plot_calibration, plot_curve, plot_det, plot_scores
from speakerlab.scoring.metrics import operating_points

image = pytest.importorskip("matplotlib.image")
BLUE, ORANGE = (0x1F, 0x5F, 0xA8), (0xC8, 0x50, 0x1E)


def trials(separation, seed=0):
    rng = np.random.default_rng(seed)
    is_target_N = np.arange(2000) < 400
    return rng.normal(size=2000) + separation * is_target_N, is_target_N


def pixels(path):
    """(height, width, 3) as bytes."""
    return (image.imread(path)[..., :3] * 255).round().astype(int)


def num_coloured(shown, colour):
    return int((np.abs(shown - np.array(colour)).max(axis=2) <= 4).sum())


def test_the_det_picture_shows_both_curves(tmp_path):
    curves = {"campplus": operating_points(*trials(3))[:2]}
    plot_det(tmp_path / "one.png", curves)
    plot_det(tmp_path / "two.png", {**curves, "another": operating_points(*trials(1))[:2]})
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    one, two = pixels(tmp_path / "one.png"), pixels(tmp_path / "two.png")
    assert min(one.shape[:2]) >= 600
    assert num_coloured(one, BLUE) > 500 and num_coloured(one, ORANGE) == 0
    assert num_coloured(two, BLUE) > 500 and num_coloured(two, ORANGE) > 500


@pytest.mark.parametrize("separation", [100, -100, 0])  # EER 0, 1 and about a half
def test_extreme_systems_can_be_drawn(tmp_path, separation):
    plot_det(tmp_path / "det.png", {"x": operating_points(*trials(separation))[:2]})
    assert (tmp_path / "det.png").stat().st_size > 5000


DRAWN = {
    "det": lambda path: plot_det(path, {"x": operating_points(*trials(2))[:2]}),
    "scores": lambda path: plot_scores(path, *trials(2)),
    "calibration": lambda path: plot_calibration(path, *trials(2)),
    "curve": lambda path: plot_curve(path, [10, 20, 30], [3.0, 2.0, 1.5], name="loss"),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_equal_input_makes_equal_bytes(tmp_path, draw):
    for name in "ab":
        draw(tmp_path / name)
    data = (tmp_path / "a").read_bytes()
    assert data.startswith(b"\x89PNG") and data == (tmp_path / "b").read_bytes()
    assert b"Software" not in data  # nor does the version of matplotlib change them


def test_what_calibration_loses_is_shaded(tmp_path):
    scores_N, is_target_N = trials(2)
    pale = tuple(round(255 + 0.12 * (c - 255)) for c in ORANGE)
    shaded = {}
    for name, offset in (("good", -2.0), ("bad", 2.0)):  # 2 x score - 2 is the right ratio
        plot_calibration(tmp_path / name, 2 * scores_N + offset, is_target_N)
        shaded[name] = num_coloured(pixels(tmp_path / name), pale)
    assert shaded["bad"] > 5 * shaded["good"] > 0
