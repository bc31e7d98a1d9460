"""Figure of confusions for papers, from results of an identification.

Layout, colours and files are those of paper_layout.py.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from speakerlab.experiments.paper_layout import (
    POINT_CM,
    WIDE_CM,
    Size,
    new_figure,
    set_title,
    width_cm,
    wrapped_title,
)
from speakerlab.experiments.plots import GREY
from speakerlab.experiments.results import Row, percent

log = logging.getLogger(__name__)
MAX_CLASSES = 20
AXIS_LABEL_CM = 1.0  # left of the names of the classes
MIN_TITLE_CM = 2.5
OTHER = "other"  # column of the classes that are not shown
DARK_CELL = 0.55  # from this share on, the number in a cell is white


def confusion_figure(rows: Mapping[str, Row], size: Size) -> Any:
    """Return a figure of confusions, a panel for each system; cells are % of the true class."""
    num_columns = min(len(rows), 2) if size.is_wide else 1
    num_rows = -(-len(rows) // num_columns)
    panel_cm = size.width_cm / num_columns
    if size.is_wide and len(rows) == 1:
        panel_cm = WIDE_CM
    figure = new_figure(size, num_rows * (panel_cm + 0.4))
    panels = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    classes = {name for row in rows.values() for name in row["confusion"]}
    names_cm = max(width_cm(figure, size, name) for name in classes)
    # Right of the names of the classes and of the axis.
    title_cm = max(panel_cm - names_cm - AXIS_LABEL_CM, MIN_TITLE_CM)
    for axes, (name, row) in zip(panels, rows.items()):
        true_names, found_names, share = confusion_shares(row)
        if OTHER in found_names:
            log.warning(
                "%s: shows the %d of %d classes with the most confusions, and the others"
                " as one",
                name,
                len(found_names) - 1,
                len(all_classes(row)),
            )
        _draw_confusion(axes, share, true_names, found_names, size, panel_cm)
        title = f"{name}: accuracy {percent(row['accuracy'])} %"
        set_title(axes, wrapped_title(figure, size, title, title_cm))
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    return figure


def all_classes(row: Row) -> set[str]:
    """Return the classes of a test: those of its recordings, and those that were found."""
    classes = set(row["confusion"])
    for counts in row["confusion"].values():
        classes.update(counts)
    return classes


def confusion_shares(row: Row) -> tuple[list[str], list[str], np.ndarray]:
    """Return true classes, found classes, and the share of each true class found as each.

    Of many classes, those with the most confusions; the last column then has all other classes.
    """
    confusion: Mapping[str, Mapping[str, int]] = row["confusion"]
    shown = _shown_classes(row)
    true_names = [name for name in shown if name in confusion]
    found_names = list(shown)
    if len(shown) < len(all_classes(row)):
        found_names.append(OTHER)
    column_of = {name: column for column, name in enumerate(shown)}
    share = np.zeros((len(true_names), len(found_names)))
    for line, true in enumerate(true_names):
        counts = confusion[true]
        total = sum(counts.values())
        for decided, count in counts.items():
            column = column_of.get(decided, len(shown))
            share[line, column] += count / total
    return true_names, found_names, share


def _shown_classes(row: Row) -> list[str]:
    """Return the classes of a test, sorted; of many, those with the most confusions."""
    classes = sorted(all_classes(row))
    if len(classes) <= MAX_CLASSES:
        return classes
    # A confusion counts for both of its classes.
    num_wrong = Counter[str]()
    for true, counts in row["confusion"].items():
        for decided, count in counts.items():
            if decided != true:
                num_wrong[true] += count
                num_wrong[decided] += count
    classes.sort(key=lambda name: num_wrong[name], reverse=True)
    return sorted(classes[:MAX_CLASSES])


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
