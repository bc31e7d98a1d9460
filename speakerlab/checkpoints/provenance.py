"""Versions, commit and host of a run, as plain values for run.json and a model's card."""

import json
import os
import platform
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import speakerlab
from speakerlab.core.distribution import FOLDERS

COMMIT_VARIABLE = "SPEAKERLAB_COMMIT"
ARCHIVED_COMMIT = ".commit"  # `git archive` replaces its text, see .gitattributes
# The keys of `environment`.
ENVIRONMENT = (
    "speakerlab",
    "commit",
    "python",
    "torch",
    "cuda",
    "cudnn",
    "driver",
    "host",
    "device",
    "gpu",
    "capability",
    "threads",
    "matmul_precision",
    "conv_tf32",
    "cudnn_benchmark",
    "deterministic",
)


def commit() -> str:
    """Return the commit of the source tree (`-dirty` if changed), or the commit pip installed.

    A copy without a repository has the commit that SPEAKERLAB_COMMIT names, or the one that `git
    archive` wrote. Return `unknown` if there is none. A repository that merely contains the package
    is ignored.
    """
    root = Path(speakerlab.__file__).parents[1]
    # Only if the root of the repository is here: git itself would also search parent folders.
    if (root / ".git").exists():
        name = ask_git(root, "describe", "--always", "--dirty", "--abbrev=12")
        return name or "unknown"

    commit_id = _recorded_commit(root) or _installed_commit(root) or "unknown"
    return commit_id[:12]


def _recorded_commit(root: Path) -> str:
    """Return the commit of a copy without a repository; empty if nothing names it."""
    commit_id = os.environ.get(COMMIT_VARIABLE, "")
    archive = root / ARCHIVED_COMMIT
    if not commit_id and archive.exists():
        commit_id = archive.read_text("utf-8").strip()
    # In a copy that `git archive` did not make, the file has the format instead of a commit.
    return "" if commit_id.startswith("$Format") else commit_id


def _installed_commit(root: Path) -> str:
    """Return the commit that pip installed; empty if it did not install from a repository."""
    info = f"{FOLDERS}-{speakerlab.__version__}.dist-info"
    origin_file = root / info / "direct_url.json"
    if not origin_file.exists():
        return ""
    text = origin_file.read_text("utf-8")
    origin: dict[str, Any] = json.loads(text)
    repository = origin.get("vcs_info", {})
    return repository.get("commit_id", "")


def ask_git(folder: Path, *arguments: str) -> str:
    """Return the output of git for a folder; empty if it is no repository or git is missing."""
    command = ["git", "-C", str(folder), *arguments]
    # Many container images have no git.
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return process.stdout.strip()


def driver(root: Path = Path("/")) -> str | None:
    """Return the version of NVIDIA's kernel driver, or None. `root` is the folder of `proc`."""
    file = root / "proc/driver/nvidia/version"
    try:
        text = file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The version is the first number with dots, between a name and a date.
    match = re.search(r"\s(\d+(\.\d+)+)\s", text)
    return match.group(1) if match else None


def environment(device: Any) -> dict[str, Any]:
    """Return versions and hardware that affect results and speed; all keys are always present."""
    import torch  # not at the top: `commit` does not need it

    gpu_name = None
    capability = None
    if device.type == "cuda":
        gpu_name = torch.cuda.get_device_name(device)
        # A list, because JSON has no tuples.
        capability = list(torch.cuda.get_device_capability(device))

    facts = {
        "speakerlab": speakerlab.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver(),
        "host": socket.gethostname(),
        "device": str(device),
        "gpu": gpu_name,
        "capability": capability,
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "conv_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    assert tuple(facts) == ENVIRONMENT
    return facts
