"""Checks of the arguments of `write_data_dir`: a wrong shape is one line with the right one."""

import os
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from speakerlab.core.counting import count_of

# Argument -> an example, which ends each error line about the argument.
EXAMPLES = {
    "wavs": '{"u1": "audio/u1.wav", "u2": "audio/u2.wav"}',
    "speakers": '{"u1": "ann", "u2": "bob"}',
    "segments": '{"u1": ("recording", 0.5, 2.0)}',
    "trials": '{"trials": [("u1", "u2", False)]}',
    "columns": '{"utt2device": {"u1": "phone", "u2": "headset"}}',
    "enroll": '{"model": ["u1", "u2"]}',
    "about": '{"corpus": "its name"}',
    "nameless": '{Path("a b.wav"): "the reason"}',
    "not_used": '{Path("a.wav"): "the reason"}',
}
# The third value of a trial -> its label in the file. 1 and 0 are equal to True and False.
LABEL_OF: dict[bool | str, str] = {
    True: "target",
    False: "nontarget",
    "target": "target",
    "nontarget": "nontarget",
}


def check_arguments(
    *,
    wavs: Any,
    speakers: Any,
    segments: Any,
    trials: Any,
    columns: Any,
    enroll: Any,
    about: Any,
    nameless: Any,
    not_used: Any,
) -> None:
    """Raise ValueError for an argument of another shape than that of its example.

    Rows of trials and models are only checked by `trial_lines` and `enroll_table`, which write
    them: they may be read only once.
    """
    mappings = {
        "enroll": enroll,
        "about": about,
        "nameless": nameless,
        "not_used": not_used,
        "speakers": speakers,
        "segments": segments,
        "trials": trials,
        "columns": columns,
    }
    for name, value in mappings.items():
        if value is not None and not isinstance(value, Mapping):
            _refuse(name, f"must be a dict, got {reprlib.repr(value)}")
    _check_wavs(wavs)
    _check_names("trials", trials or {}, "trials")
    _check_names("columns", columns or {}, "utt2", "spk2")
    _check_columns(columns or {})
    _check_segments(segments or {})
    if speakers is not None:
        utterances = wavs if segments is None else segments
        _check_speakers(speakers, utterances)


def _check_wavs(wavs: Any) -> None:
    """Raise ValueError unless this is a mapping of text to paths."""
    if not isinstance(wavs, Mapping):
        _refuse("wavs", f"must be a dict, got {reprlib.repr(wavs)}")
    for recording, path in wavs.items():
        if not isinstance(recording, str):
            _refuse("wavs", f"an id must be text, got {recording!r}")
        if not isinstance(path, str | os.PathLike):
            got = reprlib.repr(path)
            _refuse("wavs", f"{recording} must be the path of a file, got {got}")


def _check_speakers(speakers: Mapping[Any, Any], utterances: Iterable[str]) -> None:
    """Raise ValueError unless each utterance has a speaker, in one word."""
    for utterance, speaker in speakers.items():
        if not _is_word(speaker):
            got = reprlib.repr(speaker)
            problem = f"the speaker of {utterance} must be one word, got {got}"
            _refuse("speakers", problem)
    missing = [utterance for utterance in utterances if utterance not in speakers]
    if missing:
        num_others = len(missing) - 1
        others = f" and {count_of(num_others, 'other')}" if num_others else ""
        _refuse("speakers", f"has no speaker of {missing[0]}{others}")


def _check_segments(segments: Mapping[Any, Any]) -> None:
    """Raise ValueError unless words map to (recording, start, end)."""
    for utterance, segment in segments.items():
        if not _is_word(utterance):
            _refuse("segments", f"an id must be one word, got {utterance!r}")
        try:
            recording, start, end = segment
            is_right = _is_word(recording) and 0 <= float(start) < float(end)
        except (TypeError, ValueError):
            is_right = False
        if not is_right:
            got = reprlib.repr(segment)
            problem = f"{utterance} must be (recording, start, end), got {got}"
            _refuse("segments", problem)


def _check_names(argument: str, tables: Mapping[Any, Any], *beginnings: str) -> None:
    """Raise ValueError unless the names of tables begin so, as readers expect."""
    for name in tables:
        is_right = _is_word(name) and name.startswith(beginnings) and "/" not in name
        if not is_right:
            wanted = " or ".join(beginnings)
            _refuse(argument, f"a table must be named {wanted}..., got {name!r}")


def _check_columns(columns: Mapping[str, Any]) -> None:
    """Raise ValueError unless each table maps ids to values."""
    for name, values in columns.items():
        if not isinstance(values, Mapping):
            got = reprlib.repr(values)
            _refuse("columns", f"{name} must be a dict of id and value, got {got}")
        for key, value in values.items():
            if not _is_word(key) or not isinstance(value, str | int | float):
                got = f"{key!r}: {reprlib.repr(value)}"
                _refuse("columns", f"{name} must map an id to a value, got {got}")


def enroll_table(enroll: Mapping[Any, Any]) -> dict[str, str]:
    """Return the table of models; raise ValueError for one without a list of utterances."""
    table: dict[str, str] = {}
    for model, utterances in enroll.items():
        # A text is iterable, too: each of its letters would be an utterance.
        is_list = isinstance(utterances, Iterable) and not isinstance(utterances, str)
        names = list(utterances) if is_list else []
        if not _is_word(model) or not names or not all(map(_is_word, names)):
            got = f"{model!r}: {reprlib.repr(utterances)}"
            _refuse("enroll", f"must map a model to a list of utterances, got {got}")
        table[model] = " ".join(names)
    return table


def trial_lines(name: str, rows: Any) -> Iterable[str]:
    """Yield the line of each trial; raise ValueError for a row that is no trial."""
    is_list = isinstance(rows, Iterable) and not isinstance(rows, str | Mapping)
    if not is_list:
        got = reprlib.repr(rows)
        _refuse("trials", f"{name} must be a list of trials, got {got}")
    for number, row in enumerate(rows, 1):
        try:
            enrol, test, is_target = row
            label = LABEL_OF.get(is_target)
        # Not three values, or a list in place of a label.
        except (TypeError, ValueError):
            _refuse_trial(name, number, row)
        are_words = _is_word(enrol) and _is_word(test)
        # A text of three letters can be unpacked, too.
        if label is None or not are_words or isinstance(row, str):
            _refuse_trial(name, number, row)
        yield f"{enrol} {test} {label}\n"


def _refuse_trial(name: str, number: int, row: Any) -> NoReturn:
    wanted = "(enrolment id, test id, True or False)"
    got = reprlib.repr(row)
    _refuse("trials", f"row {number} of {name} must be {wanted}, got {got}")


def _refuse(argument: str, problem: str) -> NoReturn:
    example = f"{argument}={EXAMPLES[argument]}"
    raise ValueError(f"{argument}: {problem}; an example: {example}")


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.split() == [value]
