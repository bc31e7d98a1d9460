"""Metrics for Prometheus, summed over all workers.

With PROMETHEUS_MULTIPROC_DIR, which `__main__` sets, each worker writes its values into files of
that folder, and any worker answers with the sums.
"""

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)
from prometheus_client.core import GaugeMetricFamily
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("service")
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS")

REQUESTS = Counter(
    "speakerlab_requests_total",
    "Requests by endpoint, method and HTTP status",
    ["endpoint", "method", "code"],
)
LATENCY = Histogram(
    "speakerlab_request_seconds",
    "Seconds from the headers of a request to the end of the answer",
    ["endpoint"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
AUDIO_SECONDS = Counter(
    "speakerlab_audio_seconds_total",
    "Seconds of audio that were accepted",
    ["endpoint"],
)
IN_PROGRESS = Gauge(
    "speakerlab_requests_in_progress",
    "Requests that are received, wait or are computed",
    multiprocess_mode="livesum",
)
WAITING = Gauge(
    "speakerlab_requests_waiting",
    "Requests that wait for a turn to be computed",
    multiprocess_mode="livesum",
)


class Measured:
    """Middleware that counts requests and measures their time."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self.app = app
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin = time.monotonic()
        code = 500  # unless an answer begins

        async def send_measured(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_measured)
        finally:
            # Also of requests that were refused before they reached an endpoint.
            endpoint = endpoint_of(scope, self.routes)
            method = scope["method"] if scope["method"] in METHODS else "other"
            try:
                REQUESTS.labels(endpoint, method, str(code)).inc()
                LATENCY.labels(endpoint).observe(time.monotonic() - begin)
            # Its files are gone or cannot grow; the answer was sent.
            except OSError as error:
                log.error("metrics: %s", error)


def endpoint_of(scope: Scope, routes: Sequence[BaseRoute]) -> str:
    """Return the template of a path, such as /speakers/{name}; "none" for other paths.

    The paths themselves would make a series for each speaker.
    """
    for route in routes:
        match, _ = route.matches(scope)
        if match is not Match.NONE and isinstance(route, Route):
            return route.path_format
    return "none"


class _Stored:
    """Collector of numbers that are counted in a database when they are asked for."""

    def __init__(self, num_speakers: int, num_jobs: Mapping[str, int]) -> None:
        self.num_speakers = num_speakers
        self.num_jobs = num_jobs

    def collect(self) -> Iterable[GaugeMetricFamily]:
        yield GaugeMetricFamily(
            "speakerlab_speakers", "Enrolled speakers", value=self.num_speakers
        )
        jobs = GaugeMetricFamily(
            "speakerlab_jobs", "Diarization jobs by state", labels=["state"]
        )
        for state, number in self.num_jobs.items():
            jobs.add_metric([state], number)
        yield jobs


def render(num_speakers: int, num_jobs: Mapping[str, int]) -> tuple[bytes, str]:
    """Return the metrics of all workers as text, and its content type; raise OSError."""
    stored = CollectorRegistry()
    stored.register(_Stored(num_speakers, num_jobs))  # type: ignore[arg-type]
    counted = REGISTRY
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        if not Path(folder).is_dir():
            raise FileNotFoundError(
                f"{folder}: is no longer there; restart the service"
            )
        counted = CollectorRegistry()
        multiprocess.MultiProcessCollector(counted)
    text = generate_latest(stored) + generate_latest(counted)
    return text, CONTENT_TYPE_LATEST


def forget_dead_workers() -> None:
    """Remove the gauges of killed workers, whose requests are no longer in progress."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return
    for path in Path(folder).glob("gauge_live*_*.db"):
        process = int(path.stem.rpartition("_")[2])
        try:
            os.kill(process, 0)  # sends nothing
        except ProcessLookupError:
            multiprocess.mark_process_dead(process)
