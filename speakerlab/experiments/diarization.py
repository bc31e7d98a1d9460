"""Results of a diarization: errors of recordings in; JSON, and tables for the console, out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from speakerlab.core.intervals import ratio_interval
from speakerlab.diarization.scoring import Errors, total
from speakerlab.experiments.results import Row, aligned, percent

PARTS = ("missed", "false_alarm", "confusion")  # of the DER
OVERLAPS = {  # least share of the speech of a recording in which two or more speak -> group
    0.0: "overlap: below 5 %",
    0.05: "overlap: 5 to 10 %",
    0.1: "overlap: 10 to 20 %",
    0.2: "overlap: from 20 %",
}


def results_of(found: Mapping[str, Errors], protocol: Mapping[str, Any]) -> dict[str, Any]:
    """Return rates as fractions, and times in seconds: "total", "groups" and "files".

    found: recording -> errors, of at least one. Groups are the recordings with the same number of
    speakers, and those with similar shares of overlap.
    """
    errors, groups = list(found.values()), dict[str, list[Errors]]()
    for one in sorted(errors, key=lambda one: one.num_speakers):
        groups.setdefault(f"speakers: {one.num_speakers}", []).append(one)
    for one in sorted(errors, key=lambda one: one.overlap):
        groups.setdefault(OVERLAPS[max(s for s in OVERLAPS if s <= one.overlap)], []).append(one)
    return {
        "protocol": dict(protocol),
        "total": _together(errors),
        "groups": {name: _together(own) for name, own in groups.items()},
        "files": {name: _row(one) | {"overlap": one.overlap} for name, one in found.items()},
    }


def format_diarization(results: Mapping[str, Any]) -> str:
    """The table of recordings and, if there are several, of groups; then the total as text."""
    files, groups, whole = (results[name] for name in ("files", "groups", "total"))
    header = ["recording", *_cells(whole), "speakers", "found"]
    rows = [[name, *_cells(row).values(), *_counts(row)] for name, row in files.items()]
    rows.append(["total", *_cells(whole).values(), *_counts(whole)])
    parts = [aligned([header, *rows])]
    if len(files) > 1:
        header = ["recordings with", *_cells(whole), "recordings", "count right"]
        rows = [[name, *_cells(row).values(), *_right(row)] for name, row in groups.items()]
        parts.append(aligned([header, *rows]))
    protocol, num = results["protocol"], whole["num_recordings"]
    overlap = "scored" if protocol["overlap"] else "not scored"
    shown = f"collar {protocol['collar']:g} s, overlap {overlap}, regions: {protocol['regions']}"
    counts = ", ".join(f"{error} in {n}" for error, n in whole["count_errors"].items())
    parts.append(
        f"DER {_rate(whole, 'der')}; {shown}\n"
        f"JER {_rate(whole, 'jer')}; {protocol['jer']}\n"
        f"number of speakers right in {_right(whole)[1]} of {num}; found minus true: {counts}"
    )
    return "\n\n".join(parts)


def _together(errors: Sequence[Errors]) -> Row:
    """Return the row of several recordings: DER over all their speech, JER over all speakers."""
    wrong, scored = (
        np.array([getattr(one, name) for one in errors]) for name in ("wrong", "scored")
    )
    jaccard, speakers = (np.array([of(one.jaccard) for one in errors]) for of in (sum, len))
    differences = Counter(one.num_found - one.num_speakers for one in errors)
    return _row(total(errors)) | {
        "der_ci95": ratio_interval(wrong, scored),
        "jer_ci95": ratio_interval(jaccard, speakers),
        "num_recordings": len(errors),
        "count_errors": {str(error): num for error, num in sorted(differences.items())},
    }


def _row(errors: Errors) -> Row:
    scored = errors.scored
    parts = {name: getattr(errors, name) / scored if scored else None for name in PARTS}
    counts = {"num_speakers": errors.num_speakers, "num_found": errors.num_found}
    seconds = {"scored_seconds": scored, "error_seconds": errors.wrong}
    return {"der": errors.der, "jer": errors.jer, **parts, **counts, **seconds}


def _cells(row: Row) -> dict[str, str]:
    rates = {"missed": "missed %", "false_alarm": "false alarm %", "confusion": "confusion %"}
    rates |= {"der": "DER %", "jer": "JER %"}
    shown = {header: percent(row[name]) for name, header in rates.items()}
    return {"scored s": f"{row['scored_seconds']:.2f}", **shown}


def _counts(row: Row) -> list[str]:
    return [str(row["num_speakers"]), str(row["num_found"])]


def _right(row: Row) -> list[str]:
    return [str(row["num_recordings"]), str(row["count_errors"].get("0", 0))]


def _rate(row: Row, name: str) -> str:
    ci95, num = row[f"{name}_ci95"], row["num_recordings"]
    interval = " - ".join(map(percent, ci95)) if ci95 else f"n/a (recordings: {num})"
    return f"{percent(row[name])} %, 95 % interval {interval}"
