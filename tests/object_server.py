"""A store on loopback: files by HTTP, also as S3 reads them; it can misbehave."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loopback import LoopbackHandler, LoopbackServer, running


class ObjectServer(LoopbackServer):
    """Serves a folder. The first folder in a path is also a bucket of S3.

    faults: what to do with the next requests for shards, one after the other: "stall", "403",
    "500", "cut" (the connection ends early), "short" (the answer does), "flip" (a wrong bit),
    "whole" (no ranges) or "" (nothing). forever: what to do with all further ones.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(Handler)
        self.folder = folder
        self.faults: list[str] = []
        self.forever = ""
        self.latency = 0.0  # seconds
        self.paths: list[str] = []  # of shards that were asked for
        self.ended = threading.Event()

    def next_fault(self, path: str) -> str:
        if not path.endswith(".tar"):
            return ""
        with self.lock:
            self.paths.append(path)
            return self.faults.pop(0) if self.faults else self.forever


class Handler(LoopbackHandler):
    server: ObjectServer

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


@contextmanager
def served(folder: Path) -> Iterator[ObjectServer]:
    """Serve a folder until the end of the block."""
    with running(ObjectServer(folder)) as server:
        yield server
        server.ended.set()
