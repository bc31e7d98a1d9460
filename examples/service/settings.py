"""Settings of the service: a YAML file, environment variables, or both.

The variable of a setting is `SERVE_` and its name in capitals, such as SERVE_PORT; it overrides the
file. Unknown names and values out of range are refused in one line.
"""

import difflib
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)

PREFIX = "SERVE_"
CONFIG_VARIABLE = "SERVE_CONFIG"  # path of the YAML file

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


def _check_addresses(text: str) -> str:
    """Refuse what uvicorn would take as a name that no client has."""
    if text in ("", "*"):
        return text
    for part in text.split(","):
        try:
            ipaddress.ip_network(part.strip())
        except ValueError:
            raise ValueError(
                "must be addresses or networks with commas between, such as"
                " 10.0.0.1,192.168.0.0/16"
            ) from None
    return text


def _check_waiting(megabytes: float, settings: ValidationInfo) -> float:
    """Refuse a bound that no upload of the largest size would fit in."""
    for name in ("max_upload_mb", "max_job_upload_mb"):
        # A setting that was refused is missing.
        largest = settings.data.get(name, 0)
        # The comparison is also false for nan.
        if not megabytes >= largest:
            raise ValueError(f"must be at least {name}, {largest:g}")
    return megabytes


class Settings(BaseModel):
    """Everything that an operator can choose."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Experiment, model folder, .onnx file or hub:NAME.
    model: Annotated[str, Field(min_length=1)]
    # For databases and recordings that wait for diarization; needs room and a local disk.
    folder: Path = Path("service-data")
    device: str = "auto"

    # Server
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    # Of torch, in each worker.
    threads: Count = 1
    # Addresses whose X-Forwarded-For is believed, separated by commas; "*": all.
    trusted_proxies: Annotated[str, AfterValidator(_check_addresses)] = ""
    # Its lines contain the names of speakers.
    access_log: bool = False

    # Uploads
    max_upload_mb: Annotated[float, Field(gt=0, le=1024)] = (
        25  # of all files of a request
    )
    max_seconds: Seconds = 60  # of each recording
    max_job_upload_mb: Annotated[float, Field(gt=0, le=16384)] = 500
    max_job_seconds: Seconds = 4 * 3600
    # Of all requests of a worker that wait or are being received, in its temporary files.
    max_waiting_mb: Annotated[
        float, Field(validate_default=True), AfterValidator(_check_waiting)
    ] = 2000
    min_sample_rate: Annotated[int, Field(ge=2000)] = 8000  # Hz
    max_sample_rate: Annotated[int, Field(le=384_000)] = 96_000
    max_channels: Annotated[int, Field(ge=1, le=32)] = 8

    # Clients
    requests_per_second: Annotated[float, Field(gt=0)] = 20  # of a client, in a worker
    burst: Count = 40
    # Connections of a worker; more get 503.
    max_connections: Count = 500
    # Time for the headers, and for a body or answer that is slower than the rate.
    slow_seconds: Seconds = 10
    min_bytes_per_second: Count = 10_000

    # Requests that a worker computes at once, and those that wait or are being received. The time
    # decides who gets 503; the number only bounds the open requests.
    concurrency: Annotated[int, Field(ge=1, le=64)] = 2
    queue: Annotated[int, Field(ge=0)] = 200
    queue_seconds: Seconds = 30  # for a request to wait

    # Storage
    max_speakers: Count = 20_000
    max_jobs: Count = 100  # queued or running
    job_attempts: Count = 3  # starts of a job that did not end
    # A running job whose worker was silent for so long is started again.
    job_lease_seconds: Seconds = 30
    job_retention_hours: Annotated[float, Field(gt=0)] = 24

    @property
    def max_upload_bytes(self) -> int:
        return int(self.max_upload_mb * 1e6)

    @property
    def max_job_upload_bytes(self) -> int:
        return int(self.max_job_upload_mb * 1e6)

    @property
    def max_waiting_bytes(self) -> int:
        return int(self.max_waiting_mb * 1e6)


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of a YAML file and of variables; raise ValueError with one line."""
    values: dict[str, Any] = {}
    config = environment.get(CONFIG_VARIABLE)
    if config:
        values = _read_yaml(Path(config))
    for name in values:
        _refuse_unknown(name, shown=f"{config}: {name}")
    for variable, text in environment.items():
        # An empty variable, such as `${MODEL}` in a script that did not set it, is none.
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        _refuse_unknown(name, shown=variable)
        values[name] = text
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        problem = first["msg"].removeprefix("Value error, ").lower()
        got = f", got {first['input']!r}" if name in values else ""
        raise ValueError(
            f"{name} ({PREFIX}{name.upper()}): {problem}{got}; correct the setting"
        ) from None


def _refuse_unknown(name: str, *, shown: str) -> None:
    """Raise ValueError without the value, which may be a password."""
    if name in Settings.model_fields:
        return
    similar = difflib.get_close_matches(name, Settings.model_fields, n=1)
    hint = f"did you mean {similar[0]}? " if similar else ""
    raise ValueError(
        f"{shown}: unknown setting; {hint}docs/serving.md has a list of them"
        " (authentication is left to a proxy)"
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read ({reason}); correct it") from None
    has_names = isinstance(values, dict) and all(isinstance(key, str) for key in values)
    if not has_names:
        raise ValueError(f"{path}: must have lines `setting: value`; correct it")
    return values
