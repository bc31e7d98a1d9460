"""The page of an evaluation, one HTML file that holds everything, without scripts or links.

In: rows of results, pictures, the hardest trials with their clips, facts. Out: `report.html`.
Nothing is measured, chosen or drawn here.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speakerlab.core.atomic import write_text
from speakerlab.experiments.page_style import STYLE
from speakerlab.experiments.page_tables import (
    by_list,
    conditions_table,
    last_row,
    results_table,
    verdict,
)
from speakerlab.experiments.report import Row
from speakerlab.scoring.definitions import DEFINITIONS

TRAINING = ""  # in the place of a trial list's name


@dataclass(frozen=True)
class Picture:
    """A PNG file and what is said below it."""

    caption: str
    path: Path
    trials: str = TRAINING  # name of the list that it is of
    tall: bool = False  # as high as two others
    folded: bool = False  # shown when asked for


@dataclass(frozen=True)
class HardTrial:
    """A trial that a back end got wrong, or nearly; clips are data URIs of audio to listen to."""

    trials: str
    backend: str
    enrol: str
    test: str
    score: float
    kind: str  # "target trials scored low" or "non-target trials scored high"
    enrol_clip: str | None = None
    test_clip: str | None = None


def write_page(
    path: str | Path,
    *,
    title: str,
    rows: Sequence[Row],
    pictures: Sequence[Picture] = (),
    hardest: Sequence[HardTrial] = (),
    facts: Mapping[str, Mapping[str, Any]],
    notes: Sequence[str] = (),
) -> None:
    """Write the page, whole or not at all.

    facts: heading -> name -> value; a mapping as a value becomes a block of lines that unfolds.
    notes: lines that stand above the verdict: what is missing, and why.
    """
    names = list(dict.fromkeys(row["trials"] for row in rows))
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        *(f'<p class="muted">{html.escape(note)}</p>' for note in notes),
        verdict(rows),
        f"<h2>Results</h2>{results_table(rows)}",
        *(_list_section(name, rows, pictures, hardest) for name in names),
        _training(pictures),
        f"<h2>Protocol</h2>{_protocols(rows)}",
        f'<h2>Facts</h2><div class="facts">{"".join(map(_block, facts.items()))}</div>',
        f"<h2>Definitions</h2>{_facts(dict(DEFINITIONS))}",
    ]
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main></body></html>\n"
    )
    write_text(Path(path), text)


def _list_section(
    name: str, rows: Sequence[Row], pictures: Sequence[Picture], hardest: Sequence[HardTrial]
) -> str:
    """All that is known of one trial list beside its rows; empty where that is nothing."""
    own = [picture for picture in pictures if picture.trials == name]
    parts = [
        _figures([picture for picture in own if not picture.folded]),
        _folded("Other back ends", _figures([picture for picture in own if picture.folded])),
        *(_conditions(group) for (trials, _), group in by_list(rows).items() if trials == name),
        _hardest([trial for trial in hardest if trial.trials == name]),
    ]
    return f"<h2>{html.escape(name)}</h2>{''.join(parts)}" if any(parts) else ""


def _training(pictures: Sequence[Picture]) -> str:
    figures = _figures([picture for picture in pictures if picture.trials == TRAINING])
    return f"<h2>Training</h2>{figures}" if figures else ""


def _conditions(group: Sequence[Row]) -> str:
    """Tables of the last back end, those of the others folded."""
    tables = {
        row["backend"]: conditions_table(row["conditions"])
        for row in group
        if row.get("conditions")
    }
    if not tables:
        return ""
    last = last_row(group)["backend"]
    if last not in tables:
        last = list(tables)[-1]
    others = [
        _folded(f"Conditions: {name}", table) for name, table in tables.items() if name != last
    ]
    return f"<h3>Conditions: {html.escape(last)}</h3>{tables[last]}{''.join(others)}"


def _hardest(trials: Sequence[HardTrial]) -> str:
    if not trials:
        return ""
    kinds = dict.fromkeys(trial.kind for trial in trials)
    columns = [
        f"<div><h4>{html.escape(kind.capitalize())}</h4>"
        f"{''.join(_trial(trial) for trial in trials if trial.kind == kind)}</div>"
        for kind in kinds
    ]
    backend = html.escape(trials[0].backend)
    return f'<h3>Hardest trials: {backend}</h3><div class="hardest">{"".join(columns)}</div>'


def _trial(trial: HardTrial) -> str:
    sides = [
        f'<div class="side"><span>{side} {html.escape(name)}</span>{_player(name, uri)}</div>'
        for side, name, uri in (
            ("enrolment", trial.enrol, trial.enrol_clip),
            ("test", trial.test, trial.test_clip),
        )
    ]
    return f'<div class="trial"><div class="score">{trial.score:.4f}</div>{"".join(sides)}</div>'


def _player(name: str, uri: str | None) -> str:
    if uri is None:
        return ""
    label = html.escape(name)
    return f'<audio controls preload="metadata" aria-label="{label}" src="{uri}"></audio>'


def _figures(pictures: Sequence[Picture]) -> str:
    return f'<div class="figures">{"".join(map(_picture, pictures))}</div>' if pictures else ""


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    text, kind = html.escape(picture.caption), ' class="tall"' if picture.tall else ""
    return (
        f'<figure{kind}><img alt="{text}" src="data:image/png;base64,{data}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def _protocols(rows: Sequence[Row]) -> str:
    """What was done, once for the lists and back ends that share it."""
    told: dict[str, list[str]] = {}
    for row in rows:
        calibration = row.get("calibration")
        text = row["protocol"] + (f". Calibration: {calibration}" if calibration else "")
        told.setdefault(text, []).append(f"{row['trials']}, {row['backend']}")
    items = [
        f"<dt>{'<br>'.join(map(html.escape, names))}</dt><dd>{html.escape(text)}</dd>"
        for text, names in told.items()
    ]
    return f"<dl>{''.join(items)}</dl>"


def _block(named: tuple[str, Mapping[str, Any]]) -> str:
    name, values = named
    return f"<div><h3>{html.escape(name)}</h3>{_facts(values)}</div>"


def _facts(values: Mapping[str, Any]) -> str:
    blocks = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    plain = [
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(_text(value))}</dd>"
        for name, value in values.items()
        if name not in blocks
    ]
    folded = [_folded(name, _lines(block)) for name, block in blocks.items()]
    return (f"<dl>{''.join(plain)}</dl>" if plain else "") + "".join(folded)


def _lines(block: Mapping[str, Any]) -> str:
    lines = "\n".join(f"{key}: {_text(item)}" for key, item in block.items())
    return f"<pre>{html.escape(lines)}</pre>"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    return str(value)


def _folded(name: str, body: str) -> str:
    return f"<details><summary>{html.escape(name)}</summary>{body}</details>" if body else ""
