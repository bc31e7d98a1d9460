"""Shared parts of every prepare.py: options, finding audio, writing Kaldi data directories."""

import argparse
import inspect
import logging
import os
import re
import shutil
import signal
import sys
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from egs.common.corpus.convert_audio import convert_all, convert_coded
from egs.common.corpus.fetch import download_noise_and_rooms
from egs.common.corpus.once import (
    PREPARED,
    data_alone,
    prepare_once,
    refuse_other_corpus,
)
from egs.common.corpus.sources import (
    ARCHIVES,
    NONE,
    absolute,
    resolve_sources,
    source,
)
from speakerlab.bin.command import prepare_output, report
from speakerlab.core import process
from speakerlab.core.counting import count_of
from speakerlab.core.encoding import use_utf8
from speakerlab.core.faults import Faults
from speakerlab.core.leftovers import is_leftover, name_leftovers
from speakerlab.data.audio import ALL_ENDINGS, ENDINGS, require_file
from speakerlab.data.banks import KIND_TABLE, KINDS
from speakerlab.data.tables import (
    Trial,
    name_fault,
    one_line,
    write_data_dir,
    write_table,
)

MAX_ENDINGS = 5  # in a line about files with other endings
LeftOut = dict[Path, str]  # files that are not used -> why, in one line
Finder = Callable[
    [Path], tuple[dict[str, Path], LeftOut]
]  # folder -> (id -> file, left out)


def make_parser(
    description: str, *, corpus: Path, makes_corpus: bool = False
) -> argparse.ArgumentParser:
    """Return a parser of the options of every prepare.py; `corpus` is the default folder.

    makes_corpus: preparing makes the corpus if it does not exist.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.set_defaults(default_corpus=corpus, makes_corpus=makes_corpus)
    folder = "folder of the audio"
    parser.add_argument(
        "--corpus", type=absolute, default=corpus, metavar="DIR", help=folder
    )
    data = "folder of the data directories"
    parser.add_argument("--data", type=absolute, metavar="DIR", help=data)
    for option, meaning, (name, _) in (
        ("noise", "noise recordings", ARCHIVES["noise"]),
        ("rirs", "room impulse responses", ARCHIVES["rirs"]),
    ):
        text = (
            f"folder of {meaning} or {name}; auto: {name} in or beside the corpus; none"
        )
        parser.add_argument(f"--{option}", type=source, metavar="DIR", help=text)
    parser.add_argument("--seed", type=int, default=1, help="random seed (default 1)")
    parser.add_argument(
        "--num-jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N"
    )
    parser.add_argument(
        "--download", action="store_true", help="only download the corpus"
    )
    only = (
        "only download MUSAN (--noise .../musan) and RIRS_NOISES (--rirs"
        " .../RIRS_NOISES)"
    )
    parser.add_argument("--download-noise", action="store_true", help=only)
    return parser


def run(
    args: argparse.Namespace,
    *,
    download: Callable[[], None],
    prepare: Callable[[], None],
) -> int:
    """Download, or prepare once; print errors to stderr and return the exit code."""
    process.die_with_launcher()
    logging.basicConfig(
        format="%(message)s", level=logging.INFO
    )  # a lock that is waited for
    downloading = args.download or args.download_noise
    use_utf8()
    prepare_output()
    code = 0
    try:
        if args.num_jobs < 1:
            raise ValueError(f"--num-jobs: must be at least 1, not {args.num_jobs}")
        if args.data is None and not downloading:
            raise ValueError("--data: no folder given; add --data DIR")
        resolve_sources(args)
        if downloading:
            _download(args, download)
        else:
            script = Path(inspect.getfile(prepare)).resolve()
            prepare_once(args.data, script, args, prepare)
        # Here, so that an error of the output is reported like any other.
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        code = report(error)
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        code = process.EXIT_SIGNAL + signal.SIGINT
    if code == process.EXIT_SIGNAL + signal.SIGPIPE:
        drop_output()
    return code


def drop_output() -> None:
    """Lead the output nowhere: Python would report at its end that nobody reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _download(args: argparse.Namespace, download: Callable[[], None]) -> None:
    """Download what is missing, with the lock of the data directories that wait for it."""
    if args.data is not None:
        refuse_other_corpus(args.data, args)
    with ExitStack() as lock:
        # Data that has been prepared waits for nothing, and may belong to another user.
        if args.data is not None and not (args.data / PREPARED).exists():
            lock.enter_context(data_alone(args.data))
        had_to = download_noise_and_rooms(noise=args.noise, rirs=args.rirs)
        if args.download_noise and not had_to:
            places = f"--noise {args.noise or NONE}, --rirs {args.rirs or NONE}"
            print(f"{places}: nothing to download")
        if args.download:
            download()


