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
found = {
    "every": ranks.every((me, "x" * me)),
    "copied": values.tolist(),
    "largest": ranks.max(torch.tensor([me, 5 - me])).tolist(),
    "sum": ranks.sum(torch.tensor([1.0, me])).tolist(),
    "good": outcome(lambda: ranks.barrier("checkpoint")),
    "tags": outcome(lambda: ranks.barrier("checkpoint" if me else "published")),
    "first": outcome(lambda: ranks.on_first(lambda: 42)),
    "failed": outcome(lambda: ranks.on_first(fail)),
    "still": ranks.every(me),
}
if me == 0:
    leave(0) if sys.argv[2] == "die" else None
else:
    time.sleep(0.5)
try:
    ranks.barrier("end")
    found["peer"] = "there"
except RuntimeError as error:
    found["peer"] = "lost" if is_lost_peer(error) else str(error)
Path(sys.argv[1], f"{me}.json").write_text(json.dumps(found))
leave(0)
