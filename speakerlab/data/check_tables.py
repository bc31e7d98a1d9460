"""Checks of the conditions, enrolment models and trials of a data directory."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from speakerlab.core.faults import Faults
from speakerlab.data import tables

Sides = tuple[dict[str, int], dict[str, int]]  # enrolment and test ids -> the first line with each


def check_conditions(
    folder: Path, *, utterances: Collection[str], speakers: Collection[str], faults: Faults
) -> None:
    """Check that every `utt2<name>` and `spk2<name>` maps known ids to one word each."""
    for name in tables.list_conditions(folder):
        path = folder / name
        known, kind = (utterances, "utterance") if name[0] == "u" else (speakers, "speaker")
        for key, value in tables.read_table(path, faults).items():
            if key not in known:
                line = f"{path}: unknown {kind} {key}; drop the line"
                faults.add("conditions of nobody", line)
            if len(value.split()) > 1:
                line = f"{path}: a condition must be one word, got '{value}' of {key}"
                faults.add("bad conditions", f"{line}; write '{tables.one_word(value)}'")


def read_models(
    folder: Path, *, utterances: Collection[str], faults: Faults
) -> dict[str, list[str]]:
    """Read `enroll.map`, whose models must name known utterances, each once."""
    path = folder / tables.ENROLL_MAP
    models = tables.read_enroll(path, faults)
    for model, rows in models.items():
        for utterance in rows:
            if utterance not in utterances:
                line = f"{path}: model {model} has the unknown utterance {utterance}"
                faults.add("unknown utterances", f"{line}; add it to wav.scp or drop it")
        if len(set(rows)) < len(rows):
            line = f"{path}: model {model} repeats an utterance: {' '.join(rows)}"
            faults.add("utterances twice in a model", f"{line}; keep one of each")
    return models


def read_sides(path: Path, faults: Faults) -> Sides:
    """Return the enrolment ids and the test ids of a trial list."""
    sides: Sides = ({}, {})
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            words = line.split()
            if len(words) != 3 or words[2] not in ("target", "nontarget"):
                text = f"{path}:{number}: is not 'enrol test target|nontarget'"
                faults.add("bad lines", f"{text}, got '{line.strip()}'; correct it")
                continue
            sides[0].setdefault(words[0], number)
            sides[1].setdefault(words[1], number)
    return sides


def check_trials(
    path: Path, *, utterances: Collection[str], models: Collection[str], faults: Faults
) -> None:
    """Check that test ids are utterances, and enrolment ids utterances or models."""
    enrol, test = read_sides(path, faults)
    named = {**test, **{k: min(n, test.get(k, n)) for k, n in enrol.items() if k not in models}}
    for name in sorted(named.keys() - set(utterances), key=lambda name: named[name]):
        line = f"{path}:{named[name]}: unknown utterance {name}"
        faults.add("unknown utterances", f"{line}; add it to wav.scp or drop the trial")


def utterances_of(path: Path, models: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the utterances that a trial list needs, including those of its models."""
    enrol, test = read_sides(path, Faults())
    return {row for name in enrol for row in models.get(name, [name])} | test.keys()
