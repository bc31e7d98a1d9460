"""Start the service: SERVE_MODEL=EXP python -m examples.service

Settings are environment variables, or a YAML file named by SERVE_CONFIG; see docs/serving.md.
"""

import os
import shutil
import sys

from examples.service.settings import Settings, read_settings


def main() -> int:
    try:
        settings = read_settings()
        prepare_environment(settings)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    serve(settings)
    return 0


def prepare_environment(settings: Settings) -> None:
    """Set what torch and prometheus_client read when they are imported, also in the workers."""
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    # Values of workers of an earlier start would be added.
    folder = settings.folder / "metrics"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)


def serve(settings: Settings) -> None:
    """Answer requests until a signal comes."""
    # After the environment is complete.
    import uvicorn

    from examples.service.limits import TimedConnection

    uvicorn.run(
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
        access_log=settings.access_log,
        server_header=False,
        timeout_graceful_shutdown=20,
        # Seconds until a worker that does not answer its parent is replaced. The parent waits as
        # long if a worker dies while it is asked.
        timeout_worker_healthcheck=10,
    )


if __name__ == "__main__":
    sys.exit(main())
