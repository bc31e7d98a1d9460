"""The suite's report in Markdown: facts, rows with a target, rows of speed, launches, learning.

In: facts (suite_facts.py) and rows, as measured or as stored. Targets on a CPU are for two cores: a
ratio to a peer is reached at this or more, a model's also where its `share` is at least SHARE; a
value without a peer is reached at this or less, in the row's unit. Those on an H100 are rates.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gate import Row
from sides import ROOT

sys.path.insert(0, str(ROOT))
from rows import markdown

RATIOS = {
    "data.to_device": 10.0,
    "train.campplus.fp32": 1.3,
    "train.campplus.bf16": 2.5,
    "train.eres2net.fp32": 1.1,
    "train.eres2net.bf16": 2.5,
    "infer.campplus.bf16": 2.0,
    "infer.eres2net.bf16": 2.0,
    "end_to_end.campplus": 2.5,
    "end_to_end.eres2net": 2.5,
    "self_supervised.dino.bf16": 2.0,
    "self_supervised.sdpn.bf16": 2.0,
    "extract.campplus.bf16": 2.0,
    "extract.eres2net.bf16": 2.0,
    "cluster.spectral": 10.0,
    "cluster.ahc": 10.0,
    "score.cosine": 1000.0,
}
SHARE = 0.8
AT_MOST = {
    "startup.help": 1.0,
    "startup.first_step": 15.0,
    "score.metrics": 3.0,  # of a list of CN-Celeb's size
    "score.intervals": 20.0,
    "score.asnorm": 30.0,
    "score.peak_memory": 4.0,
}
ON_H100 = {  # steps of the recipes' 256 crops in bf16, from files
    "end_to_end.campplus.training.global_batch=256": 4500.0,
    "end_to_end.eres2net.training.global_batch=256": 1500.0,
}
RATIO = ("name", "ours", "peer", "unit", "ratio", "quartiles")
COUNT = "launches"  # unit
LEARNED = ("EER %, median", "95 %", "worst", "minutes", "crops")


def table(facts: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return Markdown: the facts, rows that have a target, all of speed, launches, learning."""
    counted = [row for row in rows if row["unit"] == COUNT]
    learned = [row for row in rows if "seeds" in row]
    fast = [row for row in rows if row not in counted and row not in learned]
    on_cpu, on_h100 = facts["device"] == "cpu", "H100" in facts["machine"]
    aimed = [row for row in fast if (on_h100 if row["name"] in ON_H100 else on_cpu and target(row))]
    lines = [*about(facts, rows), ""]
    if aimed:
        headings = (*RATIO, "target", "reached", "share")
        cells = ([*ratio_cells(row), *target_cells(row), share(row)] for row in aimed)
        where = "two cores" if on_cpu else "an H100"
        lines += [f"Targets on {where}:", "", *markdown(headings, cells), "", "All rows:", ""]
    if fast:
        headings = (*RATIO, "share", "peak MiB", "peer's", "commit")
        cells = ([*ratio_cells(row), share(row), *peaks(row), commit(row)] for row in fast)
        lines += [*markdown(headings, cells), ""]
    if counted:
        parts = list(dict.fromkeys(part_of(row) for row in counted))
        lines += ["Launches on a GPU of a training step of 64 crops (launches.py):", ""]
        lines += [*markdown(("name", *parts), launches_cells(counted, parts)), ""]
    if learned:
        peers = (f"peer's {heading}" for heading in LEARNED)
        headings = ("name", "seeds", *LEARNED, *peers, "difference, 95 %", "commit")
        lines += ["EER after training (learning.py):", ""]
        lines += [*markdown(headings, map(learned_cells, learned)), ""]
    return "\n".join(lines)


def target(row: Row) -> str | None:
    """Return the target as the table shows it."""
    if row["name"] in RATIOS and row.get("ratio") is not None:
        return f">= {RATIOS[row['name']]:,g}"
    if row["name"] in AT_MOST:
        return f"<= {AT_MOST[row['name']]:g} {row['unit']}"
    if row["name"] in ON_H100:
        return f">= {ON_H100[row['name']]:,g} {row['unit']}"
    return None


