"""Figures of several systems for papers: DET and ROC curves, scores, durations, confusions.

In: systems on one trial list, or results of an identification. Out: figures of matplotlib, and
files of them. The numbers are those of `speakerlab score`.

A figure has the size that it has in the paper, so its text has the size that it says. Fonts are
embedded. The colours differ for colour-blind readers too (M. Okabe and K. Ito, "Color universal
design", 2008), and lines differ in their dashes, so that they can be told apart in grey.
Letters: N trials, K operating points, T false-alarm rates, B bins.
"""

import logging
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from speakerlab.core.atomic import replacing
from speakerlab.experiments.plots import (
    GREY,
    PALE,
    DetCurve,
    default_style,
    draw_det,
    draw_scores,
    with_crossing,
)
from speakerlab.experiments.results import Row, number, percent
from speakerlab.experiments.systems import MIN_DCF, Scored
from speakerlab.scoring.bootstrap import miss_band
from speakerlab.scoring.conditions import SHORTER_SIDE, condition_rows
from speakerlab.scoring.metrics import eer_of_points, operating_points

log = logging.getLogger(__name__)
MAX_HEIGHT_CM = 24.0  # of the text on a page
WIDE_CM = 12.0  # from this width on, the legend is beside the plot
MAX_LEGEND_SHARE = 0.36  # of the width of such a figure
LEGEND_GAP_CM = 0.2  # to the plot
HANDLE_EM = 4.0  # of an entry of the legend: its line and blanks, in sizes of its font
MANY_SYSTEMS = 4  # from here on, the points of DET curves are small
HOLLOW = "hollow: no interval"
STORED = "model's own"  # threshold, that of its calibration
CM = 1 / 2.54  # in inches
POINT_CM = 2.54 / 72
PNG_DPI = 600
# Okabe and Ito, without yellow, which is too pale on white paper.
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#000000",
    "#e69f00",
    "#56b4e9",
)
# As many as colours less one, so that the pairs of both repeat late.
DASHES = (
    "-",
    (0, (5, 1.5)),
    (0, (5, 1.5, 1, 1.5)),
    (0, (1, 1.2)),
    (0, (8, 1.5, 1, 1.5, 1, 1.5)),
    (0, (2.5, 1.5)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Times is the face of most papers in two columns; the second one has more scripts.
FONTS = ("STIXGeneral", "DejaVu Sans")
NUM_BAND_POINTS = 120
MAX_CLASSES = 20
AXIS_LABEL_CM = 1.0  # left of the names of the classes
MIN_TITLE_CM = 2.5
OTHER = "other"  # column of the classes that are not shown
DARK_CELL = 0.55  # from this share on, the number in a cell is white


@dataclass(frozen=True)
class Size:
    """Width of a figure in the paper, and the size of its text."""

    width_cm: float
    font_size: float  # of labels, in points

    @property
    def is_wide(self) -> bool:
        return self.width_cm >= WIDE_CM

    @property
    def small(self) -> float:
        """Font size of ticks and of the legend."""
        return self.font_size - 1


@contextmanager
def paper_style(size: Size) -> Iterator[None]:
    """Draw and save with the fonts, lines and text sizes of a paper."""
    with default_style() as matplotlib:
        matplotlib.rcParams.update(
            {
                "font.family": list(FONTS),
                "mathtext.fontset": "stix",
                "font.size": size.font_size,
                "axes.labelsize": size.font_size,
                "axes.titlesize": size.font_size,
                "xtick.labelsize": size.small,
                "ytick.labelsize": size.small,
                "legend.fontsize": size.small,
                "legend.title_fontsize": size.small,
                "axes.linewidth": 0.6,
                "xtick.major.width": 0.6,
                "ytick.major.width": 0.6,
                "xtick.major.size": 2.5,
                "ytick.major.size": 2.5,
                "figure.constrained_layout.h_pad": 0.04,
                "figure.constrained_layout.w_pad": 0.03,
                # TrueType: publishers refuse the default, Type 3.
                "pdf.fonttype": 42,
                # Text as outlines looks the same without the font.
                "svg.fonttype": "path",
                # Equal figures have equal bytes.
                "svg.hashsalt": "speakerlab",
            }
        )
        yield


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure in the format of the ending of `path`; equal figures give equal bytes.

    Raises ValueError for a figure that is higher than a page.
    """
    height_cm = figure.get_figheight() / CM
    if height_cm > MAX_HEIGHT_CM:
        raise ValueError(
            f"{path}: would be {height_cm:.0f} cm high, and a page has"
            f" {MAX_HEIGHT_CM:g} cm; draw fewer systems, or take --width page"
        )
    ending = path.suffix.lower()
    # It writes a dozen lines on the letters of each embedded font.
    logging.getLogger("fontTools").setLevel(logging.WARNING)
    # Neither the time nor the name of the software.
    metadata: dict[str, dict[str, Any]] = {
        ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
        ".svg": {"Date": None, "Creator": None},
        ".png": {"Software": None},
    }
    with warnings.catch_warnings(record=True) as caught, replacing(path) as partial:
        warnings.simplefilter("always")
        # The layout of square axes takes a second round.
        figure.draw_without_rendering()
        figure.savefig(
            partial,
            format=ending.removeprefix("."),
            dpi=PNG_DPI,
            metadata=metadata[ending],
        )
    missing = [
        str(warning.message)
        for warning in caught
        if "missing from" in str(warning.message)
    ]
    if missing:
        log.warning(
            "%s: a name has characters that no font here has (%s); give another name",
            path,
            missing[0].partition(" missing")[0],
        )


def det_figure(
    scored: Sequence[Scored],
    size: Size,
    *,
    p_targets: Sequence[float],
    with_bands: bool = False,
) -> Any:
    """Return a figure of DET curves with the points of EER and minDCF.

    with_bands: also the 95 % intervals of the miss rates.
    """
    entries: list[tuple[str, str]] = []
    curves: list[DetCurve] = []
    for place, result in enumerate(scored):
        p_miss_K, p_fa_K, _ = _points_of(result)
        marked = _min_dcf_points(p_miss_K, p_fa_K, p_targets)
        curve = DetCurve(
            p_miss_K,
            p_fa_K,
            label=result.system.name,
            colour=_colour(place),
            dashes=_dashes(place),
            marked=marked,
            band=_band(result) if with_bands else None,
        )
        curves.append(curve)
        entries.append((result.system.name, _metrics_text(result, p_targets)))

    title = _metrics_title(p_targets)
    figure, axes, place_legend = _figure_with_legend(size, entries, title, aspect=1.0)
    plot_cm = 0.84 * figure.get_figheight() / CM
    draw_det(
        axes,
        curves,
        linewidth=1.1,
        markersize=4.5 if len(scored) < MANY_SYSTEMS else 3.5,
        character=0.5 * size.small * POINT_CM / plot_cm,
    )
    _finish(axes)
    place_legend(_system_handles(len(scored)))
    return figure


def roc_figure(
    scored: Sequence[Scored],
    size: Size,
    *,
    p_targets: Sequence[float],
) -> Any:
    """Return a figure of ROC curves over a logarithmic axis, with the points of EER and minDCF."""
    entries = [
        (result.system.name, _metrics_text(result, p_targets)) for result in scored
    ]
    title = _metrics_title(p_targets)
    figure, axes, place_legend = _figure_with_legend(size, entries, title, aspect=0.75)
    lowest_rates: list[float] = []
    lowest_accepted: list[float] = []
    for place, result in enumerate(scored):
        p_miss_K, p_fa_K, _ = _points_of(result)
        marked = _min_dcf_points(p_miss_K, p_fa_K, p_targets)
        p_miss_K, p_fa_K = with_crossing(p_miss_K, p_fa_K)
        # A rate of 0 has no place on a logarithmic axis.
        is_shown_K = p_fa_K > 0
        axes.plot(
            100 * p_fa_K[is_shown_K],
            100 * (1 - p_miss_K[is_shown_K]),
            color=_colour(place),
            linestyle=_dashes(place),
            linewidth=1.1,
        )
        lowest_rates.append(p_fa_K[is_shown_K].min())
        lowest_accepted.append(1 - p_miss_K[is_shown_K].max())
        rate = eer_of_points(p_miss_K, p_fa_K)
        for marker, p_miss, p_fa in [("o", rate, rate), *marked]:
            axes.plot(
                100 * max(p_fa, lowest_rates[-1]),
                100 * (1 - p_miss),
                marker,
                color=_colour(place),
                markersize=4.5,
                markeredgecolor="white",
                markeredgewidth=0.6,
                clip_on=False,
                zorder=3,
            )
            lowest_accepted.append(1 - p_miss)

    axes.set_xscale("log")
    # Whole tens below the lowest rate of acceptance.
    bottom = 10 * np.floor(10 * min(lowest_accepted) - 1e-9)
    axes.set(
        xlim=(100 * min(*lowest_rates, 0.1), 100),
        ylim=(np.clip(bottom, 0, 90), 100),
        xlabel="false alarms, % of non-targets",
        ylabel="accepted targets, %",
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    _finish(axes)
    place_legend(_system_handles(len(scored)))
    return figure


def scores_figure(
    scored: Sequence[Scored],
    size: Size,
    *,
    p_targets: Sequence[float],
) -> Any:
    """Return a figure with the score histograms of each system and its thresholds."""
    from matplotlib.colors import to_rgba
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    num_columns = 1
    if size.is_wide:
        num_columns = 2 if len(scored) in (2, 4) else min(len(scored), 3)
    num_rows = -(-len(scored) // num_columns)
    is_target_N = scored[0].is_target_N
    num_target = int(np.count_nonzero(is_target_N))
    num_nontarget = len(is_target_N) - num_target
    # As the histograms, also in grey: non-targets have a dashed line.
    handles: list[Any] = [
        Patch(facecolor=to_rgba(colour, 0.3), edgecolor=colour, linestyle=line)
        for colour, line in zip(COLOURS, ("-", "--"))
    ]
    entries = [f"targets ({num_target:,})", f"non-targets ({num_nontarget:,})"]
    for name, look in _threshold_looks(scored, p_targets).items():
        handles.append(Line2D([], [], **look))
        entries.append(f"threshold, {name}")

    figure = _new_figure(size, 1.0)
    lines, columns = _fit(figure, size, entries, size.width_cm, max_columns=2)
    panel_cm = 2.9 if len(scored) > 1 else 4.2
    title_cm = 1.3 * size.font_size * POINT_CM
    height_cm = num_rows * (panel_cm + title_cm) + 0.5
    figure.set_figheight(height_cm * CM)
    panels = figure.subplots(
        num_rows,
        num_columns,
        squeeze=False,
        sharex=_are_alike(scored),
    ).ravel()
    for place, result in enumerate(scored):
        axes = panels[place]
        # Shared axes show their labels only below the last row.
        axes.tick_params(axis="x", labelbottom=True)
        draw_scores(
            axes,
            result.scores_N,
            is_target_N,
            linewidth=0.9,
            colours=COLOURS,
            dashes="--",
        )
        for name, threshold in _thresholds(result, p_targets).items():
            look = _threshold_looks(scored, p_targets)[name]
            if name == STORED:
                # At the upper end, where no other threshold covers it.
                top = axes.get_xaxis_transform()
                axes.plot(threshold, 1, **look, transform=top, clip_on=False, zorder=3)
            else:
                axes.axvline(threshold, **look)
        axes.set_ylabel("density")
        if len(scored) > 1:
            panel_width = size.width_cm / num_columns - 1.2
            name = result.system.name
            _set_title(axes, _wrapped_title(figure, size, name, panel_width))
        if place >= len(scored) - num_columns:
            axes.set_xlabel("score")
        _finish(axes)
    for axes in panels[len(scored) :]:
        axes.set_visible(False)
    legend = _add_legend(
        figure, handles, lines, ncols=columns, loc="outside upper left"
    )
    _add_height(figure, legend)
    return figure


def duration_figure(scored: Sequence[Scored], size: Size) -> Any:
    """Return a figure of the EER over the duration of the shorter recording, with intervals.

    A point without an interval, or with one of no errors, is hollow. Raises ValueError if
    durations are unknown, or all are alike.
    """
    names: list[str] = []
    rows_of: list[dict[str, dict[str, Any]]] = []
    for result in scored:
        rows = _duration_rows(result)
        rows_of.append(rows)
        # All systems have the same trials, and so the same bins.
        names = list(rows)
    has_hollow = any(_is_hollow(row) for rows in rows_of for row in rows.values())
    entries = [(result.system.name, "") for result in scored]
    if has_hollow:
        entries.append((HOLLOW, ""))
    figure, axes, place_legend = _figure_with_legend(size, entries, "", aspect=0.72)

    top = 0.0
    for place, rows in enumerate(rows_of):
        # Beside each other, so that their intervals do not cover each other.
        shift = 0.09 * (place - (len(scored) - 1) / 2)
        positions: list[float] = []
        rates: list[float] = []
        for bin_number, name in enumerate(names):
            row = rows[name]
            position = bin_number + shift
            positions.append(position)
            rates.append(100 * row["eer"])
            if row["eer_ci95"] is not None:
                low, high = row["eer_ci95"]
                top = max(top, 100 * high)
                axes.vlines(
                    position,
                    100 * low,
                    100 * high,
                    color=_colour(place),
                    linewidth=0.9,
                )
        top = max(top, *rates)
        axes.plot(
            positions,
            rates,
            color=_colour(place),
            linestyle=_dashes(place),
            marker=_marker(place),
            linewidth=1.0,
            markersize=4,
            markeredgecolor="white",
            markeredgewidth=0.5,
            clip_on=False,  # an EER of 0 is on the axis
            zorder=3,
            label=scored[place].system.name,
        )
        for position, row in zip(positions, rows.values()):
            if _is_hollow(row):
                axes.plot(
                    position,
                    100 * row["eer"],
                    color=_colour(place),
                    **_hollow(_marker(place)),
                    clip_on=False,
                    zorder=4,
                )
    labels = [
        f"{_short_bin(name)}\n({rows_of[0][name]['num_target']:,})" for name in names
    ]
    axes.set_xticks(range(len(names)), labels=labels)
    axes.set(
        xlim=(-0.5, len(names) - 0.5),
        ylim=(0, 1.05 * top or 1),
        xlabel="seconds of the shorter recording (targets)",
        ylabel="EER, %",
    )
    _finish(axes)
    handles = _system_handles(len(scored), with_markers=True)
    if has_hollow:
        from matplotlib.lines import Line2D

        handles.append(Line2D([], [], color="black", linestyle="", **_hollow("o")))
    place_legend(handles)
    return figure


def _is_hollow(row: Mapping[str, Any]) -> bool:
    """Return whether an EER has no interval: too few speakers, or no error in any replicate."""
    ci95 = row["eer_ci95"]
    return ci95 is None or ci95[0] == ci95[1]


def _hollow(marker: str) -> dict[str, Any]:
    return {
        "marker": marker,
        "markersize": 4,
        "markerfacecolor": "white",
        "markeredgewidth": 0.9,
    }


def confusion_figure(rows: Mapping[str, Row], size: Size) -> Any:
    """Return a figure of confusions, a panel for each system; cells are % of the true class."""
    num_columns = min(len(rows), 2) if size.is_wide else 1
    num_rows = -(-len(rows) // num_columns)
    panel_cm = size.width_cm / num_columns
    if size.is_wide and len(rows) == 1:
        panel_cm = WIDE_CM
    figure = _new_figure(size, num_rows * (panel_cm + 0.4))
    panels = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    classes = {name for row in rows.values() for name in row["confusion"]}
    names_cm = max(_width_cm(figure, size, name) for name in classes)
    # Right of the names of the classes and of the axis.
    title_cm = max(panel_cm - names_cm - AXIS_LABEL_CM, MIN_TITLE_CM)
    for axes, (name, row) in zip(panels, rows.items()):
        true_names, found_names, share = confusion_shares(row)
        if len(true_names) < row["num_classes"]:
            log.warning(
                "%s: shows the %d of %d classes with the most confusions, and the others"
                " as one",
                name,
                len(true_names),
                row["num_classes"],
            )
        _draw_confusion(axes, share, true_names, found_names, size, panel_cm)
        title = f"{name}: accuracy {percent(row['accuracy'])} %"
        _set_title(axes, _wrapped_title(figure, size, title, title_cm))
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    return figure


def confusion_shares(row: Row) -> tuple[list[str], list[str], np.ndarray]:
    """Return true classes, found classes, and the share of each true class found as each.

    Of many classes, those with the most confusions; the last column then has all other classes.
    """
    confusion: Mapping[str, Mapping[str, int]] = row["confusion"]
    classes = set(confusion)
    num_wrong: dict[str, int] = dict.fromkeys(confusion, 0)
    for true, counts in confusion.items():
        classes.update(counts)
        for found, count in counts.items():
            if found != true:
                num_wrong[true] += count
                num_wrong[found] = num_wrong.get(found, 0) + count
    shown = sorted(classes)
    if len(shown) > MAX_CLASSES:
        worst = sorted(shown, key=lambda name: num_wrong.get(name, 0), reverse=True)
        shown = sorted(worst[:MAX_CLASSES])

    true_names = [name for name in shown if name in confusion]
    found_names = list(shown)
    if len(shown) < len(classes):
        found_names.append(OTHER)
    share = np.zeros((len(true_names), len(found_names)))
    for line, true in enumerate(true_names):
        counts = confusion[true]
        total = sum(counts.values())
        for found, count in counts.items():
            column = shown.index(found) if found in shown else len(shown)
            share[line, column] += count / total
    return true_names, found_names, share


def _draw_confusion(
    axes: Any,
    share: np.ndarray,
    true_names: Sequence[str],
    found_names: Sequence[str],
    size: Size,
    panel_cm: float,
) -> None:
    # A shade of one colour is also a shade of grey.
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="equal")
    cell_cm = 0.75 * panel_cm / len(found_names)
    font_size = min(size.small, 0.55 * cell_cm / POINT_CM)
    for (line, column), value in np.ndenumerate(share):
        # 0 would hide the confusions.
        if value > 0:
            axes.text(
                column,
                line,
                f"{100 * value:.0f}" if value >= 0.005 else "<1",
                ha="center",
                va="center",
                fontsize=font_size,
                color="white" if value > DARK_CELL else "black",
            )
    name_size = min(size.small, 0.8 * cell_cm / POINT_CM)
    axes.set_xticks(range(len(found_names)))
    axes.set_yticks(range(len(true_names)))
    axes.set_xticklabels(found_names, fontsize=name_size, parse_math=False)
    axes.set_yticklabels(true_names, fontsize=name_size, parse_math=False)
    is_long = max(map(len, found_names)) * 0.5 * name_size * POINT_CM > cell_cm
    axes.tick_params(axis="x", rotation=90 if is_long else 0, length=0)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_color(GREY)
    axes.set(xlabel="found, % of the true class", ylabel="true class")


def _points_of(result: Scored) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return operating_points(result.scores_N, result.is_target_N)


def _min_dcf_points(
    p_miss_K: np.ndarray, p_fa_K: np.ndarray, p_targets: Sequence[float]
) -> list[tuple[str, float, float]]:
    """Return marker, miss rate and false-alarm rate at the minimum cost of each prior."""
    marked: list[tuple[str, float, float]] = []
    for marker, p_target in zip(MARKERS[1:], p_targets):
        point = _min_dcf_index(p_miss_K, p_fa_K, p_target)
        marked.append((marker, float(p_miss_K[point]), float(p_fa_K[point])))
    return marked


def _min_dcf_index(p_miss_K: np.ndarray, p_fa_K: np.ndarray, p_target: float) -> int:
    return int(np.argmin(p_target * p_miss_K + (1 - p_target) * p_fa_K))


def _band(result: Scored) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return false-alarm rates and the bounds of the miss rates; None with too few speakers."""
    num_nontarget = int(np.count_nonzero(~result.is_target_N))
    # Evenly spaced on the axis.
    low, high = ndtri([0.5 / num_nontarget, 0.99])
    p_fa_T = ndtr(np.linspace(low, high, NUM_BAND_POINTS))
    bounds = miss_band(
        result.scores_N,
        result.is_target_N,
        *result.listed.speakers,
        p_fa_T,
    )
    if bounds is None:
        log.warning(
            "%s: too few speakers for intervals of its curve", result.system.name
        )
        return None
    return p_fa_T, *bounds


def _metrics_text(result: Scored, p_targets: Sequence[float]) -> str:
    texts = [f"{percent(result.metric('eer'))} %"]
    for p_target in p_targets:
        min_dcf = result.metric(f"{MIN_DCF}{p_target:g}")
        texts.append(number(min_dcf))
    return ", ".join(texts)


def _metrics_title(p_targets: Sequence[float]) -> str:
    """Explain the numbers and the markers of the legend."""
    shapes = ("square", "triangle", "diamond", "lower triangle", "plus", "cross")
    texts = ["EER (circle)"]
    for shape, p_target in zip(shapes, p_targets):
        texts.append(f"minDCF({p_target:g}) ({shape})")
    return ", ".join(texts)


def _thresholds(result: Scored, p_targets: Sequence[float]) -> dict[str, float]:
    """Return name -> threshold at the EER, at each minDCF, and that of the model's calibration.

    A threshold that rejects everything is no score and is left out.
    """
    p_miss_K, p_fa_K, threshold_K = _points_of(result)
    # The first threshold with at least as many misses as false alarms, in shares.
    at_eer = int(np.argmax(p_miss_K >= p_fa_K))
    thresholds = {"EER": float(threshold_K[at_eer])}
    for p_target in p_targets:
        point = _min_dcf_index(p_miss_K, p_fa_K, p_target)
        thresholds[f"minDCF({p_target:g})"] = float(threshold_K[point])
    stored = (result.row or {}).get("at_threshold")
    if stored is not None:
        thresholds[STORED] = stored["threshold"]
    return {name: value for name, value in thresholds.items() if np.isfinite(value)}


def _threshold_looks(
    scored: Sequence[Scored], p_targets: Sequence[float]
) -> dict[str, dict[str, Any]]:
    """Return the look of each threshold of any system, for the panels and the legend."""
    names: dict[str, None] = {}
    for result in scored:
        names |= dict.fromkeys(_thresholds(result, p_targets))
    looks: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(names):
        line = DASHES[place % len(DASHES)]
        looks[name] = {"color": "black", "linewidth": 0.9, "linestyle": line}
    if STORED in looks:
        looks[STORED] = {
            "color": "black",
            "linestyle": "",
            "marker": "v",
            "markersize": 4.5,
        }
    return looks


def _are_alike(scored: Sequence[Scored]) -> bool:
    """Return whether the scores of all systems are of one kind, such as cosines."""
    kinds: set[str] = set()
    for result in scored:
        finite_N = result.scores_N[np.isfinite(result.scores_N)]
        if result.row is not None:
            kinds.add(result.row["backend"])
        elif len(finite_N) and np.abs(finite_N).max() <= 1:
            kinds.add("cosine")
        else:
            # Of a score file: any other scale.
            kinds.add(result.system.name)
    return len(kinds) == 1


def _duration_rows(result: Scored) -> dict[str, dict[str, Any]]:
    """Return bin -> its rates, as `speakerlab score` reports them."""
    listed = result.listed
    if not listed.seconds:
        raise ValueError(
            f"{listed.path.parent}: has no utt2dur; run `speakerlab check"
            f" {listed.path.parent}`"
        )
    rows = condition_rows(
        result.scores_N, listed.trials, listed.speakers, {}, listed.seconds
    )
    # With only targets, or only non-targets, a bin has no EER.
    rates_of = {
        row["value"]: row
        for row in rows
        if row["condition"] == SHORTER_SIDE and row["eer"] is not None
    }
    if not rates_of:
        raise ValueError(
            f"{listed.name}: its trials do not differ in the duration of their shorter"
            " side enough to draw EERs by duration; use another list"
        )
    return rates_of


def _short_bin(name: str) -> str:
    """Return `2 to 4 s` as `2–4`, and `16 s and more` as `≥ 16`."""
    low, _, high = name.removesuffix(" s").partition(" to ")
    if high:
        return f"{low}–{high}"
    return f"≥ {name.partition(' ')[0]}"


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _dashes(place: int) -> Any:
    return DASHES[place % len(DASHES)]


def _marker(place: int) -> str:
    return MARKERS[place % len(MARKERS)]


def _system_handles(num_systems: int, *, with_markers: bool = False) -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D(
            [],
            [],
            color=_colour(place),
            linestyle=_dashes(place),
            linewidth=1.1,
            marker=_marker(place) if with_markers else "",
            markersize=4,
        )
        for place in range(num_systems)
    ]


def _new_figure(size: Size, height_cm: float) -> Any:
    from matplotlib.figure import Figure

    # Without pyplot, which keeps every figure in memory and may need a display.
    return Figure(
        figsize=(size.width_cm * CM, height_cm * CM),
        layout="constrained",
        # That of PDF and SVG, so that text measures the same.
        dpi=72,
    )


def _figure_with_legend(
    size: Size,
    entries: Sequence[tuple[str, str]],
    title: str,
    *,
    aspect: float,
) -> tuple[Any, Any, Callable[[list[Any]], None]]:
    """Return a figure, its axes, and a function that adds the legend, given its handles.

    The legend never covers a curve: it is above the plot, or beside it in a wide figure. entries:
    names and metrics of the systems. aspect: height of the plot as a share of its width.
    """
    figure = _new_figure(size, aspect * size.width_cm)
    axes = figure.add_subplot()
    texts = [": ".join(filter(None, entry)) for entry in entries]
    most_cm = size.width_cm * (MAX_LEGEND_SHARE if size.is_wide else 1)
    max_columns = 1 if size.is_wide else len(texts)
    lines, columns = _fit(figure, size, texts, most_cm, max_columns=max_columns)
    wrapped_title = _wrapped(figure, size, title, most_cm)
    if size.is_wide:
        # The plot has the width that the legend leaves.
        text_cm = max(_width_cm(figure, size, text) for text in lines)
        text_cm += HANDLE_EM * size.small * POINT_CM
        legend_cm = max(text_cm, _width_cm(figure, size, wrapped_title))
        plot_cm = size.width_cm - legend_cm - 2 * LEGEND_GAP_CM
        figure.set_figheight(aspect * plot_cm * CM)
        axes.set_anchor("W")

    def place_legend(handles: list[Any]) -> None:
        if size.is_wide:
            _add_legend(
                axes,
                handles,
                lines,
                title=wrapped_title,
                loc="upper left",
                bbox_to_anchor=(1.03, 1.0),
            )
            return
        legend = _add_legend(
            figure,
            handles,
            lines,
            title=wrapped_title,
            ncols=columns,
            loc="outside upper left",
        )
        _add_height(figure, legend)

    return figure, axes, place_legend


def _add_height(figure: Any, legend: Any) -> None:
    """Make a figure higher by its legend, so that the plot keeps its size."""
    height_cm = _extent_cm(figure, legend)[1] + LEGEND_GAP_CM
    figure.set_figheight(figure.get_figheight() + height_cm * CM)


def _fit(
    figure: Any,
    size: Size,
    texts: Sequence[str],
    width_cm: float,
    *,
    max_columns: int,
) -> tuple[list[str], int]:
    """Return the texts of a legend, broken into lines that fit, and its number of columns."""
    handle_cm = HANDLE_EM * size.small * POINT_CM
    widest_cm = max(_width_cm(figure, size, text) for text in texts) + handle_cm
    most_columns = min(max_columns, len(texts), max(int(width_cm / widest_cm), 1))
    # As few columns as give so few lines.
    num_lines = -(-len(texts) // most_columns)
    columns = -(-len(texts) // num_lines)
    room_cm = width_cm / columns - handle_cm
    return [_wrapped(figure, size, text, room_cm) for text in texts], columns


def _wrapped(figure: Any, size: Size, text: str, width_cm: float) -> str:
    """Break a text into lines of at most this width."""
    width = _width_cm(figure, size, text)
    if width <= width_cm:
        return text
    # By the mean width of its characters, with a reserve for lines of wide ones.
    num_characters = int(0.9 * len(text) * width_cm / width)
    return "\n".join(textwrap.wrap(text, max(num_characters, 8)))


def _wrapped_title(figure: Any, size: Size, text: str, width_cm: float) -> str:
    """Break the title of a panel, which is larger than the text of a legend."""
    return _wrapped(figure, size, text, width_cm * size.small / size.font_size)


def _width_cm(figure: Any, size: Size, text: str) -> float:
    artist = figure.text(0, 0, text, fontsize=size.small, parse_math=False)
    width_cm, _ = _extent_cm(figure, artist)
    artist.remove()
    return width_cm


def _extent_cm(figure: Any, artist: Any) -> tuple[float, float]:
    """Return the width and the height of a text or a legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    # A character without a glyph is reported when the figure is saved.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        extent = artist.get_window_extent(renderer)
    return extent.width / figure.dpi / CM, extent.height / figure.dpi / CM


def _add_legend(
    parent: Any,
    handles: Sequence[Any],
    texts: Sequence[str],
    *,
    title: str = "",
    **place: Any,
) -> Any:
    """Add a legend to a figure or to axes; place: see matplotlib."""
    # Texts are set afterwards: matplotlib would leave out a name that begins with an underscore,
    # and take what is between two $ for a formula.
    legend = parent.legend(
        handles,
        [" "] * len(texts),
        title=title or None,
        frameon=False,
        alignment="left",
        borderpad=0,
        borderaxespad=0.2,
        handlelength=2.4,
        labelspacing=0.25,
        columnspacing=1.2,
        **place,
    )
    for label, text in zip(legend.get_texts(), texts):
        label.set_parse_math(False)
        label.set_text(text)
    return legend


def _set_title(axes: Any, text: str) -> None:
    title = axes.set_title(" ", loc="left", pad=3)
    title.set_parse_math(False)
    title.set_text(text)


def _finish(axes: Any) -> None:
    axes.grid(color=PALE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GREY)
    axes.tick_params(color=GREY, labelcolor="black")
    axes.xaxis.label.set_color("black")
