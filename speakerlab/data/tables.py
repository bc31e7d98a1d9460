"""Kaldi data directories as text: tables, segments, rejections, whole directories.

A data directory holds `wav.scp` (id path), `utt2spk` (id speaker), `utt2dur` (id seconds) and, if
recordings are cut up, `segments` (id recording start end, in seconds). A test set has `trials*`.
`rejected.tsv` (id, path, reason) lists excluded audio: utterances of the tables and, under ids that
begin with NAMELESS, files that have no line there. Ids that begin with NOT_USED are of good files
that were left out on purpose. `utt2<name>` and `spk2<name>` hold conditions of an utterance or a
speaker, in one word. `enroll.map` (model utterance ...) lists the utterances of each enrolment
model of a trial list. `about` has facts about the recordings, under the keys of ABOUT, for the
cards of models that are trained on them.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from speakerlab.core.atomic import locked, replacing_folder, write_text
from speakerlab.core.counting import count_of
from speakerlab.core.faults import Faults, nearest
from speakerlab.core.leftovers import is_leftover
from speakerlab.core.reading import open_text, read_text, refuse_twins
from speakerlab.data.shards import without_readers
from speakerlab.data.table_arguments import (
    check_arguments,
    enroll_table,
    trial_lines,
)

NAMELESS = "~"
NOT_USED = "~~"  # of the nameless files: left out on purpose, such as copies
# Lock in the folder of data directories: held by prepare.py, shared by other commands.
ROOT_LOCK = ".lock"
ENROLL_MAP = "enroll.map"
ABOUT = ("corpus", "licence", "languages", "page")
# Columns of each table, by its name. A column of WITH_BLANKS takes the rest of its line, all others
# are one word.
COLUMNS = {
    "wav.scp": "recording path",
    "segments": "utterance recording start end",
    "utt2spk": "utterance speaker",
    "utt2dur": "utterance seconds",
    "spk2utt": "speaker utterances",
    "utt2utts": "utterance utterances",
    ENROLL_MAP: "model utterances",
    "about": "key text",
}
WITH_BLANKS = ("path", "utterances", "text")
CONDITION_COLUMNS = "id value"  # of utt2<name> and spk2<name>
OTHER_COLUMNS = "id text"  # of a table of any other name
# Beginnings of the names of tables that a data directory may have several of.
NAMED_TABLES = ("trials", "utt2", "spk2")
# Tables that are named like conditions, but hold none; every data directory may have them.
NO_CONDITIONS = {"utt2spk", "utt2dur", "utt2num_frames", "spk2utt"}
# Characters that cannot be in a line of UTF-8.
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
SURROGATE = re.compile("[\ud800-\udfff]")  # read in place of a byte that is not UTF-8
Trial = tuple[str, str, bool]  # enrolment id, test id, same speaker
Segment = tuple[str, float, float]  # recording, start and end in seconds
Rejection = tuple[str, str]  # path, reason
MAX_SECONDS = 1e9  # 32 years; a later time is damage


def read_table(
    path: Path, faults: Faults | None = None, *, columns: str | None = None
) -> dict[str, str]:
    """Read a Kaldi table: the first word of a line is the key, the rest its value.

    columns: their names, as in COLUMNS; by default those of the file's name.
    Lines with more or fewer columns, duplicate keys and lines that are not UTF-8 go to `faults`, or
    raise ValueError without it.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; {_missing_fix(path)}")

    line_faults = Faults() if faults is None else faults
    wanted = columns or columns_of(path.name)
    num_columns = len(wanted.split())
    may_have_blanks = wanted.endswith(WITH_BLANKS)
    table: dict[str, str] = {}
    # A byte that is not UTF-8 becomes a surrogate, so that every such line can be named.
    with open_text(path, errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            # Almost all lines are ASCII, and need no search.
            is_ascii = line.isascii()
            if not is_ascii and SURROGATE.search(line):
                got = one_line(line.strip())
                text = f"{path}:{number}: is not UTF-8, got '{got}'; save it as UTF-8"
                line_faults.add("lines of another encoding", text)
                continue
            fields = line.split(maxsplit=1 if may_have_blanks else -1)
            if not fields:
                continue
            key = fields[0]
            if len(fields) != num_columns:
                got = one_line(line.strip())
                text = (
                    f"{path}:{number}: must have {num_columns} columns, '{wanted}', got"
                    f" '{got}'; {_column_fix(len(fields) - num_columns)}"
                )
                line_faults.add("bad lines", text)
            elif key in table:
                text = f"{path}:{number}: duplicate id {key}; keep one line"
                line_faults.add("duplicate ids", text)
            elif num_columns == 2:
                table[key] = fields[1].rstrip()
            else:
                table[key] = " ".join(fields[1:])
    if wanted == COLUMNS["utt2spk"]:
        _check_spellings(table, path, line_faults)
    # A caller that passes `faults` reports them together with the faults of other tables.
    if faults is None:
        line_faults.raise_if_any(f"{path}: refused")
    return table


def read_recordings(path: Path) -> dict[str, str]:
    """Read recording -> path from a wav.scp of any name; ValueError for commands."""
    path_of = read_table(path, columns=COLUMNS["wav.scp"])
    faults = Faults()
    for recording, file in path_of.items():
        if file.endswith("|"):
            faults.add("commands", f"{path}: {command_fix(recording, file)}")
    faults.raise_if_any(f"{path}: refused")
    return path_of


def command_fix(recording: str, command: str) -> str:
    """Return the fault of a command in place of a path, and how to repair it."""
    return (
        f"{recording} is a command: '{command}'; run `{command.rstrip('| ')} >"
        f" {recording}.wav` once and put the file's path there"
    )


def _missing_fix(path: Path) -> str:
    """Return the fix of a table that is not there."""
    if path.name == "utt2dur":
        return f"run `speakerlab check {path.parent}`"
    return (
        "prepare the data directory first (prepare.py of a recipe), or correct the path"
    )


def _check_spellings(table: Mapping[str, str], path: Path, faults: Faults) -> None:
    """Report two spellings of a speaker, which would make one person two classes."""
    try:
        refuse_twins(table.values(), where=str(path), kind="speakers")
    except ValueError as error:
        faults.add("speakers that look alike", str(error))


def columns_of(name: str) -> str:
    """Return the columns of the table of this name."""
    if name in COLUMNS:
        return COLUMNS[name]
    # Corpora prefix the names: train_utt2spk.
    if name.startswith(("utt2", "spk2")) or name.endswith("utt2spk"):
        return CONDITION_COLUMNS
    return OTHER_COLUMNS


def _column_fix(num_extra: int) -> str:
    """Return the fix of a line with `num_extra` columns more than its table has."""
    if num_extra < 0:
        return "add the missing columns"
    return "remove the other columns, and write a name with blanks as one word"


def read_segments(path: Path, faults: Faults | None = None) -> dict[str, Segment]:
    """Read `segments`: id -> (recording, start, end) in seconds; empty if there is no file."""
    if not path.exists():
        return {}
    line_faults = Faults() if faults is None else faults
    segments: dict[str, Segment] = {}
    table = read_table(path, line_faults)
    for utterance, text in table.items():
        try:
            recording, start_text, end_text = text.split()
            start = float(start_text)
            end = float(end_text)
            segments[utterance] = (recording, start, end)
            # Written so that NaN, which compares as false, is wrong too.
            is_wrong = not 0 <= start < end < MAX_SECONDS
        except ValueError:
            is_wrong = True
        if is_wrong:
            wanted = "'recording start end' with 0 <= start < end"
            line = f"{path}: {utterance} must be {wanted}, got '{text}'; correct it"
            line_faults.add("bad segments", line)
    if faults is None:
        line_faults.raise_if_any(f"{path}: refused")
    return segments


def read_durations(folder: Path) -> dict[str, float]:
    """Read `utt2dur`: id -> seconds; empty if there is no file."""
    path = folder / "utt2dur"
    if not path.exists():
        return {}
    faults = Faults()
    seconds: dict[str, float] = {}
    table = read_table(path)
    for utterance, text in table.items():
        try:
            seconds[utterance] = float(text)
        except ValueError:
            seconds[utterance] = -1.0  # refused below
        if not 0 < seconds[utterance] < MAX_SECONDS:
            line = f"{path}: {utterance} must have a duration in seconds, got '{text}'"
            faults.add("bad durations", f"{line}; run `speakerlab check {folder}`")
    faults.raise_if_any()
    return seconds


def read_enroll(path: Path, faults: Faults | None = None) -> dict[str, list[str]]:
    """Read `enroll.map`: enrolment model -> its utterances; empty if there is no file."""
    if not path.exists():
        return {}
    table = read_table(path, faults)
    return {model: text.split() for model, text in table.items()}


def read_about(folder: Path) -> dict[str, str]:
    """Read `about`: a key of ABOUT -> its value; empty if there is no file."""
    path = folder / "about"
    if not path.exists():
        return {}
    stated = read_table(path)
    for key in stated.keys() - ABOUT:
        raise ValueError(f"{path}: unknown '{key}'{nearest(key, ABOUT)}")
    return stated


def is_address(folder: str) -> bool:
    """Return whether a data directory is one in a store, such as `s3://bucket/train`."""
    return "://" in folder


def list_tables(folder: Path) -> list[str]:
    """List the tables of a data directory, without the outputs of checking and packing.

    Raises ValueError for a folder that is named like a table.
    """
    names = ["wav.scp", "segments", "utt2spk", ENROLL_MAP]
    names += list_conditions(folder)
    names += [path.name for path in list_trials(folder)]
    tables: list[str] = []
    for name in names:
        path = folder / name
        if path.is_file():
            tables.append(name)
    return tables


def list_trials(folder: Path) -> list[Path]:
    """List the trial lists of a data directory, files whose names begin with `trials`.

    Raises ValueError for a folder of such a name.
    """
    paths = _list_named(folder, "trials")
    for path in paths:
        if path.is_dir():
            raise ValueError(
                f"{path}: is a folder, not a trial list; move its lists to"
                f" {folder}/trials_NAME, and remove it"
            )
    return paths


def list_conditions(folder: Path) -> list[str]:
    """List the tables of conditions that a data directory has, such as `utt2device`.

    Raises ValueError for a folder of such a name.
    """
    names: list[str] = []
    for path in _list_named(folder, "utt2", "spk2"):
        # A name with a dot is no condition: it may be a copy, such as utt2device.2.
        if path.name in NO_CONDITIONS or "." in path.name:
            continue
        if path.is_dir():
            raise ValueError(
                f"{path}: is a folder, not a table of conditions; rename it, or move it"
                " elsewhere"
            )
        names.append(path.name)
    return names


def list_skipped(folder: Path) -> list[str]:
    """List what programs have left in a data directory, such as copies of its tables."""
    names: list[str] = []
    for path in folder.iterdir():
        name = path.name
        # Records and locks of the commands are hidden.
        is_hidden = name.startswith(".") and not name.startswith("._")
        is_copy = name.startswith(NAMED_TABLES) and not _is_table_name(name)
        if is_copy or (is_leftover(name) and not is_hidden):
            names.append(name)
    return sorted(names)


def _list_named(folder: Path, *beginnings: str) -> list[Path]:
    """List tables whose names begin so; sorted, because digests of tables depend on the order."""
    paths: list[Path] = []
    for beginning in beginnings:
        for path in folder.glob(f"{beginning}*"):
            if _is_table_name(path.name):
                paths.append(path)
    return sorted(paths)


def _is_table_name(name: str) -> bool:
    """Return whether a table may have this name: one word, and no copy of an editor."""
    return name.split() == [name] and not is_leftover(name)


def read_rejected(folder: Path) -> dict[str, Rejection]:
    """Read `rejected.tsv`: id -> (path, reason); empty if nothing was rejected."""
    path = folder / "rejected.tsv"
    if not path.exists():
        return {}
    lines = [line for line in read_text(path).split("\n") if line]
    rejected: dict[str, Rejection] = {}
    for number, line in enumerate(lines, 1):
        columns = line.split("\t")
        if len(columns) != 3:
            raise ValueError(
                f"{path}:{number}: is not 'id path reason' with tabs between, got"
                f" {count_of(len(columns), 'column')}; correct it, or remove the file and"
                f" run `speakerlab check {folder}`"
            )
        name, audio_path, reason = columns
        rejected[name] = (audio_path, reason)
    return rejected


def require_checked(folder: Path) -> None:
    """Raise FileNotFoundError, one line, unless `speakerlab check` has accepted a directory."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: does not exist; check the path")
    if not (folder / "utt2dur").exists():
        raise FileNotFoundError(
            f"{folder}: has not been checked (no utt2dur); run `speakerlab check"
            f" {folder}`"
        )


@contextmanager
def keep_roots(folders: Iterable[Path]) -> Iterator[ValueError | None]:
    """Keep prepare.py from replacing these data directories; wait for one that is running.

    A prepare.py holds the lock file in the parent folder of the directories; without such a file,
    no prepare.py has written there. Yields None, or the error of a lock that cannot be taken, for
    example on data of another user. The caller raises this error if it has to write.
    """
    root_locks: set[Path] = set()
    for folder in folders:
        root = folder.absolute().parent
        root_locks.add(root / ROOT_LOCK)

    fault = None
    with ExitStack() as locks:
        for lock in sorted(root_locks):
            if not lock.exists():
                continue
            try:
                locks.enter_context(locked(lock, shared=True))
            except ValueError as error:
                fault = error
        yield fault


def one_line(name: str | Path) -> str:
    """Return a file name as one line of valid UTF-8; other characters are escaped."""

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        return character.encode("unicode_escape").decode()

    return CONTROLS.sub(escape, str(name))


def write_rejected(
    folder: Path, rejected: Mapping[str, Rejection], *, name: str = "rejected.tsv"
) -> None:
    """Write `rejected.tsv` of id -> (path, reason); no file if there are none."""
    lines: list[str] = []
    for utterance, (path, reason) in rejected.items():
        fields = [
            one_line(utterance),
            one_line(path),
            one_line(reason),
        ]
        lines.append("\t".join(fields) + "\n")
    file = folder / name
    if lines:
        text = "".join(sorted(lines))
        write_text(file, text)
    else:
        # An old list would leave out utterances that are good now.
        file.unlink(missing_ok=True)


def name_fault(name: str, path: Path | str) -> str | None:
    """Return why a table cannot list a file under this id, or None."""
    text = str(path)
    where = one_line(path)
    is_one_word = name.split() == [name]
    if not is_one_word or SURROGATE.search(name):
        got = one_line(name)
        return (
            f"{where}: its id must be one word of UTF-8, got '{got}'; rename the file"
        )
    if SURROGATE.search(text):
        return f"{where}: its name is not UTF-8; rename the file"
    if "\n" in text or "\r" in text:
        return f"{where}: its name has several lines; rename the file"
    # Kaldi takes a path that ends in "|" for a command; a table drops blanks around a path.
    has_blanks = text != text.strip()
    if text.endswith("|") or has_blanks:
        return f"{where}: its name ends in a blank or '|'; rename the file"
    return None


def write_table(path: Path, table: Mapping[str, str]) -> None:
    """Write a Kaldi table sorted by key, whole or not at all."""
    lines: list[str] = []
    for key in sorted(table):
        lines.append(f"{key} {table[key]}\n")
    write_text(path, "".join(lines))


def one_word(value: str) -> str:
    """Return a value of a table, or a name in RTTM, as one word, with '_' for blanks."""
    return "_".join(value.split())


def write_data_dir(
    folder: Path | str,
    *,
    wavs: Mapping[str, Path | str],
    speakers: Mapping[str, str] | None = None,
    segments: Mapping[str, Segment] | None = None,
    trials: Mapping[str, Iterable[tuple[str, str, bool | str]]] | None = None,
    nameless: Mapping[Path, str] | None = None,
    not_used: Mapping[Path, str] | None = None,
    columns: Mapping[str, Mapping[str, str]] | None = None,
    enroll: Mapping[str, Iterable[str]] | None = None,
    about: Mapping[str, str] | None = None,
) -> None:
    """Write or replace a data directory.

    wavs: id (of the recording, where there are segments) -> audio file, made absolute.
    speakers: utterance -> speaker, of all utterances.
    segments: utterance -> (recording, start, end), in seconds.
    trials: name of a file, `trials` or `trials_NAME` -> its rows, (enrolment id, test id, whether
        it is a target trial); the words target and nontarget are taken, too.
    columns: name of a table, `utt2<name>` or `spk2<name>` -> id -> value; conditions are made one
        word, and empty ones are left out.
    enroll: enrolment model -> its utterances.
    about: facts, under keys of ABOUT.
    nameless: audio files left out because their names cannot be ids -> the reason.
    not_used: audio files left out on purpose, such as copies -> the reason.
    Raises ValueError with an example for an argument of another shape, and where a table cannot
    hold an id or a path. `speakerlab check` then compares the tables with one another and with the
    files: missing audio, and trials of unknown utterances, given twice, or with labels that
    contradict the speakers.
    """
    folder = Path(folder)
    check_arguments(
        wavs=wavs,
        speakers=speakers,
        segments=segments,
        trials=trials,
        columns=columns,
        enroll=enroll,
        about=about,
        nameless=nameless,
        not_used=not_used,
    )
    trial_lists = trials or {}
    more_tables = columns or {}
    unknown_facts = (about or {}).keys() - set(ABOUT)
    for key in sorted(unknown_facts):
        raise ValueError(f"about: unknown '{key}'{nearest(key, ABOUT)}")
    paths: dict[str, str] = {}
    for key, wav in wavs.items():
        paths[key] = os.path.realpath(wav)
    _refuse_bad_names(folder, paths)
    if _holds_other_files(folder):
        raise ValueError(
            f"{folder}: is not a data directory and would be replaced, got a folder"
            " without wav.scp; give another --data"
        )
    # The new folder also replaces shards in the old one, so no process may be reading them.
    with without_readers(folder), replacing_folder(folder) as fresh:
        write_table(fresh / "wav.scp", paths)
        if speakers is not None:
            write_table(fresh / "utt2spk", speakers)
        if segments is not None:
            _write_segments(fresh / "segments", segments)
        for name, rows in trial_lists.items():
            lines = trial_lines(name, rows)
            write_text(fresh / name, "".join(lines))
        for name, values in more_tables.items():
            _write_column(fresh / name, values)
        if enroll is not None:
            write_table(fresh / ENROLL_MAP, enroll_table(enroll))
        if about:
            write_table(fresh / "about", about)

        # All files are listed, so that no audio is lost without a trace.
        rejected = _made_up_rows(NAMELESS, nameless or {})
        rejected |= _made_up_rows(NOT_USED, not_used or {})
        write_rejected(fresh, rejected)


def _holds_other_files(folder: Path) -> bool:
    """Return whether `folder` exists and is neither a data directory nor empty."""
    wav_scp = folder / "wav.scp"
    if not folder.exists() or wav_scp.exists():
        return False
    is_empty_folder = folder.is_dir() and not any(folder.iterdir())
    return not is_empty_folder


def _refuse_bad_names(folder: Path, paths: Mapping[str, str]) -> None:
    """Raise ValueError where a table cannot hold an id or a path."""
    faults = Faults()
    for key, path in paths.items():
        fault = name_fault(key, path)
        if fault:
            faults.add("bad names", fault)
    faults.raise_if_any(f"{folder}: refused, nothing was written")


def _write_segments(path: Path, segments: Mapping[str, Segment]) -> None:
    table: dict[str, str] = {}
    for utterance, segment in segments.items():
        recording, start, end = segment
        # A microsecond is less than a sample, so rounding to samples finds the same one again.
        table[utterance] = f"{recording} {start:.6f} {end:.6f}"
    write_table(path, table)


def _write_column(path: Path, values: Mapping[str, str]) -> None:
    """Write `utt2<name>` or `spk2<name>` without its empty values."""
    # Kaldi's own tables keep several words: spk2utt lists utterances.
    is_condition = path.name not in NO_CONDITIONS
    table: dict[str, str] = {}
    for key, value in values.items():
        text = str(value)
        if is_condition:
            text = one_word(text)
        if text:
            table[key] = text
    write_table(path, table)


def relabel_data_dir(folder: Path, out: Path, speakers: Mapping[str, str]) -> None:
    """Write a checked data directory with the utterances of `folder` that have new speakers."""
    wavs = read_table(folder / "wav.scp")
    seconds = read_table(folder / "utt2dur")
    all_segments = read_segments(folder / "segments")

    # Without segments an utterance is a whole recording of the same id.
    segments: dict[str, Segment] | None = None
    recordings: Iterable[str] = speakers
    if all_segments:
        segments = {utterance: all_segments[utterance] for utterance in speakers}
        recordings = {segment[0] for segment in segments.values()}

    utterances_of: dict[str, list[str]] = {}
    for utterance in sorted(speakers):
        speaker = speakers[utterance]
        utterances_of.setdefault(speaker, []).append(utterance)

    # The durations mark the directory as checked: it has the same audio as `folder`.
    utt2dur = {utterance: seconds[utterance] for utterance in speakers}
    spk2utt: dict[str, str] = {}
    for speaker, utterances in utterances_of.items():
        spk2utt[speaker] = " ".join(utterances)
    write_data_dir(
        out,
        wavs={recording: wavs[recording] for recording in recordings},
        speakers=speakers,
        segments=segments,
        columns={"utt2dur": utt2dur, "spk2utt": spk2utt},
    )


def _made_up_rows(prefix: str, reasons: Mapping[Path, str]) -> dict[str, Rejection]:
    """Return rows of rejected.tsv for files without an id; the made-up ids begin with `prefix`."""
    rows: dict[str, Rejection] = {}
    for path, reason in reasons.items():
        # As bytes, because the name may not be valid UTF-8.
        name = os.fsencode(path)
        digest = hashlib.blake2b(name, digest_size=8).hexdigest()
        rows[prefix + digest] = (str(path), reason)
    return rows
