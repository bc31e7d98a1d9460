"""The first process: checks what every worker needs, then starts and watches them.

torch and prometheus_client read the environment when they are imported, so nothing that imports
them is imported at the top.
"""

import fcntl
import logging
import logging.config
import multiprocessing
import os
import shutil
import socket
from pathlib import Path
from typing import IO

from examples.service.database import PRIVATE_FOLDER, check_writable, private
from examples.service.logs import LOG_CONFIG
from examples.service.settings import Settings, read_settings

log = logging.getLogger("service")


def start() -> int:
    """Check the settings, then answer requests until a signal comes; return the exit code."""
    settings = read_settings()
    logging.config.dictConfig(LOG_CONFIG)
    listener = bind(settings)
    # The lock of the folder is held until the service has ended.
    with prepare_folder(settings.folder):
        return start_workers(settings, listener)


def start_workers(settings: Settings, listener: socket.socket) -> int:
    """Answer requests in as many workers as are set; return the exit code."""
    # torch reads it when it is imported, also in the workers.
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    log.info("settings: %s", describe(settings))
    if settings.workers == 1:
        return serve(settings, listener)
    # In a process of its own, so that this one needs little memory.
    attempt = multiprocessing.get_context("spawn").Process(target=try_model)
    attempt.start()
    attempt.join()
    return attempt.exitcode or serve(settings, listener)


def describe(settings: Settings) -> str:
    """Return the settings that are most asked for, and those that are not the default."""
    shown: list[str] = []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        is_basic = name in ("model", "folder", "host", "port", "workers")
        if is_basic or value != field.default:
            shown.append(f"{name} {value}")
    return ", ".join(shown)


def bind(settings: Settings) -> socket.socket:
    """Return a socket at the host and port; it does not listen before the model is loaded."""
    is_v6 = ":" in settings.host
    listener = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        raise ValueError(
            f"host, port (SERVE_HOST, SERVE_PORT): {settings.host}:{settings.port} cannot"
            f" be used ({_reason(error)}); choose others"
        ) from None
    listener.set_inheritable(True)
    return listener


def prepare_folder(folder: Path) -> IO[bytes]:
    """Make the folder, and one in it for metrics, whose place prometheus_client reads.

    Return a file: as long as it is open, no other service can use the folder.
    """
    metrics = folder / "metrics"
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        check_writable(folder)
        # Before the metrics, which are those of a service that still runs.
        lock = open(folder / "lock", "ab", opener=private)  # noqa: SIM115 # returned
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for database in folder.glob("*.sqlite*"):
            # Opens it, and changes nothing.
            database.open("r+b").close()
        # Values of workers of an earlier start would be added.
        shutil.rmtree(metrics, ignore_errors=True)
        metrics.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    except BlockingIOError:
        raise ValueError(
            f"folder (SERVE_FOLDER): another service uses {folder}; stop it, or choose"
            " another folder"
        ) from None
    except OSError as error:
        raise ValueError(
            f"folder (SERVE_FOLDER): {error.filename or folder} cannot be written"
            f" ({_reason(error)});"
            " choose another one, or correct its permissions"
        ) from None
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
    return lock


def try_model() -> None:
    """Load the model and open the databases once; exit as a worker that cannot start."""
    from examples.service.app import from_environment

    logging.config.dictConfig(LOG_CONFIG)
    from_environment()


def serve(settings: Settings, listener: socket.socket) -> int:
    """Answer requests until a signal comes; return the exit code."""
    # After the environment is complete.
    import uvicorn
    from uvicorn.config import STARTUP_FAILURE
    from uvicorn.supervisors import Multiprocess

    from examples.service.limits import TimedConnection

    config = uvicorn.Config(
        "examples.service.app:from_environment",
        factory=True,
        http=TimedConnection,
        ws="none",
        lifespan="on",
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        limit_concurrency=settings.max_connections,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        log_config=LOG_CONFIG,
        access_log=settings.access_log,
        server_header=False,
        timeout_graceful_shutdown=20,
        # Seconds until a worker that does not answer its parent is replaced. The parent waits as
        # long if a worker dies while it is asked. On a busy machine, a worker imports for 10 s
        # before it answers, and would be replaced again and again.
        timeout_worker_healthcheck=30,
    )
    if settings.workers == 1:
        server = uvicorn.Server(config)
        server.run(sockets=[listener])
        return 0 if server.started else STARTUP_FAILURE
    parent = Multiprocess(config, sockets=[listener])
    parent.run()
    # uvicorn stops, without an error of its own, when a worker cannot start.
    has_failed = any(worker.exitcode == STARTUP_FAILURE for worker in parent.processes)
    return STARTUP_FAILURE if has_failed else 0


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
