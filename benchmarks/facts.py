"""Facts about a run of the benchmarks: date, commit, machine, versions, settings and peers."""

import argparse
import os
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import name_audio
from sides import ROOT, environment

from speakerlab.checkpoints import provenance

CPUINFO = Path("/proc/cpuinfo")
# The instructions that decide how fast a CPU is in each number format.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
# Prefixes of environment variables that change how fast either side is.
SETTINGS = (
    "OMP_",
    "MKL_",
    "GOMP_",
    "KMP_",
    "MALLOC_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "THP_",
)
VERSIONS = ("python", "torch", "cuda", "cudnn", "driver")


def facts_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts of a run with these options of suite.py or gpu.py."""
    versions = provenance.environment(torch.device(options.device))
    variables = environment(ROOT, options.threads)
    threads = options.threads or torch.get_num_threads()
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "commit": provenance.commit(),
        "machine": machine_name(options.device, threads),
        "device": versions["device"],
        "cores": os.cpu_count(),
        "threads": threads,
        **{name: versions[name] for name in VERSIONS},
        "numpy": np.__version__,
        "settings": speed_settings(variables),
        "audio": name_audio(),
        "peers": {name: version(folder) for name, folder in options.checkouts.items()},
        "quick": options.quick,
    }


def machine_name(device: str, threads: int) -> str:
    """Return a name for machines of one speed: the GPU, or the CPU with its threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))

    fields = read_cpuinfo()
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = set(fields.get("flags", "").split())
    instructions = [flag for flag in INSTRUCTIONS if flag in flags]
    return f"{name} ({' '.join(instructions)}), {threads} threads"


def read_cpuinfo() -> dict[str, str]:
    """Return the fields of the last CPU in /proc/cpuinfo; empty where there is none."""
    if not CPUINFO.exists():
        return {}
    fields = {}
    for line in CPUINFO.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields


def speed_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that change how fast either side is."""
    names = sorted(name for name in variables if name.startswith(SETTINGS))
    return {name: variables[name] for name in names}


def version(checkout: Path) -> str:
    """Return the commit of a checkout, or the date of its newest source."""
    commit = provenance.ask_git(checkout, "log", "-1", "--format=%h", "--", ".")
    if commit and (checkout / ".git").exists():
        return commit
    times = [path.stat().st_mtime for path in checkout.rglob("*.py")]
    newest = datetime.fromtimestamp(max(times, default=0.0), timezone.utc)
    return f"no commit, newest source {newest:%Y-%m-%d}"
