"""Extraction of a data directory in chunks, computed by any number of jobs.

Which utterances form a chunk, and which of them share a forward pass, depends only on the data and
the model, so the result is bit-identical for any number of processes and hosts. Each finished chunk
is a separate table in `.<name>.parts/`, written atomically and reused after a restart if model and
data are still the same. The job that finds all chunks finished joins them.
"""

import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.core.atomic import locked
from speakerlab.data.manifest import Manifest, Piece, is_other_audio
from speakerlab.data.treatments import UNTREATED, Treatment
from speakerlab.embedder import Embedder
from speakerlab.inference.batches import group_pieces
from speakerlab.scoring.embeddings import EmbeddingTable

log = logging.getLogger(__name__)
# Of large data. A process takes one chunk at a time; a killed process loses at most that chunk.
NUM_CHUNKS = 256
MIN_CHUNK_SECONDS = 60.0  # of audio
MAX_CHUNK_SECONDS = 1200.0
POLL_SECONDS = 1.0
SECONDS_PER_LINE = 60.0


@dataclass(frozen=True)
class Extraction:
    """Chunks of a data directory, facts about the model, and the path of the table."""

    stem: Path  # of the finished table
    pieces: Sequence[Piece]
    chunks: Sequence[Sequence[list[int]]]  # the batches of each, as indices of pieces
    model_sha256: str
    facts: dict[str, Any]

    @property
    def parts(self) -> Path:
        """Return the folder of the finished chunks."""
        return self.stem.with_name(f".{self.stem.name}.parts")

    def part(self, chunk: int) -> Path:
        """Return the path of a chunk's table, without endings."""
        return self.parts / f"{chunk:05d}"

    def of_job(self, job: tuple[int, int]) -> list[int]:
        """Return the chunks of job I of N."""
        number, num_jobs = job  # counted from 1
        # Every N-th chunk: batches are sorted by length, so each job gets long and short ones.
        first_chunk = number - 1
        chunks = range(len(self.chunks))
        return list(chunks[first_chunk::num_jobs])

    def ids(self, chunk: int | None = None) -> list[str]:
        """Return the utterances of a chunk in the order of its batches (None: of the table)."""
        rows: Iterable[int] = range(len(self.pieces))
        if chunk is not None:
            rows = chain.from_iterable(self.chunks[chunk])
        ids: list[str] = []
        for row in rows:
            piece = self.pieces[row]
            ids.append(piece.manifest.ids[piece.row])
        return ids

    def read(self, chunk: int | None = None) -> EmbeddingTable | None:
        """Read the table of a chunk (None: the finished table).

        Return None if it is missing, damaged, or of another model, other settings or utterances.
        """
        stem = self.stem if chunk is None else self.part(chunk)
        try:
            table = EmbeddingTable.load(stem)
        except (ValueError, OSError, EOFError):  # a truncated file raises one of these
            return None
        is_current = (
            table.model_sha256 == self.model_sha256
            and self._has_same_facts(table)
            and table.ids == self.ids(chunk)
        )
        return table if is_current else None

    def _has_same_facts(self, table: EmbeddingTable) -> bool:
        """Return whether a table was made in the same way, from the same audio."""
        table_facts = dict(table.facts)
        facts = dict(self.facts)
        # The audio is compared only where it is known.
        table_audio = table_facts.pop("audio", None)
        audio = facts.pop("audio", None)
        if is_other_audio(table_audio, audio):
            return False
        return table_facts == facts

    def save_part(self, chunk: int, emb_ND: np.ndarray) -> None:
        """Write the embeddings of a chunk; ValueError if one is not finite."""
        table = EmbeddingTable(
            self.ids(chunk),
            emb_ND,
            self.model_sha256,
            self.facts,
        )
        # Another job may be joining the chunks or deleting tables of another model.
        with self.locked():
            table.save(self.part(chunk))

    def locked(self) -> AbstractContextManager[object]:
        """Return a lock, under which no other process writes, deletes or joins tables."""
        folder = self.stem.parent
        folder.mkdir(parents=True, exist_ok=True)
        return locked(folder / f".{self.stem.name}.lock")

    def todo(self, job: tuple[int, int]) -> list[int] | None:
        """Return the chunks that job I of N still has to compute, None if the table is finished.

        Delete damaged tables and tables of another model, so that they do not count as finished.
        """
        # Without the lock, because a finished table may be in a folder that cannot be written.
        if self.read() is not None:
            return None
        with self.locked():
            # Another job may have joined the chunks.
            if self.read() is not None:
                return None
            # Without its .json, a table counts as missing.
            Path(f"{self.stem}.json").unlink(missing_ok=True)
            todo: list[int] = []
            for chunk in self.of_job(job):
                if self.read(chunk) is None:
                    Path(f"{self.part(chunk)}.json").unlink(missing_ok=True)
                    todo.append(chunk)
        return todo

    def join(self) -> list[int]:
        """Join the chunks into the table; return the missing chunks, [] if it is finished."""
        with self.locked():
            # Another job may have joined them.
            if self.read() is None:
                missing: list[int] = []
                embeddings: list[np.ndarray] = []
                for chunk in range(len(self.chunks)):
                    table = self.read(chunk)
                    if table is None:
                        missing.append(chunk)
                    else:
                        embeddings.append(table.emb_ND)
                if missing:
                    return missing
                self._save_joined(embeddings)
            shutil.rmtree(self.parts, ignore_errors=True)
        return []

    def _save_joined(self, embeddings: Sequence[np.ndarray]) -> None:
        """Write the finished table, given the embeddings of each chunk."""
        # Remove leftovers of a process that was killed while joining.
        for path in self.stem.parent.glob(f".{self.stem.name}.*.partial"):
            path.unlink(missing_ok=True)

        # Chunks are in the order of their batches, the table in the order of the data.
        rows: list[int] = []
        for chunk in self.chunks:
            for batch in chunk:
                rows += batch
        # argsort inverts the permutation: where the chunks have the rows 2, 0 and 1 of the data,
        # these rows in order are at the places 1, 2 and 0.
        in_chunk_order_ND = np.concatenate(embeddings)
        place_of_row = np.argsort(rows)
        emb_ND = in_chunk_order_ND[place_of_row]
        joined = EmbeddingTable(
            self.ids(),
            emb_ND,
            self.model_sha256,
            self.facts,
        )
        joined.save(self.stem)

    def wait(self, num_jobs: int, *, minutes: float) -> None:
        """Wait for the other jobs; join the chunks once all are finished.

        Raises ValueError, naming the jobs whose chunks are missing, if no chunk was finished for
        that many minutes.
        """
        changed_at = time.monotonic()
        logged_at = changed_at
        previously_missing: list[int] = []
        while True:
            missing = self._chunks_without_file()
            # Another job may have joined the chunks, and removed them.
            if not missing or Path(f"{self.stem}.json").exists():
                missing = self.join()
            if not missing:
                return
            # A finished chunk shows that the other jobs are running, so the timeout starts again.
            now = time.monotonic()
            if missing != previously_missing:
                previously_missing = missing
                changed_at = now
            remain = (
                f"{len(missing)} of {len(self.chunks)} chunks of"
                f" {name_jobs(missing, num_jobs)}"
            )
            if now - changed_at >= 60 * minutes:
                raise ValueError(
                    f"{self.stem}: no chunk was finished for {minutes:g} minutes,"
                    f" {remain} are missing; check their hosts, then run the same"
                    " command on each again (finished chunks are kept)"
                )
            if now - logged_at >= SECONDS_PER_LINE:
                logged_at = now
                log.info("%s: waiting for %s", self.stem, remain)
            time.sleep(POLL_SECONDS)

    def _chunks_without_file(self) -> list[int]:
        """Return the chunks that no job has written, by the names of files alone."""
        written = {path.stem for path in self.parts.glob("*.json")}
        missing: list[int] = []
        for chunk in range(len(self.chunks)):
            name = self.part(chunk).name
            if name not in written:
                missing.append(chunk)
        return missing


