"""Recordings below a folder, and what else is there."""

import os
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from speakerlab.core.leftovers import is_leftover, name_leftovers
from speakerlab.data.arrays import stable_hash
from speakerlab.data.audio import ALL_ENDINGS

MAX_ENDINGS = 4  # that are counted one by one in a line
# The first bytes of a file ._NAME, in which macOS keeps attributes of the file NAME.
APPLE_DOUBLE = b"\x00\x05\x16\x07"
# Leaves room for an ending, and for the name of a temporary file: most systems allow 255 bytes.
MAX_NAME_BYTES = 200
NUM_FIRST = 40  # characters of a longer name that are kept


@dataclass
class Listing:
    """Files below a folder: recordings, and others, which are only counted."""

    recordings: list[Path] = field(default_factory=list)  # sorted
    # Names of files and of whole folders.
    leftovers: list[str] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)  # of all other files

    def skipped(self) -> str:
        """Return what is no recording, in a few words; "" if there is nothing else."""
        parts: list[str] = []
        num_others = self.endings.total()
        if num_others:
            counts: list[str] = []
            for ending, count in self.endings.most_common(MAX_ENDINGS):
                counts.append(f"{count} {ending or 'without'}")
            if len(self.endings) > MAX_ENDINGS:
                counts.append("...")
            parts.append(f"files of other endings: {num_others} ({', '.join(counts)})")
        if self.leftovers:
            parts.append(name_leftovers(self.leftovers))
        return "; ".join(parts)


def list_recordings(folder: Path, endings: Collection[str] = ALL_ENDINGS) -> Listing:
    """List the files below a folder; links are followed, and a folder is read once.

    endings: of recordings, in lower case. Raises OSError if a folder cannot be read.
    """
    listing = Listing()
    seen: set[tuple[int, int]] = set()
    for here, folders, files in os.walk(folder, followlinks=True, onerror=_refuse):
        # A link may lead back to a folder above.
        stat = Path(here).stat()
        inode = (stat.st_dev, stat.st_ino)
        if inode in seen:
            folders.clear()
            continue
        seen.add(inode)
        skipped_folders = [name for name in folders if is_leftover(name)]
        # `os.walk` goes into what stays in this list.
        folders[:] = sorted(set(folders) - set(skipped_folders))
        for name in [*skipped_folders, *files]:
            lower = name.lower()
            if is_leftover(name):
                listing.leftovers.append(name)
            elif lower.endswith(tuple(endings)):
                listing.recordings.append(Path(here, name))
            else:
                _, ending = os.path.splitext(lower)  # noqa: PTH122
                listing.endings[ending] += 1
    listing.recordings.sort()
    return listing


def shorten(name: str) -> str:
    """Return an id as a relative path without ending, whose parts are short enough for files."""
    parts: list[str] = []
    for part in name.split("/"):
        if len(part.encode()) > MAX_NAME_BYTES:
            # The hash keeps names apart that begin alike.
            part = f"{part[:NUM_FIRST]}~{stable_hash(part):016x}"
        parts.append(part)
    return "/".join(parts)


def is_apple_double(path: Path) -> bool:
    """Return whether a file is ._NAME with the attributes of NAME, whatever its ending says."""
    if not path.name.startswith("._") or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(APPLE_DOUBLE)) == APPLE_DOUBLE


def _refuse(error: OSError) -> None:
    raise error
