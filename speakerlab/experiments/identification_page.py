"""The page of an identification, one HTML file without scripts or links.

In: rows of results, facts. Out: `report.html`: how many were right, who is taken for whom.
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from speakerlab.core.atomic import write_text
from speakerlab.experiments.page_style import STYLE
from speakerlab.experiments.report import percent
from speakerlab.scoring.identification import Row, commonest_confusions, confusion_table

DEFINITIONS = {
    "Accuracy": "The share of utterances that are given their own class.",
    "Balanced accuracy": "The mean over the classes of the share that is given its own class: "
    "guessing gives one divided by their number, however many utterances each has.",
    "Interval": "95 % percentile interval by bootstrap: speakers (utterances, where speakers are "
    "not told) are drawn with replacement, 1,000 replicates, fixed seed. Where all are right or "
    "all wrong: the exact binomial bound for as many trials as there are speakers.",
}
SHADE = "31,95,168"  # red, green, blue of a share of 1


def write_page(
    path: Path, *, title: str, rows: Sequence[Row], facts: Mapping[str, Mapping[str, object]]
) -> None:
    """Write the page, whole or not at all. facts: heading -> name -> value."""
    sections = [
        f'<div class="cards">{"".join(map(_card, rows))}</div>',
        *(f"<h2>{html.escape(row['data'])}</h2>{_classes(row)}{_confusion(row)}" for row in rows),
        "<h2>Protocol</h2>",
        *(f"<p>{html.escape(row['data'])}: {html.escape(row['protocol'])}.</p>" for row in rows),
        *(f"<h2>{html.escape(name)}</h2>{_listed(values)}" for name, values in facts.items()),
        f"<h2>Definitions</h2>{_listed(DEFINITIONS)}",
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title>'
    body = f"<main><h1>{html.escape(title)}</h1>{''.join(sections)}</main>"
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    write_text(
        path,
        f'<!doctype html>\n<html lang="en"><head>{head}{view}<style>{STYLE}</style></head>\n'
        f"<body>{body}</body></html>\n",
    )


def _card(row: Row) -> str:
    low, high = map(percent, row["accuracy_ci95"])
    lines = [
        f"balanced accuracy {percent(row['balanced_accuracy'])} %",
        f"{row['num']:,} utterances, {row['num_classes']} classes",
    ]
    items = "".join(f"<li>{line}</li>" for line in lines)
    name = html.escape(f"{row['data']} · {row['system']}")
    return (
        f'<div class="card"><span>{name}</span><b>{percent(row["accuracy"])} %</b>'
        f"<span>accuracy, 95 % interval {low} to {high} %</span><ul>{items}</ul></div>"
    )


def _classes(row: Row) -> str:
    """Each class: how many, and the share given it; of many classes the worst are shown first."""
    lines = []
    for name, counts in row["confusion"].items():
        total = sum(counts.values())
        lines.append((counts.get(name, 0) / total, name, total))
    body = [[name, f"{total:,}", percent(share)] for share, name, total in sorted(lines)[:50]]
    note = f"<p class='muted'>The 50 worst of {len(lines)} classes.</p>" if len(lines) > 50 else ""
    return f"<h3>Classes</h3>{note}{_table(['class', 'utterances', 'right %'], body)}"


def _confusion(row: Row) -> str:
    """The confusion table, a cell the darker the larger its share of the row."""
    found = confusion_table(row)
    if found is None:
        worst = [[true, other, str(count)] for true, other, count in commonest_confusions(row)]
        return f"<h3>Commonest confusions</h3>{_table(['true', 'found', 'utterances'], worst)}"
    names, counts = found
    header = "".join(f"<th>{html.escape(name)}</th>" for name in ["true \\ found", *names])
    body = []
    for name, line in counts:
        cells = [_shaded(count, count / sum(line)) for count in line]
        body.append(f"<tr><td>{html.escape(name)}</td>{''.join(cells)}</tr>")
    return (
        '<h3>Confusion</h3><div class="wide"><table style="width:auto"><thead><tr>'
        f"{header}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _shaded(count: int, share: float) -> str:
    if not count:
        return "<td></td>"
    ink = ";color:#fff" if share > 0.55 else ""
    return f'<td style="background:rgba({SHADE},{share:.2f}){ink}">{count:,}</td>'


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>" for line in lines
    )
    return (
        f'<div class="wide"><table style="width:auto"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _listed(values: Mapping[str, object]) -> str:
    """Names and values; a mapping becomes a block of lines that unfolds."""
    plain, blocks = [], []
    for name, value in values.items():
        label = html.escape(name)
        if isinstance(value, Mapping):
            lines = html.escape("\n".join(f"{key}: {item}" for key, item in value.items()))
            blocks.append(f"<details><summary>{label}</summary><pre>{lines}</pre></details>")
        else:
            plain.append(f"<dt>{label}</dt><dd>{html.escape(str(value))}</dd>")
    return f"<dl>{''.join(plain)}</dl>{''.join(blocks)}"
