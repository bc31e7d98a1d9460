"""A headless Chromium that opens pages and reports what they did, by its DevTools protocol."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FOUND = next((path for name in NAMES if (path := shutil.which(name))), None)
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--remote-debugging-pipe",
    "--autoplay-policy=no-user-gesture-required",
)


class Page:
    """A tab. events: what the browser reported, in order; no load ends before its page is idle."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self.reader = reader
        self.writer = writer
        self.session = {}
        self.number = 0
        self.unread = b""
        self.events = list[dict[str, Any]]()
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Load a page, its pictures and its audio."""
        self.events.clear()
        self.send("Page.navigate", url=url)
        while not any(
            event["method"] == "Page.loadEventFired" for event in self.events
        ):
            self.events.append(self._receive())

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, of a promise once it is resolved."""
        options = {
            "expression": expression,
            "returnByValue": True,
            "awaitPromise": True,
        }
        answer = self.send("Runtime.evaluate", **options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def seen(self, method: str) -> list[Any]:
        """Return the parameters of all events of a kind since the page was opened."""
        return [event["params"] for event in self.events if event["method"] == method]

    def send(self, method: str, **params: Any) -> Any:
        """Send a command, return its result."""
        self.number += 1
        text = json.dumps(
            {"id": self.number, "method": method, "params": params, **self.session}
        )
        self.writer.write(text.encode() + b"\0")
        self.writer.flush()
        while (answer := self._receive()).get("id") != self.number:
            self.events.append(answer)
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.unread:
            self.unread += (block := os.read(self.reader.fileno(), 1 << 16))
            assert block, "the browser has ended"
        text, _, self.unread = self.unread.partition(b"\0")
        return json.loads(text)


@contextmanager
def browsing(profile: Path) -> Iterator[Page]:
    """Start the browser, with its files in `profile`; end it afterwards."""
    assert FOUND
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    # The browser reads from descriptor 3 and writes to 4.
    shell = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
    command = ["bash", "-c", shell, FOUND, *OPTIONS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        command,
        pass_fds=(their_in, their_out),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(their_in)
    os.close(their_out)
    try:
        with os.fdopen(our_in, "rb") as reader, os.fdopen(our_out, "wb") as writer:
            page = Page(reader, writer)
            yield page
            page.send("Browser.close")
    finally:
        process.kill()
        process.wait()
