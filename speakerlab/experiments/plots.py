"""Plots of an evaluation. In: operating points, scores, curves. Out: PNG files.

`draw_det` and `draw_scores` also draw the figures for papers (paper_figures.py).
Letters: N trials, K operating points, B bins, P priors, T points in time.
Matplotlib (the extra `report`) is imported only when something is drawn.
"""

import base64
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
from scipy.special import logit, ndtri

from speakerlab.core.atomic import replacing
from speakerlab.experiments.curves import Curve, Reference
from speakerlab.experiments.results import BEFORE_TUNING, UNTRAINED
from speakerlab.experiments.trial_list import ListScores
from speakerlab.scoring.metrics import bayes_error, eer_of_points, operating_points

Arguments = ParamSpec("Arguments")
Points = Sequence[np.ndarray]  # p_miss_K, p_fa_K

PERCENT_TICKS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 60, 80, 95),
)
DECADES = (0.0001, 0.001, 0.01, 0.1, 1, 10)
LEAST_TICK = 0.01  # of an axis on which no rarer errors are marked
COLOURS = (
    "#1f5fa8",
    "#c8501e",
    "#2f8a4c",
    "#7b4fa3",
    "#b0890f",
    "#0f8a94",
)
GREY = "#8a94a0"
PALE = "#e3e8ee"
DARK = "#5b6773"
INCHES = 5.6
DPI = 160
LEGEND_LINE = 0.23  # height in inches
FLAT = 3.1  # height in inches; two of these are as high as a square plot
LOG_ODDS_P = np.linspace(-7, 7, 281)  # prior log-odds of the calibration plot
MARKED_PRIORS = (0.01, 0.05)
MAX_BAYES_ERROR = 1.5  # end of the axis; above 1, the ratios are worse than the prior


@dataclass(frozen=True)
class Picture:
    """PNG file and its caption."""

    caption: str
    path: Path
    tall: bool = False  # as high as two others
    folded: bool = False  # shown on request

    @property
    def uri(self) -> str:
        """Return the picture as a data URI, so that the report needs no other file."""
        content = self.path.read_bytes()
        text = base64.b64encode(content).decode("ascii")
        return f"data:image/png;base64,{text}"


@dataclass(frozen=True, eq=False)
class DetCurve:
    """Operating points of a system, and how they are drawn."""

    p_miss_K: np.ndarray
    p_fa_K: np.ndarray
    label: str
    colour: str
    dashes: Any = "-"  # a line style of matplotlib
    # Other points to mark: marker, miss rate, false-alarm rate.
    marked: Sequence[tuple[str, float, float]] = ()
    # False-alarm rates, and the bounds of the miss rates there.
    band: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def eer(self) -> float:
        return eer_of_points(self.p_miss_K, self.p_fa_K)


def draw_list(folder: Path, group: Sequence[ListScores]) -> Iterator[Picture]:
    """Draw DET curves of all back ends, then scores and calibration of each back end."""
    name = group[0].listed.name
    is_target_N = group[0].listed.trials.is_target_N
    scores_of = {scored.backend: scored.scores_N for scored in group}
    for scored in group:
        # Only the back end cosine has scores of the initial weights.
        if scored.untrained_N is not None:
            initial = BEFORE_TUNING if scored.fine_tuned else UNTRAINED
            scores_of.setdefault(initial, scored.untrained_N)

    curves: dict[str, Points] = {}
    for label, scores_N in scores_of.items():
        p_miss_K, p_fa_K, _ = operating_points(scores_N, is_target_N)
        curves[label] = (p_miss_K, p_fa_K)
    path = _png(folder, f"{name}_det")
    plot_det(path, curves)
    yield Picture("DET curves; the EERs are marked", path, tall=True)

    for number, scored in enumerate(group):
        stem = f"{name}_{scored.backend}"
        is_first = number == 0
        path = _png(folder, f"{stem}_scores")
        plot_scores(path, scored.scores_N, is_target_N)
        caption = f"Scores of {scored.backend}"
        yield Picture(caption, path, folded=not is_first)

        if scored.llr_N is not None:
            path = _png(folder, f"{stem}_calibration")
            plot_calibration(path, scored.llr_N, is_target_N)
            caption = (
                f"Calibration of {scored.backend}: Bayes error rate over the prior's"
                " log-odds"
            )
            yield Picture(caption, path, folded=not is_first)


def _png(folder: Path, stem: str) -> Path:
    """Return the path of a picture; replace slashes in its stem."""
    name = f"{stem}.png".replace("/", "_")
    return folder / name


