"""The audio that a comparison is made with: its options, and data directories of it.

In: folders of recordings, noises and rooms (--audio --noise --rirs); what is not named is taken
from where this project keeps a small corpus, and is synthetic where there is none. Out: what
data_corpus.py writes, and a sentence on it.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sides import ROOT, environment

HERE = Path(__file__).parent
SHARED = ROOT.parent / "shared/data"
DEFAULTS = {"audio": "librispeech-mini/train-clean-100", "noise": "noise", "rirs": "rirs"}
SOURCES = ("flac", "wav", "shard")
AUGMENTED = 0.8  # of the crops; as 3D-Speaker's aug_prob
PROB = 1 - (1 - AUGMENTED) ** 0.5  # of a room, and of noise


@dataclass(frozen=True)
class Speech:
    """What was found, or made."""

    name: str
    utterances: int
    speakers: int
    seconds: float  # of an utterance, on average

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.utterances} recordings of {self.speakers} speakers, "
            f"{self.seconds:.1f} s on average"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--audio`, `--noise`, `--rirs` and `--utterance-seconds`."""
    parser.add_argument("--audio", type=Path, help="flac files in a folder for each speaker")
    parser.add_argument("--noise", type=Path, help="a folder of noises")
    parser.add_argument("--rirs", type=Path, help="a folder of room impulse responses")
    parser.add_argument("--utterance-seconds", type=float, help="cut recordings to this length")


def settle(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    defaults: Mapping[str, str] = DEFAULTS,
) -> None:
    """Refuse folders that are none; take the defaults where they are."""
    for name, default in defaults.items():
        given = getattr(options, name)
        if given is not None and not given.is_dir():
            parser.error(f"--{name}: must be a folder, got {given}")
        if given is None and (SHARED / default).is_dir():
            setattr(options, name, SHARED / default)


def make(
    folder: Path, options: argparse.Namespace, *, crop_seconds: float, sources: Sequence[str]
) -> Speech:
    """Fill the folder with data directories (data_corpus.py), packed if `shard` is a source."""
    words = [f"--folder={folder}", f"--crop-seconds={crop_seconds}"]
    for name in ("audio", "noise", "rirs", "utterance_seconds"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}={value}"]
    words += ["--pack"] if "shard" in sources else []
    command = [sys.executable, str(HERE / "data_corpus.py"), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment(ROOT, 1))
    if done.returncode:
        raise SystemExit("speech.py: there is nothing to measure with; see above")
    facts = json.loads(done.stdout.splitlines()[-1])
    return Speech("synthetic" if options.audio is None else str(options.audio), **facts)


def warm(folder: Path) -> None:
    """Bring every file into the system's cache."""
    scps = (folder / source / "wav.scp" for source in SOURCES)
    loose = (line.split(maxsplit=1)[1] for scp in scps for line in scp.read_text().splitlines())
    for path in {*map(Path, loose), *(path for path in folder.rglob("*") if path.is_file())}:
        path.read_bytes()
