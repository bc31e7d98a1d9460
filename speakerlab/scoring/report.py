"""What is left of an evaluation: score files, rows of results, a table and one HTML page.

Letters: N trials.
In: trials, scores and measured numbers. Out: files, each written whole or not at all. Nothing is
measured or chosen here.
"""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.atomic import replacing
from speakerlab.scoring.calibration import Quality
from speakerlab.scoring.plots import plot_det, plot_scores
from speakerlab.scoring.trials import LINES_AT_ONCE, Trials, label_of

__all__ = [
    "format_table",
    "plot_det",
    "plot_scores",
    "result_row",
    "update_results",
    "write_html",
    "write_scores",
]

Row = dict[str, Any]

DEFINITIONS = (
    (
        "EER",
        "The equal error rate: the share of targets rejected where it equals the share of "
        "non-targets accepted. A trial is accepted when its score is at least the threshold; equal "
        "scores are one operating point; between the two operating points around the crossing the "
        "value is interpolated linearly.",
    ),
    (
        "Interval",
        "95 % percentile interval by bootstrap over speakers: speakers are drawn with replacement, "
        "a trial weighs the product of how often its two speakers were drawn; 1,000 replicates, "
        "200 above a million trials, fixed seed; replicates without targets or without "
        "non-targets are drawn again.",
    ),
    (
        "minDCF(p)",
        "The least detection cost over all thresholds with prior p of a target and costs of 1, "
        "divided by min(p, 1 - p): 1 is a system that says the same to every trial.",
    ),
    (
        "At threshold",
        "The mean of the share of targets rejected and of non-targets accepted at the threshold "
        "that is stored with the model, learned from its validation speakers.",
    ),
    (
        "actDCF, Cllr",
        "The cost of decisions made by the calibrated log-likelihood ratios with a prior of 0.01, "
        "normalised like minDCF; and the cost of the ratios themselves over all priors, in bits "
        "(0 is perfect, 1 is worth nothing).",
    ),
    (
        "Untrained",
        "The same network with the weights that its training began with, drawn or those of --init, "
        "scored on the same trials.",
    ),
)

STYLE = """
:root{color-scheme:light}*{box-sizing:border-box}
body{margin:0;background:#f5f7f9;color:#1c2733;font:16px/1.55 system-ui,-apple-system,"Segoe UI",
Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1040px;margin:0 auto;padding:40px 28px 56px;background:#fff;min-height:100vh}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 1.4rem;letter-spacing:-.01em}
h2{font-size:1.1rem;margin:2.4rem 0 .8rem;padding-bottom:.3rem;border-bottom:1px solid #e3e8ee}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(270px,1fr));gap:14px}
.card{border:1px solid #e3e8ee;border-left:4px solid #1f5fa8;border-radius:6px;padding:14px 18px}
.card b{display:block;font-size:2.1rem;line-height:1.2;font-variant-numeric:tabular-nums}
.card span,.muted,figcaption{color:#5b6773;font-size:.88rem}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{padding:.5rem .6rem;text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums;
border-bottom:1px solid #e3e8ee}th{color:#5b6773;font-weight:600;
white-space:normal;vertical-align:bottom}
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}td:nth-child(3){font-weight:700}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(400px,1fr));gap:24px}
figure{margin:0;break-inside:avoid}img{width:100%;height:auto;display:block}
dl{display:grid;grid-template-columns:minmax(110px,max-content) 1fr;gap:.35rem 1.4rem;margin:0}
dt{color:#5b6773}dd{margin:0;overflow-wrap:anywhere}
pre{margin:0;padding:12px 14px;background:#f5f7f9;border-radius:6px;white-space:pre-wrap;
overflow-wrap:anywhere;font:.82rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media(max-width:520px){.figures{grid-template-columns:1fr}main{padding:24px 16px}}
@media print{body,main{background:#fff}main{max-width:none;padding:0}h2{break-after:avoid}}
"""


def write_scores(path: str | Path, trials: Trials, scores_N: np.ndarray) -> None:
    """Write one line a trial: enrolment id, test id, score, target|nontarget."""
    assert len(scores_N) == len(trials), (len(scores_N), len(trials))
    columns = zip(trials.enrol_N, trials.test_N, scores_N, trials.is_target_N)
    with replacing(Path(path)) as partial, partial.open("w", encoding="utf-8") as stream:
        while piece := list(islice(columns, LINES_AT_ONCE)):
            stream.writelines(
                f"{trials.enrol_ids[e]} {trials.test_ids[t]} {score:.6f} {label_of(is_target)}\n"
                for e, t, score, is_target in piece
            )


def result_row(
    *,
    trials: str,
    system: str,
    eer: float,
    eer_untrained: float | None,
    eer_ci95: Sequence[float],
    min_dcf: Mapping[str, float],
    num_target: int,
    num_nontarget: int,
    backend: str,
    protocol: str,
    model_sha256: str,
    commit: str | None,
    calibrated: Quality | None = None,
    bn_batch: int | None = None,
) -> Row:
    """One row of results.json; rates are fractions, `min_dcf` is keyed by the prior.

    bn_batch: crops that BatchNorm saw at once in training, where that is known.

    The measured part comes from `metrics.summary` and, for a model that has a calibration (else
    it is null), from `calibration.quality`.
    """
    low, high = (float(bound) for bound in eer_ci95)
    return {
        "trials": trials,
        "system": system,
        "eer": float(eer),
        "eer_untrained": eer_untrained,
        "eer_ci95": [low, high],
        "min_dcf": dict(min_dcf),
        "cllr": None if calibrated is None else calibrated["cllr"],
        "act_dcf": None if calibrated is None else calibrated["act_dcf"],
        "num_target": num_target,
        "num_nontarget": num_nontarget,
        "backend": backend,
        "protocol": protocol,
        "model_sha256": model_sha256,
        "commit": commit,
        "at_threshold": None if calibrated is None else calibrated["at_threshold"],
        "bn_batch": bn_batch,
    }