def plan_extraction(
    stem: Path,
    manifest: Manifest,
    embedder: Embedder,
    *,
    model_sha256: str,
    facts: dict[str, Any],
    per_speaker: int | None = None,
    treatment: Treatment = UNTREATED,
) -> Extraction:
    """Divide the utterances of a manifest into chunks.

    per_speaker: take only the first utterances of each speaker, in the order of the manifest, which
    is sorted by the hash of the ids. treatment: applied to every utterance.
    """
    # A finished chunk is reused only if it has the same `facts`.
    facts = dict(facts)
    facts["data_sha256"] = manifest.sha256()
    facts["audio"] = manifest.audio_digest()
    whole_pieces = manifest.pieces()
    pieces = treatment.apply(whole_pieces)
    if treatment.name:
        facts["treatment"] = treatment.name
    if per_speaker is not None:
        facts["per_speaker"] = per_speaker
        speakers = manifest.speaker_N.tolist()
        pieces = _first_of_each(pieces, speakers, per_speaker)
    if not pieces:
        raise ValueError(
            f"{stem.parent.name}: has no utterances to embed; see its rejected.tsv"
        )
    batches = list(group_pieces(embedder, pieces))
    seconds: list[float] = []  # of audio in each batch
    for batch in batches:
        lengths = [pieces[row].num_samples for row in batch]
        seconds.append(sum(lengths) / manifest.sample_rate)
    bounds = chunk_bounds(seconds)
    chunks = [batches[first:end] for first, end in bounds]
    return Extraction(
        stem=stem,
        pieces=pieces,
        chunks=chunks,
        model_sha256=model_sha256,
        facts=facts,
    )


