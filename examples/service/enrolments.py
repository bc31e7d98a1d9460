"""Enrolled speakers in SQLite, shared by all workers.

Each row has the sha256 of the model that made its embedding. A database with speakers of another
model is refused: their embeddings cannot be compared. Letters: D embedding dimensions.
"""

import sqlite3
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.service.database import Database
from examples.service.names import look_of

SCHEMA = """
CREATE TABLE IF NOT EXISTS speakers (
    model_sha256 TEXT NOT NULL,
    name TEXT NOT NULL,
    embedding BLOB NOT NULL,  -- unit vector, float32, little-endian
    num_recordings INTEGER NOT NULL,
    seconds REAL NOT NULL,  -- of audio
    enrolled_at REAL NOT NULL,  -- seconds since 1970
    PRIMARY KEY (model_sha256, name)
)
"""


class SpeakerRow(NamedTuple):
    """Enrolled speaker, without the embedding."""

    name: str
    num_recordings: int
    seconds: float
    enrolled_at: float


class TooManySpeakers(Exception):
    """The database has its maximum of speakers."""


class LooksAlike(ValueError):
    """A speaker is enrolled whose name looks like the new one."""


class Enrolments:
    """Speakers of one model; threads and processes may use the same database."""

    def __init__(
        self, path: Path, *, model_sha256: str, embed_dim: int, max_speakers: int
    ) -> None:
        """Open the database; raise ValueError if it has speakers of another model."""
        self.path = path
        self.model_sha256 = model_sha256
        self.embed_dim = embed_dim
        self.max_speakers = max_speakers
        self.database = Database(path, SCHEMA)
        self._embeddings: dict[str, np.ndarray] = {}
        self._version: tuple[int, int] | None = None
        self._refuse_other_model()

    def add(
        self, name: str, unit_D: np.ndarray, *, num_recordings: int, seconds: float
    ) -> bool:
        """Store a speaker, in place of one of the same name; return whether there was one.

        On return, the speaker is on the disk and other workers see it. Raises TooManySpeakers, and
        LooksAlike.
        """
        row = (
            self.model_sha256,
            name,
            unit_D.astype("<f4").tobytes(),
            num_recordings,
            seconds,
            time.time(),
        )
        with self.database.transaction() as connection:
            names = {
                name for (name,) in connection.execute("SELECT name FROM speakers")
            }
            is_enrolled = name in names
            if not is_enrolled:
                _refuse_look(name, names)
                if len(names) >= self.max_speakers:
                    raise TooManySpeakers
            connection.execute("REPLACE INTO speakers VALUES (?, ?, ?, ?, ?, ?)", row)
        return is_enrolled

    def remove(self, name: str) -> bool:
        """Delete a speaker; return whether there was one."""
        with self.database.transaction() as connection:
            deleted = connection.execute("DELETE FROM speakers WHERE name = ?", (name,))
        self.database.forget_deleted()
        return deleted.rowcount > 0

    def count(self) -> int:
        (number,) = self.database.fetch_one("SELECT COUNT(*) FROM speakers")
        return number

    def rows(self, *, after: str, limit: int) -> list[SpeakerRow]:
        """Return speakers in order of name, from the first behind `after`."""
        found = self.database.fetch_all(
            "SELECT name, num_recordings, seconds, enrolled_at FROM speakers"
            " WHERE model_sha256 = ? AND name > ? ORDER BY name LIMIT ?",
            (self.model_sha256, after, limit),
        )
        return [SpeakerRow(*row) for row in found]

    def embeddings(self) -> Mapping[str, np.ndarray]:
        """Return name -> unit_D of all speakers, also those that other workers enrolled."""
        with self.database.connected() as connection:
            # The first number changes with commits of other connections, the second with our own.
            (data_version,) = connection.execute("PRAGMA data_version").fetchone()
            version = (data_version, connection.total_changes)
            if version != self._version:
                self._embeddings = self._read_embeddings(connection)
                self._version = version
            return self._embeddings

    def _read_embeddings(self, connection: sqlite3.Connection) -> dict[str, np.ndarray]:
        embeddings: dict[str, np.ndarray] = {}
        found = connection.execute(
            "SELECT name, embedding FROM speakers WHERE model_sha256 = ? ORDER BY name",
            (self.model_sha256,),
        )
        for name, content in found:
            unit_D = np.frombuffer(content, dtype="<f4")
            if unit_D.shape != (self.embed_dim,):
                raise sqlite3.DatabaseError(
                    f"{self.path}: {name!r} has {len(unit_D)} dimensions, not"
                    f" {self.embed_dim}; delete and enrol the speaker again"
                )
            embeddings[name] = unit_D
        return embeddings

    def _refuse_other_model(self) -> None:
        found = self.database.fetch_one(
            "SELECT model_sha256, COUNT(*) FROM speakers WHERE model_sha256 != ?"
            " GROUP BY model_sha256",
            (self.model_sha256,),
        )
        if found is not None:
            other, number = found
            raise ValueError(
                f"{self.path}: has {number} speakers of model {other[:12]}, not of"
                f" {self.model_sha256[:12]} (sha256); start that model, or choose"
                " another folder and enrol the speakers again"
            )


def _refuse_look(name: str, enrolled: Iterable[str]) -> None:
    look = look_of(name)
    for other in enrolled:
        if look_of(other) == look:
            raise LooksAlike(
                f"name: looks like {other!r}, who is enrolled; use that name, or one"
                " that differs in more than capitals and forms of letters"
            )
