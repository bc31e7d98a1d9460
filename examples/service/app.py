"""The application of a worker: `create_app` puts the parts together."""

import logging
import multiprocessing
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from uvicorn.config import STARTUP_FAILURE

import speakerlab
from examples.service import metrics
from examples.service.endpoints import MAX_RECORDINGS, router
from examples.service.enrolments import LooksAlike, TooManySpeakers
from examples.service.forms import refuse_fields
from examples.service.jobs import TooManyJobs
from examples.service.limits import Gate, TimedConnection
from examples.service.service import Model, Service
from examples.service.settings import Settings, read_settings

log = logging.getLogger("service")


async def refuse_full(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, TooManyJobs):
        headers = {"Retry-After": "60"}
        return JSONResponse({"detail": "too many jobs wait"}, 503, headers)
    detail = "as many speakers are enrolled as may be; delete some"
    return JSONResponse({"detail": detail}, status_code=409)


async def refuse_name(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status_code=422)


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
        log.info(
            "ready: model %s (sha256), %d speakers enrolled",
            model.sha256[:12],
            service.enrolments.count(),
        )
        yield
        is_idle = service.jobs.stop()
        service.enrolments.database.close()
        # A thread cannot be stopped, so the process ends with it. The job is started again.
        if not is_idle:
            log.info("stopped; a job that was running is queued again")
            os._exit(0)

    app = FastAPI(
        title="Speaker verification",
        version=speakerlab.__version__,
        description="Times are in seconds, rates in Hz, scores are cosines.",
        lifespan=lifespan,
        # curl would not follow them.
        redirect_slashes=False,
        form_limits={
            "max_files": MAX_RECORDINGS,
            "max_fields": 20,
            "max_part_size": 10_000,  # bytes of a field that is no file
        },
        exception_handlers={
            RequestValidationError: refuse_fields,
            LooksAlike: refuse_name,
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
    app.add_middleware(metrics.Measured, routes=router.routes)
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
        log.error("%s", explain(error))
        # uvicorn does not start such a worker again.
        sys.exit(STARTUP_FAILURE)


def explain(error: Exception) -> str:
    """Return the problem in one line; of a file that cannot be used, with its path."""
    # Errors of the system have an errno; those of the library have only a message.
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    where = error.filename or "a file"
    reason = (error.strerror or str(error)).lower()
    return (
        f"{where}: cannot be used ({reason}); check the disk, and the permissions of the"
        " user who runs the service"
    )


def _end_with_parent() -> None:
    """End this worker when the process that started it is killed, which would free no port."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
