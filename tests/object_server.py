"""A store on loopback: files by HTTP, also as S3 reads them; it can misbehave."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CHUNK_BYTES = 1 << 16


class ObjectServer(ThreadingHTTPServer):
    """Serves a folder. The first folder in a path is also a bucket of S3.

    faults: what to do with the next requests for shards, one after the other: "stall", "403",
    "500", "cut" (the connection ends early), "short" (the answer does), "flip" (a wrong bit),
    "whole" (no ranges) or "" (nothing). forever: what to do with all further ones.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.faults: list[str] = []
        self.forever = ""
        self.latency = 0.0  # seconds
        self.bytes_per_second = 0.0  # of a connection; 0: as fast as it can
        self.paths: list[str] = []  # of shards that were asked for
        self.ended = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next_fault(self, path: str) -> str:
        if not path.endswith(".tar"):
            return ""
        with self.lock:
            self.paths.append(path)
            return self.faults.pop(0) if self.faults else self.forever

    def handle_error(self, *_arguments: object) -> None:
        """Say nothing of clients that have gone."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Otherwise the second packet of an answer waits for the acknowledgement of the first.
    disable_nagle_algorithm = True
    server: ObjectServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server = self.server
        path = self.path.partition("?")[0]
        fault = server.next_fault(path)
        time.sleep(server.latency)
        file = server.folder / path.lstrip("/")
        if fault == "stall":
            server.ended.wait()
            return
        if fault in ("403", "500"):
            self.send(int(fault), b"")
        elif not file.is_file():
            self.send(404, b"")
        else:
            self.send_file(file, fault)

    def send_file(self, file: Path, fault: str) -> None:
        asked = self.headers.get("Range", "")
        status = 200
        with file.open("rb") as opened:
            if asked and fault != "whole":
                first, _, last = asked.removeprefix("bytes=").partition("-")
                opened.seek(int(first))
                content = opened.read(int(last) + 1 - int(first))
                status = 206
            else:
                content = opened.read()
        if fault == "short":
            content = content[: len(content) // 2]
        if fault == "flip":
            middle = len(content) // 2
            flipped = bytes([content[middle] ^ 1])
            content = content[:middle] + flipped + content[middle + 1 :]
        self.send(status, content, is_cut=fault == "cut")

    def send(self, status: int, content: bytes, *, is_cut: bool = False) -> None:
        self.send_response(status)
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


@contextmanager
def served(folder: Path) -> Iterator[ObjectServer]:
    """Serve a folder until the end of the block."""
    with ObjectServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.ended.set()
        server.shutdown()
