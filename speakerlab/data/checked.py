"""Records of completed checks of data directories, beside their tables.

A directory has a record of the check of its headers and one of the check that decodes all audio,
because a recipe runs both. The inputs of a check are its options, all tables, the path, size and
time of every recording, and the files that were left out before the check (`NAMELESS` rows of
rejected.tsv). Its outputs are utt2dur and the other rows of rejected.tsv, except for utterances
that have a duration: `speakerlab pack` adds and removes these rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from speakerlab.core import done
from speakerlab.core.atomic import locked
from speakerlab.core.faults import Faults
from speakerlab.data.pack import LOCK
from speakerlab.data.tables import (
    NAMELESS,
    Rejection,
    list_tables,
    read_rejected,
    read_table,
)

HEADERS, DECODED = ".checked", ".decoded"
VERSION = 3  # of the rules of a check; a new version checks all directories again


@dataclass(frozen=True)
class CheckInputs:
    """Inputs of a check of data directories."""

    folders: Sequence[Path]
    contents: Sequence[str]  # one digest for each folder
    sample_rate: int
    decode: bool
    allow_rejected: float

    @classmethod
    def of(
        cls,
        folders: Sequence[Path],
        *,
        sample_rate: int,
        decode: bool,
        allow_rejected: float,
    ) -> "CheckInputs":
        """Read the tables, and the size and time of every recording."""
        return cls(
            folders=folders,
            contents=[content_digest(folder) for folder in folders],
            sample_rate=sample_rate,
            decode=decode,
            allow_rejected=allow_rejected,
        )

    def are_checked(self) -> bool:
        """Return whether all directories were checked with these inputs, together."""
        for folder, content in zip(self.folders, self.contents):
            inputs = self._record_of(folder, content)
            if not done.is_done(folder / self._name, inputs):
                return False
        return True

    def forget(self) -> None:
        """Remove the records of earlier checks of this kind, which may fail now."""
        for folder in self.folders:
            done.forget(folder / self._name)

    def record(self) -> None:
        """Record that the check has succeeded.

        A check that decodes also covers the headers: a record of the headers of the same content
        stays valid, and is updated for the tables that were just written.
        """
        for folder, content in zip(self.folders, self.contents):
            inputs = self._record_of(folder, content)
            done.record(folder / self._name, inputs)
            header_check = done.read_record(folder / HEADERS)
            is_same_content = header_check.get("content") == content
            is_same_rate = header_check.get("sample_rate") == str(self.sample_rate)
            if is_same_content and is_same_rate:
                header_check["written"] = str(inputs["written"])
                done.record(folder / HEADERS, header_check)

    @property
    def _name(self) -> str:
        """Return the name of the record of this kind of check."""
        return DECODED if self.decode else HEADERS

    def _record_of(self, folder: Path, content: str) -> dict[str, object]:
        return {
            "version": VERSION,
            "sample_rate": self.sample_rate,
            "allow_rejected": self.allow_rejected,
            "content": content,
            # A check of several directories also compares their speakers and utterances.
            "checked_together": done.digest(sorted(self.contents)),
            "written": written_digest(folder),
        }


def content_digest(folder: Path) -> str:
    """Return the SHA-256 of the tables and recordings that a check of one directory reads."""
    table_digests: list[tuple[str, str]] = []
    for name in list_tables(folder):
        digest = done.file_digest(folder / name)
        table_digests.append((name, digest))

    # Faults are dropped here, because the check itself reports bad lines.
    wavs = read_table(folder / "wav.scp", Faults())
    paths = list(wavs.values())
    stamped_paths = list(zip(paths, done.stamps(paths)))

    # Use only the rows of rejected.tsv that exist before a check; the check writes the other rows.
    nameless: list[tuple[str, Rejection]] = []
    rejected = read_rejected(folder)
    for name, row in rejected.items():
        is_nameless = name.startswith(NAMELESS)
        if is_nameless and name not in wavs:
            nameless.append((name, row))
    return done.digest(
        {
            "tables": table_digests,
            "recordings": stamped_paths,
            "nameless": sorted(nameless),
        }
    )


def written_digest(folder: Path) -> str:
    """Return the SHA-256 of the outputs of a check of one directory; "" if there are none."""
    path = folder / "utt2dur"
    if not path.is_file():
        return ""
    # Not `read_table`, which refuses a damaged line: a digest must be possible for any file.
    with_duration: set[str] = set()
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, _ = line.partition(" ")
            with_duration.add(name.strip())

    # Leave out rejected utterances with a duration: `speakerlab pack` adds and removes them.
    rows: list[tuple[str, Rejection]] = []
    rejected = read_rejected(folder)
    for name, row in rejected.items():
        if name not in with_duration:
            rows.append((name, row))
    return done.digest(
        {
            "utt2dur": done.file_digest(path),
            "rejected": sorted(rows),
        }
    )


@contextmanager
def check_alone(folders: Sequence[Path]) -> Iterator[bool]:
    """Keep other processes from checking or packing these directories; yield whether it waited."""
    lock_paths = {folder.resolve() / LOCK for folder in folders}
    with ExitStack() as locks:
        waited = False
        # Take the locks in a fixed order, so that two processes cannot deadlock.
        for path in sorted(lock_paths):
            waited |= locks.enter_context(locked(path))
        yield waited
