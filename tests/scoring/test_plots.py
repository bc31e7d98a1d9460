"""The pictures: real PNGs that show what they should, read back as pixels."""

import sys

import numpy as np
import pytest

from speakerlab.scoring.metrics import operating_points
from speakerlab.scoring.plots import plot_det, plot_scores

BLUE, ORANGE = (0x1F, 0x5F, 0xA8), (0xC8, 0x50, 0x1E)


def trials(separation, seed=0):
    rng = np.random.default_rng(seed)
    is_target_N = np.arange(2000) < 400
    return rng.normal(size=2000) + separation * is_target_N, is_target_N


def pixels(path):
    """(height, width, 3) as bytes."""
    image = pytest.importorskip("matplotlib.image")
    return (image.imread(path)[..., :3] * 255).round().astype(int)


def num_coloured(image, colour):
    return int((np.abs(image - np.array(colour)).max(axis=2) <= 4).sum())


def test_the_det_picture_shows_both_curves(tmp_path):
    pytest.importorskip("matplotlib")
    curves = {"campplus": operating_points(*trials(3))[:2]}
    plot_det(tmp_path / "one.png", curves)
    plot_det(tmp_path / "two.png", {**curves, "another": operating_points(*trials(1))[:2]})
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    one, two = pixels(tmp_path / "one.png"), pixels(tmp_path / "two.png")
    assert min(one.shape[:2]) >= 600
    assert num_coloured(one, BLUE) > 500 and num_coloured(one, ORANGE) == 0
    assert num_coloured(two, BLUE) > 500 and num_coloured(two, ORANGE) > 500


def test_the_untrained_curve_is_grey(tmp_path):
    pytest.importorskip("matplotlib")
    points = operating_points(*trials(0.2))[:2]
    plot_det(tmp_path / "det.png", {"untrained": points})
    image = pixels(tmp_path / "det.png")
    assert num_coloured(image, (0x8A, 0x94, 0xA0)) > 500
    assert num_coloured(image, BLUE) == 0


@pytest.mark.parametrize("separation", [100, -100, 0])  # EER 0, 1 and about a half
def test_extreme_systems_can_be_drawn(tmp_path, separation):
    pytest.importorskip("matplotlib")
    plot_det(tmp_path / "det.png", {"x": operating_points(*trials(separation))[:2]})
    assert (tmp_path / "det.png").stat().st_size > 5000


def test_equal_curves_are_equal_bytes(tmp_path):
    pytest.importorskip("matplotlib")
    for name in "ab":
        plot_det(tmp_path / name, {"x": operating_points(*trials(2))[:2]})
    data = (tmp_path / "a").read_bytes()
    assert data == (tmp_path / "b").read_bytes()
    assert b"Software" not in data  # nor does the version of matplotlib change them


def test_the_histogram_shows_targets_right_of_non_targets(tmp_path):
    pytest.importorskip("matplotlib")
    plot_scores(tmp_path / "scores.png", *trials(8))
    image = pixels(tmp_path / "scores.png")
    lower = image[image.shape[0] // 4 :]  # below the legend
    columns = [
        np.nonzero(np.abs(lower - np.array(c)).max(axis=2) <= 4)[1].mean() for c in (ORANGE, BLUE)
    ]
    assert columns[1] - columns[0] > image.shape[1] / 4


def test_without_matplotlib_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (
        lambda: plot_det(tmp_path / "x.png", {"x": operating_points(*trials(1))[:2]}),
        lambda: plot_scores(tmp_path / "x.png", *trials(1)),
    ):
        with pytest.raises(ImportError, match=r"pip install matplotlib"):
            draw()
    assert not list(tmp_path.iterdir())
