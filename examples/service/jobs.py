"""Diarizations that take longer than a request: stored in SQLite, computed by a thread a worker.

A job is queued, running, then done or failed. Its worker renews a lease while it computes; a job
whose lease has ended, because its worker was killed, is started again. Recordings lie beside the
database until their job has ended.
"""

import json
import logging
import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from examples.service.database import PRIVATE_FOLDER, Database, private

log = logging.getLogger("service.jobs")
SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL CHECK (state IN ('queued', 'running', 'done', 'failed')),
    recording TEXT NOT NULL,  -- name that the client gave
    options TEXT NOT NULL,  -- JSON
    created_at REAL NOT NULL,  -- seconds since 1970, as all times
    finished_at REAL,
    owner TEXT,  -- worker that runs it
    leased_until REAL,
    attempts INTEGER NOT NULL DEFAULT 0,
    result TEXT,  -- JSON
    error TEXT
)
"""
POLL_SECONDS = 1.0
CLEAN_SECONDS = 60.0
# Until the next attempt, so that a fault does not fill the log.
FAULT_SECONDS = 10.0
# A recording without a job is being stored, or its worker was killed while it stored it.
ORPHAN_SECONDS = 600.0

# (path of the recording, its name, options) -> result; ValueError for a bad recording.
Compute = Callable[[Path, str, Mapping[str, Any]], Mapping[str, Any]]


class TooManyJobs(Exception):
    """As many jobs are queued or running as may be."""


@dataclass(frozen=True)
class Job:
    """State of a job."""

    id: str
    state: str
    recording: str
    created_at: float
    finished_at: float | None
    attempts: int
    result: Mapping[str, Any] | None
    error: str | None


class Jobs:
    """Queue of jobs that all workers share, and the thread that computes them in this one."""

    def __init__(
        self,
        folder: Path,
        *,
        max_jobs: int,
        max_attempts: int,
        lease_seconds: float,
        retention_seconds: float,
    ) -> None:
        self.recordings = folder / "recordings"
        self.database = Database(folder / "jobs.sqlite", SCHEMA)
        self.recordings.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        self.max_jobs = max_jobs
        self.max_attempts = max_attempts
        self.lease_seconds = lease_seconds
        self.retention_seconds = retention_seconds
        self._owner = uuid.uuid4().hex
        self._stopping = threading.Event()
        self._has_work = threading.Event()
        self._threads: list[threading.Thread] = []

    # Called by requests

    def add(self, file: BinaryIO, recording: str, options: Mapping[str, Any]) -> Job:
        """Store a recording and queue its job; on return both are on the disk.

        Raises TooManyJobs.
        """
        # Before the copy, and again after it, because other requests may have added jobs meanwhile.
        with self.database.connected() as connection:
            self._refuse_too_many(connection)
        job_id = uuid.uuid4().hex
        path = self.recordings / job_id
        try:
            with open(path, "xb", opener=private) as copy:
                shutil.copyfileobj(file, copy)
                copy.flush()
                os.fsync(copy.fileno())
            _sync_folder(self.recordings)
            with self.database.transaction() as connection:
                self._refuse_too_many(connection)
                connection.execute(
                    "INSERT INTO jobs (id, state, recording, options, created_at)"
                    " VALUES (?, 'queued', ?, ?, ?)",
                    (job_id, recording, json.dumps(options), time.time()),
                )
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._has_work.set()
        job = self.get(job_id)
        assert job is not None
        return job

    def get(self, job_id: str) -> Job | None:
        row = self.database.fetch_one(
            "SELECT id, state, recording, created_at, finished_at, attempts, result,"
            " error FROM jobs WHERE id = ?",
            (job_id,),
        )
        if row is None:
            return None
        *fields, result, error = row
        return Job(*fields, result=json.loads(result or "null"), error=error)

    def remove(self, job_id: str) -> bool:
        """Delete a job, its recording and its result; return whether there was one."""
        with self.database.transaction() as connection:
            deleted = connection.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
        self.database.forget_deleted()
        if deleted.rowcount:
            # Not for another id, which could be the name of any file.
            (self.recordings / job_id).unlink(missing_ok=True)
        return deleted.rowcount > 0

    def count(self) -> dict[str, int]:
        """Return state -> number of jobs."""
        rows = self.database.fetch_all(
            "SELECT state, COUNT(*) FROM jobs GROUP BY state"
        )
        return {"queued": 0, "running": 0, "done": 0, "failed": 0, **dict(rows)}

    # The thread that computes

    def start(self, compute: Compute) -> None:
        """Start to compute jobs in this worker, one at a time."""
        self._threads = [
            threading.Thread(target=self._run, args=(compute,), daemon=True),
            threading.Thread(target=self._renew_lease, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, *, grace_seconds: float = 5.0) -> bool:
        """Stop; return False if a job still runs, which another worker will start again."""
        self._stopping.set()
        self._has_work.set()
        for thread in self._threads:
            thread.join(grace_seconds)
        if any(thread.is_alive() for thread in self._threads):
            try:
                self._hand_back()
            # Its lease will end.
            except (OSError, sqlite3.Error) as error:
                log.error("jobs: the running job is not handed back: %s", error)
            return False
        self.database.close()
        return True

    def _run(self, compute: Compute) -> None:
        cleaned_at = -CLEAN_SECONDS
        while not self._stopping.is_set():
            try:
                if time.monotonic() - cleaned_at >= CLEAN_SECONDS:
                    self.clean()
                    cleaned_at = time.monotonic()
                claimed = self._claim()
                if claimed is not None:
                    self._compute(compute, *claimed)
                    continue
            # A full disk or a locked database: the thread must not end.
            except (OSError, sqlite3.Error) as error:
                log.error("jobs: %s; trying again", error)
                self._stopping.wait(FAULT_SECONDS)
            except Exception:
                log.exception("jobs: trying again")
                self._stopping.wait(FAULT_SECONDS)
            self._has_work.wait(POLL_SECONDS)
            self._has_work.clear()

    def _compute(
        self, compute: Compute, job_id: str, recording: str, options: str
    ) -> None:
        path = self.recordings / job_id
        result: str | None = None
        error: str | None = None
        try:
            computed = compute(path, recording, json.loads(options))
            result = json.dumps(computed)
        except ValueError as bad_recording:
            error = str(bad_recording)
        except Exception:
            log.exception("job %s", job_id)
            error = "the service could not compute it; see its log"
        with self.database.transaction() as connection:
            # Of another owner: the lease had ended, and the job was started again.
            changed = connection.execute(
                "UPDATE jobs SET state = ?, result = ?, error = ?, finished_at = ?"
                " WHERE id = ? AND owner = ? AND state = 'running'",
                (
                    "failed" if result is None else "done",
                    result,
                    error,
                    time.time(),
                    job_id,
                    self._owner,
                ),
            )
        if changed.rowcount:
            path.unlink(missing_ok=True)

    def _claim(self) -> tuple[str, str, str] | None:
        """Take the oldest job that waits or whose lease has ended; return id, name, options."""
        waiting = (
            "SELECT id, recording, options, attempts FROM jobs WHERE state = 'queued'"
            " OR (state = 'running' AND leased_until < ?) ORDER BY created_at LIMIT 1"
        )
        # Without a transaction first, so that idle workers do not lock the others out.
        if self.database.fetch_one(waiting, (time.time(),)) is None:
            return None
        with self.database.transaction() as connection:
            now = time.time()
            row = connection.execute(waiting, (now,)).fetchone()
            if row is None:
                return None
            job_id, recording, options, attempts = row
            if attempts >= self.max_attempts:
                # Its recording may be what kills workers.
                connection.execute(
                    "UPDATE jobs SET state = 'failed', error = ?, finished_at = ?"
                    " WHERE id = ?",
                    (f"was interrupted {attempts} times", now, job_id),
                )
                (self.recordings / job_id).unlink(missing_ok=True)
                return None
            connection.execute(
                "UPDATE jobs SET state = 'running', owner = ?, leased_until = ?,"
                " attempts = attempts + 1 WHERE id = ?",
                (self._owner, now + self.lease_seconds, job_id),
            )
        return job_id, recording, options

    def _renew_lease(self) -> None:
        while not self._stopping.wait(self.lease_seconds / 4):
            try:
                with self.database.transaction() as connection:
                    connection.execute(
                        "UPDATE jobs SET leased_until = ? WHERE owner = ? AND state ="
                        " 'running'",
                        (time.time() + self.lease_seconds, self._owner),
                    )
            except (OSError, sqlite3.Error) as error:
                log.error("jobs: the lease was not renewed (%s); trying again", error)

    def _hand_back(self) -> None:
        with self.database.transaction() as connection:
            connection.execute(
                "UPDATE jobs SET state = 'queued', owner = NULL, attempts = attempts - 1"
                " WHERE owner = ? AND state = 'running'",
                (self._owner,),
            )

    def clean(self) -> None:
        """Delete results after their time, and recordings without a job."""
        with self.database.transaction() as connection:
            deleted = connection.execute(
                "DELETE FROM jobs WHERE finished_at < ?",
                (time.time() - self.retention_seconds,),
            )
        if deleted.rowcount:
            self.database.forget_deleted()
        unfinished = self.database.fetch_all(
            "SELECT id FROM jobs WHERE finished_at IS NULL"
        )
        needed = {job_id for (job_id,) in unfinished}
        for path in self.recordings.iterdir():
            if path.name in needed:
                continue
            try:
                age = time.time() - path.stat().st_mtime
            # Another worker has just deleted it.
            except FileNotFoundError:
                continue
            if age > ORPHAN_SECONDS:
                path.unlink(missing_ok=True)

    def _refuse_too_many(self, connection: sqlite3.Connection) -> None:
        (number,) = connection.execute(
            "SELECT COUNT(*) FROM jobs WHERE finished_at IS NULL"
        ).fetchone()
        if number >= self.max_jobs:
            raise TooManyJobs


def _sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
