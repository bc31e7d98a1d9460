"""Results of a diarization. In: errors of recordings. Out: JSON, tables and headlines."""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from speakerlab.core.intervals import ratio_interval
from speakerlab.diarization.scoring import Errors, total
from speakerlab.experiments.results import Row, aligned, percent

Texts = list[str]
Table = tuple[Texts, list[Texts]]  # header and rows
Results = Mapping[str, Any]  # of `results_of`
Headline = tuple[str, str, Texts]  # name, value and notes
Groups = dict[str, list[Errors]]
PARTS = ("missed", "false_alarm", "confusion")  # of the DER
RATES = (*PARTS, "der", "jer")
HEADERS = (
    "scored s",
    "missed %",
    "false alarm %",
    "confusion %",
    "DER %",
    "JER %",
)
# Smallest share of overlap in a recording's speech -> name of the group. Ascending.
OVERLAPS = {
    0.0: "overlap: below 5 %",
    0.05: "overlap: 5 to 10 %",
    0.1: "overlap: 10 to 20 %",
    0.2: "overlap: from 20 %",
}


def results_of(
    errors_of: Mapping[str, Errors],
    protocol: Mapping[str, Any],
) -> dict[str, Any]:
    """Return rates as fractions, and times in seconds: "total", "groups" and "files".

    errors_of: recording -> errors, at least one. Groups are recordings with the same number of
    speakers, and recordings with similar shares of overlap.
    """
    recordings = list(errors_of.values())
    # Errors depend most on the number of speakers and on overlap.
    groups = _group_by_speakers(recordings) | _group_by_overlap(recordings)
    rows_of_groups: dict[str, Row] = {}
    for name, errors_of_group in groups.items():
        rows_of_groups[name] = _together(errors_of_group)

    rows_of_files: dict[str, Row] = {}
    for name, errors in errors_of.items():
        row = _row(errors)
        row["overlap"] = errors.overlap
        rows_of_files[name] = row
    return {
        "protocol": dict(protocol),
        "total": _together(recordings),
        "groups": rows_of_groups,
        "files": rows_of_files,
    }


def _group_by_speakers(recordings: Sequence[Errors]) -> Groups:
    """Return the recordings by their number of speakers, ascending."""
    groups: Groups = {}
    ascending = sorted(recordings, key=attrgetter("num_speakers"))
    for errors in ascending:
        name = f"speakers: {errors.num_speakers}"
        groups.setdefault(name, []).append(errors)
    return groups


def _group_by_overlap(recordings: Sequence[Errors]) -> Groups:
    """Return the recordings by the range of their share of overlap, ascending."""
    groups: Groups = {}
    ascending = sorted(recordings, key=attrgetter("overlap"))
    for errors in ascending:
        lower_shares = [share for share in OVERLAPS if share <= errors.overlap]
        name = OVERLAPS[max(lower_shares)]
        groups.setdefault(name, []).append(errors)
    return groups


def format_diarization(results: Results) -> str:
    """Format the tables, then the total as text."""
    paragraphs: list[str] = []
    for header, rows in tables_of(results):
        table = aligned([header, *rows])
        paragraphs.append(table)

    lines: list[str] = []
    for name, value, notes in headlines(results):
        parts = [f"{name} {value}", *notes]
        lines.append(", ".join(parts))
    paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def tables_of(results: Results) -> list[Table]:
    """Return header and rows of the recordings and, if there are several, of the groups."""
    rows: list[Texts] = []
    files = dict(results["files"])
    files["total"] = results["total"]
    for name, row in files.items():
        num_speakers = str(row["num_speakers"])
        num_found = str(row["num_found"])
        rows.append([name, *_rates(row), num_speakers, num_found])
    header = ["recording", *HEADERS, "speakers", "found"]
    tables = [(header, rows)]

    # The groups of a single recording would repeat its row.
    if len(results["files"]) > 1:
        rows = []
        for name, row in results["groups"].items():
            num_recordings = str(row["num_recordings"])
            rows.append([name, *_rates(row), num_recordings, _right(row)])
        header = ["recordings with", *HEADERS, "recordings", "count right"]
        tables.append((header, rows))
    return tables


