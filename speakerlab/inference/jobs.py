"""An extraction as chunks of work. In: a model, a data directory. Out: one table of embeddings.

Which utterances make a chunk, and which of them share a forward pass, follows from the data and the
model alone. So any number of processes and hosts gives the same bits, and what was killed goes on:
each chunk is a table of its own in `.<name>.parts/`, written whole, and kept where it was made by
this model from these data. Whoever finds all chunks there joins them.
"""

import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.config.embedder import Embedder
from speakerlab.core.atomic import alone
from speakerlab.data.manifest import Manifest
from speakerlab.data.pieces import Stretch
from speakerlab.inference.batches import group_pieces, utterance_pieces
from speakerlab.scoring.embeddings import EmbeddingTable

log = logging.getLogger(__name__)
CHUNKS = 256  # of data that are large enough: what is lost by a kill, and handed to a process
MIN_CHUNK_SECONDS = 60.0  # of audio
MAX_CHUNK_SECONDS = 1200.0
POLL_SECONDS = 1.0
SECONDS_PER_LINE = 60.0


@dataclass(frozen=True)
class Extraction:
    """All that is to be embedded, by which model, and where it goes."""

    stem: Path  # of the finished table
    pieces: Sequence[Stretch]
    chunks: Sequence[Sequence[list[int]]]  # the batches of each, as indices of pieces
    model_sha256: str
    facts: dict[str, Any]

    @cached_property
    def ids(self) -> list[str]:
        """Of all utterances, in the order of the table."""
        return [piece.manifest.ids[piece.row] for piece in self.pieces]

    @property
    def parts(self) -> Path:
        """The folder of the chunks."""
        return self.stem.with_name(f".{self.stem.name}.parts")

    def part(self, chunk: int) -> Path:
        """Where the table of a chunk is, without endings."""
        return self.parts / f"{chunk:05d}"

    def of_job(self, job: tuple[int, int]) -> list[int]:
        """The chunks of job I of N."""
        return list(range(job[0] - 1, len(self.chunks), job[1]))

    def load(self, stem: Path, wanted: Sequence[str]) -> EmbeddingTable | None:
        """The table of just these utterances by this model; None where there is none, or half."""
        try:
            table = EmbeddingTable.load(stem)
        except (ValueError, OSError, EOFError):  # a file that was cut is one of these
            return None
        same_model = table.model_sha256 == self.model_sha256 and dict(table.facts) == self.facts
        return table if same_model and table.ids == list(wanted) else None

    def load_part(self, chunk: int) -> EmbeddingTable | None:
        """The embeddings of a chunk, where they were finished."""
        return self.load(self.part(chunk), self.ids_of(chunk))

    def save_part(self, chunk: int, emb_ND: np.ndarray) -> None:
        """Keep what was computed of a chunk; ValueError where an embedding is not finite."""
        table = EmbeddingTable(self.ids_of(chunk), emb_ND, self.model_sha256, self.facts)
        table.save(self.part(chunk))

    def num_utterances(self, chunk: int) -> int:
        """How many a chunk has."""
        return sum(map(len, self.chunks[chunk]))

    def ids_of(self, chunk: int) -> list[str]:
        """In the order of the batches."""
        pieces = (self.pieces[row] for rows in self.chunks[chunk] for row in rows)
        return [piece.manifest.ids[piece.row] for piece in pieces]

    def is_done(self) -> bool:
        """Whether the whole table is there."""
        return self.load(self.stem, self.ids) is not None

    def alone(self) -> AbstractContextManager[None]:
        """While this lasts no other process removes or joins."""
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        return alone(self.stem.with_name(f".{self.stem.name}.lock"))


def plan_extraction(
    stem: Path,
    manifest: Manifest,
    embedder: Embedder,
    *,
    model_sha256: str,
    facts: dict[str, Any],
    per_speaker: int | None = None,
) -> Extraction:
    """All utterances of the manifest, or at most so many of each speaker.

    Of a speaker those are taken whose ids have the lowest hashes, whatever else there is.
    """
    facts = {**facts, "data_sha256": manifest.sha256()}
    pieces = utterance_pieces(manifest)
    if per_speaker is not None:
        facts["per_speaker"] = per_speaker
        pieces = [pieces[row] for row in first_rows(manifest.speaker_N, per_speaker)]
    if not pieces:
        raise ValueError(f"{stem.parent.name}: has no utterances to embed; run stage 1 again")
    batches = list(group_pieces(embedder, pieces))
    seconds = [sum(pieces[row].num_samples for row in b) / manifest.sample_rate for b in batches]
    chunks = [batches[first:end] for first, end in chunk_bounds(seconds)]
    return Extraction(stem, pieces, chunks, model_sha256, facts)


