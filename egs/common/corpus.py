"""What every recipe's prepare.py shares: its options, its errors, and writing data directories.

In: folders of audio, tables of utterances and speakers. Out: Kaldi data directories under --data
and one printed line about each.
"""

import argparse
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from egs.common.openslr import download_noise_and_rooms
from speakerlab.core.faults import Faults
from speakerlab.data.banks import KIND_TABLE, KINDS
from speakerlab.data.files import one_line, require_file
from speakerlab.data.tables import Trial, name_fault, write_data_dir, write_table

AUDIO_SUFFIXES = (".wav", ".flac")
LeftOut = dict[Path, str]  # files that are not used -> why, in one line
Finder = Callable[[Path], tuple[dict[str, Path], LeftOut]]  # folder -> (id -> file, left out)


def make_parser(description: str, *, corpus: Path) -> argparse.ArgumentParser:
    """The options that all prepare.py have; `corpus` is where the audio lies by default."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--corpus", type=Path, default=corpus, metavar="DIR", help="the audio")
    parser.add_argument("--data", type=Path, metavar="DIR", help="where data directories go")
    parser.add_argument("--noise", type=Path, metavar="DIR", help="noise recordings, or MUSAN")
    parser.add_argument("--rirs", type=Path, metavar="DIR", help="rooms, or RIRS_NOISES")
    parser.add_argument("--seed", type=int, default=1, help="of everything drawn (default 1)")
    parser.add_argument("--num-jobs", type=int, default=num_cpus or 1, metavar="N")
    parser.add_argument("--download", action="store_true", help="get the corpus, prepare nothing")
    only = "get MUSAN as --noise .../musan and RIRS_NOISES as --rirs .../RIRS_NOISES, nothing else"
    parser.add_argument("--download-noise", action="store_true", help=only)
    return parser


def run(
    args: argparse.Namespace, *, download: Callable[[], None], prepare: Callable[[], None]
) -> int:
    """Download or prepare, as `args` says; the exit code. What is wrong goes to stderr in lines."""
    try:
        preparing = not (args.download or args.download_noise)
        if preparing and args.data is None:
            raise ValueError("--data: no folder given, got nothing; add --data DIR")
        if args.num_jobs < 1:
            raise ValueError(f"--num-jobs: must be at least 1, got {args.num_jobs}; raise it")
        if preparing:
            prepare()
        else:
            download_noise_and_rooms(noise=args.noise, rirs=args.rirs)
        if args.download:
            download()
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def walk(folder: Path, suffixes: Collection[str] = AUDIO_SUFFIXES) -> tuple[list[Path], LeftOut]:
    """(files below `folder` that end like audio, sorted; what ends like it but cannot be used).

    Links are followed; a folder that several lead to is read once, by its own name if that is here.
    """
    if not folder.is_dir():
        return [], {}
    files: list[Path] = []
    hollow: list[Path] = []  # folders that end like audio, until a file below tells that they may
    left_out: LeftOut = {}
    pending, seen = deque([folder]), {_inode(parent) for parent in folder.resolve().parents}
    while pending:
        here = pending.popleft()
        if here != folder and _looks_like(here, suffixes):
            hollow.append(here)
        try:
            inode = _inode(here)
            entries = [] if inode in seen else [*map(_entry, os.scandir(here))]
        except OSError as error:
            left_out[here] = f"{one_line(here)}: cannot be listed, got '{error.strerror}'; mend it"
            continue
        seen.add(inode)
        pending.extendleft(sorted(path for path, kind in entries if kind == "folder"))
        pending.extend(sorted(path for path, kind in entries if kind == "link to a folder"))
        files += [path for path, kind in entries if kind == "file" and _looks_like(path, suffixes)]
    parents = {parent for path in files for parent in path.parents} if hollow else set()
    for path in {*files, *hollow} - parents:
        if fault := _file_fault(path):
            left_out[path] = fault
    return sorted(path for path in files if path not in left_out), left_out


def _entry(entry: os.DirEntry[str]) -> tuple[Path, str]:
    """Path and kind, which costs no look at the file itself unless it is a link."""
    try:
        if entry.is_dir():
            return Path(entry), "link to a folder" if entry.is_symlink() else "folder"
    except OSError:  # a link to itself, say
        pass
    return Path(entry), "file"


def _inode(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _looks_like(path: Path, suffixes: Collection[str]) -> bool:
    return path.name.lower().endswith(tuple(suffixes))


def _file_fault(path: Path) -> str | None:
    try:
        require_file(path)
    except (ValueError, FileNotFoundError) as error:
        return str(error).replace(str(path), one_line(path))
    return None


def find_audio(folder: Path) -> tuple[dict[str, Path], LeftOut]:
    """(id -> audio file below `folder`, sorted; what is left out). The id is the relative path.

    Raises FileNotFoundError where there are none.
    """
    found, left_out = walk(folder)
    files: dict[str, Path] = {}
    for path in found:
        name = make_id(path.relative_to(folder))
        if fault := id_fault(name, path, files):
            left_out[path] = fault
        else:
            files[name] = path
    refuse_nothing(folder, files, left_out)
    return files, left_out


def refuse_nothing(
    folder: Path, files: Mapping[str, Path], left_out: LeftOut, *, wanted: str = "wav or flac"
) -> None:
    """Raise FileNotFoundError, with what was left out, where there are no files."""
    if not files:
        faults = Faults()
        for fault in left_out.values():
            faults.add("files that cannot be used", fault)
        got = f"{len(left_out)} files that cannot be used" if left_out else "none"
        got = got if folder.is_dir() else "no folder"
        verdict = f"{folder}: no recordings found, got {got}; give a folder with {wanted}"
        raise FileNotFoundError(faults.report(verdict))


def make_id(name: Path | str) -> str:
    """A path as one word: blanks and control characters as '_'."""
    return re.sub(r"[\s\x00-\x1f\x7f]", "_", str(name))


def id_fault(name: str, path: Path, files: Mapping[str, Path]) -> str | None:
    """Why a file cannot be listed under an id beside others, in one line, or None."""
    if name in files:
        first = one_line(files[name].name)
        return f"{one_line(path)}: would have the id of {first}, got {name}; rename one"
    return name_fault(name, path)


def write_set(
    folder: Path,
    *,
    wavs: Mapping[str, Path],
    speakers: Mapping[str, str] | None = None,
    trials: Mapping[str, Sequence[Trial]] | None = None,
    left_out: LeftOut | None = None,
    columns: Mapping[str, Mapping[str, str]] | None = None,
    enroll: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Write one data directory and print a line about it; `left_out` goes to its rejected.tsv."""
    write_data_dir(
        folder,
        wavs=wavs,
        speakers=speakers,
        trials=trials,
        nameless=left_out,
        columns=columns,
        enroll=enroll,
    )
    counts = [f"{len(wavs)} recordings"]
    if speakers is not None:
        counts = [f"{len(set(speakers.values()))} speakers, {len(wavs)} utterances"]
    for name, rows in (trials or {}).items():
        num_target = sum(same for _, _, same in rows)
        counts.append(f"{name} {num_target} target + {len(rows) - num_target} nontarget")
    if enroll is not None:
        counts.append(f"{len(enroll)} enrolment models")
    if left_out:
        counts.append(f"{len(left_out)} files left out, see {folder}/rejected.tsv")
    print(f"{folder}: {', '.join(counts)}")