def _first_of_each(
    pieces: Sequence[Piece], speakers: Sequence[int], per_speaker: int
) -> list[Piece]:
    """Return the first `per_speaker` pieces of each speaker, given the speaker of each piece."""
    num_pieces = Counter[int]()  # so far, of a speaker
    chosen: list[Piece] = []
    for piece, speaker in zip(pieces, speakers):
        if num_pieces[speaker] < per_speaker:
            chosen.append(piece)
        num_pieces[speaker] += 1
    return chosen


def chunk_bounds(seconds: Sequence[float]) -> list[tuple[int, int]]:
    """Return (first batch, end) of each chunk; seconds: of audio in each batch.

    A chunk ends with the batch that fills it: where it takes 60 s, batches of 40, 30, 50 and 20 s
    make the chunks (0, 2) and (2, 4).
    """
    chunk_seconds = sum(seconds) / NUM_CHUNKS
    chunk_seconds = max(chunk_seconds, MIN_CHUNK_SECONDS)
    chunk_seconds = min(chunk_seconds, MAX_CHUNK_SECONDS)
    bounds: list[tuple[int, int]] = []
    first = 0
    filled_seconds = 0.0
    for end, batch_seconds in enumerate(seconds, start=1):
        filled_seconds += batch_seconds
        is_last = end == len(seconds)
        if is_last or filled_seconds >= chunk_seconds:
            bounds.append((first, end))
            first = end
            filled_seconds = 0.0
    return bounds


def name_jobs(chunks: Sequence[int], num_jobs: int) -> str:
    """Name the jobs that chunks belong to: "job 2 of 4", "jobs 2 and 3 of 4"."""
    # The same division as in `of_job`.
    numbers = sorted({chunk % num_jobs + 1 for chunk in chunks})
    *others, last = map(str, numbers)
    if not others:
        return f"job {last} of {num_jobs}"
    return f"jobs {', '.join(others)} and {last} of {num_jobs}"
