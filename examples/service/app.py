"""Endpoints of the service; `create_app` puts the parts together.

Requests are received by the event loop of a worker, and computed in threads, `concurrency` at once.
"""

import asyncio
import copy
import logging
import multiprocessing
import os
import signal
import sqlite3
import sys
import threading
import unicodedata
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import (
    APIRouter,
    FastAPI,
    File,
    Form,
    HTTPException,
    Query,
    Request,
    Response,
    UploadFile,
)
from fastapi import Path as UrlPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from uvicorn.config import STARTUP_FAILURE

import speakerlab
from examples.service import answers, metrics
from examples.service.enrolments import Enrolments, TooManySpeakers
from examples.service.jobs import Job, Jobs, TooManyJobs
from examples.service.limits import Gate, Slots, TimedConnection
from examples.service.recordings import (
    Recording,
    Warnings,
    explained,
    measure,
    printable,
)
from examples.service.settings import Settings, read_settings

log = logging.getLogger("service")
router = APIRouter()
Value = TypeVar("Value")
Model = Any  # SpeakerModel, which `speakerlab.load` returns
JOINERS = "\u200c\u200d"  # invisible, but used to write Persian and Indian names
REFUSALS: dict[int | str, dict[str, Any]] = {
    413: {"model": answers.Error, "description": "Too many bytes or seconds"},
    422: {"model": answers.Error, "description": "A recording cannot be used"},
    429: {"model": answers.Error, "description": "Too many requests; see Retry-After"},
    503: {"model": answers.Error, "description": "Busy; see Retry-After"},
}

