"""What a corpus's publisher gives beside the audio: trial lists, and counts to compare with.

In: a trial list in any of the usual spellings, the ids that there are, the published counts.
Out: trials, one printed line that holds what was found against what is published, and a fault by
file and line for everything that is wrong.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path

from speakerlab.core.faults import Faults
from speakerlab.data.tables import Trial
from speakerlab.scoring.trials import FORMATS, TRUTH

Counts = tuple[int, int]


def read_official(
    path: Path,
    faults: Faults,
    *,
    known: Collection[str],
    models: Collection[str] | None = None,
    rename: Callable[[str], str] = str,
    published: Counts | None = None,
    source: str = "",
    others: Mapping[Counts, str] | None = None,
) -> list[Trial]:
    """The trials of a list, in its order; what is wrong with it goes to `faults`.

    A list is `1|0 enrol test` (VoxCeleb), `enrol test 1|0` or `enrol test target|nontarget`, which
    its first line decides. A trial that occurs twice is kept once, and that is said.
    known: ids of test utterances. models: those of the enrolment side, None: the same as `known`.
    rename: turns an id of the list into one of ours.
    published: (targets, nontargets) as `source` gives them, None: nobody does, nothing is printed.
    others: counts of other versions of the list -> what these are.
    """
    rows: dict[tuple[str, str], bool] = {}
    sides = (known if models is None else models, known)
    form, counts = "", [0, 0]
    ours = cache(rename)  # one string for an id, however many of the trials name it
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words:
                continue
            form = form or _form_of(words)
            if not _fits(words, form):
                _add_bad_line(faults, path, number, line, form)
                continue
            label = TRUTH[words.pop(FORMATS[form][0])]
            counts[not label] += 1
            pair = ours(words[0]), ours(words[1])
            if rows.setdefault(pair, label) != label:
                line = f"{path}:{number}: a trial is target and nontarget, got {' '.join(pair)}"
                faults.add("contradictions", f"{line}; keep one of the two")
            for name, side in zip(pair, sides):
                if name not in side:
                    line = f"{path}:{number}: no such test utterance, got {name}"
                    text = f"{line}; remove the trial or complete the corpus"
                    faults.add("trials of unknown utterances", text)
    if published is not None:
        found, units = (counts[0], counts[1]), ("target", "nontarget trials")
        print(compare(path.name, found, published, units, source, others))
    if len(rows) < sum(counts):
        print(f"{path.name}: {sum(counts) - len(rows)} trials occur again and are left out")
    return [(enrol, test, label) for (enrol, test), label in rows.items()]


def _form_of(words: Sequence[str]) -> str:
    return next((form for form in FORMATS if _fits(words, form)), "")


def _fits(words: Sequence[str], form: str) -> bool:
    if not form or len(words) != 3:
        return False
    column, labels = FORMATS[form]
    return words[column] in labels


def _add_bad_line(faults: Faults, path: Path, number: int, line: str, form: str) -> None:
    wanted = form or "' or '".join(FORMATS)
    text = f"{path}:{number}: is not '{wanted}', got '{line.strip()}'; correct it"
    faults.add("bad trials", text)


def compare(
    name: str,
    found: Counts,
    published: Counts,
    units: tuple[str, str],
    source: str,
    others: Mapping[Counts, str] | None = None,
) -> str:
    """One line: what was found beside what is published, and what follows where they differ."""
    line = f"{name}: {found[0]} {units[0]} and {found[1]} {units[1]} are listed"
    if found == published:
        return f"{line}, as published ({source})"
    verdict = (others or {}).get(found, "not the whole corpus, or another version of it")
    return f"{line}, published are {published[0]} and {published[1]} ({source}): {verdict}"