def update_results(path: str | Path, row: Row) -> list[Row]:
    """Put a row into results.json, in the place of an older one of the same trials and system."""
    path = Path(path)
    rows = _read_results(path)
    places = [i for i, old in enumerate(rows) if _key(old) == _key(row)]
    if places:
        rows[places[0]] = row
    else:
        rows.append(row)
    with replacing(path) as partial:
        partial.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def format_table(rows: Sequence[Row]) -> str:
    """The results as aligned text for a console."""
    cells = _cells(rows)
    widths = [max(map(len, column)) for column in zip(*cells)]

    def line(texts: Sequence[str]) -> str:
        left = [text.ljust(width) for text, width in zip(texts[:2], widths)]
        right = [text.rjust(width) for text, width in zip(texts[2:], widths[2:])]
        return "  ".join(left + right).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])


def write_html(
    path: str | Path,
    rows: Sequence[Row],
    figures: Mapping[str, str | Path],
    facts: Mapping[str, Any],
    *,
    title: str = "Speaker verification",
) -> None:
    """One page that holds everything, without scripts or links.

    `figures`: caption -> PNG file. `facts`: name -> value; a mapping becomes a block of lines.
    """
    header, *lines = _cells(rows)
    protocols = dict.fromkeys(f"{row['trials']}: {row['protocol']}" for row in rows)
    sections = [
        f'<div class="cards">{"".join(map(_card, rows))}</div>',
        "<h2>Results</h2>",
        f'<div class="wide"><table><thead>{_line("th", header)}</thead>'
        f"<tbody>{''.join(_line('td', line) for line in lines)}</tbody></table></div>",
        "<h2>Figures</h2>" if figures else "",
        f'<div class="figures">{"".join(_picture(*item) for item in figures.items())}</div>',
        "<h2>Protocol</h2>",
        "".join(f"<p>{html.escape(protocol)}</p>" for protocol in protocols),
        f"<h2>Facts</h2><dl>{''.join(_fact(*item) for item in facts.items())}</dl>",
        f"<h2>Definitions</h2><dl>{''.join(_fact(*item) for item in DEFINITIONS)}</dl>",
    ]
    text = html.escape(title)
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text}</title>\n<style>{STYLE}</style></head>\n"
        f"<body><main>\n<h1>{text}</h1>\n" + "\n".join(sections) + "\n</main></body></html>\n"
    )
    with replacing(Path(path)) as partial:
        partial.write_text(page, encoding="utf-8")


def _read_results(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(rows, list)
        [_key(row) for row in rows]
    except (ValueError, AssertionError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a list of results, got {error!r}; move it away and score again"
        ) from error
    return rows


def _key(row: Row) -> tuple[str, str]:
    return row["trials"], row["system"]


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    """A header and one line a row, as text; columns that no row fills are left out."""
    priors = list(dict.fromkeys(prior for row in rows for prior in row["min_dcf"]))
    columns = {
        "trials": [row["trials"] for row in rows],
        "system": [row["system"] for row in rows],
        "EER %": [_percent(row["eer"]) for row in rows],
        "95 % interval": [" - ".join(map(_percent, row["eer_ci95"])) for row in rows],
        "untrained %": [_percent(row["eer_untrained"]) for row in rows],
        **{f"minDCF({p})": [_number(row["min_dcf"].get(p)) for row in rows] for p in priors},
        "at threshold %": [_at_threshold(row.get("at_threshold")) for row in rows],
        "actDCF(0.01)": [_number(row["act_dcf"]) for row in rows],
        "Cllr": [_number(row["cllr"]) for row in rows],
        "targets": [f"{row['num_target']:,}" for row in rows],
        "non-targets": [f"{row['num_nontarget']:,}" for row in rows],
    }
    filled = {name: cells for name, cells in columns.items() if any(cell != "" for cell in cells)}
    return [list(filled), *map(list, zip(*filled.values()))]


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.2f}"


def _at_threshold(rates: Mapping[str, float] | None) -> str:
    """The mean of the two error rates where the model itself decides."""
    return "" if rates is None else _percent((rates["p_miss"] + rates["p_fa"]) / 2)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _line(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _card(row: Row) -> str:
    low, high = map(_percent, row["eer_ci95"])
    untrained = _percent(row["eer_untrained"])
    details = f"EER, 95 % interval {low} to {high} %" + (
        f"<br>untrained network {untrained} %" if untrained else ""
    )
    name = html.escape(f"{row['trials']} · {row['system']}")
    return (
        f'<div class="card"><span>{name}</span><b>{_percent(row["eer"])} %</b>'
        f"<span>{details}</span></div>"
    )


def _picture(caption: str, path: str | Path) -> str:
    data = base64.b64encode(Path(path).read_bytes()).decode("ascii")
    text = html.escape(caption)
    return (
        f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def _fact(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        lines = "\n".join(f"{key}: {item}" for key, item in value.items())
        body = f"<pre>{html.escape(lines)}</pre>"
    else:
        body = html.escape(str(value))
    return f"<dt>{html.escape(name)}</dt><dd>{body}</dd>"
