"""Plots of an evaluation: operating points, scores, curves in; PNG files out.

Letters: N trials, K operating points, P priors, T points in time.
Matplotlib (the extra `report`) is imported only when something is drawn.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import logit, ndtri

from speakerlab.core.atomic import replacing
from speakerlab.experiments.curves import Curve, Reference
from speakerlab.experiments.trial_list import ListScores
from speakerlab.scoring.metrics import bayes_error, eer_of_points, operating_points

PERCENT_TICKS = (0.01, 0.1, 0.3, 1, 2, 5, 10, 20, 40, 60, 80, 95)
COLOURS = ("#1f5fa8", "#c8501e", "#2f8a4c", "#7b4fa3", "#b0890f", "#0f8a94")
GREY, PALE = "#8a94a0", "#e3e8ee"
INCHES, DPI = 5.6, 160
LEGEND_LINE = 0.23  # height in inches
FLAT = 3.1  # height in inches; two of these are as high as a square plot
LOG_ODDS_P = np.linspace(-7, 7, 281)  # of the prior, for the calibration plot
MARKED_PRIORS = (0.01, 0.05)
MAX_BAYES_ERROR = 1.5  # end of the axis: above 1, the ratios are worse than none


@dataclass(frozen=True)
class Picture:
    """A PNG file and its caption."""

    caption: str
    path: Path
    tall: bool = False  # as high as two others
    folded: bool = False  # shown on request

    @property
    def uri(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.path.read_bytes()).decode('ascii')}"


def draw_list(folder: Path, group: Sequence[ListScores]) -> Iterator[Picture]:
    """Draw DET curves of all back ends, and scores and calibration of each; the first unfolded."""
    name, is_target_N = group[0].listed.name, group[0].listed.trials.is_target_N
    curves = {one.backend: one.scores_N for one in group}
    untrained = [one.untrained_N for one in group if one.untrained_N is not None]
    curves |= dict(zip(["untrained"], untrained))
    det = folder / f"{name}_det.png".replace("/", "_")
    plot_det(det, {k: operating_points(s, is_target_N)[:2] for k, s in curves.items()})
    yield Picture("DET curves; the EERs are marked", det, tall=True)
    for i, one in enumerate(group):
        stem = f"{name}_{one.backend}".replace("/", "_")
        histogram, calibration = folder / f"{stem}_scores.png", folder / f"{stem}_calibration.png"
        plot_scores(histogram, one.scores_N, is_target_N)
        yield Picture(f"Scores of {one.backend}", histogram, folded=i > 0)
        if one.llr_N is not None:
            plot_calibration(calibration, one.llr_N, is_target_N)
            text = f"Calibration of {one.backend}: Bayes error rate over the prior's log-odds"
            yield Picture(text, calibration, folded=i > 0)


def draw_training(
    folder: Path, curves: Mapping[str, Curve], reference: Reference | None = None
) -> Iterator[Picture]:
    """Draw each curve of a training, with that of the reference behind it."""
    for name, (step_T, value_T) in curves.items():
        stem = name.removesuffix(" in %").replace(" ", "_")
        path = folder / f"training_{stem}.png"
        behind = reference["curves"].get(name) if reference else None
        plot_curve(path, step_T, value_T, name=name, behind=behind)
        text = f"{name[0].upper()}{name[1:]} by step"
        if reference and behind:
            text += f"; grey: median and range of {len(reference['seeds'])} reference runs"
        yield Picture(text, path)


def plot_det(path: str | Path, curves: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Plot DET curves (p_miss_K, p_fa_K) by name as a PNG; both axes are normal deviates.

    EERs are marked. A curve with "untrained" in its name is drawn in grey dashes.
    """
    figure, axes = _figure(height=INCHES + LEGEND_LINE * len(curves))
    eers = {name: eer_of_points(*points) for name, points in curves.items()}
    low, high = _limits(curves, max(eers.values()))
    axes.plot(ndtri([low, high]), ndtri([low, high]), color=PALE, linewidth=1)
    colours = iter(COLOURS * len(curves))
    for name, (p_miss_K, p_fa_K) in curves.items():
        is_untrained = "untrained" in name
        colour = GREY if is_untrained else next(colours)
        # beyond the axes rather than at minus infinity, so that a curve leaves the plot
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
    """Plot histograms of target and non-target scores, each with area 1, as a PNG."""
    figure, axes = _figure(height=FLAT)
    is_target_N = np.asarray(is_target_N, dtype=np.bool_)
    edges = np.histogram_bin_edges(scores_N, bins=60)
    for name, chosen_N, colour in (
        ("non-targets", ~is_target_N, COLOURS[1]),
        ("targets", is_target_N, COLOURS[0]),
    ):
        density = np.histogram(scores_N[chosen_N], bins=edges, density=True)[0]
        label = f"{name} ({np.count_nonzero(chosen_N):,})"
        axes.stairs(density, edges, fill=True, alpha=0.3, color=colour, label=label)
        axes.stairs(density, edges, linewidth=1.4, color=colour)
    axes.set(xlabel="score", ylabel="density")
    axes.set_ylim(bottom=0)
    _save(figure, axes, path)


