"""examples/service as processes: kills, slow clients, memory and load."""

import asyncio
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voices import make_wave

pytest.importorskip("fastapi", reason="needs the extra `serve`")

import httpx2
from service_clients import (
    ROOT,
    Server,
    encode,
    free_port,
    publish_tiny,
    silent_flac,
    voice,
)

from examples.service.enrolments import Enrolments
from examples.service.load_test import MIX, Load, measure


@pytest.fixture(scope="module")
def exp(tmp_path_factory) -> Path:
    return publish_tiny(tmp_path_factory.mktemp("exp"))


def enrol(url: str, name: str, content: bytes) -> bool:
    """Return whether the service has acknowledged an enrolment."""
    try:
        answer = httpx2.post(
            f"{url}/speakers/{name}",
            files={"recordings": ("a.wav", content)},
            timeout=20,
        )
    # The worker was killed before it answered.
    except httpx2.HTTPError:
        return False
    assert answer.status_code in (201, 503), answer.text
    return answer.status_code == 201


@pytest.mark.slow
def test_no_acknowledged_enrolment_is_lost_by_kills_of_workers(exp, tmp_path):
    acknowledged: set[str] = set()
    is_over = threading.Event()
    num_kills = 6

    def enrol_many(client: int, url: str) -> None:
        content = voice(client, seconds=0.5)
        number = 0
        while not is_over.is_set():
            name = f"speaker-{client}-{number}"
            if enrol(url, name, content):
                acknowledged.add(name)
            number += 1

    with Server(exp, tmp_path, workers=3) as server:
        threads = [
            threading.Thread(target=enrol_many, args=(client, server.url))
            for client in range(6)
        ]
        for thread in threads:
            thread.start()
        rng = random.Random(0)
        deadline = time.monotonic() + 240
        for number in range(num_kills):
            # In the middle of enrolments, of which some were acknowledged since the last kill.
            while len(acknowledged) < 10 * (number + 1):
                assert time.monotonic() < deadline, server.read_log()
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 0.2))
            os.kill(rng.choice(server.workers()), signal.SIGKILL)
        # At last all processes at once.
        server.kill()
        is_over.set()
        for thread in threads:
            thread.join()
    assert len(acknowledged) >= 10 * num_kills

    with Server(exp, tmp_path, workers=2) as server:
        stored: set[str] = set()
        after = ""
        while True:
            page = httpx2.get(
                f"{server.url}/speakers", params={"after": after, "limit": 1000}
            ).json()
            stored |= {speaker["name"] for speaker in page["speakers"]}
            if not page["speakers"]:
                break
            after = page["speakers"][-1]["name"]
        found = httpx2.post(
            f"{server.url}/identify", files={"recording": voice(3)}
        ).json()
    assert acknowledged <= stored
    assert found["ranking"]
    with sqlite3.connect(tmp_path / "data/speakers.sqlite") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("end", "attempts"), [(Server.kill, 2), (Server.stop, 1)])
def test_a_job_that_runs_when_all_is_killed_is_run_again(exp, tmp_path, end, attempts):
    parts = [make_wave(speaker, 0, 30.0) for speaker in range(20)]
    recording = encode(np.concatenate(parts), "FLAC")
    settings = {"job_lease_seconds": 2, "workers": 2}

    def job(server: Server, job_id: str) -> dict:
        return httpx2.get(f"{server.url}/diarizations/{job_id}", timeout=60).json()

    with Server(exp, tmp_path, **settings) as server:
        answer = httpx2.post(
            f"{server.url}/diarizations",
            files={"recording": ("meeting.flac", recording)},
            timeout=60,
        )
        assert answer.status_code == 202, answer.text
        job_id = answer.json()["id"]
        while job(server, job_id)["state"] == "queued":
            time.sleep(0.01)
        assert job(server, job_id)["state"] == "running"
        end(server)
    with Server(exp, tmp_path, **settings) as server:
        deadline = time.monotonic() + 120
        while (found := job(server, job_id))["state"] in ("queued", "running"):
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
    assert found["state"] == "done", found
    assert found["attempts"] == attempts
    assert found["result"]["seconds"] == 600
    assert list((tmp_path / "data/recordings").iterdir()) == []


