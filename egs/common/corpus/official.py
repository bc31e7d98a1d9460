"""Reading the official trial lists of a corpus and comparing counts with the published ones."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path

from speakerlab.core.counting import count_of
from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text
from speakerlab.core.trial_lines import FORMATS, TRUTH
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
    form, counts = "", [0, 0]
    ours = cache(rename)  # one string object per id: lists have millions of lines
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            fields = line.split()
            if not fields:
                continue
            form = form or _form_of(fields)
            if not _fits(fields, form):
                _add_bad_line(faults, path, number, line, form)
                continue
            label = TRUTH[fields.pop(FORMATS[form][0])]
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


def _form_of(fields: Sequence[str]) -> str:
    return next((form for form in FORMATS if _fits(fields, form)), "")


def _fits(fields: Sequence[str], form: str) -> bool:
    if not form or len(fields) != 3:
        return False
    column, labels = FORMATS[form]
    return fields[column] in labels


def _add_bad_line(
    faults: Faults, path: Path, number: int, line: str, form: str
) -> None:
    wanted = form or "' or '".join(FORMATS)
    text = f"{path}:{number}: expected '{wanted}', not '{line.strip()}'"
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