def plot_calibration(path: str | Path, llr_N: np.ndarray, is_target_N: np.ndarray) -> None:
    """Plot the normalised Bayes error rate, actual and minimum, over prior log-odds as a PNG.

    llr_N are natural logarithms; see `bayes_error`. The priors 0.01 and 0.05 are marked.
    """
    figure, axes = _figure(height=FLAT)
    actual_P, minimum_P = bayes_error(llr_N, is_target_N, LOG_ODDS_P)
    axes.axhline(1, color=GREY, linewidth=1, linestyle=":")
    axes.fill_between(LOG_ODDS_P, minimum_P, actual_P, color=COLOURS[1], alpha=0.12, linewidth=0)
    axes.plot(LOG_ODDS_P, actual_P, color=COLOURS[1], linewidth=1.8, label="actual")
    axes.plot(LOG_ODDS_P, minimum_P, color=COLOURS[0], linewidth=1.8, label="minimum")
    marked = logit(MARKED_PRIORS)
    for log_odds, prior in zip(marked, MARKED_PRIORS):
        axes.axvline(log_odds, color=GREY, linewidth=1, linestyle="--")
        axes.annotate(
            f"{prior:g}", (log_odds, 1), xycoords=("data", "axes fraction"), xytext=(3, -10),
            textcoords="offset points", color="#5b6773", fontsize="small",
        )  # fmt: skip
    for curve_P, colour in zip((actual_P, minimum_P), (COLOURS[1], COLOURS[0])):
        heights = np.interp(marked, LOG_ODDS_P, curve_P)
        axes.plot(marked, heights, "o", color=colour, markersize=6, markeredgecolor="white")
    top = float(np.clip(1.05 * max(actual_P.max(), minimum_P.max(), 1), 1.05, MAX_BAYES_ERROR))
    axes.set(xlim=(LOG_ODDS_P[0], LOG_ODDS_P[-1]), ylim=(0, top))
    axes.set(xlabel="log-odds of the prior of a target", ylabel="Bayes error, normalised")
    _save(figure, axes, path)


def plot_curve(
    path: str | Path,
    step_T: Sequence[float],
    value_T: Sequence[float],
    *,
    name: str,
    behind: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Plot one metric of a training over its steps as a PNG; few points are marked.

    behind: step, median, low and high of a reference.
    """
    figure, axes = _figure(height=FLAT)
    if behind is not None:
        band = behind["step"], behind["low"], behind["high"]
        axes.fill_between(*band, color=GREY, alpha=0.3, linewidth=0)
        axes.plot(behind["step"], behind["median"], color=GREY, linewidth=1.2)
    marker = "o" if len(step_T) <= 40 else ""
    axes.plot(step_T, value_T, color=COLOURS[0], linewidth=1.6, marker=marker, markersize=4)
    axes.set(xlabel="step", ylabel=name, xlim=(0, None))
    _save(figure, axes, path)


def _limits(curves: Mapping[str, Sequence[np.ndarray]], worst_eer: float) -> tuple[float, float]:
    steps = [max(p_K[p_K > 0].min() for p_K in points) for points in curves.values()]
    rates = np.array(PERCENT_TICKS) / 100
    low = rates[rates <= min(steps)].max(initial=rates[0])
    high = rates[rates >= min(1.6 * worst_eer, rates[-1])].min()
    return float(min(low, 0.1)), float(max(high, 0.4))


def _figure(*, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(INCHES, height), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Any, axes: Any, path: str | Path) -> None:
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GREY)
    axes.tick_params(color=GREY)
    if axes.get_legend_handles_labels()[0]:
        columns = 1 if figure.get_figheight() > FLAT else 2
        axes.legend(
            frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderpad=0.1, ncols=columns
        )
    with replacing(Path(path)) as partial:
        # without the name of the drawing program, so that equal curves make equal bytes
        figure.savefig(partial, format="png", dpi=DPI, metadata={"Software": None})
