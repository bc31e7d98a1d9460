"""What is left of an evaluation: rows of results and a table for the console.

In: measured numbers. Out: results.json, written whole or not at all, and lines of text. Nothing is
measured or chosen here. The page is made in `page`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speakerlab.core.atomic import replacing

Row = dict[str, Any]


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
    calibrated: Mapping[str, object] | None = None,
    bn_batch: int | None = None,
    min_cllr: float | None = None,
    intervals: Mapping[str, Sequence[float]] | None = None,
    calibration: str | None = None,
    conditions: Sequence[Mapping[str, object]] | None = None,
    compared: Mapping[str, object] | None = None,
) -> Row:
    """One row of results.json; rates are fractions, `min_dcf` is keyed by the prior.

    What was not measured is null.
    calibrated: `cllr`, `act_dcf` and, where there is a threshold from elsewhere, `at_threshold`
        (`calibration.quality` gives all three); `calibration` says what it was learned from.
    bn_batch: crops that BatchNorm saw at once in training, where that is known.
    intervals: metric ("eer", "min_dcf_0.01", "cllr", ...) -> the bounds of its 95 % interval.
    conditions: one mapping for each part of the list: `condition`, `value`, `num_target`,
        `num_nontarget`, and `eer`, `eer_ci95`, `min_dcf`, which are null where trials are too few.
    compared: `with` (another back end), `eer_difference` (this minus that), `ci95`, `p_value`.
    """
    low, high = (float(bound) for bound in eer_ci95)
    calibrated = calibrated or {}
    return {
        "trials": trials,
        "system": system,
        "eer": float(eer),
        "eer_untrained": eer_untrained,
        "eer_ci95": [low, high],
        "min_dcf": dict(min_dcf),
        "cllr": calibrated.get("cllr"),
        "act_dcf": calibrated.get("act_dcf"),
        "num_target": num_target,
        "num_nontarget": num_nontarget,
        "backend": backend,
        "protocol": protocol,
        "model_sha256": model_sha256,
        "commit": commit,
        "at_threshold": calibrated.get("at_threshold"),
        "bn_batch": bn_batch,
        "min_cllr": min_cllr,
        "intervals": {name: list(map(float, ends)) for name, ends in (intervals or {}).items()},
        "calibration": calibration,
        "conditions": list(conditions or ()),
        "compared": None if compared is None else dict(compared),
    }


def update_results(path: str | Path, row: Row) -> list[Row]:
    """Put a row into results.json, in the place of an older one of the same name.

    That is: of the same trials, system and back end.
    """
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
        left = [text.ljust(width) for text, width in zip(texts[:3], widths)]
        right = [text.rjust(width) for text, width in zip(texts[3:], widths[3:])]
        return "  ".join(left + right).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])


def priors_of(rows: Sequence[Row]) -> list[str]:
    """The priors at which a minDCF is given, each once."""
    return list(dict.fromkeys(prior for row in rows for prior in row["min_dcf"]))


def at_threshold(row: Row) -> float | None:
    """The mean of the two error rates where the model itself decides."""
    rates = row.get("at_threshold")
    return None if rates is None else (rates["p_miss"] + rates["p_fa"]) / 2


def percent(rate: float | None) -> str:
    """A fraction as a number of per cent, two decimals."""
    return "" if rate is None else f"{100 * rate:.2f}"


def points(difference: float) -> str:
    """A difference of fractions in points of per cent, with its sign."""
    return f"{100 * difference:+.2f}"


def number(value: float | None) -> str:
    """Three decimals."""
    return "" if value is None else f"{value:.3f}"


def p_value(compared: Mapping[str, Any]) -> str:
    """Of a paired comparison, as it is cited."""
    p = compared["p_value"]
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


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


def _key(row: Row) -> tuple[str, str, str]:
    return row["trials"], row["system"], row["backend"]


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    """A header and one line a row, as text; columns that no row fills are left out."""
    priors = priors_of(rows)
    columns = {
        "trials": [row["trials"] for row in rows],
        "system": [row["system"] for row in rows],
        "back end": [row["backend"] for row in rows],
        "EER %": [percent(row["eer"]) for row in rows],
        "95 % interval": [" - ".join(map(percent, row["eer_ci95"])) for row in rows],
        "untrained %": [percent(row["eer_untrained"]) for row in rows],
        **{f"minDCF({p})": [number(row["min_dcf"].get(p)) for row in rows] for p in priors},
        "compared": [_compared(row.get("compared")) for row in rows],
        "at threshold %": [percent(at_threshold(row)) for row in rows],
        "actDCF(0.01)": [number(row["act_dcf"]) for row in rows],
        "Cllr": [number(row["cllr"]) for row in rows],
        "minCllr": [number(row.get("min_cllr")) for row in rows],
        "targets": [f"{row['num_target']:,}" for row in rows],
        "non-targets": [f"{row['num_nontarget']:,}" for row in rows],
    }
    filled = {name: cells for name, cells in columns.items() if any(cell != "" for cell in cells)}
    return [list(filled), *map(list, zip(*filled.values()))]


def _compared(compared: Mapping[str, Any] | None) -> str:
    if compared is None:
        return ""
    return f"{points(compared['eer_difference'])} to {compared['with']}, {p_value(compared)}"
