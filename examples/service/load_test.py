"""Load the service with many clients at once, and report its times, refusals and memory.

    python -m examples.service.load_test --url http://127.0.0.1:8000 --minutes 5 --pid PID

It enrols 20 speakers `load-<random>-voice0` ... and deletes them at the end, so that no other
speaker changes. All its clients are one client for the rate limit, so start the service with
SERVE_REQUESTS_PER_SECOND=100000 SERVE_BURST=100000. PID is the first process of a service on this
machine; the memory of its processes is read at the start and after each tenth of the time. Only
servers on this machine are accepted. Letters: S samples.
"""

import argparse
import asyncio
import io
import json
import random
import sys
import time
import uuid
import wave
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np

SAMPLE_RATE = 16000
NUM_VOICES = 20
# Endpoint -> share of the requests.
MIX = {"embed": 0.4, "verify": 0.2, "identify": 0.3, "enrol": 0.1}
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def make_wav(voice: int, seconds: float, rng: np.random.Generator) -> bytes:
    """Return a recording of harmonics and noise, in which a voice has its own pitch."""
    time_S = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    pitch = 90 + 8 * voice
    wave_S = 0.01 * rng.standard_normal(len(time_S))
    for harmonic in range(1, 11):
        wave_S += 0.1 / harmonic * np.sin(2 * np.pi * pitch * harmonic * time_S)
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        wav.writeframes((wave_S * 32767).astype("<i2").tobytes())
    return file.getvalue()


def make_recordings(count: int = 200) -> list[tuple[int, bytes]]:
    """Return (voice, content) of recordings of 2 to 10 seconds."""
    rng = np.random.default_rng(0)
    recordings: list[tuple[int, bytes]] = []
    for number in range(count):
        voice = number % NUM_VOICES
        content = make_wav(voice, rng.uniform(2, 10), rng)
        recordings.append((voice, content))
    return recordings


class Load:
    """Clients that send one request after the other, and what came back."""

    def __init__(self, url: str, *, num_clients: int, seconds: float) -> None:
        self.url = url
        self.num_clients = num_clients
        self.seconds = seconds
        self.recordings = make_recordings()
        self.prefix = f"load-{uuid.uuid4().hex[:8]}-"
        # Endpoint -> seconds of each request that was answered with success.
        self.times: dict[str, list[float]] = defaultdict(list)
        self.num_requests: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    async def run(self) -> None:
        limits = httpx2.Limits(max_connections=self.num_clients)
        async with httpx2.AsyncClient(
            base_url=self.url, timeout=60, limits=limits
        ) as http:
            try:
                # So that there is someone to identify.
                for voice in range(NUM_VOICES):
                    await self._request(http, "enrol", random.Random(voice), voice)
                self.times.clear()
                self.num_requests.clear()
                end = time.monotonic() + self.seconds
                clients = [self._client(http, i, end) for i in range(self.num_clients)]
                await asyncio.gather(*clients)
            finally:
                await self._delete_speakers(http)

    async def _delete_speakers(self, http: httpx2.AsyncClient) -> None:
        for voice in range(NUM_VOICES):
            name = self._name(voice)
            try:
                answer = await http.delete(f"/speakers/{name}")
            except httpx2.HTTPError as error:
                self.errors[f"{name} is not deleted: {type(error).__name__}"] += 1
                continue
            # 404: it was refused when it was enrolled.
            if answer.status_code not in (204, 404):
                self.errors[f"{name} is not deleted: {answer.status_code}"] += 1

    def _name(self, voice: int) -> str:
        return f"{self.prefix}voice{voice}"

    async def _client(self, http: httpx2.AsyncClient, number: int, end: float) -> None:
        """Send one request after the other until `end`."""
        rng = random.Random(number)
        kinds = list(MIX)
        shares = list(MIX.values())
        while time.monotonic() < end:
            (kind,) = rng.choices(kinds, shares)
            voice = rng.randrange(NUM_VOICES)
            await self._request(http, kind, rng, voice)

    async def _request(
        self, http: httpx2.AsyncClient, kind: str, rng: random.Random, voice: int
    ) -> None:
        of_voice = [content for v, content in self.recordings if v == voice]
        first, second = rng.choice(of_voice), rng.choice(of_voice)
        path = f"/{kind}"
        files = [("recording", ("a.wav", first))]
        if kind == "verify":
            files = [
                ("recording_a", ("a.wav", first)),
                ("recording_b", ("b.wav", second)),
            ]
        elif kind == "enrol":
            path = f"/speakers/{self._name(voice)}"
            files = [
                ("recordings", ("a.wav", first)),
                ("recordings", ("b.wav", second)),
            ]
        self.num_requests[kind] += 1
        begin = time.monotonic()
        try:
            answer = await http.post(path, files=files)
        except httpx2.HTTPError as error:
            self.errors[f"{kind}: {type(error).__name__}"] += 1
            # A server that does not answer is not asked as fast as it fails.
            await asyncio.sleep(1)
            return
        if not answer.is_success:
            self.errors[f"{kind}: {answer.status_code} {answer.text[:80]}"] += 1
            return
        self.times[kind].append(time.monotonic() - begin)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each endpoint: requests, answers, and their times in milliseconds.

        The percentiles are of answers with success: a refusal takes no time.
        """
        rows: list[dict[str, Any]] = []
        for kind in [*MIX, "all"]:
            kinds = list(MIX) if kind == "all" else [kind]
            times: list[float] = []
            for of_kind in kinds:
                times += self.times[of_kind]
            row: dict[str, Any] = {
                "endpoint": kind,
                "requests": sum(self.num_requests[of_kind] for of_kind in kinds),
                "answered": len(times),
            }
            for percent in (50, 95, 99):
                milliseconds = None
                if times:
                    milliseconds = round(1000 * float(np.percentile(times, percent)), 1)
                row[f"p{percent}_ms"] = milliseconds
            rows.append(row)
        return rows


def resident_mb(pid: int | None) -> dict[str, float]:
    """Return the memory of a process and its children (Linux), resident and proportional."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    total = {"rss": 0, "pss": 0}
    for process in [str(pid), *children.split()]:
        text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name.lower() in total:
                total[name.lower()] += int(value.split()[0])
    return {name: round(kilobytes / 1024, 1) for name, kilobytes in total.items()}


