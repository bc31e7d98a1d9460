"""What stands above the suite's table: machine, versions, settings, peers, as plain values.

In: the suite's options. Out: a dictionary for JSON.
"""

import argparse
import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import STARTED
from sides import ROOT, environment
from speech import DEFAULTS, SHARED

sys.path.insert(0, str(ROOT))
from speakerlab.checkpoints import provenance

CPUINFO = Path("/proc/cpuinfo")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # what decides how fast each format is
# Variables that change how fast either side is.
SETTINGS = ("OMP_", "MKL_", "GOMP_", "KMP_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "THP_")


def kind_of_machine(device: str, threads: int) -> str:
    """What ratios may be compared on: a GPU's name, or a CPU's with its flags and the threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    name, flags = cpu()
    return f"{name} ({' '.join(flags)}), {threads} threads"


def cpu() -> tuple[str, list[str]]:
    """(name of the model, those of FLAGS that it has)."""
    if not CPUINFO.exists():
        return platform.processor() or platform.machine(), []
    pairs = (line.partition(":") for line in CPUINFO.read_text(encoding="utf-8").splitlines())
    told = {key.strip(): value.strip() for key, _, value in pairs}
    has = set(told.get("flags", "").split())
    return told.get("model name", platform.machine()), [flag for flag in FLAGS if flag in has]


def facts_of(options: argparse.Namespace, *, kind: str, threads: int) -> dict[str, Any]:
    """Date, commit, machine, versions, settings and peers."""
    known = provenance.environment(torch.device(options.device))
    of_sides = environment(ROOT, options.threads)
    settings = {k: v for k, v in sorted(of_sides.items()) if k.startswith(SETTINGS)}
    return {
        **STARTED,
        "machine": kind,
        "device": known["device"],
        "cores": os.cpu_count(),
        "threads": threads,
        **{name: known[name] for name in ("python", "torch", "cuda", "cudnn", "driver")},
        "numpy": np.__version__,
        "settings": settings,
        "audio": audio(),
        "peers": {name: version(folder) for name, folder in options.checkouts.items()},
        "command": command(options),
    }


def audio() -> str:
    """Which recordings the parts take where none are named, as they are here."""
    name = DEFAULTS["audio"]
    return name if (SHARED / name).is_dir() else "made-up recordings"


def version(checkout: Path) -> str:
    """The commit of a checkout, or the date of its newest source."""
    top = provenance.ask_git(checkout, "log", "-1", "--format=%h", "--", ".")
    if top and (checkout / ".git").exists():
        return top
    newest = max((path.stat().st_mtime for path in checkout.rglob("*.py")), default=0.0)
    return f"no commit, newest source {datetime.fromtimestamp(newest, timezone.utc):%Y-%m-%d}"


def command(options: argparse.Namespace) -> str:
    """What decides about the figures of what was typed, without the names of folders here."""
    words = [f"--device {options.device}"]
    if options.checkouts:
        words.append(f"--peers {' '.join(f'{name}=DIR' for name in options.checkouts)}")
    if len(options.only) < len(options.parts):
        words.append(f"--only {' '.join(options.only)}")
    words += ["--quick"] if options.quick else []
    words += [f"--threads {options.threads}"] if options.threads else []
    return " ".join(["python benchmarks/suite.py", *words])
