"""What stands above and in the table of the suite.

In: the suite's options and the rows. Out: facts of machine and software as plain values, and the
table as markdown.
"""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sides import ROOT

sys.path.insert(0, str(ROOT))
from speakerlab import provenance

CPUINFO = Path("/proc/cpuinfo")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # what decides how fast each format is
# Variables that change how fast either side is.
SETTINGS = ("OMP_", "MKL_", "GOMP_", "KMP_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "THP_")
HEADINGS = ("name", "ours", "peer", "ratio", "quartiles", "share", "peak MiB", "peer's", "unit")


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
    settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)}
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "commit": known["commit"],
        "machine": kind,
        "device": known["device"],
        "cores": os.cpu_count(),
        "threads": threads,
        **{name: known[name] for name in ("python", "torch", "cuda", "cudnn", "driver")},
        "numpy": np.__version__,
        "settings": settings,
        "peers": {name: version(folder) for name, folder in options.checkouts.items()},
        "command": "python benchmarks/suite.py " + " ".join(sys.argv[1:]),
    }


def version(checkout: Path) -> str:
    """The commit of a checkout; what its version file says, or the date of its newest source."""
    top = subprocess.run(
        ["git", "-C", str(checkout), "log", "-1", "--format=%h", "--", "."],
        capture_output=True,
        text=True,
        check=False,
    )
    if top.stdout.strip() and (checkout / ".git").exists():
        return top.stdout.strip()
    newest = max((path.stat().st_mtime for path in checkout.rglob("*.py")), default=0.0)
    return f"no commit, newest source {datetime.fromtimestamp(newest, timezone.utc):%Y-%m-%d}"


def table(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the facts, then a line for each row."""
    versions = ", ".join(f"{key} {facts[key]}" for key in ("python", "torch", "numpy"))
    gpu = f", CUDA {facts['cuda']}, driver {facts['driver']}" if "cuda" in facts["device"] else ""
    settings = "not told by what was read"
    if facts["settings"] is not None:
        settings = " ".join(f"{key}={value}" for key, value in facts["settings"].items())
    peers = "; ".join(f"{name} ({found})" for name, found in facts["peers"].items())
    about = [
        f"{facts['date']}, commit {facts['commit']}; {facts['machine']}, {facts['cores']} cores, "
        f"on {facts['device']}; {versions}{gpu}.",
        f"Set for both sides: {settings or 'nothing'}. Peers: {peers or 'none'}.",
        f"`{facts['command']}`",
    ]
    lines = [" | ".join(HEADINGS), "|".join("---" for _ in HEADINGS)]
    lines += [" | ".join(cells(row)) for row in rows]
    return "\n".join([*about, "", *(f"| {line} |" for line in lines)]) + "\n"


def cells(row: Mapping[str, Any]) -> Iterator[str]:
    """In the order of HEADINGS; empty where the row has nothing."""
    quartiles, share = row.get("quartiles"), row.get("share")
    yield row["name"]
    yield from (figure(row[side]) for side in ("ours", "peer"))
    yield "" if row["ratio"] is None else f"**{row['ratio']:.2f}**"
    yield "" if quartiles is None else f"{quartiles[0]:.2f} - {quartiles[1]:.2f}"
    yield "" if share is None else f"{share:.0%}"
    yield from (figure(row.get(side)) for side in ("peak_mib", "peer_peak_mib"))
    yield row["unit"]


def figure(value: float | None) -> str:
    """Four digits that count."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