def write_noise_and_rooms(
    data: Path,
    *,
    noise: Path | None,
    rirs: Path | None,
    find_noise: Finder = find_audio,
    find_rooms: Finder = find_audio,
) -> None:
    """Write `noise/` and `rirs/` for the folders given, remove those of an earlier run.

    Noise laid out as MUSAN is gets a table of the kind of each recording. `find_noise` and
    `find_rooms` choose what of a folder is taken (`noises.py`), by default all.
    """
    for name, folder, find in (("noise", noise, find_noise), ("rirs", rirs, find_rooms)):
        if folder is not None:
            wavs, left_out = find(folder)
            write_set(data / name, wavs=wavs, left_out=left_out)
            if name == "noise":
                write_kinds(data / name, wavs)
        elif (data / name / "wav.scp").exists():
            shutil.rmtree(data / name)


def write_kinds(folder: Path, wavs: Iterable[str]) -> None:
    """The table of kinds, if the first folders in the ids are MUSAN's; noise is what is elsewhere.

    One of them alone counts, so that MUSAN may be taken without its speech.
    """
    tops = {name: name.partition("/")[0] for name in wavs}
    if not set(KINDS) & set(tops.values()):
        return
    kinds = {name: top if top in KINDS else KINDS[0] for name, top in tops.items()}
    write_table(folder / KIND_TABLE, kinds)
    counts = [f"{list(kinds.values()).count(kind)} {kind}" for kind in KINDS]
    print(f"{folder}: by kind, {', '.join(counts)}")


def check_disjoint(train: Iterable[str], test: Iterable[str], *, where: Path) -> None:
    """Raise ValueError if a speaker is in both sets."""
    faults = Faults()
    for speaker in sorted(set(train) & set(test)):
        faults.add(
            "speakers in both sets",
            f"{where}: a speaker is in train and test, got {speaker}; keep one of the two",
        )
    faults.raise_if_any(f"{where}: refused")
