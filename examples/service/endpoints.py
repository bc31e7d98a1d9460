"""Endpoints of the service.

Requests are received by the event loop of a worker, and computed in threads, `concurrency` at once.
"""

import asyncio
import unicodedata
from typing import Annotated, Any

import numpy as np
from fastapi import (
    APIRouter,
    Depends,
    File,
    Form,
    HTTPException,
    Query,
    Request,
    Response,
    UploadFile,
)
from fastapi import Path as UrlPath
from starlette.convertors import Convertor, register_url_convertor

from examples.service import answers, metrics
from examples.service.forms import check_form, check_query
from examples.service.jobs import Job
from examples.service.names import checked_name
from examples.service.recordings import Warnings, explained, printable
from examples.service.service import Service


class AnyText(Convertor[str]):
    """The rest of a path, for `{name:text}`, with line ends.

    Starlette's `path` takes none: a name with one would be cut off there, or have no endpoint.
    """

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("text", AnyText())


router = APIRouter()
QUERY = [Depends(check_query)]
FORM = [*QUERY, Depends(check_form)]
MAX_RECORDINGS = 20  # of an enrolment
Responses = dict[int | str, dict[str, Any]]


def refusal(description: str) -> dict[str, Any]:
    """Return a refusal for the OpenAPI page."""
    return {"model": answers.Error, "description": description}


# Of all but /health and /metrics.
STORED: Responses = {
    429: refusal("Too many requests; see Retry-After"),
    503: refusal("Busy, or the disk is full; see Retry-After"),
}
NO_JOB: Responses = {**STORED, 404: refusal("No such job")}
REFUSALS: Responses = {
    **STORED,
    400: refusal("The form cannot be read"),
    408: refusal("The upload is too slow"),
    413: refusal("Too many bytes or seconds"),
    415: refusal("The body is no multipart/form-data"),
    422: refusal("A field or recording cannot be used"),
}

Audio = Annotated[
    UploadFile,
    File(description="Recording: wav, flac, ogg, mp3; the first channel is used"),
]
Far = Annotated[
    float | None,
    Form(
        description="Decide at this false-alarm rate, such as 0.01, not at the equal error rate;"
        " one of the rates that are stored with the model"
    ),
]
Name = Annotated[
    str,
    UrlPath(
        max_length=100,
        description="Name of the speaker in any language: a line with a letter or digit, no slash",
    ),
]


def service_of(request: Request) -> Service:
    return request.app.state.service


@router.post("/embed", responses=REFUSALS, dependencies=FORM)
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


@router.post("/verify", responses=REFUSALS, dependencies=FORM)
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


@router.post(
    "/speakers/{name:text}",
    status_code=201,
    responses={**REFUSALS, 409: refusal("As many speakers as may be are enrolled")},
    dependencies=FORM,
)
async def enrol(
    request: Request,
    name: Name,
    recordings: Annotated[
        list[UploadFile],
        File(
            max_length=MAX_RECORDINGS,
            description="Recordings of the speaker; the field may be repeated",
        ),
    ],
) -> answers.Enrolment:
    """Enrol a speaker, in place of one of the same name.

    After the answer, the speaker is on the disk and known to all workers.
    """
    service = service_of(request)
    try:
        name = checked_name(name)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None

    def compute() -> answers.Enrolment:
        audio = service.read(recordings, request)
        unit_D, warnings = service.enrol(name, audio)
        seconds = sum(recording.seconds for recording in audio)
        is_replaced = service.enrolments.add(
            name,
            unit_D,
            num_recordings=len(audio),
            seconds=seconds,
        )
        return answers.Enrolment(
            name=name,
            replaced=is_replaced,
            num_recordings=len(audio),
            seconds=seconds,
            model_sha256=service.model.sha256,
            warnings=warnings,
        )

    return await service.compute(compute)


@router.get("/speakers", responses=STORED, dependencies=QUERY)
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


@router.delete(
    "/speakers/{name:text}",
    status_code=204,
    responses={**STORED, 404: refusal("No such speaker")},
    dependencies=QUERY,
)
async def delete_speaker(request: Request, name: Name) -> None:
    """Delete a speaker and the embedding."""
    enrolments = service_of(request).enrolments
    # Not checked, so that names from before a rule can be deleted.
    name = unicodedata.normalize("NFC", name)
    if not await asyncio.to_thread(enrolments.remove, name):
        raise HTTPException(404, "no speaker of this name is enrolled")


@router.post(
    "/identify",
    responses={**REFUSALS, 409: refusal("No speaker is enrolled")},
    dependencies=FORM,
)
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


@router.post("/diarizations", status_code=202, responses=REFUSALS, dependencies=FORM)
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

    def add() -> Job:
        file = recording.file
        seconds = service.measure_job(recording)
        metrics.AUDIO_SECONDS.labels("/diarizations").inc(seconds)
        file.seek(0)
        options = {"num_speakers": num_speakers, "known": known}
        return service.jobs.add(
            file, printable(recording.filename or "recording"), options
        )

    job = await service.compute(add)
    return answers.Diarization(**vars(job))


@router.get("/diarizations/{job_id}", responses=NO_JOB, dependencies=QUERY)
async def get_diarization(request: Request, job_id: str) -> answers.Diarization:
    """Return the state of a job and, when it is done, who spoke when."""
    job = await asyncio.to_thread(service_of(request).jobs.get, job_id)
    if job is None:
        raise HTTPException(404, "no such job; results are deleted after a time")
    return answers.Diarization(**vars(job))


@router.delete(
    "/diarizations/{job_id}", status_code=204, responses=NO_JOB, dependencies=QUERY
)
async def delete_diarization(request: Request, job_id: str) -> None:
    """Delete a job, its recording and its result."""
    if not await asyncio.to_thread(service_of(request).jobs.remove, job_id):
        raise HTTPException(404, "no such job")


@router.head("/health", include_in_schema=False)
@router.get("/health", responses={503: refusal("Not ready; see the log")})
async def health(request: Request) -> answers.Health:
    """Return whether requests can be served: 200, or 503 if nothing can be stored."""
    service = service_of(request)
    # Raises an error, which is answered with 503.
    await asyncio.to_thread(service.check_storage)
    model = service.model
    return answers.Health(
        live=True,
        ready=True,
        model_sha256=model.sha256,
        sample_rate=model.sample_rate,
        embedding_dimensions=model.embed_dim,
        calibrated=model.calibration is not None,
    )


@router.head("/health/live", include_in_schema=False)
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
