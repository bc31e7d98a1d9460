"""Pictures of an evaluation: operating points or scores in, PNG files out.

Letters: N trials, K operating points.
Matplotlib is the extra `plot` and is imported only when something is drawn.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtri

from speakerlab.atomic import replacing
from speakerlab.scoring.metrics import eer_of_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PERCENT_TICKS = (0.01, 0.1, 0.3, 1, 2, 5, 10, 20, 40, 60, 80, 95)
COLOURS = ("#1f5fa8", "#c8501e", "#2f8a4c", "#7b4fa3", "#b0890f", "#0f8a94")
GREY, PALE = "#8a94a0", "#e3e8ee"
INCHES, DPI = 5.6, 160


def plot_det(path: str | Path, curves: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """DET curves (p_miss_K, p_fa_K) by name, as a PNG; both axes are normal deviates.

    EERs are marked. A name with "untrained" in it is drawn in grey dashes.
    """
    figure, axes = _figure("plot_det")
    eers = {name: eer_of_points(*points) for name, points in curves.items()}
    low, high = _limits(curves, max(eers.values()))
    axes.plot(ndtri([low, high]), ndtri([low, high]), color=PALE, linewidth=1)
    colours = iter(COLOURS * len(curves))
    for name, (p_miss_K, p_fa_K) in curves.items():
        is_untrained = "untrained" in name
        colour = GREY if is_untrained else next(colours)
        # beyond the axes rather than at minus infinity, so that a curve leaves the picture
        x_K, y_K = (ndtri(np.clip(p_K, low / 10, 1 - low / 10)) for p_K in (p_fa_K, p_miss_K))
        label = f"{name}: EER {100 * eers[name]:.2f} %"
        style = "--" if is_untrained else "-"
        axes.plot(x_K, y_K, style, color=colour, linewidth=1.8, label=label)
        crossing = ndtri(np.clip(eers[name], low / 10, 1 - low / 10))
        axes.plot(crossing, crossing, "o", color=colour, markersize=7, markeredgecolor="white")
    ticks = [tick for tick in PERCENT_TICKS if low <= tick / 100 <= high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ndtri(np.array(ticks) / 100), labels=[f"{tick:g}" for tick in ticks])
    axes.set(xlim=ndtri([low, high]), ylim=ndtri([low, high]), aspect="equal")
    axes.set(xlabel="false alarms, % of non-targets", ylabel="misses, % of targets")
    _save(figure, axes, path)


def plot_scores(path: str | Path, scores_N: np.ndarray, is_target_N: np.ndarray) -> None:
    """Histograms of target and of non-target scores, each with area 1, as a PNG."""
    figure, axes = _figure("plot_scores")
    is_target_N = np.asarray(is_target_N, dtype=np.bool_)
    edges = np.histogram_bin_edges(scores_N, bins=40).tolist()
    for name, chosen_N, colour in (
        ("non-targets", ~is_target_N, COLOURS[1]),
        ("targets", is_target_N, COLOURS[0]),
    ):
        label = f"{name} ({np.count_nonzero(chosen_N):,})"
        kinds: tuple[dict[str, Any], ...] = (
            {"histtype": "stepfilled", "alpha": 0.3, "label": label},
            {"histtype": "step", "linewidth": 1.4},
        )
        for kind in kinds:
            axes.hist(scores_N[chosen_N], bins=edges, density=True, color=colour, **kind)
    axes.set(xlabel="score", ylabel="density")
    _save(figure, axes, path)


def _limits(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]], worst_eer: float
) -> tuple[float, float]:
    """Ticks to begin and to end both axes with: down to what the trials resolve, up to the EERs."""
    steps = [max(p_K[p_K > 0].min() for p_K in points) for points in curves.values()]
    rates = np.array(PERCENT_TICKS) / 100
    low = rates[rates <= min(steps)].max(initial=rates[0])
    high = rates[rates >= min(1.6 * worst_eer, rates[-1])].min()
    return float(low), float(max(high, 0.4))


def _figure(caller: str) -> "tuple[Figure, Axes]":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{caller}: matplotlib is not installed; pip install matplotlib"
        ) from error
    figure = Figure(figsize=(INCHES, INCHES), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: "Figure", axes: "Axes", path: str | Path) -> None:
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GREY)
    axes.tick_params(color=GREY)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderpad=0.1)
    with replacing(Path(path)) as partial:
        # without the name of the drawing program, so equal curves are equal bytes
        figure.savefig(partial, format="png", dpi=DPI, metadata={"Software": None})
