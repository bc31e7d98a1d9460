"""The service in this process, or as processes of its own, and what is uploaded to it."""

import io
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import soundfile
from models_on_disk import CALIBRATION, publish_xvector
from voices import RATE, make_wave

ROOT = Path(__file__).parents[2]


def publish_tiny(exp: Path) -> Path:
    return publish_xvector(exp, CALIBRATION)


def encode(wave: np.ndarray, form: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, RATE, format=form, subtype=subtype)
    return file.getvalue()


def voice(speaker: int, take: int = 0, seconds: float = 1.5) -> bytes:
    return encode(make_wave(speaker, take, seconds))


def silent_flac(seconds: int) -> bytes:
    """Kilobytes that decode to so many seconds."""
    file = io.BytesIO()
    silence = np.zeros(60 * RATE, dtype=np.int16)
    with soundfile.SoundFile(file, "w", RATE, 1, "PCM_16", format="FLAC") as flac:
        for _ in range(seconds // 60):
            flac.write(silence)
    return file.getvalue()


def wav_of_10_gb() -> bytes:
    """RF64, whose lengths have 64 bits, with a second of sound."""
    wave = make_wave(1, 0, 1.0).tobytes()
    stated = 10 * 1000**3
    sizes = struct.pack("<QQQI", stated + 72, stated, stated // 2, 0)
    return (
        b"RF64\xff\xff\xff\xffWAVE"
        + b"ds64"
        + struct.pack("<I", len(sizes))
        + sizes
        + b"fmt "
        + struct.pack("<IHHIIHH", 16, 1, 1, RATE, 2 * RATE, 2, 16)
        + b"data\xff\xff\xff\xff"
        + wave
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """The service as its own processes."""

    def __init__(self, model: Path, folder: Path, **settings: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.temporary = folder / "tmp"
        self.settings = {
            "model": model,
            "folder": folder / "data",
            "port": self.port,
            "requests_per_second": 100_000,
            "burst": 100_000,
            **settings,
        }

    def __enter__(self) -> "Server":
        self.temporary.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(self.temporary)}
        for name, value in self.settings.items():
            environment[f"SERVE_{name.upper()}"] = str(value)
        self.log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "examples.service"],
            cwd=ROOT,
            env=environment,
            stdout=self.log,
            stderr=self.log,
        )
        self.wait_until_ready()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.stop()
        finally:
            self.kill()

    def stop(self) -> int:
        """End the service as an operator does; return its exit code."""
        self.process.terminate()
        return self.process.wait(60)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.read_log()
            try:
                httpx2.get(f"{self.url}/health", timeout=5).raise_for_status()
                return
            except httpx2.HTTPError:
                time.sleep(0.2)
        raise AssertionError(self.read_log())

    def read_log(self) -> str:
        return (self.folder / "log").read_text()

    def workers(self) -> list[int]:
        """Return the processes that have the model."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", "spawn_main"],
            capture_output=True,
            text=True,
        )
        return [int(line) for line in found.stdout.split()] or [self.process.pid]

    def kill(self) -> None:
        """Kill all processes, without a chance to save anything."""
        for process in [*self.workers(), self.process.pid]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)
        self.log.close()

    def resident_mb(self) -> float:
        """Return the memory of the workers."""
        total = 0
        for process in self.workers():
            status = Path(f"/proc/{process}/status").read_text()
            total += int(status.partition("VmRSS:")[2].split()[0])
        return total / 1024
