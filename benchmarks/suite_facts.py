"""Facts about a run of the suite, as plain values: machine, versions, settings, peers."""

import argparse
import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sides import ROOT, environment

sys.path.insert(0, str(ROOT))
from corpus import name_audio

from speakerlab.checkpoints import provenance

CPUINFO = Path("/proc/cpuinfo")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # what decides how fast each format is
# Variables that change how fast either side is.
SETTINGS = ("OMP_", "MKL_", "GOMP_", "KMP_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "THP_")


def kind_of_machine(device: str, threads: int) -> str:
    """Return a name for machines with comparable ratios: the GPU, or CPU, flags and threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    name, flags = cpu()
    return f"{name} ({' '.join(flags)}), {threads} threads"


def cpu() -> tuple[str, list[str]]:
    """Return (model name, those of FLAGS that it has)."""
    if not CPUINFO.exists():
        return platform.processor() or platform.machine(), []
    pairs = (line.partition(":") for line in CPUINFO.read_text(encoding="utf-8").splitlines())
    found = {key.strip(): value.strip() for key, _, value in pairs}
    has = set(found.get("flags", "").split())
    return found.get("model name", platform.machine()), [flag for flag in FLAGS if flag in has]


def facts_of(
    options: argparse.Namespace, *, kind: str, threads: int, command: str
) -> dict[str, Any]:
    """Return date, commit, machine, versions, settings and peers."""
    known = provenance.environment(torch.device(options.device))
    of_sides = environment(ROOT, options.threads)
    settings = {k: v for k, v in sorted(of_sides.items()) if k.startswith(SETTINGS)}
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "commit": provenance.commit(),
        "machine": kind,
        "device": known["device"],
        "cores": os.cpu_count(),
        "threads": threads,
        **{name: known[name] for name in ("python", "torch", "cuda", "cudnn", "driver")},
        "numpy": np.__version__,
        "settings": settings,
        "audio": name_audio(),
        "peers": {name: version(folder) for name, folder in options.checkouts.items()},
        "quick": options.quick,
        "command": command,
    }


def version(checkout: Path) -> str:
    """Return the commit of a checkout, or the date of its newest source."""
    top = provenance.ask_git(checkout, "log", "-1", "--format=%h", "--", ".")
    if top and (checkout / ".git").exists():
        return top
    newest = max((path.stat().st_mtime for path in checkout.rglob("*.py")), default=0.0)
    return f"no commit, newest source {datetime.fromtimestamp(newest, timezone.utc):%Y-%m-%d}"


def command(options: argparse.Namespace) -> str:
    """Return the command as typed, without the names of local folders."""
    words = [f"--device {options.device}"]
    if options.checkouts:
        words.append(f"--peers {' '.join(f'{name}=DIR' for name in options.checkouts)}")
    if len(options.only) < options.num_cases:
        words.append(f"--only {' '.join(options.only)}")
    words += ["--quick"] if options.quick else []
    words += [f"--threads {options.threads}"] if options.threads else []
    return " ".join(["python benchmarks/suite.py", *words])
