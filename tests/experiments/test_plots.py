"""The pictures: real PNGs that show what they should, read back as pixels."""

import os
import subprocess
import sys

import numpy as np
import pytest

from speakerlab.experiments.plots import (
    plot_calibration,
    plot_curve,
    plot_det,
    plot_scores,
)
from speakerlab.scoring.metrics import operating_points

image = pytest.importorskip("matplotlib.image")
BLUE = (0x1F, 0x5F, 0xA8)
ORANGE = (0xC8, 0x50, 0x1E)


def trials(separation, seed=0):
    rng = np.random.default_rng(seed)
    is_target_N = np.arange(2000) < 400
    scores_N = rng.normal(size=2000) + separation * is_target_N
    return scores_N, is_target_N


def det_points(separation):
    """Miss and false-alarm rates."""
    p_miss, p_fa, _ = operating_points(*trials(separation))
    return p_miss, p_fa


def pixels(path):
    """(height, width, 3) as bytes."""
    share = image.imread(path)[..., :3]
    return (share * 255).round().astype(int)


def num_coloured(shown, colour):
    distance = np.abs(shown - np.array(colour)).max(axis=2)
    return int(np.sum(distance <= 4))


def test_the_det_picture_shows_both_curves(tmp_path):
    curves = {"campplus": det_points(3)}
    plot_det(tmp_path / "one.png", curves)
    curves["another"] = det_points(1)
    plot_det(tmp_path / "two.png", curves)
    content = (tmp_path / "two.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    single = pixels(tmp_path / "one.png")
    two = pixels(tmp_path / "two.png")
    assert min(single.shape[:2]) >= 600
    assert num_coloured(single, BLUE) > 500
    assert num_coloured(single, ORANGE) == 0
    assert num_coloured(two, BLUE) > 500
    assert num_coloured(two, ORANGE) > 500


# EER 0, 1 and about a half
@pytest.mark.parametrize("separation", [100, -100, 0])
def test_extreme_systems_can_be_drawn(tmp_path, separation):
    path = tmp_path / "det.png"
    plot_det(path, {"x": det_points(separation)})
    assert path.stat().st_size > 5000


DRAWN = {
    "det": lambda path: plot_det(path, {"x": det_points(2)}),
    "scores": lambda path: plot_scores(path, *trials(2)),
    "calibration": lambda path: plot_calibration(path, *trials(2)),
    "curve": lambda path: plot_curve(
        path,
        [10, 20, 30],
        [3.0, 2.0, 1.5],
        name="loss",
    ),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_equal_input_makes_equal_bytes(tmp_path, draw):
    for name in "ab":
        draw(tmp_path / name)
    data = (tmp_path / "a").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert data == (tmp_path / "b").read_bytes()
    # nor does the version of matplotlib change them
    assert b"Software" not in data


def test_what_calibration_loses_is_shaded(tmp_path):
    scores_N, is_target_N = trials(2)
    pale = tuple(round(255 + 0.12 * (c - 255)) for c in ORANGE)
    shaded = {}
    # 2 x score - 2 is the right ratio
    for name, offset in (("good", -2.0), ("bad", 2.0)):
        path = tmp_path / name
        plot_calibration(path, 2 * scores_N + offset, is_target_N)
        shaded[name] = num_coloured(pixels(path), pale)
    assert shaded["good"] > 0
    assert shaded["bad"] > 5 * shaded["good"]


DRAW = """
import sys
from speakerlab.experiments.plots import plot_curve
plot_curve(sys.argv[1], [1, 2, 3], [3.0, 2.0, 1.0], name="loss")
import matplotlib
print(dict.__getitem__(matplotlib.rcParams, "backend"), matplotlib.rcParams["text.usetex"])
"""


def test_settings_of_other_programs_change_no_picture(tmp_path):
    """Backends of notebooks and of screens, missing or not, and a user's matplotlibrc."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\naxes.facecolor: red\n")
    expected = tmp_path / "expected.png"
    plot_curve(expected, [1, 2, 3], [3.0, 2.0, 1.0], name="loss")
    for name, value in (
        ("MPLBACKEND", "module://no_such_module.backend_inline"),
        # matplotlib has this name in a list, and refuses it unless the package is installed.
        ("MPLBACKEND", "module://matplotlib_inline.backend_inline"),
        ("MATPLOTLIBRC", str(tmp_path)),
    ):
        picture = tmp_path / "picture.png"
        drawn = subprocess.run(
            [sys.executable, "-c", DRAW, str(picture)],
            env={**os.environ, name: value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert drawn.stderr == ""
        assert picture.read_bytes() == expected.read_bytes()
        # The rest of the program keeps its settings.
        backend, usetex = drawn.stdout.split()[-2:]
        if "no_such_module" in value:
            assert backend == value
        assert usetex == str(name == "MATPLOTLIBRC")
