"""What every recipe's prepare.py shares: its options, its errors, and writing data directories.

In: folders of audio, tables of utterances and speakers. Out: Kaldi data directories under --data
and one printed line about each.
"""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from speakerlab.data.tables import Trial, write_data_dir
from speakerlab.faults import Faults

AUDIO_SUFFIXES = (".wav", ".flac")


def make_parser(description: str, *, corpus: Path) -> argparse.ArgumentParser:
    """The options that all prepare.py have; `corpus` is where the audio lies by default."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--corpus", type=Path, default=corpus, metavar="DIR", help="the audio")
    parser.add_argument("--data", type=Path, metavar="DIR", help="where data directories go")
    parser.add_argument("--noise", type=Path, metavar="DIR", help="noise recordings (wav, flac)")
    parser.add_argument("--rirs", type=Path, metavar="DIR", help="room impulse responses")
    parser.add_argument("--seed", type=int, default=1, help="of everything drawn (default 1)")
    parser.add_argument("--num-jobs", type=int, default=num_cpus or 1, metavar="N")
    parser.add_argument("--download", action="store_true", help="get the corpus, prepare nothing")
    return parser


def run(
    args: argparse.Namespace, *, download: Callable[[], None], prepare: Callable[[], None]
) -> int:
    """Download or prepare, as `args` says; the exit code. What is wrong goes to stderr in lines."""
    try:
        if not args.download and args.data is None:
            raise ValueError("--data: no folder given, got nothing; add --data DIR")
        if args.num_jobs < 1:
            raise ValueError(f"--num-jobs: must be at least 1, got {args.num_jobs}; raise it")
        (download if args.download else prepare)()
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def find_audio(folder: Path) -> dict[str, Path]:
    """Audio files below `folder`: id (the relative path, blanks as '_') -> file, sorted.

    Raises FileNotFoundError where there are none, ValueError where two files get one id.
    """
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in AUDIO_SUFFIXES or not path.is_file():
            continue
        name = re.sub(r"\s", "_", path.relative_to(folder).as_posix())
        if name in files:
            raise ValueError(f"{path}: has the id of {files[name]}, got {name}; rename one")
        files[name] = path
    if not files:
        got = "no .wav or .flac" if folder.is_dir() else "no folder"
        raise FileNotFoundError(f"{folder}: no audio found, got {got}; give a folder with some")
    return files


def write_set(
    folder: Path,
    *,
    wavs: Mapping[str, Path],
    speakers: Mapping[str, str] | None = None,
    trials: Mapping[str, Sequence[Trial]] | None = None,
) -> None:
    """Write one data directory and print a line about it."""
    write_data_dir(folder, wavs=wavs, speakers=speakers, trials=trials)
    counts = [f"{len(wavs)} recordings"]
    if speakers is not None:
        counts = [f"{len(set(speakers.values()))} speakers, {len(wavs)} utterances"]
    for name, rows in (trials or {}).items():
        num_target = sum(same for _, _, same in rows)
        counts.append(f"{name} {num_target} target + {len(rows) - num_target} nontarget")
    print(f"{folder}: {', '.join(counts)}")


def write_noise_and_rooms(data: Path, *, noise: Path | None, rirs: Path | None) -> None:
    """Write `noise/` and `rirs/` for the folders given, remove those of an earlier run."""
    for name, folder in (("noise", noise), ("rirs", rirs)):
        if folder is not None:
            write_set(data / name, wavs=find_audio(folder))
        elif (data / name / "wav.scp").exists():
            shutil.rmtree(data / name)


def check_disjoint(train: Iterable[str], test: Iterable[str], *, where: Path) -> None:
    """Raise ValueError if a speaker is in both sets."""
    faults = Faults()
    for speaker in sorted(set(train) & set(test)):
        faults.add(
            "speakers in both sets",
            f"{where}: a speaker is in train and test, got {speaker}; keep one of the two",
        )
    faults.raise_if_any(f"{where}: refused")
