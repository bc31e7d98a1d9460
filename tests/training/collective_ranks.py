"""Run the collectives on two ranks and write their results as JSON, for test_distributed.py."""

import json
import sys
import time
from pathlib import Path

import torch

from speakerlab.core.process import leave
from speakerlab.training.distributed import is_lost_peer, start_ranks


def outcome(work):
    """Return the result of `work`, or the exception as text."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fail():
    raise ValueError("data/train: no such folder; run stage 1")


ranks = start_ranks(timeout_minutes=1)
me = ranks.rank
values = torch.full((2,), float(me))
ranks.copy_from_first([values])
copied = values.tolist()
# ranks must call these in the same order
every = ranks.gather_objects((me, "x" * me))
largest = ranks.max(torch.tensor([me, 5 - me]))
total = ranks.sum(torch.tensor([1.0, me]))
good = outcome(lambda: ranks.barrier("checkpoint"))
tag = "checkpoint" if me else "published"
tags = outcome(lambda: ranks.barrier(tag))
first = outcome(lambda: ranks.on_first(lambda: 42))
failed = outcome(lambda: ranks.on_first(fail))
still = ranks.gather_objects(me)
gathered = {
    "every": every,
    "copied": copied,
    "largest": largest.tolist(),
    "sum": total.tolist(),
    "good": good,
    "tags": tags,
    "first": first,
    "failed": failed,
    "still": still,
}
if me == 0:
    if sys.argv[2] == "die":
        leave(0)
else:
    time.sleep(0.5)
try:
    ranks.barrier("end")
    gathered["peer"] = "there"
except RuntimeError as error:
    gathered["peer"] = "lost" if is_lost_peer(error) else str(error)
path = Path(sys.argv[1], f"{me}.json")
path.write_text(json.dumps(gathered))
leave(0)
