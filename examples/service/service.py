"""What the endpoints of a worker share: the model, turns to compute, databases, jobs.

Letters: N recordings, D embedding dimensions.
"""

import asyncio
import copy
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from fastapi import HTTPException, Request, UploadFile

from examples.service import metrics
from examples.service.database import check_writable
from examples.service.enrolments import Enrolments
from examples.service.jobs import Jobs
from examples.service.limits import Slots
from examples.service.recordings import (
    Alias,
    Recording,
    Warnings,
    explained,
    find_missing_end,
    measure,
    printable,
    with_shown_names,
)
from examples.service.settings import Settings

Value = TypeVar("Value")
Model = Any  # SpeakerModel, which `speakerlab.load` returns


class Service:
    """What the endpoints of a worker use."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model = model
        self.settings = settings
        self.slots = Slots(
            concurrency=settings.concurrency,
            queue_seconds=settings.queue_seconds,
        )
        # As few as compute at once, because a thread does not use memory that another one freed.
        self.threads = ThreadPoolExecutor(settings.concurrency)
        self.enrolments = Enrolments(
            settings.folder / "speakers.sqlite",
            model_sha256=model.sha256,
            embed_dim=model.embed_dim,
            max_speakers=settings.max_speakers,
        )
        self.jobs = Jobs(
            settings.folder,
            max_jobs=settings.max_jobs,
            max_attempts=settings.job_attempts,
            lease_seconds=settings.job_lease_seconds,
            retention_seconds=settings.job_retention_hours * 3600,
        )

    async def compute(self, function: Callable[[], Value]) -> Value:
        """Call a function in a thread when it is its turn."""
        async with self.slots.turn():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.threads, function)

    def model_with_speakers(self) -> Model:
        """Return the model with the speakers that are enrolled now; the network is shared."""
        model = copy.copy(self.model)
        model.speakers = dict(self.enrolments.embeddings())
        return model

    def check_storage(self) -> None:
        """Raise OSError or sqlite3.Error unless enrolments and jobs can be stored."""
        self.enrolments.count()
        self.jobs.count()
        check_writable(self.settings.folder)
        check_writable(self.jobs.recordings)

    def read(self, uploads: list[UploadFile], request: Request) -> list[Recording]:
        """Return the contents of uploads after measuring them."""
        endpoint = request.scope["route"].path_format
        recordings: list[Recording] = []
        for upload in uploads:
            recording = Recording(upload.file.read(), upload.filename)
            with explained([recording]):
                recording.seconds = measure(
                    recording,
                    self.settings,
                    shown_name=recording.shown_name,
                    max_seconds=self.settings.max_seconds,
                )
            recording.doubts += find_missing_end(
                recording, recording.seconds, recording.shown_name
            )
            metrics.AUDIO_SECONDS.labels(endpoint).inc(recording.seconds)
            recordings.append(recording)
        return recordings

    def enrol(
        self, name: str, audio: Sequence[Recording]
    ) -> tuple[np.ndarray, list[str]]:
        """Return the embedding of a speaker, a unit vector, and doubts about the recordings."""
        # Alone and with a random name, by which the library's warnings are found.
        model = copy.copy(self.model)
        model.speakers = {}
        speaker = Alias(uuid.uuid4().hex, name)
        named = [*audio, speaker]
        with explained(named), Warnings(named) as warnings:
            unit_ND = model.enroll(speaker.name, audio)
        doubts = self._doubts_about_match(audio, unit_ND)
        return model.speakers[speaker.name], warnings.lines + doubts

    def _doubts_about_match(
        self, audio: Sequence[Recording], unit_ND: np.ndarray
    ) -> list[str]:
        """Return a doubt if two recordings, of embeddings unit_ND, may be of different speakers."""
        if self.model.calibration is None or len(audio) < 2:
            return []
        score_NN = unit_ND @ unit_ND.T
        first, second = divmod(int(score_NN.argmin()), len(audio))
        lowest = float(score_NN[first, second])
        threshold = self.model.calibration.threshold
        if lowest >= threshold:
            return []
        names = f"{audio[first].shown_name} and {audio[second].shown_name}"
        return [
            f"{names}: may be of different speakers, their score is {lowest:.3f}, the"
            f" threshold {threshold:.3f}; check that all recordings are of one speaker"
        ]

    def measure_job(self, upload: UploadFile) -> float:
        """Return the seconds of a recording for a job; raise HTTPException if it cannot be used."""
        shown_name = printable(upload.filename or "recording")
        # In pieces through a temporary file, because the recording may be larger than the memory.
        try:
            return measure(
                upload.file,
                self.settings,
                shown_name=shown_name,
                max_seconds=self.settings.max_job_seconds,
            )
        except ValueError as error:
            text = str(error)
            where, _, problem = text.partition(": ")
            # The library does not know the name of an upload.
            if where.startswith("audio ("):
                text = problem
            if where != shown_name:
                text = f"{shown_name}: {text}"
            raise HTTPException(422, text) from None

    def diarize(
        self, path: Path, recording: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Compute a job; raise ValueError for a recording that cannot be used."""
        named = [Alias(str(path), recording)]
        try:
            with Warnings(named) as warnings:
                found = self.model_with_speakers().diarize(path, **options)
        except ValueError as error:
            raise ValueError(with_shown_names(str(error), named)) from None
        result = found.to_dict()
        with path.open("rb") as file:
            doubts = find_missing_end(file, result["seconds"], recording)
        seconds: dict[str, float] = {}
        # Without the embeddings, which identify a person.
        for name, speaker in result["speakers"].items():
            seconds[name] = speaker["seconds"]
        return {
            "seconds": result["seconds"],
            "speakers": seconds,
            "segments": result["segments"],
            "warnings": doubts + warnings.lines,
        }
