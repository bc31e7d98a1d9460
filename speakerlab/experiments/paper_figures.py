"""Figures of several systems for papers: DET and ROC curves, scores, durations.

In: systems on one trial list. Out: figures of matplotlib. The numbers are those of `speakerlab
score`. Layout, colours and files are those of paper_layout.py.
Letters: N trials, K operating points, T false-alarm rates, B bins.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from speakerlab.experiments.paper_layout import (
    CM,
    COLOURS,
    DASHES,
    MARKERS,
    POINT_CM,
    Legend,
    Size,
    colour_of,
    dashes_of,
    figure_with_legend,
    finish,
    marker_of,
    new_figure,
    set_title,
    system_handles,
    wrapped_title,
)
from speakerlab.experiments.plots import DetCurve, draw_det, draw_scores, with_crossing
from speakerlab.experiments.results import number, percent
from speakerlab.experiments.systems import MIN_DCF, Scored
from speakerlab.scoring.bootstrap import miss_band
from speakerlab.scoring.conditions import SHORTER_SIDE, condition_rows
from speakerlab.scoring.metrics import eer_of_points, operating_points

log = logging.getLogger(__name__)
MANY_SYSTEMS = 4  # from here on, the points of DET curves are small
AXES_SHARE = 0.84  # of the height of a square plot with its labels
MAX_LEFT = 0.1  # start of the axis of a ROC curve, which has at least a decade
PANEL_CM, SINGLE_PANEL_CM = 2.9, 4.2  # height of histograms
X_LABEL_CM = 0.5  # below the last row of panels
Y_LABEL_CM = 1.2  # left of a panel
LINE_HEIGHT = 1.3  # in sizes of the font
BESIDE = 0.09  # from a system to the next within a bin of durations, in widths of a bin
HOLLOW = "hollow: no interval"
STORED = "model's own"  # threshold, that of its calibration
NUM_BAND_POINTS = 120


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
    curves: list[DetCurve] = []
    for place, result in enumerate(scored):
        p_miss_K, p_fa_K, _ = _points_of(result)
        marked = _min_dcf_points(p_miss_K, p_fa_K, p_targets)
        curve = DetCurve(
            p_miss_K,
            p_fa_K,
            label=result.system.name,
            colour=colour_of(place),
            dashes=dashes_of(place),
            marked=marked,
            band=_band(result) if with_bands else None,
        )
        curves.append(curve)

    legend = _legend_of_systems(scored, p_targets)
    figure, axes, height_cm = figure_with_legend(size, legend, aspect=1.0)
    # Width of a character of the labels, in heights of the axes.
    character = 0.5 * size.small * POINT_CM / (AXES_SHARE * height_cm)
    draw_det(
        axes,
        curves,
        linewidth=1.1,
        markersize=4.5 if len(scored) < MANY_SYSTEMS else 3.5,
        character=character,
    )
    finish(axes)
    return figure


def roc_figure(
    scored: Sequence[Scored],
    size: Size,
    *,
    p_targets: Sequence[float],
) -> Any:
    """Return a figure of ROC curves over a logarithmic axis, with the points of EER and minDCF."""
    legend = _legend_of_systems(scored, p_targets)
    figure, axes, _ = figure_with_legend(size, legend, aspect=0.75)
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
            color=colour_of(place),
            linestyle=dashes_of(place),
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
                color=colour_of(place),
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
        xlim=(100 * min(*lowest_rates, MAX_LEFT), 100),
        ylim=(np.clip(bottom, 0, 90), 100),
        xlabel="false alarms, % of non-targets",
        ylabel="accepted targets, %",
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    finish(axes)
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

    figure = new_figure(size, 1.0)
    panel_cm = PANEL_CM if len(scored) > 1 else SINGLE_PANEL_CM
    title_cm = LINE_HEIGHT * size.font_size * POINT_CM
    height_cm = num_rows * (panel_cm + title_cm) + X_LABEL_CM
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
            panel_width = size.width_cm / num_columns - Y_LABEL_CM
            name = result.system.name
            set_title(axes, wrapped_title(figure, size, name, panel_width))
        if place >= len(scored) - num_columns:
            axes.set_xlabel("score")
        finish(axes)
    for axes in panels[len(scored) :]:
        axes.set_visible(False)
    Legend(handles, entries).add_above(figure, size, max_columns=2)
    return figure


def duration_figure(scored: Sequence[Scored], size: Size) -> Any:
    """Return a figure of the EER over the duration of the shorter recording, with intervals.

    A point without an interval, or with one of no errors, is hollow. Raises ValueError if
    durations are unknown, or all are alike.
    """
    from matplotlib.lines import Line2D

    names: list[str] = []
    rows_of: list[dict[str, dict[str, Any]]] = []
    for result in scored:
        rows = _duration_rows(result)
        rows_of.append(rows)
        # All systems have the same trials, and so the same bins.
        names = list(rows)
    has_hollow = any(_is_hollow(row) for rows in rows_of for row in rows.values())
    texts = [result.system.name for result in scored]
    handles = system_handles(len(scored), with_markers=True)
    if has_hollow:
        texts.append(HOLLOW)
        handles.append(Line2D([], [], color="black", linestyle="", **_hollow("o")))
    figure, axes, _ = figure_with_legend(size, Legend(handles, texts), aspect=0.72)

    highest_rate = 0.0
    for place, result in enumerate(scored):
        rows = [rows_of[place][name] for name in names]
        # Systems beside each other, so that their intervals do not cover each other.
        shift = BESIDE * (place - (len(scored) - 1) / 2)
        positions = [bin_number + shift for bin_number in range(len(names))]
        _draw_rates(axes, positions, rows, place=place, label=result.system.name)
        for row in rows:
            bounds = row["eer_ci95"] or []
            highest_rate = max(highest_rate, row["eer"], *bounds)
    top = 100 * highest_rate
    labels: list[str] = []
    for name in names:
        num_target = rows_of[0][name]["num_target"]
        labels.append(f"{_short_bin(name)}\n({num_target:,})")
    axes.set_xticks(range(len(names)), labels=labels)
    axes.set(
        xlim=(-0.5, len(names) - 0.5),
        ylim=(0, 1.05 * top or 1),
        xlabel="seconds of the shorter recording (targets)",
        ylabel="EER, %",
    )
    finish(axes)
    return figure


def _draw_rates(
    axes: Any,
    positions: Sequence[float],
    rows: Sequence[Mapping[str, Any]],
    *,
    place: int,
    label: str,
) -> None:
    """Draw the EERs of a system and their intervals. place: number of the system."""
    colour = colour_of(place)
    rates: list[float] = []
    for position, row in zip(positions, rows):
        rates.append(100 * row["eer"])
        if row["eer_ci95"] is not None:
            low, high = row["eer_ci95"]
            axes.vlines(position, 100 * low, 100 * high, color=colour, linewidth=0.9)
    axes.plot(
        positions,
        rates,
        color=colour,
        linestyle=dashes_of(place),
        marker=marker_of(place),
        linewidth=1.0,
        markersize=4,
        markeredgecolor="white",
        markeredgewidth=0.5,
        clip_on=False,  # an EER of 0 is on the axis
        zorder=3,
        label=label,
    )
    for position, rate, row in zip(positions, rates, rows):
        if _is_hollow(row):
            axes.plot(
                position,
                rate,
                color=colour,
                **_hollow(marker_of(place)),
                clip_on=False,
                zorder=4,
            )


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


def _legend_of_systems(scored: Sequence[Scored], p_targets: Sequence[float]) -> Legend:
    """Return a legend with the name and the metrics of each system."""
    texts = [
        f"{result.system.name}: {_metrics_text(result, p_targets)}" for result in scored
    ]
    return Legend(system_handles(len(scored)), texts, _metrics_title(p_targets))


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
