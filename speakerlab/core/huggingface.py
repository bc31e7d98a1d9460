"""Files of huggingface.co by name, through `huggingface_hub`, its cache and its settings.

In: `hf:owner/name`, or `hf:owner/name@REVISION` with a branch, a tag or a commit. Out: a folder of
the cache, named after the commit. HF_ENDPOINT is the address of a mirror, HF_TOKEN the user's
token, HF_HOME the place of the cache; with HF_HUB_OFFLINE=1 only the cache is read.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from speakerlab import __version__
from speakerlab.core import bars

PREFIX = "hf:"
WEBSITE = "https://huggingface.co"
# A part of a name; two hyphens or dots in a row and a final .git are not allowed there.
PART = r"(?!.*(--|\.\.|\.git$))[A-Za-z0-9][\w.-]*"
COMMIT = re.compile(r"[0-9a-f]{40}")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
INSTALL = "pip install huggingface_hub"


class Repository(NamedTuple):
    """A repository, or one of its revisions."""

    name: str  # owner/name
    revision: str | None  # branch, tag or commit; None: the default branch


def parse(model: str) -> Repository:
    """Return the repository that `hf:owner/name@REVISION` names; ValueError for another form."""
    name, at, revision = model.removeprefix(PREFIX).partition("@")
    owner, _, rest = name.partition("/")
    is_name = all(re.fullmatch(PART, part) for part in (owner, rest))
    if not is_name or (at and not revision):
        raise ValueError(
            f"{model}: is not {PREFIX}owner/name or {PREFIX}owner/name@REVISION; correct"
            " it"
        )
    return Repository(name, revision or None)


def require_package(model: str) -> Any:
    """Return the module `huggingface_hub`; ValueError if it is not installed."""
    try:
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise ValueError(
            f"{model}: needs huggingface_hub, which is not installed; {INSTALL}"
        ) from None
    if not bars.are_shown():
        disable_progress_bars()
    # Its clients log a line for each request, which our commands would print.
    for name in ("httpx", "httpx2"):
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
    return huggingface_hub


def api_of(model: str) -> Any:
    """Return a client of the hub."""
    hub = require_package(model)
    return hub.HfApi(library_name="speakerlab", library_version=__version__)


def fetch(model: str, files: Sequence[str]) -> Path:
    """Return the folder with those of the named files that the repository has.

    files: names, or patterns such as `model-*.safetensors`. They are downloaded if the cache lacks
    them. Raises ValueError with one line if that fails.
    """
    repository = parse(model)
    hub = require_package(model)
    with one_line(model, "downloaded"):
        folder = hub.snapshot_download(
            repository.name,
            revision=repository.revision,
            allow_patterns=list(files),
            library_name="speakerlab",
            library_version=__version__,
        )
    return Path(folder)


def origin_of(folder: Path) -> str | None:
    """Return `hf:owner/name@COMMIT` for a folder of the cache; None for any other folder."""
    # models--OWNER--NAME/snapshots/COMMIT
    folder = folder.absolute()
    commit = folder.name
    repository = folder.parent.parent.name
    is_snapshot = folder.parent.name == "snapshots" and COMMIT.fullmatch(commit)
    kind, _, name = repository.partition("--")
    if kind != "models" or not is_snapshot:
        return None
    name = name.replace("--", "/")
    return f"{PREFIX}{name}@{commit}"


def page_of(model: str) -> str:
    """Return the address of a repository's page for records, which name no mirror."""
    return f"{WEBSITE}/{parse(model).name}"


def page_here(model: str) -> str:
    """Return the address of a repository's page on the mirror in use, for messages."""
    mirror = require_package(model).constants.ENDPOINT  # that of HF_ENDPOINT
    return f"{mirror}/{parse(model).name}"


@contextmanager
def one_line(model: str, participle: str) -> Iterator[None]:
    """Turn errors of `huggingface_hub` into ValueError: "cannot be <participle> (<reason>)"."""
    try:
        yield
    except Exception as error:
        # A full disk, or a cache that cannot be written: the line names the file.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason, fix = explain(model, error)
        raise ValueError(f"{model}: cannot be {participle} ({reason}); {fix}") from None


def explain(model: str, error: Exception) -> tuple[str, str]:
    """Return the reason of an error of `huggingface_hub`, and what to do."""
    from huggingface_hub import errors

    # If there is neither an answer nor a copy in the cache, the cause is the error of the network.
    while isinstance(error, errors.LocalEntryNotFoundError):
        if not isinstance(error.__cause__, Exception):
            break
        error = error.__cause__
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return (
            "it is not in the cache, and HF_HUB_OFFLINE forbids to download it",
            "unset HF_HUB_OFFLINE, or copy the cache of another machine",
        )
    if isinstance(error, errors.GatedRepoError):
        return (
            "it is gated",
            f"ask for access on {page_here(model)}, and {LOG_IN}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"it has no revision {parse(model).revision}",
            f"see {page_here(model)}/commits for its branches and commits",
        )
    if isinstance(error, errors.LocalTokenNotFoundError):
        return "there is no token", LOG_IN
    response = getattr(error, "response", None)
    if isinstance(error, errors.HfHubHTTPError) and response is not None:
        return _explain_status(error, int(response.status_code))
    # Errors of the network have no common class, and texts of several lines.
    text = str(error).strip() or type(error).__name__
    reason, _, _ = text.partition("\n")
    return (
        reason,
        "check the network and try again, or set HF_ENDPOINT to a mirror",
    )


def _explain_status(error: Exception, status: int) -> tuple[str, str]:
    """Return the reason of an answer with an HTTP status of 400 or more, and what to do."""
    from huggingface_hub import errors

    reason = f"HTTP {status}"
    message = getattr(error, "server_message", None)
    if message:
        first_line, _, _ = str(message).partition("\n")
        reason += f", {first_line.strip()}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{reason}: it does not exist, or is private",
            f"correct the name, or {LOG_IN}",
        )
    if status == 401:
        return f"{reason}: no token, or one that is not valid", LOG_IN
    if status == 403:
        return f"{reason}: the token has no right to do that", LOG_IN
    return reason, "try again later, or set HF_ENDPOINT to a mirror"