async def watch_memory(pid: int | None, seconds: float) -> list[dict[str, float]]:
    """Return the memory at the start, and after each tenth of the time."""
    memory: list[dict[str, float]] = []
    if pid is None:
        return memory
    memory.append(resident_mb(pid))
    for _ in range(10):
        await asyncio.sleep(seconds / 10)
        memory.append(resident_mb(pid))
    return memory


async def measure(load: Load, pid: int | None) -> dict[str, Any]:
    begin = time.monotonic()
    _, memory = await asyncio.gather(load.run(), watch_memory(pid, load.seconds))
    seconds = time.monotonic() - begin
    rows = load.rows()
    return {
        "clients": load.num_clients,
        "seconds": round(seconds, 1),
        "answers_per_second": round(rows[-1]["answered"] / seconds, 1),
        "errors": dict(load.errors),
        "endpoints": rows,
        "memory_mb": memory,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--pid", type=int, help="first process of the service")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args(arguments)
    if urlsplit(options.url).hostname not in LOCAL_HOSTS:
        parser.error(f"--url: must be a server on this machine, got {options.url}")

    try:
        httpx2.get(f"{options.url}/health", timeout=30).raise_for_status()
    except httpx2.HTTPError as error:
        problem = str(error) or type(error).__name__
        parser.error(f"--url: no service is ready at {options.url} ({problem})")
    load = Load(
        options.url,
        num_clients=options.clients,
        seconds=60 * options.minutes,
    )
    report = asyncio.run(measure(load, options.pid))
    for row in report["endpoints"]:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(f"{report['answers_per_second']} answers a second")
    print(f"refused or failed: {sum(load.errors.values())}")
    for error, count in load.errors.most_common():
        print(f"  {count} x {error}")
    for number, memory in enumerate(report["memory_mb"]):
        when = f"after {10 * number} %" if number else "at the start"
        print(f"memory {when}: {memory['rss']} MB, {memory['pss']} MB of its own")
    if not report["memory_mb"]:
        print("memory: not read; give the first process of the service by --pid")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
