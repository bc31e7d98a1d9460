"""Servers on loopback: what the hub and the store of the tests have in common."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

CHUNK_BYTES = 1 << 16


class LoopbackServer(ThreadingHTTPServer):
    """Server of HTTP at a free port."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.bytes_per_second = 0.0  # of a connection; 0: as fast as it can
        # Each request has a thread, and all of them change the fields of the server.
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_arguments: object) -> None:
        """Print nothing about clients that closed their connection."""


class LoopbackHandler(BaseHTTPRequestHandler):
    """Requests of a connection that stays open; a subclass has `do_GET`."""

    protocol_version = "HTTP/1.1"
    # Otherwise the second packet of an answer waits for the acknowledgement of the first.
    disable_nagle_algorithm = True
    server: LoopbackServer

    def do_GET(self) -> None:
        raise NotImplementedError

    def do_HEAD(self) -> None:
        self.do_GET()

    def send(
        self,
        status: int,
        content: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        is_cut: bool = False,
    ) -> None:
        """Send an answer. is_cut: the connection ends after half of the content."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", f"{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_cut:
            content = content[: len(content) // 2]
            self.close_connection = True
        rate = self.server.bytes_per_second
        for first in range(0, len(content), CHUNK_BYTES):
            chunk = content[first : first + CHUNK_BYTES]
            if rate:
                time.sleep(len(chunk) / rate)
            self.wfile.write(chunk)

    def log_message(self, *_arguments: object) -> None:
        pass


Server = TypeVar("Server", bound=LoopbackServer)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Answer requests until the end of the block."""
    with server:
        # The server looks for a shutdown every 10 ms instead of 500 ms.
        options = {"poll_interval": 0.01}
        thread = threading.Thread(
            target=server.serve_forever,
            kwargs=options,
            daemon=True,
        )
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
