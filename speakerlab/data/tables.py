"""Kaldi data directories as text: tables, segments, rejections, whole directories.

A data directory holds `wav.scp` (id path), `utt2spk` (id speaker), `utt2dur` (id seconds), where
recordings are cut up `segments` (id recording start end, in seconds), `trials*` where it is a test
set, and `rejected.tsv` (id, path, reason) of what is left out: utterances of the tables and, under
ids that begin with NAMELESS, files that have no line there. `utt2<name>` and `spk2<name>` give
conditions of an utterance or a speaker in one word; `enroll.map` (model utterance ...) the
utterances that an enrolment model of a trial list is made of. `about` states facts about the
recordings, the keys of ABOUT, for the cards of models that are trained on them.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from speakerlab.core.atomic import replacing_folder, write_text
from speakerlab.core.faults import Faults, nearest
from speakerlab.data.shards import unread

NAMELESS = "~"
ENROLL_MAP = "enroll.map"
ABOUT = ("corpus", "licence", "languages", "page")
# Tables of those names that every data directory may have, and that are no conditions.
NO_CONDITIONS = {"utt2spk", "utt2dur", "utt2num_frames", "spk2utt"}
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # not in a line of UTF-8
SURROGATE = re.compile("[\ud800-\udfff]")  # what a byte that is not UTF-8 is read as
Trial = tuple[str, str, bool]  # enrolment id, test id, same speaker
MAX_SECONDS = 1e9  # 32 years; a later time is damage


def read_table(path: Path, faults: Faults | None = None) -> dict[str, str]:
    """Read a Kaldi table: the first word of a line is the key, the rest its value.

    Duplicate keys and lines without a value go to `faults`, or raise ValueError without it.
    """
    own = Faults() if faults is None else faults
    table: dict[str, str] = {}
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; run stage 1 first")
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if not line.isascii() and SURROGATE.search(line):
                got = one_line(line.strip())
                text = f"{path}:{number}: is not UTF-8, got '{got}'; save it as UTF-8"
                own.add("lines of another encoding", text)
                continue
            key, value = (*line.split(maxsplit=1), "", "")[:2]
            if not key:
                continue
            if not value:
                own.add("bad lines", f"{path}:{number}: '{key}' has no value; write 'id value'")
            elif key in table:
                own.add("duplicate ids", f"{path}:{number}: duplicate id {key}; keep one line")
            else:
                table[key] = value.strip()
    if faults is None:
        own.raise_if_any(f"{path}: refused")
    return table


def read_segments(path: Path, faults: Faults | None = None) -> dict[str, tuple[str, float, float]]:
    """Read `segments`: id -> (recording, start, end) in seconds; empty if there is no file."""
    if not path.exists():
        return {}
    own = Faults() if faults is None else faults
    segments: dict[str, tuple[str, float, float]] = {}
    for utterance, text in read_table(path, own).items():
        try:
            recording, start, end = text.split()
            segments[utterance] = (recording, float(start), float(end))
            is_wrong = not 0 <= float(start) < float(end) < MAX_SECONDS
        except ValueError:
            is_wrong = True
        if is_wrong:
            wanted = "'recording start end' with 0 <= start < end"
            line = f"{path}: {utterance} must be {wanted}, got '{text}'; correct it"
            own.add("bad segments", line)
    if faults is None:
        own.raise_if_any(f"{path}: refused")
    return segments


def read_durations(folder: Path) -> dict[str, float]:
    """Read `utt2dur`: id -> seconds; empty if there is no file."""
    path, faults = folder / "utt2dur", Faults()
    seconds: dict[str, float] = {}
    for utterance, text in (read_table(path) if path.exists() else {}).items():
        try:
            seconds[utterance] = float(text)
        except ValueError:
            seconds[utterance] = -1.0
        if not 0 < seconds[utterance] < MAX_SECONDS:
            line = f"{path}: {utterance} must have a duration in seconds, got '{text}'"
            faults.add("bad durations", f"{line}; run stage 1, or `speakerlab check`, again")
    faults.raise_if_any()
    return seconds


def read_enroll(path: Path, faults: Faults | None = None) -> dict[str, list[str]]:
    """Read `enroll.map`: enrolment model -> its utterances; empty if there is no file."""
    if not path.exists():
        return {}
    return {model: text.split() for model, text in read_table(path, faults).items()}


def read_about(folder: Path) -> dict[str, str]:
    """Read `about`: a key of ABOUT -> what is stated; empty if there is no file."""
    path = folder / "about"
    stated = read_table(path) if path.exists() else {}
    for key in stated.keys() - ABOUT:
        raise ValueError(f"{path}: unknown '{key}'{nearest(key, ABOUT)}")
    return stated


def list_conditions(folder: Path) -> list[str]:
    """List the tables of conditions that a data directory has, such as `utt2device`."""
    found = {path.name for kind in ("utt2*", "spk2*") for path in folder.glob(kind)}
    return sorted(name for name in found - NO_CONDITIONS if "." not in name)


def read_rejected(folder: Path) -> dict[str, tuple[str, str]]:
    """Read `rejected.tsv`: id -> (path, reason); empty if nothing was rejected."""
    path = folder / "rejected.tsv"
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = [line.split("\t") for line in text.split("\n") if line]
    for number, row in enumerate(rows, 1):
        if len(row) != 3:
            raise ValueError(
                f"{path}:{number}: is not 'id path reason' with tabs between, got {len(row)} "
                "columns; correct it, or remove the file and run stage 1 again"
            )
    return {row[0]: (row[1], row[2]) for row in rows}


def one_line(name: str | Path) -> str:
    """Return a file name as one line of valid UTF-8; other characters are escaped."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), str(name))


