"""The extraction of a data directory, divided into chunks that any number of jobs compute.

Which utterances form a chunk, and which of them share a forward pass, depends only on the data and
the model, so the result is bit-identical for any number of processes and hosts. Each finished chunk
is a separate table in `.<name>.parts/`, written atomically and reused after a restart if model and
data are still the same. The job that finds all chunks finished joins them.
"""

import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.config.embedder import Embedder
from speakerlab.core.atomic import alone
from speakerlab.data.manifest import Manifest, Piece
from speakerlab.data.treatments import UNTREATED, Treatment
from speakerlab.inference.batches import group_pieces, utterance_pieces
from speakerlab.scoring.embeddings import EmbeddingTable

log = logging.getLogger(__name__)
NUM_CHUNKS = 256  # of large data; a chunk is what a kill loses, and what a process takes at a time
MIN_CHUNK_SECONDS = 60.0  # of audio
MAX_CHUNK_SECONDS = 1200.0
POLL_SECONDS = 1.0
SECONDS_PER_LINE = 60.0


@dataclass(frozen=True)
class Extraction:
    """Chunks of a data directory, the model that embeds them, and where the table is written."""

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
        return list(range(job[0] - 1, len(self.chunks), job[1]))

    def ids(self, chunk: int | None = None) -> list[str]:
        """Return the utterances of a chunk in the order of its batches; by default of the table."""
        batches = [range(len(self.pieces))] if chunk is None else self.chunks[chunk]
        pieces = (self.pieces[row] for rows in batches for row in rows)
        return [piece.manifest.ids[piece.row] for piece in pieces]

    def read(self, chunk: int | None = None) -> EmbeddingTable | None:
        """Read the table of a chunk, or the finished one.

        None if it is missing, damaged, or of another model, other settings or other utterances.
        """
        try:
            table = EmbeddingTable.load(self.stem if chunk is None else self.part(chunk))
        except (ValueError, OSError, EOFError):  # a truncated file raises one of these
            return None
        same_model = table.model_sha256 == self.model_sha256 and dict(table.facts) == self.facts
        return table if same_model and table.ids == self.ids(chunk) else None

    def save_part(self, chunk: int, emb_ND: np.ndarray) -> None:
        """Write the embeddings of a chunk; ValueError if one is not finite."""
        table = EmbeddingTable(self.ids(chunk), emb_ND, self.model_sha256, self.facts)
        with self.alone():
            table.save(self.part(chunk))

    def alone(self) -> AbstractContextManager[None]:
        """Keep other processes from writing, deleting or joining tables meanwhile."""
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        return alone(self.stem.with_name(f".{self.stem.name}.lock"))

    def todo(self, job: tuple[int, int]) -> list[int] | None:
        """Return the chunks that job I of N still has to compute, None if the table is finished.

        Deletes tables of another model and damaged ones, so that none is taken for finished.
        """
        with self.alone():
            if self.read() is not None:
                return None
            Path(f"{self.stem}.json").unlink(missing_ok=True)
            todo = [chunk for chunk in self.of_job(job) if self.read(chunk) is None]
            for chunk in todo:
                Path(f"{self.part(chunk)}.json").unlink(missing_ok=True)
        return todo

    def join(self) -> list[int]:
        """Join the chunks into the table; return those that are missing, none if it is finished."""
        with self.alone():
            if self.read() is None:
                tables = [self.read(chunk) for chunk in range(len(self.chunks))]
                missing = [chunk for chunk, table in enumerate(tables) if table is None]
                if missing:
                    return missing
                for path in self.stem.parent.glob(f".{self.stem.name}.*.partial"):
                    path.unlink(missing_ok=True)  # of a process that was killed while joining
                parts = [table.emb_ND for table in tables if table is not None]
                rows = [row for chunk in self.chunks for rows in chunk for row in rows]
                emb_ND = np.concatenate(parts)[np.argsort(rows)]
                EmbeddingTable(self.ids(), emb_ND, self.model_sha256, self.facts).save(self.stem)
            shutil.rmtree(self.parts, ignore_errors=True)
        return []

    def wait(self, num_jobs: int, *, minutes: float) -> None:
        """Wait for the other jobs; join the chunks once all are finished.

        Raises ValueError, naming the jobs whose chunks are missing, if no chunk was finished for
        that many minutes.
        """
        changed_at = logged_at = time.monotonic()
        seen: list[int] = []
        while True:
            finished = {path.stem for path in self.parts.glob("*.json")}
            chunks = range(len(self.chunks))
            missing = [chunk for chunk in chunks if self.part(chunk).name not in finished]
            if not missing or Path(f"{self.stem}.json").exists():
                missing = self.join()
            if not missing:
                return
            now = time.monotonic()
            if missing != seen:
                seen, changed_at = missing, now
            remain = f"{len(missing)} of {len(chunks)} chunks of {name_jobs(missing, num_jobs)}"
            if now - changed_at >= 60 * minutes:
                raise ValueError(
                    f"{self.stem}: no chunk was finished for {minutes:g} minutes, {remain} are "
                    "missing; check their hosts, then run the same command on each again (finished "
                    "chunks are kept)"
                )
            if now - logged_at >= SECONDS_PER_LINE:
                logged_at = now
                log.info("%s: waiting for %s", self.stem, remain)
            time.sleep(POLL_SECONDS)


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
    """Divide the utterances of a manifest, or the first `per_speaker` of each speaker, into chunks.

    A manifest is sorted by the hash of its ids. treatment: of every utterance.
    """
    facts = {**facts, "data_sha256": manifest.sha256()}
    pieces = treatment.apply(utterance_pieces(manifest))
    if treatment.name:
        facts["treatment"] = treatment.name
    if per_speaker is not None:
        facts["per_speaker"] = per_speaker
        number = defaultdict[int, count](count)  # of the next utterance of a speaker
        speakers = manifest.speaker_N.tolist()
        pieces = [p for p, s in zip(pieces, speakers) if next(number[s]) < per_speaker]
    if not pieces:
        raise ValueError(f"{stem.parent.name}: has no utterances to embed; run stage 1 again")
    batches = list(group_pieces(embedder, pieces))
    seconds = [sum(pieces[row].num_samples for row in b) / manifest.sample_rate for b in batches]
    chunks = [batches[first:end] for first, end in chunk_bounds(seconds)]
    return Extraction(stem, pieces, chunks, model_sha256, facts)


def chunk_bounds(seconds: Sequence[float]) -> list[tuple[int, int]]:
    """Return (first batch, end) of each chunk, given the audio of each batch."""
    size = min(max(sum(seconds) / NUM_CHUNKS, MIN_CHUNK_SECONDS), MAX_CHUNK_SECONDS)
    bounds, first, filled = [], 0, 0.0
    for end, of_batch in enumerate(seconds, start=1):
        filled += of_batch
        if filled >= size or end == len(seconds):
            bounds.append((first, end))
            first, filled = end, 0.0
    return bounds


def name_jobs(chunks: Sequence[int], num_jobs: int) -> str:
    """Name the jobs that chunks belong to: "job 2 of 4", "jobs 2 and 3 of 4"."""
    *others, last = [str(job) for job in sorted({chunk % num_jobs + 1 for chunk in chunks})]
    jobs = f"jobs {', '.join(others)} and {last}" if others else f"job {last}"
    return f"{jobs} of {num_jobs}"