def first_rows(speaker_N: np.ndarray, per_speaker: int) -> list[int]:
    """The first rows of each speaker, rising; a manifest's rows are in the order of their hash."""
    order_N = np.argsort(speaker_N, kind="stable")
    ordered_N = speaker_N[order_N]
    rank_N = np.arange(len(ordered_N)) - np.searchsorted(ordered_N, ordered_N)
    return sorted(order_N[rank_N < per_speaker].tolist())


def chunk_bounds(seconds: Sequence[float]) -> list[tuple[int, int]]:
    """(first batch, end) of each chunk, given the audio of each batch; about CHUNKS of them."""
    size = min(max(sum(seconds) / CHUNKS, MIN_CHUNK_SECONDS), MAX_CHUNK_SECONDS)
    bounds, first, filled = [], 0, 0.0
    for index, of_batch in enumerate(seconds, start=1):
        filled += of_batch
        if filled >= size or index == len(seconds):
            bounds.append((first, index))
            first, filled = index, 0.0
    return bounds


def left_of_job(work: Extraction, job: tuple[int, int]) -> list[int] | None:
    """The chunks that job I of N has still to do; None where the whole table is there.

    What another model made, or was cut, is removed: nobody may take it for finished.
    """
    with work.alone():
        if work.is_done():
            return None
        _described(work.stem).unlink(missing_ok=True)
    left = [number for number in work.of_job(job) if work.load_part(number) is None]
    for number in left:
        _described(work.part(number)).unlink(missing_ok=True)
    return left


def join(work: Extraction) -> list[int]:
    """Make the table of all chunks; those that are not there yet, none where it is done.

    Raises ValueError naming utterances that no chunk has.
    """
    with work.alone():
        if not work.is_done():
            tables = [work.load_part(number) for number in range(len(work.chunks))]
            missing = [number for number, table in enumerate(tables) if table is None]
            if missing:
                return missing
            whole = [table for table in tables if table is not None]
            for path in work.stem.parent.glob(f".{work.stem.name}.*.partial"):
                path.unlink(missing_ok=True)  # of one that was killed while it joined
            EmbeddingTable.merge(whole, work.ids).save(work.stem)
        shutil.rmtree(work.parts, ignore_errors=True)
    return []


def wait_for_jobs(work: Extraction, num_jobs: int, *, minutes: float) -> None:
    """Return when the table is there; joins the chunks itself where all of them are.

    Raises ValueError, naming the jobs whose chunks are missing, when for so many minutes none came.
    """
    moved_at = told_at = time.monotonic()
    seen: set[str] = set()
    while missing := _missing(work):
        there = {path.name for path in work.parts.glob("*.json")}
        now = time.monotonic()
        if there != seen:
            seen, moved_at = there, now
        line = f"{len(missing)} of {len(work.chunks)} chunks of {name_jobs(missing, num_jobs)}"
        if now - moved_at >= 60 * minutes:
            raise ValueError(
                f"{work.stem}: nothing has come for {minutes:g} minutes, got {line} missing; look "
                "at those hosts, then run the same command on each again (finished chunks are kept)"
            )
        if now - told_at >= SECONDS_PER_LINE:
            told_at = now
            log.info("%s: waiting for %s", work.stem, line)
        time.sleep(POLL_SECONDS)


def _missing(work: Extraction) -> list[int]:
    """Chunks that are not there yet; where all seem to be, they are looked into and joined."""
    if not _described(work.stem).exists():
        there = {path.name for path in work.parts.glob("*.json")}
        numbers = range(len(work.chunks))
        missing = [number for number in numbers if _described(work.part(number)).name not in there]
        if missing:
            return missing
    return join(work)


def _described(stem: Path) -> Path:
    """The file that makes a table count."""
    return stem.with_name(f"{stem.name}.json")


def name_jobs(chunks: Sequence[int], num_jobs: int) -> str:
    """The jobs that chunks belong to: "job 2 of 4", "jobs 2 and 3 of 4"."""
    jobs = [str(job) for job in sorted({chunk % num_jobs + 1 for chunk in chunks})]
    if len(jobs) == 1:
        return f"job {jobs[0]} of {num_jobs}"
    return f"jobs {', '.join(jobs[:-1])} and {jobs[-1]} of {num_jobs}"