def target_cells(row: Row) -> tuple[str, str]:
    name: str = row["name"]
    if name in AT_MOST:
        reached = row["ours"] <= AT_MOST[name]
    elif name in ON_H100:
        reached = row["ours"] >= ON_H100[name]
    else:
        reached = row["ratio"] >= RATIOS[name] or (row.get("share") or 0.0) >= SHARE
    return target(row) or "", "yes" if reached else "NO"


def about(facts: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    """Yield the date, machine, versions, settings and command of the rows."""
    versions = ", ".join(f"{key} {facts[key]}" for key in ("python", "torch", "numpy"))
    gpu = f", CUDA {facts['cuda']}, driver {facts['driver']}" if "cuda" in facts["device"] else ""
    settings = "unknown"
    if facts["settings"] is not None:
        settings = " ".join(f"{key}={value}" for key, value in facts["settings"].items())
    peers = "; ".join(f"{name} ({found})" for name, found in facts["peers"].items())
    dates = sorted(row["date"] for row in rows if "date" in row) or [facts["date"]]
    commits = dict.fromkeys(commit(row) for row in rows if "commit" in row) or [facts["commit"]]
    yield (
        f"From {dates[0]} to {dates[-1]}, commit {', '.join(commits)}; {facts['machine']}, "
        f"{facts['cores']} cores, on {facts['device']}; {versions}{gpu}."
    )
    yield (
        f"Set for both sides: {settings or 'nothing'}. Peers: {peers or 'none'}. Recordings: "
        f"{facts.get('audio') or 'unknown'}."
    )
    yield f"`{facts['command']}`" if facts["command"] else "Measured in pieces."


def commit(row: Row) -> str:
    """Return seven digits of the row's commit, and `-dirty` where files were changed since."""
    digits, _, state = row.get("commit", "").partition("-")
    return digits[:7] + (f"-{state}" if state else "")


def ratio_cells(row: Row) -> Iterator[str]:
    """Yield the cells of RATIO."""
    quartiles = row.get("quartiles")
    yield row["name"]
    yield from (four_digits(row[side]) for side in ("ours", "peer"))
    yield row["unit"]
    yield "" if row["ratio"] is None else f"**{times(row['ratio'])}**"
    yield "" if quartiles is None else " - ".join(map(times, quartiles))


def part_of(row: Row) -> str:
    """Return the part of a step whose launches are counted."""
    return row["name"].rpartition(".")[2]


def launches_cells(rows: Sequence[Row], parts: Sequence[str]) -> Iterator[list[str]]:
    """Yield a line for each model and precision, with all parts."""
    names = dict.fromkeys(row["name"].removesuffix(f".{part_of(row)}") for row in rows)
    counts = {row["name"]: row["ours"] for row in rows}
    for name in names:
        yield [name, *(four_digits(counts.get(f"{name}.{part}")) for part in parts)]


def learned_cells(row: Row) -> Iterator[str]:
    """Yield the cells of a row of learning.py; an unknown one is empty."""
    yield from (row["name"], str(row["seeds"]))
    for side, prefix in (("ours", ""), ("peer", "peer_")):
        yield four_digits(row.get(side))
        yield bounds(row.get(f"{prefix}ci95"))
        yield from (four_digits(row.get(prefix + key)) for key in ("worst", "minutes", "crops"))
    yield from (bounds(row.get("difference_ci95")), commit(row))


def bounds(ci95: Sequence[float] | None) -> str:
    return "" if ci95 is None else " to ".join(f"{value:.2f}" for value in ci95)


def peaks(row: Row) -> Iterator[str]:
    yield from (four_digits(row.get(side)) for side in ("peak_mib", "peer_peak_mib"))


def share(row: Row) -> str:
    return f"{row['share']:.0%}" if row.get("share") is not None else ""


def times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.2f}"


def four_digits(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