Audio = Annotated[
    UploadFile,
    File(description="Recording: wav, flac, ogg, mp3; the first channel is used"),
]
Far = Annotated[
    float | None,
    Form(
        description="Decide at this false-alarm rate, such as 0.01, not at the equal error rate"
    ),
]
Name = Annotated[
    str,
    UrlPath(max_length=100, description="Name of the speaker; any language, no slash"),
]


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

    def read(self, uploads: list[UploadFile], request: Request) -> list[Recording]:
        """Return the contents of uploads after measuring them."""
        endpoint = request.scope["route"].path
        recordings: list[Recording] = []
        for upload in uploads:
            recording = Recording(upload.file.read(), upload.filename)
            with explained([recording]):
                recording.seconds = measure(
                    recording,
                    self.settings,
                    max_seconds=self.settings.max_seconds,
                )
            metrics.AUDIO_SECONDS.labels(endpoint).inc(recording.seconds)
            recordings.append(recording)
        return recordings

    def diarize(
        self, path: Path, recording: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Compute a job."""
        try:
            found = self.model_with_speakers().diarize(path, **options)
        except ValueError as error:
            text = str(error).replace(str(path), recording)
            raise ValueError(text) from None
        result = found.to_dict()
        seconds: dict[str, float] = {}
        # Without the embeddings, which identify a person.
        for name, speaker in result["speakers"].items():
            seconds[name] = speaker["seconds"]
        return {
            "seconds": result["seconds"],
            "speakers": seconds,
            "segments": result["segments"],
        }


def service_of(request: Request) -> Service:
    return request.app.state.service


@router.post("/embed", responses=REFUSALS)
async def embed(request: Request, recording: Audio) -> answers.Embedding:
    """Return the embedding of a recording."""
    service = service_of(request)

    def compute() -> answers.Embedding:
        (audio,) = service.read([recording], request)
        with explained([audio]), Warnings([audio]) as warnings:
            emb_D: np.ndarray = service.model.embed(audio)
        return answers.Embedding(
            embedding=emb_D.tolist(),
            seconds=audio.seconds,
            model_sha256=service.model.sha256,
            warnings=warnings.lines,
        )

    return await service.compute(compute)


@router.post("/verify", responses=REFUSALS)
async def verify(
    request: Request, recording_a: Audio, recording_b: Audio, far: Far = None
) -> answers.Verification:
    """Compare two recordings: is it the same speaker?"""
    service = service_of(request)

    def compute() -> answers.Verification:
        audio = service.read([recording_a, recording_b], request)
        with explained(audio), Warnings(audio) as warnings:
            result = service.model.verify(*audio, far=far)
        return answers.Verification(
            score=result.score,
            llr=result.llr,
            threshold=result.threshold,
            same=result.is_same,
            speech_seconds=list(result.speech_seconds),
            warnings=warnings.lines,
        )

    return await service.compute(compute)


@router.post("/speakers/{name}", status_code=201, responses=REFUSALS)
async def enrol(
    request: Request,
    name: Name,
    recordings: Annotated[
        list[UploadFile],
        File(description="Recordings of the speaker; the field may be repeated"),
    ],
) -> answers.Enrolment:
    """Enrol a speaker, in place of one of the same name.

    After the answer, the speaker is on the disk and known to all workers.
    """
    service = service_of(request)
    name = usable(name)

    def compute() -> answers.Enrolment:
        audio = service.read(recordings, request)
        # With the other speakers, because names that look alike are refused.
        model = service.model_with_speakers()
        with explained(audio), Warnings(audio) as warnings:
            model.enroll(name, audio)
        seconds = sum(recording.seconds for recording in audio)
        is_replaced = service.enrolments.add(
            name,
            model.speakers[name],
            num_recordings=len(audio),
            seconds=seconds,
        )
        return answers.Enrolment(
            name=name,
            replaced=is_replaced,
            num_recordings=len(audio),
            seconds=seconds,
            model_sha256=service.model.sha256,
            warnings=warnings.lines,
        )

    return await service.compute(compute)


@router.get("/speakers")
async def list_speakers(
    request: Request,
    after: Annotated[
        str, Query(max_length=100, description="Last name of the page before")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=1000, description="Speakers of a page")] = 100,
) -> answers.Speakers:
    """List the enrolled speakers."""
    enrolments = service_of(request).enrolments
    rows = await asyncio.to_thread(
        enrolments.rows, after=unicodedata.normalize("NFC", after), limit=limit
    )
    speakers = [answers.Speaker(**row._asdict()) for row in rows]
    total = await asyncio.to_thread(enrolments.count)
    return answers.Speakers(total=total, speakers=speakers)


@router.delete("/speakers/{name}", status_code=204)
async def delete_speaker(request: Request, name: Name) -> None:
    """Delete a speaker and the embedding."""
    enrolments = service_of(request).enrolments
    if not await asyncio.to_thread(enrolments.remove, usable(name)):
        raise HTTPException(404, "no speaker of this name is enrolled")


@router.post("/identify", responses={**REFUSALS, 409: {"model": answers.Error}})
async def identify(
    request: Request,
    recording: Audio,
    far: Far = None,
    top: Annotated[int, Form(ge=1, le=100, description="Length of the ranking")] = 5,
) -> answers.Identification:
    """Rank the enrolled speakers for a recording, and decide whether the best one is speaking."""
    service = service_of(request)

    def compute() -> answers.Identification:
        model = service.model_with_speakers()
        if not model.speakers:
            raise HTTPException(409, "no speaker is enrolled; enrol some first")
        audio = service.read([recording], request)
        with explained(audio), Warnings(audio) as warnings:
            result = model.identify(*audio, far=far)
        ranking: list[answers.Candidate] = []
        for name, score in result.ranking[:top]:
            ranking.append(answers.Candidate(name=name, score=score))
        return answers.Identification(
            name=result.name,
            known=result.is_known,
            threshold=result.threshold,
            speech_seconds=result.speech_seconds,
            ranking=ranking,
            warnings=warnings.lines,
        )

    return await service.compute(compute)


@router.post("/diarizations", status_code=202, responses=REFUSALS)
async def start_diarization(
    request: Request,
    recording: Audio,
    num_speakers: Annotated[
        int | None,
        Form(ge=1, le=50, description="Number of speakers, where it is known"),
    ] = None,
    known: Annotated[
        bool, Form(description="Name speakers after the enrolled ones")
    ] = False,
) -> answers.Diarization:
    """Start a job that finds who spoke when; ask for its state at /diarizations/{id}."""
    service = service_of(request)
    settings = service.settings

    def add() -> Job:
        file = recording.file
        seconds = measured_job(file, recording.filename, settings)
        metrics.AUDIO_SECONDS.labels("/diarizations").inc(seconds)
        file.seek(0)
        options = {"num_speakers": num_speakers, "known": known}
        return service.jobs.add(
            file, printable(recording.filename or "recording"), options
        )

    job = await service.compute(add)
    return answers.Diarization(**vars(job))


@router.get("/diarizations/{job_id}", responses={404: {"model": answers.Error}})
async def get_diarization(request: Request, job_id: str) -> answers.Diarization:
    """Return the state of a job and, when it is done, who spoke when."""
    job = await asyncio.to_thread(service_of(request).jobs.get, job_id)
    if job is None:
        raise HTTPException(404, "no such job; results are deleted after a time")
    return answers.Diarization(**vars(job))


@router.delete("/diarizations/{job_id}", status_code=204)
async def delete_diarization(request: Request, job_id: str) -> None:
    """Delete a job, its recording and its result."""
    if not await asyncio.to_thread(service_of(request).jobs.remove, job_id):
        raise HTTPException(404, "no such job")


@router.get("/health", responses={503: {"model": answers.Error}})
async def health(request: Request) -> answers.Health:
    """Return whether requests can be served: 200, or 503 if the databases do not answer."""
    service = service_of(request)
    # Raises an error of the database, which is answered with 503.
    await asyncio.to_thread(service.enrolments.count)
    await asyncio.to_thread(service.jobs.count)
    model = service.model
    return answers.Health(
        live=True,
        ready=True,
        model_sha256=model.sha256,
        sample_rate=model.sample_rate,
        embedding_dimensions=model.embed_dim,
        calibrated=model.calibration is not None,
    )


@router.get("/health/live")
async def live() -> dict[str, bool]:
    """Return that the worker answers."""
    return {"live": True}


@router.get("/metrics", response_class=Response)
async def get_metrics(request: Request) -> Response:
    """Return the metrics of all workers in the text format of Prometheus."""
    service = service_of(request)
    num_speakers = await asyncio.to_thread(service.enrolments.count)
    num_jobs = await asyncio.to_thread(service.jobs.count)
    text, content_type = await asyncio.to_thread(metrics.render, num_speakers, num_jobs)
    return Response(text, media_type=content_type)


def measured_job(file: Any, name: str | None, settings: Settings) -> float:
    """Return the seconds of a recording for a job; raise HTTPException if it cannot be used."""
    # In pieces through a temporary file, because the recording may be larger than the memory.
    try:
        return measure(file, settings, max_seconds=settings.max_job_seconds)
    except ValueError as error:
        _, colon, problem = str(error).partition(": ")
        text = problem if colon and str(error).startswith("audio (") else str(error)
        detail = f"{printable(name or 'recording')}: {text}"
        raise HTTPException(422, detail) from None


def usable(name: str) -> str:
    """Return a speaker's name in the usual form of Unicode; raise HTTPException 422.

    An accent can be a character of its own; both spellings are the same speaker.
    """
    # U+FFFD stands for bytes of the URL that are not UTF-8.
    if "\ufffd" in name or not any(character.isalnum() for character in name):
        raise HTTPException(422, "name: must be text in UTF-8 with a letter or digit")
    for character in name:
        # Such as marks that reverse the text around them.
        is_invisible = unicodedata.category(character) == "Cf"
        if is_invisible and character not in JOINERS:
            raise HTTPException(422, f"name: must not contain {ascii(character)}")
    return unicodedata.normalize("NFC", name)


# Errors -> answers


async def refuse_fields(request: Request, error: Any) -> JSONResponse:
    """Answer missing or wrong fields in one line, without repeating what was sent."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:])
    return JSONResponse({"detail": f"{place}: {first['msg']}"}, status_code=422)


async def refuse_full(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, TooManyJobs):
        headers = {"Retry-After": "60"}
        return JSONResponse({"detail": "too many jobs wait"}, 503, headers)
    detail = "as many speakers are enrolled as may be; delete some"
    return JSONResponse({"detail": detail}, status_code=409)


async def report_storage(request: Request, error: Exception) -> JSONResponse:
    """Answer 503 for a disk that is full or a database that is locked."""
    log.error("%s: %s", type(error).__name__, error)
    return JSONResponse(
        {"detail": "the service cannot read or write its files; see its log"},
        status_code=503,
        headers={"Retry-After": "30"},
    )


def create_app(settings: Settings, model: Model) -> FastAPI:
    """Return the application; raise ValueError if the database is of another model."""
    service = Service(model, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.jobs.start(service.diarize)
        yield
        is_idle = service.jobs.stop()
        service.enrolments.close()
        # A thread cannot be stopped, so the process ends with it. The job is started again.
        if not is_idle:
            os._exit(0)

    app = FastAPI(
        title="Speaker verification",
        version=speakerlab.__version__,
        description="Times are in seconds, rates in Hz, scores are cosines.",
        lifespan=lifespan,
        form_limits={
            "max_files": settings.max_files,
            "max_fields": 20,
            "max_part_size": 10_000,  # bytes of a field that is no file
        },
        exception_handlers={
            RequestValidationError: refuse_fields,
            TooManySpeakers: refuse_full,
            TooManyJobs: refuse_full,
            sqlite3.Error: report_storage,
            OSError: report_storage,
        },
    )
    app.state.service = service
    app.include_router(router)
    app.add_middleware(Gate, settings=settings)
    # The last one added is the first to be called.
    app.add_middleware(metrics.Measured)
    return app


def from_environment() -> FastAPI:
    """Return the application of a worker, whose settings are in the environment."""
    settings = read_settings()
    TimedConnection.slow_seconds = settings.slow_seconds
    metrics.forget_dead_workers()
    _end_with_parent()
    try:
        model = speakerlab.load(settings.model, device=settings.device)
        return create_app(settings, model)
    except (ValueError, OSError, sqlite3.Error) as error:
        log.error("%s", error)
        # uvicorn does not start such a worker again.
        sys.exit(STARTUP_FAILURE)


def _end_with_parent() -> None:
    """End this worker when the process that started it is killed, which would free no port."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