def walk(
    folder: Path, suffixes: Collection[str] = ENDINGS
) -> tuple[list[Path], LeftOut]:
    """Return (files below `folder` with one of the suffixes, sorted; those that cannot be used).

    Links are followed. A folder with several paths is read once, under its real name if possible.
    What systems and editors leave is skipped. Prints a line about skipped files and folders and, if
    any audio is wanted, one about files with other endings.
    """
    if not folder.is_dir():
        return [], {}
    content = _Content(tuple(suffixes))
    # Folders named like audio files; an error unless they hold audio.
    hollow: list[Path] = []
    left_out: LeftOut = {}
    pending = deque([folder])
    seen = {_inode(parent) for parent in folder.resolve().parents}
    while pending:
        here = pending.popleft()
        if here != folder and content.is_wanted(here):
            hollow.append(here)
        try:
            inode = _inode(here)
            entries = [] if inode in seen else [*map(_entry, os.scandir(here))]
        except OSError as error:
            left_out[here] = f"{one_line(here)}: cannot be listed: {error.strerror}"
            continue
        seen.add(inode)
        folders, links = content.add(entries)
        pending.extendleft(sorted(folders))
        pending.extend(sorted(links))

    parents: set[Path] = set()
    if hollow:
        for path in content.files:
            parents.update(path.parents)
    for path in {*content.files, *hollow} - parents:
        fault = _file_fault(path)
        if fault:
            left_out[path] = fault
    content.report(folder)
    return sorted(path for path in content.files if path not in left_out), left_out


class _Content:
    """Files below a folder, by what they are."""

    def __init__(self, suffixes: tuple[str, ...]) -> None:
        self.suffixes = suffixes  # of wanted files
        self.files: list[Path] = []
        self.leftovers: list[str] = []  # names of files and whole folders
        self.others: list[Path] = []  # files with other endings

    def is_wanted(self, path: Path) -> bool:
        return path.name.lower().endswith(self.suffixes)

    def add(self, entries: Iterable[tuple[Path, str]]) -> tuple[list[Path], list[Path]]:
        """Add the content of a folder; return its folders, and its links to folders."""
        folders: list[Path] = []
        links: list[Path] = []
        for path, kind in entries:
            if is_leftover(path.name):
                self.leftovers.append(path.name)
            elif kind == "folder":
                folders.append(path)
            elif kind == "link to a folder":
                links.append(path)
            elif self.is_wanted(path):
                self.files.append(path)
            else:
                self.others.append(path)
        return folders, links

    def report(self, folder: Path) -> None:
        """Print a line about leftovers and, if any audio is wanted, one about other endings."""
        where = one_line(folder)
        if self.leftovers:
            print(f"{where}: skipped {name_leftovers(self.leftovers)}")
        takes_any_audio = set(ALL_ENDINGS) <= set(self.suffixes)
        if self.others and takes_any_audio:
            text = f"skipped {count_of(len(self.others), 'file')} with other endings"
            print(f"{where}: {text}, {_count_endings(self.others)}")


def _count_endings(paths: Iterable[Path]) -> str:
    """Return the most frequent endings of file names with their numbers."""
    endings = Counter(path.suffix.lower() or "without ending" for path in paths)
    counts: list[str] = []
    for ending, count in endings.most_common(MAX_ENDINGS):
        counts.append(f"{count} {one_line(ending)}")
    if len(endings) > MAX_ENDINGS:
        counts.append("...")
    return ", ".join(counts)


def _entry(entry: os.DirEntry[str]) -> tuple[Path, str]:
    """Return path and kind; calls stat only for links."""
    try:
        if entry.is_dir():
            return Path(entry), "link to a folder" if entry.is_symlink() else "folder"
    except OSError:  # for example a link to itself
        pass
    return Path(entry), "file"


