"""What one client can take from the others: requests, bytes, time and connections.

`Gate` stands before the application. It answers 429, 413 and 503 before a body is read, and stops
bodies while they are received. 503 is only for requests that compute, which are those by POST.
"""

import asyncio
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from examples.service.metrics import IN_PROGRESS, WAITING
from examples.service.settings import Settings

# Health and metrics must be answered also when the service is full.
UNLIMITED = ("/health", "/metrics")
MAX_CLIENTS = 10_000
UPLOADS_FULL = "the service is busy, too many uploads wait"
IPV6_NETWORK_BITS = 64  # that a client usually has for itself


class TokenBuckets:
    """Requests that each client may still make: `burst` at once, and `rate` a second."""

    def __init__(self, *, rate: float, burst: int) -> None:
        self.rate = rate
        self.burst = burst
        # Client -> (tokens, time of its last request); the longest silent client first.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, now: float) -> float:
        """Take a token; return 0, or the seconds to wait for one."""
        tokens, before = self._buckets.pop(client, (float(self.burst), now))
        tokens = min(tokens + (now - before) * self.rate, self.burst)
        wait = max(1 - tokens, 0) / self.rate
        if not wait:
            tokens -= 1
        self._buckets[client] = (tokens, now)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return wait


class Slots:
    """Turns to compute: as many at once as the cores can do, for a bounded time of waiting."""

    def __init__(self, *, concurrency: int, queue_seconds: float) -> None:
        self.queue_seconds = queue_seconds
        self._free = asyncio.Semaphore(concurrency)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn; raise HTTPException 503 if that takes too long."""
        with WAITING.track_inprogress():
            try:
                await asyncio.wait_for(self._free.acquire(), self.queue_seconds)
            except asyncio.TimeoutError:
                raise HTTPException(
                    status_code=503,
                    detail="the service is busy; try again later",
                    headers={"Retry-After": "5"},
                ) from None
        try:
            yield
        finally:
            self._free.release()


class Gate:
    """Middleware that refuses requests beyond the limits."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.buckets = TokenBuckets(
            rate=settings.requests_per_second, burst=settings.burst
        )
        self.places = settings.concurrency + settings.queue
        self.num_inside = 0
        self.num_bytes_inside = 0  # of their bodies, as far as they have come

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(UNLIMITED):
            await self.app(scope, receive, send)
            return
        max_bytes = self.settings.max_upload_bytes
        if scope["path"].startswith("/diarizations"):
            max_bytes = self.settings.max_job_upload_bytes
        refusal = self._refusal(scope, max_bytes)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        body = _Body(receive, self.settings, max_bytes, count=self._count_bytes)
        is_post = scope["method"] == "POST"
        self.num_inside += is_post
        try:
            with IN_PROGRESS.track_inprogress() if is_post else nullcontext():
                await self.app(scope, body.receive, send)
        finally:
            self.num_inside -= is_post
            self.num_bytes_inside -= body.num_bytes

    def _count_bytes(self, num_bytes: int) -> None:
        """Count a part of a body; raise HTTPException 503 if all bodies take too much space."""
        self.num_bytes_inside += num_bytes
        if self.num_bytes_inside > self.settings.max_waiting_bytes:
            raise HTTPException(
                status_code=503,
                detail=UPLOADS_FULL,
                headers={"Retry-After": "5", "Connection": "close"},
            )

    def _refusal(self, scope: Scope, max_bytes: int) -> JSONResponse | None:
        """Return the answer to a request that is refused by its headers."""
        wait = self.buckets.take(client_of(scope), time.monotonic())
        if wait:
            return _answer(429, "too many requests", retry_seconds=wait)
        for name, value in scope["headers"]:
            # The server has checked that the value is a number.
            if name != b"content-length":
                continue
            num_bytes = int(value)
            if num_bytes > max_bytes:
                return _answer(413, _too_large(max_bytes))
            if self.num_bytes_inside + num_bytes > self.settings.max_waiting_bytes:
                return _answer(503, UPLOADS_FULL, retry_seconds=5)
        if scope["method"] == "POST" and self.num_inside >= self.places:
            return _answer(503, "the service is busy", retry_seconds=1)
        return None


class _Body:
    """Body of a request, stopped while it is received if it is too large or too slow."""

    def __init__(
        self,
        receive: Receive,
        settings: Settings,
        max_bytes: int,
        *,
        count: Callable[[int], None],
    ) -> None:
        self._receive = receive
        self._settings = settings
        self._max_bytes = max_bytes
        self._count = count  # of the bytes of each part
        self.num_bytes = 0
        self._begin = time.monotonic()
        self._is_complete = False

    async def receive(self) -> Message:
        """Return the next part; raise HTTPException 413 or 408."""
        if self._is_complete:
            return await self._receive()
        slow_seconds = self._settings.slow_seconds
        allowed = slow_seconds + self.num_bytes / self._settings.min_bytes_per_second
        left = self._begin + allowed - time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), max(left, 0))
        except asyncio.TimeoutError:
            raise HTTPException(
                status_code=408,
                detail=f"the upload is slower than {slow_seconds:g} s and"
                f" {self._settings.min_bytes_per_second} bytes a second",
                headers={"Connection": "close"},
            ) from None
        part = message.get("body", b"")
        self.num_bytes += len(part)
        self._is_complete = not message.get("more_body", False)
        self._count(len(part))
        if self.num_bytes > self._max_bytes:
            raise HTTPException(status_code=413, detail=_too_large(self._max_bytes))
        return message


class TimedConnection(H11Protocol):
    """Connection of uvicorn that is cut when headers are late, or an answer is not read."""

    slow_seconds = 10.0  # `from_environment` sets it
    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        # To close waits until the client has read the answer, perhaps for ever.
        self.loop.call_later(self.slow_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch_headers(self) -> None:
        """Start the time for headers, or stop it when they have come."""
        is_in_request = self.cycle is not None and not self.cycle.response_complete
        if is_in_request:
            self._stop_watching()
        elif self._headers_due is None:
            self._headers_due = self.loop.call_later(
                self.slow_seconds, self.transport.abort
            )

    def _stop_watching(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


def client_of(scope: Scope) -> str:
    """Return the address of a client; of IPv6 the network, in which a client has many."""
    host, _ = scope.get("client") or ("unknown", 0)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 6:
        network = ipaddress.ip_network((host, IPV6_NETWORK_BITS), strict=False)
        return str(network)
    return host


def _too_large(max_bytes: int) -> str:
    return f"the upload has more than {max_bytes / 1e6:g} MB"


def _answer(
    status: int, detail: str, *, retry_seconds: float | None = None
) -> JSONResponse:
    headers: dict[str, str] = {}
    if retry_seconds is not None:
        headers["Retry-After"] = str(math.ceil(retry_seconds))
    return JSONResponse({"detail": detail}, status_code=status, headers=headers)
