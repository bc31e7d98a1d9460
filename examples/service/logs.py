"""What the service logs, and how: time, level, process, one line."""

import logging
from typing import Any


class Unanswered(logging.Filter):
    """Filter against warnings that a client has got in the answer, see `recordings.Warnings`."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(record, "is_answered", False)


# In the form of `logging.config.dictConfig`, which uvicorn calls in each worker.
LOG_CONFIG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {
            "format": "%(asctime)s %(levelname)s %(name)s [%(process)d]: %(message)s"
        }
    },
    "filters": {"unanswered": {"()": Unanswered}},
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": "line",
            "filters": ["unanswered"],
        }
    },
    "root": {"level": "WARNING", "handlers": ["stderr"]},
    "loggers": {"service": {"level": "INFO"}, "uvicorn": {"level": "INFO"}},
}