def headlines(results: Results) -> list[Headline]:
    """Return DER, JER and counts of speakers of all recordings, with intervals and protocol."""
    protocol = results["protocol"]
    whole = results["total"]
    der = f"{percent(whole['der'])} %"
    jer = f"{percent(whole['jer'])} %"
    # DERs are comparable only if the same time was scored, so show the protocol with the rate.
    der_notes = [
        _interval(whole, "der"),
        f"collar {protocol['collar']:g} s",
        "overlap scored" if protocol["overlap"] else "overlap not scored",
        f"regions: {protocol['regions']}",
    ]
    # The JER has a separate protocol: it ignores collar and skipped overlap.
    jer_notes = [_interval(whole, "jer"), protocol["jer"]]

    count_errors: list[str] = []
    for difference, num_recordings in whole["count_errors"].items():
        count_errors.append(f"{difference} in {num_recordings}")
    num_right = f"{_right(whole)} of {whole['num_recordings']}"
    count_notes = [f"found minus true: {', '.join(count_errors)}"]
    return [
        ("DER", der, der_notes),
        ("JER", jer, jer_notes),
        ("number of speakers right in", num_right, count_notes),
    ]


def _together(errors: Sequence[Errors]) -> Row:
    """Return the row of several recordings: DER over all their speech, JER over all speakers."""
    # Both rates are ratios of sums over recordings; the bootstrap draws whole recordings.
    wrong_seconds: list[float] = []
    scored_seconds: list[float] = []
    jaccard_sums: list[float] = []
    num_speakers: list[int] = []
    differences = Counter[int]()
    for recording in errors:
        wrong_seconds.append(recording.wrong)
        scored_seconds.append(recording.scored)
        jaccard_sums.append(sum(recording.jaccard))
        num_speakers.append(len(recording.jaccard))
        differences[recording.num_found - recording.num_speakers] += 1

    der_ci95 = ratio_interval(np.array(wrong_seconds), np.array(scored_seconds))
    jer_ci95 = ratio_interval(np.array(jaccard_sums), np.array(num_speakers))
    count_errors: dict[str, int] = {}
    for difference in sorted(differences):
        # JSON keys are text.
        count_errors[str(difference)] = differences[difference]

    return {
        **_row(total(errors)),
        "der_ci95": der_ci95,
        "jer_ci95": jer_ci95,
        "num_recordings": len(errors),
        "count_errors": count_errors,
    }


def _row(errors: Errors) -> Row:
    row: Row = {
        "der": errors.der,
        "jer": errors.jer,
    }
    for part in PARTS:
        seconds = getattr(errors, part)
        # Without scored speech there is no rate.
        row[part] = seconds / errors.scored if errors.scored else None
    row["num_speakers"] = errors.num_speakers
    row["num_found"] = errors.num_found
    row["scored_seconds"] = errors.scored
    row["error_seconds"] = errors.wrong
    return row


def _rates(row: Row) -> list[str]:
    """Return the cells of the columns HEADERS."""
    cells = [f"{row['scored_seconds']:.2f}"]
    for rate in RATES:
        cells.append(percent(row[rate]))
    return cells


def _right(row: Row) -> str:
    """Return how many recordings have the right number of speakers, as text."""
    num_right = row["count_errors"].get("0", 0)
    return str(num_right)


def _interval(row: Row, name: str) -> str:
    ci95 = row[f"{name}_ci95"]
    if ci95 is None:  # too few recordings to draw from
        return f"95 % interval n/a (recordings: {row['num_recordings']})"
    low, high = ci95
    return f"95 % interval {percent(low)} to {percent(high)}"
