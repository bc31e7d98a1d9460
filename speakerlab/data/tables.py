"""Kaldi data directories as text: tables, segments, rejections, whole directories.

A data directory holds `wav.scp` (id path), `utt2spk` (id speaker), `utt2dur` (id seconds), where
recordings are cut up `segments` (id recording start end, in seconds), `trials*` where it is a test
set, and `rejected.tsv` (id, path, reason) of utterances to leave out.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from speakerlab.atomic import write_text
from speakerlab.faults import Faults

Trial = tuple[str, str, bool]  # enrolment id, test id, same speaker


def read_table(path: Path, faults: Faults | None = None) -> dict[str, str]:
    """A Kaldi table: the first word of a line is the key, the rest its value.

    Duplicate keys and lines without a value go to `faults`, or raise ValueError without it.
    """
    own = Faults() if faults is None else faults
    table: dict[str, str] = {}
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; run stage 1 first")
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if "\ufffd" in line:
                text = f"{path}:{number}: is not UTF-8, got '{line.strip()}'; save it as UTF-8"
                own.add("lines of another encoding", text)
                continue
            key, value = (*line.split(maxsplit=1), "", "")[:2]
            if not key:
                continue
            if not value:
                own.add(
                    "bad lines", f"{path}:{number}: has no value, got '{key}'; write 'id value'"
                )
            elif key in table:
                own.add("duplicate ids", f"{path}:{number}: duplicate id, got {key}; keep one line")
            else:
                table[key] = value.strip()
    if faults is None:
        own.raise_if_any(f"{path}: refused")
    return table


def read_segments(path: Path, faults: Faults | None = None) -> dict[str, tuple[str, float, float]]:
    """`segments`: id -> (recording, start, end) in seconds; empty where there is no such file."""
    if not path.exists():
        return {}
    own = Faults() if faults is None else faults
    segments: dict[str, tuple[str, float, float]] = {}
    for utterance, text in read_table(path, own).items():
        try:
            recording, start, end = text.split()
            segments[utterance] = (recording, float(start), float(end))
        except ValueError:
            own.add(
                "bad lines",
                f"{path}: segment {utterance} is not 'recording start end', got '{text}'; mend it",
            )
    if faults is None:
        own.raise_if_any(f"{path}: refused")
    return segments


def read_rejected(folder: Path) -> dict[str, tuple[str, str]]:
    """`rejected.tsv`: id -> (path, reason); empty where nothing was rejected."""
    path = folder / "rejected.tsv"
    if not path.exists():
        return {}
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").split("\n") if line]
    return {row[0]: (row[1], row[-1]) for row in rows}


def write_rejected(folder: Path, rejected: Mapping[str, tuple[str, str]]) -> None:
    """`rejected.tsv` of id -> (path, reason); no file where there are none."""
    rows = [
        "\t".join(map(_one_field, (utterance, *rejected[utterance]))) + "\n"
        for utterance in sorted(rejected)
    ]
    if rows:
        write_text(folder / "rejected.tsv", "".join(rows))
    else:
        (folder / "rejected.tsv").unlink(missing_ok=True)


def _one_field(text: str) -> str:
    """Tabs and line ends, which file names may have, would end a field or a line."""
    return text.translate({9: "\\t", 10: "\\n", 13: "\\r"})


def write_table(path: Path, table: Mapping[str, str]) -> None:
    """Write a Kaldi table sorted by key, whole or not at all."""
    write_text(path, "".join(f"{key} {table[key]}\n" for key in sorted(table)))


def write_data_dir(
    folder: Path,
    *,
    wavs: Mapping[str, Path | str],
    speakers: Mapping[str, str] | None = None,
    segments: Mapping[str, tuple[str, float, float]] | None = None,
    trials: Mapping[str, Iterable[Trial]] | None = None,
) -> None:
    """Write a data directory, replacing one that is there; `trials` maps file name to its lines.

    wavs: id (of the recording, where there are segments) -> audio file, made absolute.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "wav.scp").exists():
        raise ValueError(
            f"{folder}: is not a data directory and would be replaced, got a folder without "
            "wav.scp; give another --data"
        )
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_table(fresh / "wav.scp", {key: str(Path(wav).resolve()) for key, wav in wavs.items()})
    if speakers is not None:
        write_table(fresh / "utt2spk", speakers)
    if segments is not None:
        rows = {key: f"{rec} {start:.6f} {end:.6f}" for key, (rec, start, end) in segments.items()}
        write_table(fresh / "segments", rows)
    for name, rows in (trials or {}).items():
        words = ("nontarget", "target")
        text = "".join(f"{enrol} {test} {words[same]}\n" for enrol, test, same in rows)
        write_text(fresh / name, text)
    if folder.exists():
        shutil.rmtree(folder)
    fresh.replace(folder)
