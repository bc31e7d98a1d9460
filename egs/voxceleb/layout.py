"""Where the utterances of VoxCeleb lie: a folder a speaker, wherever they were unpacked.

In: a folder that holds VoxCeleb1 and VoxCeleb2 in any of the usual layouts. Out: utterance -> file,
by part of the corpus. An utterance is `<speaker>/<video>/<number>.wav`, as in the official trial
lists, whatever its file ends in.

Whose a speaker is follows from the id: VoxCeleb1 counts from id10001, VoxCeleb2 below that
(vox1_meta.csv, vox2_meta.csv); the 40 test speakers of VoxCeleb1 are id10270 to id10309 (column Set
of vox1_meta.csv). VoxCeleb2 has a test part of its own, which nothing here uses: it lies below a
folder named test.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from egs.common.corpus import LeftOut, walk
from speakerlab.data.files import one_line

SPEAKER = re.compile(r"id\d{5}")
FIRST_OF_VOX1, LAST_OF_VOX1 = "id10001", "id11251"  # 1,251 speakers, counted through
TEST_OF_VOX1 = ("id10270", "id10309")
MAX_DEPTH = 5  # of folders above those of speakers
# Better first: what was converted is read rather than what it was made from.
SUFFIXES = (".wav", ".flac", ".m4a")


@dataclass
class Part:
    """One of the three parts: utterance -> file, and how many speakers' folders there are."""

    wavs: dict[str, Path] = field(default_factory=dict)
    empty: list[Path] = field(default_factory=list)  # folders of speakers without a recording

    @property
    def speakers(self) -> dict[str, str]:
        return {utterance: utterance.split("/")[0] for utterance in self.wavs}


PARTS = ("vox1_test", "vox1_dev", "vox2_dev")


def is_speaker(name: str) -> bool:
    """Whether VoxCeleb has a speaker of this name, as far as names tell."""
    return SPEAKER.fullmatch(name) is not None and name <= LAST_OF_VOX1


def part_of(speaker: str) -> str:
    """The part of the corpus that a speaker belongs to."""
    if speaker < FIRST_OF_VOX1:
        return "vox2_dev"
    return "vox1_test" if TEST_OF_VOX1[0] <= speaker <= TEST_OF_VOX1[1] else "vox1_dev"


def find_roots(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Folders that hold folders of speakers; what is being unpacked begins with a dot."""
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    if any(SPEAKER.fullmatch(name) for name in names):
        yield folder
    elif depth < MAX_DEPTH:
        for name in names:
            yield from find_roots(folder / name, depth + 1)


def find_parts(corpus: Path) -> tuple[dict[str, Part], LeftOut]:
    """(part -> its utterances, recordings that are none of them)."""
    parts = {name: Part() for name in PARTS}
    left_out: LeftOut = {}
    for root in find_roots(corpus) if corpus.is_dir() else ():
        of_test = "test" in root.relative_to(corpus).parts
        found, unusable = walk(root, SUFFIXES)
        left_out |= unusable
        heard: set[str] = set()
        for path in found:
            names = path.relative_to(root).parts
            heard.add(names[0])
            if len(names) != 3 or not is_speaker(names[0]):
                line = f"{one_line(path)}: is not <speaker>/<video>/<recording> below {root}, a"
                left_out[path] = (
                    f"{line} speaker being id00001 to {LAST_OF_VOX1}, got {'/'.join(names)}; "
                    "move it away"
                )
            elif not (of_test and part_of(names[0]) == "vox2_dev"):
                _add(parts[part_of(names[0])].wavs, path, names)
        silent = {entry.name for entry in root.iterdir() if is_speaker(entry.name)} - heard
        for name in sorted(silent):
            parts[part_of(name)].empty.append(root / name)
    return parts, left_out


def _add(wavs: dict[str, Path], path: Path, names: tuple[str, ...]) -> None:
    utterance = "/".join((*names[:2], path.stem + ".wav"))
    there = wavs.get(utterance)
    if there is None or _rank(path) < _rank(there):
        wavs[utterance] = path


def _rank(path: Path) -> int:
    return SUFFIXES.index(path.suffix.lower())
