"""Reading the official trial lists of a corpus and comparing counts with the published ones."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path

from speakerlab.core.counting import count_of
from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text
from speakerlab.core.trial_lines import FORMATS, TRUTH, Format
from speakerlab.data.tables import Trial

Counts = tuple[int, int]


def read_official(
    path: Path,
    faults: Faults,
    *,
    recordings: Collection[str],
    models: Collection[str] | None = None,
    rename: Callable[[str], str] = str,
    published: Counts | None = None,
    source: str = "",
    others: Mapping[Counts, str] | None = None,
) -> list[Trial]:
    """Return the trials of a list in its order; add an error for each bad line to `faults`.

    Formats: `1|0 enrol test` (VoxCeleb), `enrol test 1|0` or `enrol test target|nontarget`; the
    first line decides. Repeated trials are kept once, with a printed note.
    recordings: ids of test utterances. models: ids of the enrolment side, by default `recordings`.
    rename: maps an id of the list to an id of the data directory.
    published: (targets, nontargets) according to `source`; None prints no comparison.
    others: counts of other versions of the list -> their description.
    """
    rows: dict[tuple[str, str], bool] = {}
    sides = (recordings if models is None else models, recordings)
    row_format: Format | None = None
    counts = [0, 0]  # of targets and of non-targets
    ours = cache(rename)  # one string object per id: lists have millions of lines
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            fields = line.split()
            if not fields:
                continue
            if row_format is None:
                row_format = _format_of(fields)
            if row_format is None or not _fits(fields, row_format):
                _add_bad_line(faults, path, number, line, row_format)
                continue
            label = TRUTH[fields.pop(row_format.label_column)]
            counts[not label] += 1
            pair = ours(fields[0]), ours(fields[1])
            if rows.setdefault(pair, label) != label:
                line = (
                    f"{path}:{number}: trial {' '.join(pair)} is both target and"
                    " nontarget"
                )
                faults.add("contradictions", f"{line}; remove one of the two lines")
            for name, side in zip(pair, sides):
                if name not in side:
                    line = f"{path}:{number}: unknown test utterance {name}"
                    text = f"{line}; remove the trial or complete the corpus"
                    faults.add("trials of unknown utterances", text)
    if published is not None:
        num_trials, units = (counts[0], counts[1]), ("target", "nontarget trials")
        print(compare(path.name, num_trials, published, units, source, others))
    if len(rows) < sum(counts):
        ignored = count_of(sum(counts) - len(rows), "repeated trial")
        print(f"{path.name}: ignored {ignored}")
    return [(enrol, test, label) for (enrol, test), label in rows.items()]


def _format_of(fields: Sequence[str]) -> Format | None:
    """Return the format of a line; None if it is no trial."""
    for row_format in FORMATS:
        if _fits(fields, row_format):
            return row_format
    return None


def _fits(fields: Sequence[str], row_format: Format) -> bool:
    """Return whether a line has the format."""
    return len(fields) == 3 and fields[row_format.label_column] in row_format.labels


def _add_bad_line(
    faults: Faults, path: Path, number: int, line: str, row_format: Format | None
) -> None:
    """Add the error of a line that has not the format of the list; None: of no known format."""
    expected = [row_format] if row_format is not None else FORMATS
    names = "' or '".join(known_format.name for known_format in expected)
    text = f"{path}:{number}: expected '{names}', not '{line.strip()}'"
    faults.add("bad trials", text)


def compare(
    name: str,
    counted: Counts,
    published: Counts,
    units: tuple[str, str],
    source: str,
    others: Mapping[Counts, str] | None = None,
) -> str:
    """Return one line that compares the counts found with the published ones."""
    line = f"{name}: {counted[0]} {units[0]} and {counted[1]} {units[1]}"
    if counted == published:
        return f"{line}, as published ({source})"
    verdict = (others or {}).get(counted, "incomplete corpus or another version")
    return f"{line}, published: {published[0]} and {published[1]} ({source}): {verdict}"
