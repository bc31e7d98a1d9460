"""Find the utterances of VoxCeleb1 and VoxCeleb2 in any of the usual layouts.

There is one folder per speaker, at any depth. The id of an utterance is
`<speaker>/<video>/<number>.wav`, as in the official trial lists, for any suffix of the file.

The id of a speaker determines the part: VoxCeleb1 starts at id10001, VoxCeleb2 is below
(vox1_meta.csv, vox2_meta.csv); the 40 test speakers of VoxCeleb1 are id10270 to id10309 (column Set
of vox1_meta.csv). The test part of VoxCeleb2, in a folder named test, is not used.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from egs.common.corpus.prepare import LeftOut, walk
from speakerlab.core.leftovers import is_leftover
from speakerlab.data.audio import ENDINGS
from speakerlab.data.tables import one_line

SPEAKER = re.compile(r"id\d{5}")
FIRST_OF_VOX1, LAST_OF_VOX1 = "id10001", "id11251"  # 1,251 speakers without gaps
TEST_OF_VOX1 = ("id10270", "id10309")
MAX_DEPTH = 5  # of the folders above the speakers
# In order of preference: converted files before their sources.
PREFERRED = (*ENDINGS, ".m4a")


@dataclass
class Part:
    """One of the three parts of the corpus: utterance -> file."""

    wavs: dict[str, Path] = field(default_factory=dict)
    empty: list[Path] = field(
        default_factory=list
    )  # folders of speakers without a recording

    @property
    def speakers(self) -> dict[str, str]:
        return {utterance: utterance.split("/")[0] for utterance in self.wavs}


PARTS = ("vox1_test", "vox1_dev", "vox2_dev")


def is_speaker(name: str) -> bool:
    """Return whether a name is in the range of speaker ids."""
    return SPEAKER.fullmatch(name) is not None and name <= LAST_OF_VOX1


def part_of(speaker: str) -> str:
    """Return the part of the corpus of a speaker."""
    if speaker < FIRST_OF_VOX1:
        return "vox2_dev"
    return "vox1_test" if TEST_OF_VOX1[0] <= speaker <= TEST_OF_VOX1[1] else "vox1_dev"


def find_roots(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Yield folders that hold folders of speakers; hidden folders are still being unpacked."""
    with os.scandir(folder) as entries:
        names = sorted(
            entry.name
            for entry in entries
            if entry.is_dir() and not is_leftover(entry.name)
        )
    if any(SPEAKER.fullmatch(name) for name in names):
        yield folder
    elif depth < MAX_DEPTH:
        for name in names:
            yield from find_roots(folder / name, depth + 1)


def find_parts(corpus: Path) -> tuple[dict[str, Part], LeftOut]:
    """Return (part -> utterances, recordings outside the layout)."""
    parts = {name: Part() for name in PARTS}
    left_out: LeftOut = {}
    for root in find_roots(corpus) if corpus.is_dir() else ():
        of_test = "test" in root.relative_to(corpus).parts
        paths, unusable = walk(root, PREFERRED)
        left_out |= unusable
        heard: set[str] = set()
        for path in paths:
            names = path.relative_to(root).parts
            heard.add(names[0])
            if len(names) != 3 or not is_speaker(names[0]):
                line = (
                    f"{one_line(path)}: not <speaker>/<video>/<recording> below {root}"
                )
                left_out[path] = f"{line}, with speakers from id00001 to {LAST_OF_VOX1}"
            elif not (of_test and part_of(names[0]) == "vox2_dev"):
                _add(parts[part_of(names[0])].wavs, path, names)
        silent = {
            entry.name for entry in root.iterdir() if is_speaker(entry.name)
        } - heard
        for name in sorted(silent):
            parts[part_of(name)].empty.append(root / name)
    return parts, left_out


def _add(wavs: dict[str, Path], path: Path, names: tuple[str, ...]) -> None:
    """Add a file under its utterance; of the formats of an utterance, the best one counts."""
    speaker, video = names[:2]
    utterance = f"{speaker}/{video}/{path.stem}.wav"
    other = wavs.get(utterance)
    if other is None or _rank(path) < _rank(other):
        wavs[utterance] = path


def _rank(path: Path) -> int:
    return PREFERRED.index(path.suffix.lower())