def send_slowly(port: int, begin: bytes, drop: bytes) -> float:
    """Send `begin`, then `drop` again and again; return the seconds until the server ends it."""
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(begin)
        connection.settimeout(0.2)
        while time.monotonic() - started < 30:
            try:
                connection.sendall(drop)
                if connection.recv(4096) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    return time.monotonic() - started


@pytest.mark.slow
def test_slow_clients_are_cut_and_do_not_keep_others_waiting(exp, tmp_path):
    body = (
        b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n"
        b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
    )
    kinds = {
        "nothing": (b"", b""),
        "headers": (b"GET /health HTTP/1.1\r\n", b"X-A: b\r\n"),
        "second headers": (
            b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /health HTTP/1.1\r\n",
            b"X-A: b\r\n",
        ),
        "body": (body, b"a"),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with Server(exp, tmp_path, slow_seconds=2) as server:
        threads: list[threading.Thread] = []
        for kind, (begin, drop) in kinds.items():
            for _ in range(5):

                def attack(kind=kind, begin=begin, drop=drop) -> None:
                    taken = send_slowly(server.port, begin, drop)
                    seconds[kind].append(taken)

                threads.append(threading.Thread(target=attack))
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        answer = httpx2.post(f"{server.url}/embed", files={"recording": voice(1)})
        assert answer.status_code == 200
        assert answer.elapsed.total_seconds() < 1.5
        for thread in threads:
            thread.join()
    for kind, taken in seconds.items():
        assert len(taken) == 5
        assert max(taken) < 8, kind


def send_endlessly(port: int) -> float:
    """Send a chunked body until the server ends it; return the seconds."""
    head = (
        b"POST /embed HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"
    )
    part = (
        b'--x\r\nContent-Disposition: form-data; name="recording"; filename="a"\r\n\r\n'
    )
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(head)
        try:
            while time.monotonic() - started < 30:
                connection.sendall(b"%x\r\n%b\r\n" % (len(part), part))
                part = bytes(1 << 16)
        except OSError:
            pass
    return time.monotonic() - started


@pytest.mark.slow
def test_hostile_uploads_need_little_memory_and_leave_no_file(exp, tmp_path):
    with Server(exp, tmp_path, slow_seconds=2) as server:

        def post(content: bytes, path: str = "/embed") -> int:
            answer = httpx2.post(
                server.url + path, files={"recording": content}, timeout=60
            )
            return answer.status_code

        for _ in range(3):
            assert post(voice(1, seconds=50.0)) == 200
        before = server.resident_mb()
        peak = before
        bomb = silent_flac(8 * 3600)
        for _ in range(3):
            assert post(bomb) == 413
            assert post(bomb, "/diarizations") == 413
            assert post(bytes(30_000_000)) == 413
            assert send_endlessly(server.port) < 10
            for number in range(20):
                assert 400 <= post(voice(1)[: 1000 + number]) < 500
            peak = max(peak, server.resident_mb())
        assert peak < before + 150
        assert post(voice(1)) == 200
        metrics = httpx2.get(f"{server.url}/metrics").text
        assert 'code="500"' not in metrics
        assert list(server.temporary.iterdir()) == []
        assert list((tmp_path / "data/recordings").iterdir()) == []


@pytest.mark.slow
def test_workers_answer_as_one(exp, tmp_path):
    with Server(exp, tmp_path, workers=3) as server:
        for number in range(12):
            assert enrol(server.url, f"speaker{number}", voice(number))
            page = httpx2.get(f"{server.url}/speakers").json()
            assert page["total"] == number + 1
        text = httpx2.get(f"{server.url}/metrics").text
        counted = 'code="201",endpoint="/speakers/{name}",method="POST"} 12.0'
        assert counted in text
        # A worker that was killed is replaced, and what it has counted stays.
        os.kill(server.workers()[0], signal.SIGKILL)
        server.wait_until_ready()
        deadline = time.monotonic() + 60
        while len(server.workers()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        server.wait_until_ready()
        text = httpx2.get(f"{server.url}/metrics").text
        assert counted in text
        assert "speakerlab_requests_in_progress 0.0" in text
        # When their parent is killed, the workers end, too, and free the port.
        workers = server.workers()
        server.process.kill()
        while any(Path(f"/proc/{worker}").exists() for worker in workers):
            assert time.monotonic() < deadline + 60
            time.sleep(0.1)


def start_and_end(**settings: Any) -> tuple[int, str]:
    """Start a service that cannot run; return its exit code and what it has written."""
    environment = dict(os.environ)
    for name, value in settings.items():
        environment[f"SERVE_{name.upper()}"] = str(value)
    ended = subprocess.run(
        [sys.executable, "-m", "examples.service"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_a_wrong_setting_ends_the_start_in_one_line(tmp_path):
    code, log = start_and_end(api_key="secret", folder=tmp_path / "data")
    assert code == 2
    (line,) = log.splitlines()
    assert line.startswith("SERVE_API_KEY: unknown setting")
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_service_that_cannot_start_says_why_in_one_line(exp, tmp_path, workers):
    common = {"folder": tmp_path / "data", "port": free_port(), "workers": workers}
    code, log = start_and_end(model=tmp_path / "missing", **common)
    assert code == 3
    (line,) = [line for line in log.splitlines() if " ERROR " in line]
    assert f"{tmp_path}/missing: does not exist" in line
    assert "Traceback" not in log

    enrolments = Enrolments(
        tmp_path / "data/speakers.sqlite",
        model_sha256="b" * 64,
        embed_dim=2,
        max_speakers=10,
    )
    unit_D = np.array([0.6, 0.8], dtype=np.float32)
    enrolments.add("ann", unit_D, num_recordings=1, seconds=1.0)
    code, log = start_and_end(model=exp, **common)
    assert code == 3
    (line,) = [line for line in log.splitlines() if " ERROR " in line]
    assert "has 1 speakers of model bbbbbbbbbbbb" in line
    assert "Traceback" not in log


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_service_on_the_port_or_the_folder_ends_and_the_first_goes_on(
    exp, tmp_path, workers
):
    with Server(exp, tmp_path, workers=workers) as server:
        assert enrol(server.url, "ann", voice(1))
        before = httpx2.get(f"{server.url}/metrics").text
        settings = {"model": exp, "folder": tmp_path / "data", "workers": workers}
        code, log = start_and_end(port=server.port, **settings)
        assert code == 2
        (line,) = log.splitlines()
        assert f"127.0.0.1:{server.port} cannot be used" in line
        counted = 'code="201",endpoint="/speakers/{name}",method="POST"} 1.0'
        assert counted in before
        assert counted in httpx2.get(f"{server.url}/metrics").text
        # On another port, with the same folder.
        code, log = start_and_end(port=free_port(), **settings)
        assert code == 2
        (line,) = log.splitlines()
        assert f"another service uses {tmp_path}/data" in line
        assert counted in httpx2.get(f"{server.url}/metrics").text
        log = server.read_log()
        assert f"folder {tmp_path}/data, host 127.0.0.1, port {server.port}" in log
        assert log.count("ready: model ") == workers
        assert server.stop() == 0


@pytest.mark.slow
def test_fifty_clients_get_no_error_and_memory_does_not_grow(exp, tmp_path):
    with Server(exp, tmp_path, workers=2) as server:
        load = Load(server.url, num_clients=50, seconds=30)
        report = asyncio.run(measure(load, server.process.pid))
    assert report["errors"] == {}
    counts = {row["endpoint"]: row["answered"] for row in report["endpoints"]}
    assert all(counts[kind] > 20 for kind in MIX)
    at_start, *memory = [sample["rss"] for sample in report["memory_mb"]]
    assert at_start > 100
    # After half of the time, the library has seen recordings of all lengths.
    assert memory[-1] < 1.1 * memory[4], memory
