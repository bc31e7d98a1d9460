"""Results of a diarization: errors of recordings in; JSON, tables and headlines out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from speakerlab.core.intervals import ratio_interval
from speakerlab.diarization.scoring import Errors, total
from speakerlab.experiments.results import Row, aligned, percent

Table = tuple[list[str], list[list[str]]]  # header and rows
Headline = tuple[str, str, list[str]]  # name, value and notes
PARTS = ("missed", "false_alarm", "confusion")  # of the DER
HEADERS = ("scored s", "missed %", "false alarm %", "confusion %", "DER %", "JER %")
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
    """Format the tables, then the total as text."""
    tables = [aligned([header, *rows]) for header, rows in tables_of(results)]
    lines = [", ".join([f"{name} {value}", *notes]) for name, value, notes in headlines(results)]
    return "\n\n".join([*tables, "\n".join(lines)])


def tables_of(results: Mapping[str, Any]) -> list[Table]:
    """Return header and rows of the recordings and, if there are several, of the groups."""
    files = {**results["files"], "total": results["total"]}
    counts = ("num_speakers", "num_found")
    rows = [[name, *_rates(row), *(str(row[n]) for n in counts)] for name, row in files.items()]
    tables = [(["recording", *HEADERS, "speakers", "found"], rows)]
    if len(results["files"]) > 1:
        groups = results["groups"].items()
        rows = [
            [name, *_rates(row), str(row["num_recordings"]), _right(row)] for name, row in groups
        ]
        tables.append((["recordings with", *HEADERS, "recordings", "count right"], rows))
    return tables


def headlines(results: Mapping[str, Any]) -> list[Headline]:
    """Return DER, JER and counts of speakers of all recordings, with intervals and protocol."""
    protocol, whole = results["protocol"], results["total"]
    overlap = "overlap scored" if protocol["overlap"] else "overlap not scored"
    scored = [f"collar {protocol['collar']:g} s", overlap, f"regions: {protocol['regions']}"]
    errors = ", ".join(f"{error} in {num}" for error, num in whole["count_errors"].items())
    right = f"{_right(whole)} of {whole['num_recordings']}"
    return [
        ("DER", f"{percent(whole['der'])} %", [_interval(whole, "der"), *scored]),
        ("JER", f"{percent(whole['jer'])} %", [_interval(whole, "jer"), protocol["jer"]]),
        ("number of speakers right in", right, [f"found minus true: {errors}"]),
    ]


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


def _rates(row: Row) -> list[str]:
    """Return the cells below HEADERS."""
    return [f"{row['scored_seconds']:.2f}", *(percent(row[n]) for n in (*PARTS, "der", "jer"))]


def _right(row: Row) -> str:
    return str(row["count_errors"].get("0", 0))


def _interval(row: Row, name: str) -> str:
    ci95 = row[f"{name}_ci95"]
    shown = " to ".join(map(percent, ci95 or ())) or f"n/a (recordings: {row['num_recordings']})"
    return f"95 % interval {shown}"
