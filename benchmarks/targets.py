"""What was to be reached on a CPU of two cores, by the name of a row.

A ratio to a peer is reached at this or more; a model's step or inference also where it
does at least SHARE of the machine's own convolution rate, whichever is lower. A figure without a
peer is reached at this or less, in the row's unit.
"""

from rows import Row

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
    "extract.campplus.bf16": 2.0,
    "extract.eres2net.bf16": 2.0,
    "score.cosine": 1000.0,
}
SHARE = 0.8
AT_MOST = {
    "startup.help": 1.0,
    "startup.first_step": 15.0,
    # Of a list of CN-Celeb's size, on two cores.
    "score.metrics": 3.0,
    "score.intervals": 20.0,
    "score.asnorm": 30.0,
    "score.peak_memory": 4.0,
}


def target(row: Row) -> str | None:
    """As the table has it; None where nothing was named."""
    if row["name"] in RATIOS and row.get("ratio") is not None:
        return f">= {RATIOS[row['name']]:,g}"
    if row["name"] in AT_MOST:
        return f"<= {AT_MOST[row['name']]:g} {row['unit']}"
    return None


def is_reached(row: Row) -> bool:
    """Of a row that has a target."""
    name: str = row["name"]
    if name in AT_MOST:
        return row["ours"] <= AT_MOST[name]
    return row["ratio"] >= RATIOS[name] or (row.get("share") or 0.0) >= SHARE