def draw_training(
    folder: Path,
    curves: Mapping[str, Curve],
    reference: Reference | None = None,
) -> Iterator[Picture]:
    """Draw each curve of a training, with the reference's curve behind it."""
    for name, (step_T, value_T) in curves.items():
        stem = name.removesuffix(" in %").replace(" ", "_")
        path = folder / f"training_{stem}.png"
        behind = None
        if reference:
            behind = reference["curves"].get(name)
        plot_curve(path, step_T, value_T, name=name, behind=behind)

        caption = f"{name[0].upper()}{name[1:]} by step"
        if reference and behind:
            num_runs = len(reference["seeds"])
            caption += f"; grey: median and range of {num_runs} reference runs"
        yield Picture(caption, path)


def import_matplotlib() -> Any:
    """Return matplotlib, whatever backend another program has set."""
    imported = sys.modules.get("matplotlib")
    if imported is not None:
        return imported
    # A notebook exports the name of its own backend to the commands that it starts. Files need no
    # backend, but the import fails if it is not installed.
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    # The rest of the program may draw to a screen.
    if backend is not None:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = backend
    return matplotlib


def _in_default_style(plot: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Make a plot look the same for every user: without the settings of a matplotlibrc."""

    @wraps(plot)
    def plot_in_default_style(
        *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> None:
        with default_style():
            plot(*args, **kwargs)

    return plot_in_default_style


@contextmanager
def default_style() -> Iterator[Any]:
    """Yield matplotlib with its own settings instead of those of a matplotlibrc."""
    matplotlib = import_matplotlib()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield matplotlib


@_in_default_style
def plot_det(path: str | Path, curves: Mapping[str, Points]) -> None:
    """Plot DET curves (p_miss_K, p_fa_K) by name as a PNG; both axes are normal deviates.

    EERs are marked. A curve with the name of initial weights is drawn in grey dashes.
    """
    # The legend is above the plot, so that the plot itself stays square.
    height = INCHES + LEGEND_LINE * len(curves)
    figure, axes = _figure(height=height)
    colours = iter(COLOURS * len(curves))
    det_curves: list[DetCurve] = []
    for name, (p_miss_K, p_fa_K) in curves.items():
        is_initial = any(initial in name for initial in (UNTRAINED, BEFORE_TUNING))
        curve = DetCurve(
            p_miss_K,
            p_fa_K,
            label=f"{name}: EER {100 * eer_of_points(p_miss_K, p_fa_K):.2f} %",
            colour=GREY if is_initial else next(colours),
            dashes="--" if is_initial else "-",
        )
        det_curves.append(curve)
    draw_det(axes, det_curves, linewidth=1.8, markersize=7, character=0.017)
    _save(figure, axes, path)


def draw_det(
    axes: Any,
    curves: Sequence[DetCurve],
    *,
    linewidth: float,
    markersize: float,
    character: float,
) -> None:
    """Draw DET curves, whose EERs are marked; both axes are normal deviates, in percent.

    character: width of a character of a tick's label, as a share of the axis.
    """
    low, high = _limits(curves)
    ends = ndtri([low, high])
    # Both rates are equal on the diagonal: each curve crosses it at its EER.
    axes.plot(ends, ends, color=PALE, linewidth=linewidth / 2)

    # The deviates of 0 and 1 are infinite. Rates are clipped beyond the axes, so that a curve
    # leaves the plot.
    def to_deviate(rates: Any) -> Any:
        clipped = np.clip(rates, low / 10, 1 - low / 10)
        return ndtri(clipped)

    for curve in curves:
        if curve.band is not None:
            p_fa_T, low_T, high_T = map(to_deviate, curve.band)
            axes.fill_between(
                p_fa_T,
                low_T,
                high_T,
                color=curve.colour,
                alpha=0.15,
                linewidth=0,
            )
    for curve in curves:
        p_miss_K, p_fa_K = with_crossing(curve.p_miss_K, curve.p_fa_K)
        axes.plot(
            to_deviate(p_fa_K),
            to_deviate(p_miss_K),
            linestyle=curve.dashes,
            color=curve.colour,
            linewidth=linewidth,
            label=curve.label,
        )
    # Above all curves.
    for curve in curves:
        for marker, p_miss, p_fa in [("o", curve.eer, curve.eer), *curve.marked]:
            # A rate of 0 or below the axis is marked at its end.
            position = ndtri(np.clip([p_fa, p_miss], low, high))
            axes.plot(
                *position,
                marker,
                color=curve.colour,
                markersize=markersize,
                markeredgecolor="white",
                markeredgewidth=markersize / 7,
                clip_on=False,
                zorder=3,
            )

    ticks = [tick for tick in PERCENT_TICKS if low <= tick / 100 <= high]
    positions = ndtri(np.array(ticks) / 100)
    labels = [f"{tick:g}" for tick in ticks]
    places = (positions - ends[0]) / (ends[1] - ends[0])
    is_decade = [tick in DECADES for tick in ticks]
    # Both axes have the same labels, so that they can be read alike.
    labels = _apart(labels, places, is_decade, character)
    axes.xaxis.set_ticks(positions, labels=labels)
    axes.yaxis.set_ticks(positions, labels=labels)
    axes.set(
        xlim=ends,
        ylim=ends,
        aspect="equal",
        xlabel="false alarms, % of non-targets",
        ylabel="misses, % of targets",
    )


def _apart(
    labels: Sequence[str],
    places: Sequence[float],
    is_first: Sequence[bool],
    character: float,
) -> list[str]:
    """Return the labels of ticks, "" for one that would touch another one.

    is_first: whether a label has precedence over its neighbours. Of equals, the right one has.
    """
    shown = [""] * len(labels)
    ends: list[tuple[float, float]] = []
    order = sorted(range(len(labels)), key=lambda n: (not is_first[n], -n))
    for number in order:
        # Between two labels, the room of a character.
        half_width = character * (len(labels[number]) + 1) / 2
        start, end = places[number] - half_width, places[number] + half_width
        if all(
            end <= other_start or start >= other_end for other_start, other_end in ends
        ):
            shown[number] = labels[number]
            ends.append((start, end))
    return shown


def with_crossing(p_miss_K: np.ndarray, p_fa_K: np.ndarray) -> Points:
    """Add the point at which both rates are the EER, as in `eer_of_points`.

    With few trials, a line between two operating points would cross the diagonal elsewhere, because
    an axis of a plot is not linear.
    """
    rate = eer_of_points(p_miss_K, p_fa_K)
    after = int(np.searchsorted(p_miss_K - p_fa_K, 0.0))
    return np.insert(p_miss_K, after, rate), np.insert(p_fa_K, after, rate)


@_in_default_style
def plot_scores(
    path: str | Path,
    scores_N: np.ndarray,
    is_target_N: np.ndarray,
) -> None:
    """Plot histograms of target and non-target scores, each with area 1, as a PNG."""
    figure, axes = _figure(height=FLAT)
    draw_scores(axes, scores_N, is_target_N, linewidth=1.4)
    axes.set(xlabel="score", ylabel="density")
    _save(figure, axes, path)


def draw_scores(
    axes: Any,
    scores_N: np.ndarray,
    is_target_N: np.ndarray,
    *,
    linewidth: float,
    colours: Sequence[str] = COLOURS,
    dashes: str = "-",
) -> None:
    """Draw histograms of target and non-target scores, each with area 1.

    colours: of targets and of non-targets. dashes: the line of non-targets.
    """
    is_target_N = np.asarray(is_target_N, dtype=np.bool_)
    # Both histograms have the same bins, so that their areas are comparable. Infinite scores have
    # no place on the axis.
    finite_N = scores_N[np.isfinite(scores_N)]
    edges = np.histogram_bin_edges(finite_N, bins=60)
    for name, is_shown_N, colour, line in (
        ("non-targets", ~is_target_N, colours[1], dashes),
        ("targets", is_target_N, colours[0], "-"),
    ):
        # Targets are far fewer than non-targets: with counts they would be invisible.
        shown_scores = scores_N[is_shown_N]
        count_B, _ = np.histogram(shown_scores, bins=edges)
        # All scores of a kind may be infinite.
        density = count_B / (max(count_B.sum(), 1) * np.diff(edges))
        axes.stairs(
            density,
            edges,
            fill=True,
            alpha=0.3,
            color=colour,
            label=f"{name} ({len(shown_scores):,})",
        )
        axes.stairs(density, edges, linewidth=linewidth, color=colour, linestyle=line)
    axes.set_ylim(bottom=0)


@_in_default_style
def plot_calibration(
    path: str | Path,
    llr_N: np.ndarray,
    is_target_N: np.ndarray,
) -> None:
    """Plot the normalised Bayes error rate, actual and minimum, over prior log-odds as a PNG.

    llr_N are natural logarithms; see `bayes_error`. The priors 0.01 and 0.05 are marked.
    """
    figure, axes = _figure(height=FLAT)
    actual_P, minimum_P = bayes_error(llr_N, is_target_N, LOG_ODDS_P)
    # At 1, the scores are no better than the prior alone.
    axes.axhline(1, color=GREY, linewidth=1, linestyle=":")
    # The area between both curves is the calibration loss.
    axes.fill_between(
        LOG_ODDS_P,
        minimum_P,
        actual_P,
        color=COLOURS[1],
        alpha=0.12,
        linewidth=0,
    )
    axes.plot(LOG_ODDS_P, actual_P, color=COLOURS[1], linewidth=1.8, label="actual")
    axes.plot(LOG_ODDS_P, minimum_P, color=COLOURS[0], linewidth=1.8, label="minimum")

    marked = logit(MARKED_PRIORS)
    for log_odds, prior in zip(marked, MARKED_PRIORS):
        axes.axvline(log_odds, color=GREY, linewidth=1, linestyle="--")
        axes.annotate(
            f"{prior:g}",
            (log_odds, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -10),
            textcoords="offset points",
            color=DARK,
            fontsize="small",
        )
    for curve_P, colour in (
        (actual_P, COLOURS[1]),
        (minimum_P, COLOURS[0]),
    ):
        axes.plot(
            marked,
            np.interp(marked, LOG_ODDS_P, curve_P),
            "o",
            color=colour,
            markersize=6,
            markeredgecolor="white",
        )

    highest_error = max(actual_P.max(), minimum_P.max(), 1)
    top = float(np.clip(1.05 * highest_error, 1.05, MAX_BAYES_ERROR))
    axes.set(
        xlim=(LOG_ODDS_P[0], LOG_ODDS_P[-1]),
        ylim=(0, top),
        xlabel="log-odds of the prior of a target",
        ylabel="Bayes error, normalised",
    )
    _save(figure, axes, path)


@_in_default_style
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
        # Drawn first, so that the run is on top.
        axes.fill_between(
            behind["step"],
            behind["low"],
            behind["high"],
            color=GREY,
            alpha=0.3,
            linewidth=0,
        )
        axes.plot(
            behind["step"],
            behind["median"],
            color=GREY,
            linewidth=1.2,
        )
    axes.plot(
        step_T,
        value_T,
        color=COLOURS[0],
        linewidth=1.6,
        # More markers would touch each other.
        marker="o" if len(step_T) <= 40 else "",
        markersize=4,
    )
    axes.set(xlabel="step", ylabel=name, xlim=(0, None))
    _save(figure, axes, path)


def _limits(curves: Sequence[DetCurve]) -> tuple[float, float]:
    """Return the lowest and the highest rate of the axes; both are ticks."""
    # A curve ends at its smallest rates above 0, of about one trial each; the axes begin at the
    # larger of the two rates.
    lowest_rates: list[float] = []
    highest_rates: list[float] = []
    lowest_marked = 1.0
    for curve in curves:
        smallest_rates = [
            rate_K[rate_K > 0].min() for rate_K in (curve.p_miss_K, curve.p_fa_K)
        ]
        lowest_rates.append(max(smallest_rates))
        highest_rates.append(1.6 * curve.eer)
        for _, *rates in curve.marked:
            # From its smallest rate on, a curve is level up to its point of rate 0, which is
            # marked at the end of the axis.
            shown_rates = [
                rate or smallest for rate, smallest in zip(rates, smallest_rates)
            ]
            lowest_marked = min(lowest_marked, *shown_rates)
            highest_rates += rates

    ticks = np.array(PERCENT_TICKS) / 100
    highest_shown = min(max(highest_rates), ticks[-1])
    lowest_shown = min(max(min(lowest_rates), LEAST_TICK / 100), lowest_marked)
    low = ticks[ticks <= lowest_shown].max(initial=ticks[0])
    high = ticks[ticks >= highest_shown].min()
    # With few trials or a small EER, the range would otherwise be too narrow.
    low = min(low, 0.1)
    high = max(high, 0.4)
    return float(low), float(high)


def _figure(*, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    # Without pyplot, which keeps every figure in memory and may need a display.
    figure = Figure(figsize=(INCHES, height), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Any, axes: Any, path: str | Path) -> None:
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GREY)
    axes.tick_params(color=GREY)
    labelled_lines, _ = axes.get_legend_handles_labels()
    if labelled_lines:
        # A flat plot has no room for a legend of several lines.
        is_flat = figure.get_figheight() <= FLAT
        axes.legend(
            frameon=False,
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            borderpad=0.1,
            ncols=2 if is_flat else 1,
        )
    with replacing(Path(path)) as partial:
        # Omit the name of the software, so that equal curves give equal bytes.
        figure.savefig(partial, format="png", dpi=DPI, metadata={"Software": None})