def write_rejected(
    folder: Path, rejected: Mapping[str, tuple[str, str]], *, name: str = "rejected.tsv"
) -> None:
    """Write `rejected.tsv` of id -> (path, reason); no file if there are none."""
    rows = sorted("\t".join(map(one_line, (id_, *row))) + "\n" for id_, row in rejected.items())
    if rows:
        write_text(folder / name, "".join(rows))
    else:
        (folder / name).unlink(missing_ok=True)


def name_fault(name: str, path: Path | str) -> str | None:
    """Return why a table cannot list a file under this id, or None."""
    text, where = str(path), one_line(path)
    if name.split() != [name] or SURROGATE.search(name):
        got = one_line(name)
        return f"{where}: its id must be one word of UTF-8, got '{got}'; rename the file"
    if SURROGATE.search(text):
        return f"{where}: its name is not UTF-8; rename the file"
    if "\n" in text or "\r" in text:
        return f"{where}: its name has several lines; rename the file"
    if text.endswith("|") or text != text.strip():
        return f"{where}: its name ends in a blank or '|'; rename the file"
    return None


def write_table(path: Path, table: Mapping[str, str]) -> None:
    """Write a Kaldi table sorted by key, whole or not at all."""
    write_text(path, "".join(f"{key} {table[key]}\n" for key in sorted(table)))


def one_word(value: str) -> str:
    """Return a value of a condition as its table has it: blanks as '_'."""
    return "_".join(value.split())


def write_data_dir(
    folder: Path,
    *,
    wavs: Mapping[str, Path | str],
    speakers: Mapping[str, str] | None = None,
    segments: Mapping[str, tuple[str, float, float]] | None = None,
    trials: Mapping[str, Iterable[Trial]] | None = None,
    nameless: Mapping[Path, str] | None = None,
    columns: Mapping[str, Mapping[str, str]] | None = None,
    enroll: Mapping[str, Iterable[str]] | None = None,
    about: Mapping[str, str] | None = None,
) -> None:
    """Write a data directory, replacing one that is there; `trials` maps file name to its lines.

    wavs: id (of the recording, where there are segments) -> audio file, made absolute.
    columns: name of a table, `utt2<name>` or `spk2<name>` -> id -> value; conditions are made one
        word, and empty ones are left out.
    enroll: enrolment model -> its utterances.
    about: what is known of ABOUT.
    nameless: audio files left out because their names cannot be ids -> the reason.
    Raises ValueError where a table cannot hold an id or a path.
    """
    paths, faults = {key: os.path.realpath(wav) for key, wav in wavs.items()}, Faults()
    for fault in filter(None, map(name_fault, paths.keys(), paths.values())):
        faults.add("bad names", fault)
    faults.raise_if_any(f"{folder}: refused, nothing was written")
    is_other = folder.exists() and not (folder / "wav.scp").exists()
    if is_other and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(
            f"{folder}: is not a data directory and would be replaced, got a folder without "
            "wav.scp; give another --data"
        )
    with unread(folder), replacing_folder(folder) as fresh:
        write_table(fresh / "wav.scp", paths)
        if speakers is not None:
            write_table(fresh / "utt2spk", speakers)
        if segments is not None:
            times = {key: f"{rec} {a:.6f} {b:.6f}" for key, (rec, a, b) in segments.items()}
            write_table(fresh / "segments", times)
        for name, rows in (trials or {}).items():
            kinds = ("nontarget", "target")
            text = "".join(f"{enrol} {test} {kinds[same]}\n" for enrol, test, same in rows)
            write_text(fresh / name, text)
        for name, values in (columns or {}).items():
            word_of = str if name in NO_CONDITIONS else one_word
            words = {key: word for key, value in values.items() if (word := word_of(value))}
            write_table(fresh / name, words)
        if enroll is not None:
            models = {model: " ".join(rows) for model, rows in enroll.items()}
            write_table(fresh / ENROLL_MAP, models)
        if about:
            write_table(fresh / "about", about)
        write_rejected(fresh, {_made_up(p): (str(p), why) for p, why in (nameless or {}).items()})


def relabel_data_dir(folder: Path, out: Path, speakers: Mapping[str, str]) -> None:
    """Write a checked data directory like `folder`, of the utterances that have new speakers."""
    wavs, seconds = read_table(folder / "wav.scp"), read_table(folder / "utt2dur")
    segments = read_segments(folder / "segments")
    kept = {u: segments[u] for u in speakers} if segments else None
    recordings = {row[0] for row in kept.values()} if kept else speakers.keys()
    of_speaker: dict[str, list[str]] = {}
    for utterance in sorted(speakers):
        of_speaker.setdefault(speakers[utterance], []).append(utterance)
    write_data_dir(
        out,
        wavs={name: wavs[name] for name in recordings},
        speakers=speakers,
        segments=kept,
        columns={
            "utt2dur": {utterance: seconds[utterance] for utterance in speakers},
            "spk2utt": {name: " ".join(ids) for name, ids in of_speaker.items()},
        },
    )


def _made_up(path: Path) -> str:
    return NAMELESS + hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
