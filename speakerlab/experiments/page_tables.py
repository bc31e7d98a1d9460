"""The measured part of the page: rows of results in, HTML of verdict, table and conditions out.

A row is what `report.result_row` makes; what it lacks is left out, so older rows can be shown.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from speakerlab.experiments.report import (
    Row,
    at_threshold,
    number,
    p_value,
    percent,
    points,
    priors_of,
)

Column = Callable[[Row], str]
PRIOR = "0.01"  # of the detection cost in the verdict; actDCF is measured there


def last_row(rows: Sequence[Row]) -> Row:
    """The last back end, which the recipe names as its result: the numbers choose nothing."""
    return rows[-1]


def by_list(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """(trials, system) -> its rows, one a back end, in the order they have."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["trials"], row["system"]), []).append(row)
    return groups


def verdict(rows: Sequence[Row]) -> str:
    """A card for each trial list: its last back end."""
    cards = [_card(name, group) for name, group in _named(rows)]
    return f'<div class="cards">{"".join(cards)}</div>'


def results_table(rows: Sequence[Row]) -> str:
    """Every row, trial list by trial list; intervals stand below their numbers."""
    columns = _columns(rows)
    header = "".join(f"<th>{html.escape(name)}</th>" for name in ["back end", *columns])
    body = []
    for name, group in _named(rows):
        last = last_row(group)
        known = filter(None, [_counts(last), _untrained(group)])
        body.append(
            f'<tr class="group"><th colspan="{len(columns) + 1}">{html.escape(name)} '
            f"<small>{' · '.join(known)}</small></th></tr>"
        )
        for row in group:
            cells = "".join(f"<td>{column(row)}</td>" for column in columns.values())
            kind = ' class="last"' if row is last and len(group) > 1 else ""
            body.append(f"<tr{kind}><td>{html.escape(row['backend'])}</td>{cells}</tr>")
    return (
        f'<div class="wide"><table><thead><tr>{header}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def conditions_table(conditions: Sequence[Mapping[str, Any]]) -> str:
    """One line a part of the list, with its interval drawn on a scale that all share."""
    ends = [max(c["eer"], *(c["eer_ci95"] or ())) for c in conditions if c["eer"] is not None]
    top = max(ends, default=0.0) or 1.0
    priors = priors_of([{"min_dcf": c.get("min_dcf") or {}} for c in conditions])
    names = ["", "targets", "non-targets", "EER %", f"0 to {percent(top)} %"]
    header = "".join(f"<th>{name}</th>" for name in [*names, *(f"minDCF({p})" for p in priors)])
    body, last = [], None
    for part in conditions:
        if part["condition"] != last:
            last = part["condition"]
            label = html.escape(str(last))
            body.append(f'<tr class="group"><th colspan="{len(names) + len(priors)}">{label}</th>')
            body.append("</tr>")
        costs = part.get("min_dcf") or {}
        cells = [
            html.escape(str(part["value"])),
            f"{part['num_target']:,}",
            f"{part['num_nontarget']:,}",
            _with_interval(percent(part["eer"]), part.get("eer_ci95"), percent) or _lack(part),
            _drawn(part["eer"], part.get("eer_ci95"), top),
            *(number(costs.get(prior)) for prior in priors),
        ]
        body.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        f'<div class="wide"><table class="conditions"><thead><tr>{header}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _columns(rows: Sequence[Row]) -> dict[str, Column]:
    """Header -> the HTML of a row's cell; columns that no row fills are left out."""

    def cost(prior: str) -> Column:
        return lambda row: _measured(row, f"min_dcf_{prior}", row["min_dcf"].get(prior))

    references = {row["compared"]["with"] for row in rows if row.get("compared")}
    reference = references.pop() if len(references) == 1 else ""
    columns: dict[str, Column] = {
        "EER %": lambda row: _with_interval(percent(row["eer"]), row["eer_ci95"], percent),
        f"EER difference to {reference or 'another'}": lambda row: _compared(
            row.get("compared"), named=not reference
        ),
        **{f"minDCF({prior})": cost(prior) for prior in priors_of(rows)},
        "actDCF(0.01)": lambda row: _measured(row, "act_dcf_0.01", row["act_dcf"]),
        "Cllr": lambda row: _measured(row, "cllr", row["cllr"]),
        "minCllr": lambda row: _measured(row, "min_cllr", row.get("min_cllr")),
        "at threshold %": lambda row: percent(at_threshold(row)),
    }
    return {name: cell for name, cell in columns.items() if any(map(cell, rows))}


def _measured(row: Row, name: str, value: float | None) -> str:
    return _with_interval(number(value), row.get("intervals", {}).get(name), number)


def _with_interval(
    text: str, interval: Sequence[float] | None, show: Callable[[float], str]
) -> str:
    if not text or interval is None:
        return text
    return f"{text}<small>{show(interval[0])} – {show(interval[1])}</small>"


def _compared(compared: Mapping[str, Any] | None, *, named: bool) -> str:
    if compared is None:
        return ""
    low, high, difference = (
        points(value).replace("-", "−") for value in (*compared["ci95"], compared["eer_difference"])
    )
    lines = [f"{low} to {high}", p_value(compared), *([f"to {compared['with']}"] if named else [])]
    return f"{difference}<small>{'<br>'.join(map(html.escape, lines))}</small>"


def _counts(row: Row) -> str:
    return f"{row['num_target']:,} target and {row['num_nontarget']:,} non-target trials"


def _untrained(group: Sequence[Row]) -> str:
    """EER of the initial weights, which one of the back ends has."""
    rates = [row["eer_untrained"] for row in group if row["eer_untrained"] is not None]
    return f"untrained network: EER {percent(rates[0])} %" if rates else ""


def _named(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """What to call a trial list, and its rows; the system is named where there are several."""
    several = len({row["system"] for row in rows}) > 1
    return [
        (f"{trials} · {system}" if several else trials, group)
        for (trials, system), group in by_list(rows).items()
    ]


def _card(name: str, group: Sequence[Row]) -> str:
    row = last_row(group)
    low, high = map(percent, row["eer_ci95"])
    chosen = f", the last of {len(group)} back ends" if len(group) > 1 else ""
    lines = [f"{row['backend']}{chosen}", _costs(row), *_remarks(row)]
    lines = filter(None, [*lines, _untrained(group)])
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return (
        f'<div class="card"><div><span>{html.escape(name)}</span><b>{percent(row["eer"])} %</b>'
        f"<span>EER, 95 % interval {low} to {high} %</span></div><ul>{items}</ul></div>"
    )


def _costs(row: Row) -> str:
    costs = [f"minDCF({prior}) {number(cost)}" for prior, cost in row["min_dcf"].items()]
    return ", ".join(costs)


def _remarks(row: Row) -> list[str]:
    """Calibration and the comparison, each a line."""
    lines = []
    least, actual = row["min_dcf"].get(PRIOR), row["act_dcf"]
    if actual is not None:
        times = f", {actual / least:.2f} times the minimum" if least else ""
        lines.append(f"calibrated: actDCF({PRIOR}) {number(actual)}{times}")
    if row["cllr"] is not None:
        part = number(row.get("min_cllr"))
        lines.append(f"Cllr {number(row['cllr'])}" + (f", minCllr {part}" if part else ""))
    if row["cllr"] is None and actual is None:
        lines.append("not calibrated: scores are no log-likelihood ratios")
    if compared := row.get("compared"):
        difference = compared["eer_difference"]
        lines.append(
            f"{percent(abs(difference))} points of EER {'below' if difference < 0 else 'above'} "
            f"{compared['with']}, {p_value(compared)}".replace(" = ", "\u00a0=\u00a0")
        )
    return lines


def _lack(part: Mapping[str, Any]) -> str:
    """Why a part of a list has no figure."""
    for key, kind in (("num_target", "targets"), ("num_nontarget", "non-targets")):
        if not part[key]:
            return f"no {kind}"
    return "too few trials"


def _drawn(eer: float | None, interval: Sequence[float] | None, top: float) -> str:
    """A dot on a line from 0 to `top`, its interval a thick stroke."""
    if eer is None:
        return ""
    low, high = (100 * bound / top for bound in interval or (eer, eer))
    return (
        '<svg viewBox="-3 0 106 12" width="132" height="15" role="img" aria-hidden="true">'
        '<line x1="0" y1="6" x2="100" y2="6" stroke="#e3e8ee"/>'
        f'<line x1="{low:.1f}" y1="6" x2="{high:.1f}" y2="6" stroke="#9dbbe0" stroke-width="4"/>'
        f'<circle cx="{100 * eer / top:.1f}" cy="6" r="3" fill="#1f5fa8"/></svg>'
    )