def _inode(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _file_fault(path: Path) -> str | None:
    try:
        require_file(path)
    except (ValueError, FileNotFoundError) as error:
        return str(error).replace(str(path), one_line(path))
    return None


def find_audio(folder: Path) -> tuple[dict[str, Path], LeftOut]:
    """Return (id -> audio file below `folder`, sorted; files left out). Ids are relative paths.

    Raise FileNotFoundError if there are none.
    """
    paths, left_out = walk(folder, ALL_ENDINGS)
    files: dict[str, Path] = {}
    for path in paths:
        name = make_id(path.relative_to(folder))
        if fault := id_fault(name, path, files):
            left_out[path] = fault
        else:
            files[name] = path
    refuse_nothing(folder, files, left_out)
    return files, left_out


def refuse_nothing(
    folder: Path,
    files: Mapping[str, Path],
    left_out: LeftOut,
    *,
    wanted: str = "wav or flac",
) -> None:
    """Raise FileNotFoundError, listing the files left out, if there are no usable files."""
    if not files:
        faults = Faults()
        for fault in left_out.values():
            faults.add("files that cannot be used", fault)
        remark = ""
        if left_out:
            remark = f" ({count_of(len(left_out), 'file')} cannot be used)"
        problem = (
            f"no recordings found{remark}" if folder.is_dir() else "no such folder"
        )
        verdict = f"{folder}: {problem}; give a folder with {wanted} files"
        raise FileNotFoundError(faults.report(verdict))


def make_id(name: Path | str) -> str:
    """Return a path as one word: blanks and control characters become '_'.

    Unicode is composed (NFC): macOS writes an accent as a character of its own, other systems do
    not, and both spellings of a name are one id.
    """
    composed = unicodedata.normalize("NFC", str(name))
    return re.sub(r"[\s\x00-\x1f\x7f]", "_", composed)


def id_fault(name: str, path: Path, files: Mapping[str, Path]) -> str | None:
    """Return why a file cannot get this id (taken, or not a valid name), or None."""
    if name in files:
        first = one_line(files[name].name)
        return f"{one_line(path)}: same id as {first}: {name}; rename one of them"
    return name_fault(name, path)


def write_set(
    folder: Path,
    *,
    wavs: Mapping[str, Path],
    speakers: Mapping[str, str] | None = None,
    trials: Mapping[str, Sequence[Trial]] | None = None,
    left_out: LeftOut | None = None,
    not_used: LeftOut | None = None,
    columns: Mapping[str, Mapping[str, str]] | None = None,
    enroll: Mapping[str, Sequence[str]] | None = None,
    about: Mapping[str, str] | None = None,
) -> None:
    """Write a data directory and print its counts.

    left_out: files that cannot be used. not_used: files that could be, but teach nothing; the
    limits of `speakerlab check` do not count them. Both go to rejected.tsv.
    """
    write_data_dir(
        folder,
        wavs=wavs,
        speakers=speakers,
        trials=trials,
        nameless=left_out,
        not_used=not_used,
        columns=columns,
        enroll=enroll,
        about=about,
    )
    counts = [count_of(len(wavs), "recording")]
    if speakers is not None:
        num_speakers = len(set(speakers.values()))
        counts = [count_of(num_speakers, "speaker"), count_of(len(wavs), "utterance")]
    for name, rows in (trials or {}).items():
        num_target = sum(same for _, _, same in rows)
        counts.append(
            f"{name} {num_target} target + {len(rows) - num_target} nontarget"
        )
    if enroll is not None:
        counts.append(count_of(len(enroll), "enrolment model"))
    print(f"{folder}: {', '.join(counts)}")


def write_noise_and_rooms(
    data: Path,
    *,
    noise: Path | None,
    rirs: Path | None,
    find_noise: Finder = find_audio,
    find_rooms: Finder = find_audio,
    sample_rate: int | None = None,
) -> None:
    """Write the data directories `noise` and `rirs`; remove old ones if a folder is None or NONE.

    sample_rate: recordings of another rate are converted to it; None: wav and flac files stay.
    Noise in the layout of MUSAN also gets a table of kinds (noise, music, speech). `find_noise` and
    `find_rooms` select the files (see noises.py), by default all.
    """
    for name, folder, find in (
        ("noise", noise, find_noise),
        ("rirs", rirs, find_rooms),
    ):
        if folder is not None and folder != NONE:
            wavs, left_out = find(folder)
            # Crops of noise and rooms are read at random.
            converted = data / f"{name}_wav"
            num_jobs = len(os.sched_getaffinity(0))
            if sample_rate is None:
                wavs, broken = convert_coded(wavs, converted, num_jobs=num_jobs)
            else:
                wavs, broken = convert_all(
                    wavs, converted, num_jobs=num_jobs, sample_rate=sample_rate
                )
            left_out |= broken
            write_set(data / name, wavs=wavs, left_out=left_out)
            if name == "noise":
                write_kinds(data / name, wavs)
        elif (data / name / "wav.scp").exists():
            shutil.rmtree(data / name)


def write_kinds(folder: Path, wavs: Iterable[str]) -> None:
    """Write the kind of each recording if any id begins with a folder of MUSAN.

    Recordings elsewhere count as noise. One folder is enough: MUSAN may be used without its speech.
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
            f"{where}: speaker {speaker} is in train and test; remove one of the two",
        )
    faults.raise_if_any(f"{where}: training and test overlap")
