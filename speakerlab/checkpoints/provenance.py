"""Versions, commit and host of a run, as plain values for run.json and a model's card."""

import json
import platform
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import speakerlab

# The keys of `environment`.
ENVIRONMENT = (
    *("speakerlab", "commit", "python", "torch", "cuda", "cudnn", "driver", "host", "device"),
    *("gpu", "capability", "threads", "matmul_precision", "conv_tf32", "cudnn_benchmark"),
    "deterministic",
)


def commit() -> str:
    """Return the commit of the source tree, `-dirty` if changed, or the one that pip installed.

    `unknown` if there is none. The package itself may lie in another repository of the user's.
    """
    root = Path(speakerlab.__file__).parents[1]
    if (root / ".git").exists():
        return ask_git(root, "describe", "--always", "--dirty", "--abbrev=12") or "unknown"
    installed = root / f"speakerlab-{speakerlab.__version__}.dist-info/direct_url.json"
    origin = json.loads(installed.read_text("utf-8")) if installed.exists() else {}
    return origin.get("vcs_info", {}).get("commit_id", "unknown")[:12]


def ask_git(folder: Path, *words: str) -> str:
    """Return git's answer about a folder; empty if it is no repository or git is missing."""
    command = ["git", "-C", str(folder), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed, as in many images
        return ""


def driver(root: Path = Path("/")) -> str | None:
    """Return the version of NVIDIA's kernel driver, or None. `root` is the folder of `proc`."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"\s(\d+(\.\d+)+)\s", text)
    return found.group(1) if found else None


def environment(device: Any) -> dict[str, Any]:
    """Return versions and hardware that affect results and speed; every key is always there."""
    import torch  # callers that only need the commit do without

    on_gpu = device.type == "cuda"
    found = {
        "speakerlab": speakerlab.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver(),
        "host": socket.gethostname(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "capability": list(torch.cuda.get_device_capability(device)) if on_gpu else None,
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "conv_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    assert tuple(found) == ENVIRONMENT
    return found
