"""What a run was made with: versions, commit, host. In: nothing. Out: plain values for run.json."""

import platform
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch

import speakerlab


def commit() -> str:
    """The commit of the source tree, `-dirty` if it was changed, or `unknown` outside git."""
    root = Path(speakerlab.__file__).parents[1]
    described = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, as far as they bear on results and speed."""
    facts: dict[str, Any] = {
        "speakerlab": speakerlab.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "host": socket.gethostname(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "conv_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }
    if device.type == "cuda":
        facts |= {
            "gpu": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts
