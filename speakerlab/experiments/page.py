"""Render the reports as HTML: one file each that holds everything, without scripts or links.

Collects the values for `templates/`, which escape all of them. Nothing is measured or drawn here.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from speakerlab.core.atomic import write_text
from speakerlab.experiments import report
from speakerlab.experiments.report import Row, number, p_value, percent, points, priors_of

Facts = Mapping[str, Mapping[str, Any]]  # heading -> name -> value; text of several lines unfolds
Cell = tuple[str, list[str]]  # text, and smaller lines below it
TRAINING = ""  # takes the place of a trial list's name
NOT_MEASURED: Row = {"min_cllr": None, "intervals": {}, "compared": None, "conditions": []}


@dataclass(frozen=True)
class Picture:
    """A PNG file and its caption."""

    caption: str
    path: Path
    trials: str = TRAINING  # name of its trial list
    tall: bool = False  # as high as two others
    folded: bool = False  # shown on request

    @property
    def uri(self) -> str:
        """The file as a data URI."""
        return f"data:image/png;base64,{base64.b64encode(self.path.read_bytes()).decode('ascii')}"


@dataclass(frozen=True)
class HardTrial:
    """A trial that a back end got wrong, or nearly; clips are data URIs of audio."""

    trials: str
    backend: str
    enrol: str
    test: str
    score: float
    kind: str  # "target trials scored low" or "non-target trials scored high"
    enrol_clip: str | None = None
    test_clip: str | None = None


def write_page(
    path: Path,
    *,
    title: str,
    rows: Sequence[Row],
    pictures: Sequence[Picture] = (),
    hardest: Sequence[HardTrial] = (),
    facts: Facts,
    notes: Sequence[str] = (),
) -> None:
    """Write the report of trial lists. `notes` come first: what is missing, and why."""
    rows = [NOT_MEASURED | row for row in rows]
    pictures_of: dict[str, list[Picture]] = {}
    for picture in pictures:
        pictures_of.setdefault(picture.trials, []).append(picture)
    hardest_of: dict[str, dict[str, list[HardTrial]]] = {}
    for trial in hardest:
        hardest_of.setdefault(trial.trials, {}).setdefault(trial.kind, []).append(trial)
    groups: dict[tuple[str, str], list[Row]] = {}
    protocols: dict[str, list[str]] = {}
    for row, cells in zip(rows, _table(rows)):
        groups.setdefault((row["trials"], row["system"]), []).append(row | {"cells": cells})
        text = row["protocol"]
        text += f". Calibration: {row['calibration']}" if row.get("calibration") else ""
        protocols.setdefault(text, []).append(f"{row['trials']}, {row['backend']}")
    several = len({system for _, system in groups}) > 1
    lists = [
        {
            "name": f"{trials} · {system}" if several else trials,
            "rows": group,
            "untrained": next(
                (r for row in group if (r := row["eer_untrained"]) is not None), None
            ),
            "pictures": pictures_of.pop(trials, []),
            "hardest": hardest_of.pop(trials, {}),
        }
        for (trials, system), group in groups.items()
    ]
    text = _render(
        "verification.html.j2",
        title=title,
        notes=notes,
        lists=lists,
        training=pictures_of.get(TRAINING, []),
        protocols=protocols,
        facts=facts,
    )
    write_text(path, text)


def write_identification_page(path: Path, *, title: str, rows: Sequence[Row], facts: Facts) -> None:
    """Write the report of an identification: accuracy, each class, and the confusions."""
    sets = []
    for row in rows:
        classes = [
            (counts.get(name, 0) / sum(counts.values()), name, sum(counts.values()))
            for name, counts in row["confusion"].items()
        ]
        sets.append(
            {
                "row": row,
                "classes": [(name, f"{n:,}", percent(rate)) for rate, name, n in sorted(classes)],
                "confusion": report.confusion_table(row),
                "frequent": report.frequent_confusions(row),
            }
        )
    write_text(path, _render("identification.html.j2", title=title, sets=sets, facts=facts))


def _render(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "number": number,
        "p_value": p_value,
        "plain": _plain,
        "scale": _condition_scale,
    }
    return environment.get_template(template).render(values)


def _table(rows: Sequence[Row]) -> list[dict[str, Cell]]:
    """Header -> cell for each row; columns that no row fills are left out."""
    priors = priors_of(rows)
    others = {row["compared"]["with"] for row in rows if row["compared"]}
    other = others.pop() if len(others) == 1 else None
    table: list[dict[str, Cell]] = []
    for row in rows:
        bounds, costs = row["intervals"], row["min_dcf"]
        table.append(
            {
                "EER %": _cell(row["eer"], row["eer_ci95"], percent),
                f"EER difference to {other or 'another'}": _compared(row["compared"], other),
                **{f"minDCF({p})": _cell(costs.get(p), bounds.get(f"min_dcf_{p}")) for p in priors},
                "actDCF(0.01)": _cell(row["act_dcf"], bounds.get("act_dcf_0.01")),
                "Cllr": _cell(row["cllr"], bounds.get("cllr")),
                "minCllr": _cell(row["min_cllr"], bounds.get("min_cllr")),
                "at threshold %": _cell(report.at_threshold(row), None, percent),
            }
        )
    filled = [name for name in table[0] if any(cells[name][0] for cells in table)] if table else []
    return [{name: cells[name] for name in filled} for cells in table]


def _cell(
    value: float | None,
    bounds: Sequence[float] | None,
    show: Callable[[float | None], str] = number,
) -> Cell:
    return show(value), [] if value is None or bounds is None else [" – ".join(map(show, bounds))]


def _compared(compared: Mapping[str, Any] | None, other: str | None) -> Cell:
    if compared is None:
        return "", []
    difference, low, high = (
        points(value).replace("-", "−") for value in (compared["eer_difference"], *compared["ci95"])
    )
    named = [] if other else [f"to {compared['with']}"]
    return difference, [f"{low} to {high}", p_value(compared), *named]


def _condition_scale(parts: Sequence[Mapping[str, Any]]) -> tuple[float, list[str]]:
    """(the largest rate drawn in a table of conditions, the priors that it has)."""
    ends = [rate for part in parts for rate in (part["eer"] or 0, *(part.get("eer_ci95") or ()))]
    return max(ends, default=0.0) or 1.0, priors_of(parts)


def _plain(value: object) -> str:
    """A value as people write it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    return str(value)
