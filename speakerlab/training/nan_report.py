"""Find and report where a step went wrong: `exp/<name>/nan_report.json`.

Batches are a function of their key, so those of a bad step can be read again; the weights are
those of that step, because it was skipped. It is computed again outside DDP, every output watched.
Letters: B rows, D embedding.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speakerlab.core.atomic import write_json
from speakerlab.training.task import MicroBatch, Task

log = logging.getLogger(__name__)
MAX_LINES = 3  # on bad micro-batches; the file has all


def write_report(
    found: dict[str, Any], *, path: Path, utterances: Sequence[str], facts: Mapping[str, Any]
) -> None:
    """Write what was found, with names for the `rows` of the manifest; log the main points."""
    for one in found["micro_batches"]:
        one["utterances"] = [utterances[row] for row in one.pop("rows")]
    known = {name: facts[name] for name in ("device", "precision", "torch", "commit")}
    write_json(path, {**found, **known})
    log.error("%s", found["error"])
    bad = [one for one in found["micro_batches"] if not one["is_finite"]]
    for one in bad[:MAX_LINES]:
        what = "gradient" if one["module"] is None else "output"
        names = ", ".join(one["utterances"][:3]) + " and others" * (len(one["utterances"]) > 3)
        log.error(
            "rank %d: the first non-finite %s is in %s, utterances %s%s",
            *(one["rank"], what, one["module"] or one["gradient"], names),
            "; in fp32 it is finite" if one.get("is_finite_in_fp32") else "",
        )
    if not bad:
        log.error("computed again, all values of step %d are finite", found["step"])
    log.error("details in %s", path)


def examine(task: Task, inputs: MicroBatch, margin: float, *, seed: int) -> dict[str, Any]:
    """Return what is not finite in one micro-batch; gradients are computed and thrown away.

    Keys: `loss`, `module`, `gradient`, `is_finite`, `is_finite_in_fp32` where that was tried, and
    `rows` of the manifest: those whose embedding alone in eval mode is not finite, or else all.
    """
    embedder: Any = task.embedder
    compiled, embedder.compiled = embedder.compiled, ()  # compiled modules have no hooks
    found = _run(task, inputs, margin, seed)
    rows = _bad_rows(task, inputs.x_B) or list(range(len(inputs.x_B)))
    found["rows"] = inputs.batch.row_B[rows].tolist()
    used = task.precision
    if used.name != "fp32" and not found["is_finite"]:
        task.set_precision(replace(used, name="fp32"))
        found["is_finite_in_fp32"] = _run(task, inputs, margin, seed)["is_finite"]
        task.set_precision(used)
    embedder.compiled = compiled
    return found


def _run(task: Task, inputs: MicroBatch, margin: float, seed: int) -> dict[str, Any]:
    """Run forward and backward; find the first output and the gradient nearest to the loss."""
    torch.manual_seed(seed)
    failed = [] if bool(inputs.x_B.isfinite().all()) else ["the augmentation"]

    def watch(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple | list) else [output]
        if not all(bool(t.isfinite().all()) for t in tensors if isinstance(t, Tensor)):
            failed.append(name)

    parts = [(name, part) for name, part in task.named_modules() if name]
    hooks = [part.register_forward_hook(partial(watch, name)) for name, part in parts]
    output = task(inputs.x_B, inputs.batch.label_B, margin, batch=inputs.batch)
    output.loss.backward()
    for hook in hooks:
        hook.remove()
    gradients = [
        name
        for name, parameter in task.named_parameters()
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
    ]
    task.zero_grad(set_to_none=True)
    loss = float(output.loss.detach())
    return {
        "loss": loss if math.isfinite(loss) else str(loss),  # JSON has no NaN
        "module": failed[0] if failed else None,
        "gradient": gradients[-1] if gradients else None,
        "is_finite": not failed and not gradients,
    }


@torch.no_grad()
def _bad_rows(task: Task, x_B: Tensor) -> list[int]:
    was_training = task.embedder.training
    task.embedder.eval()
    with task.autocast:
        emb_BD: Tensor = task.embedder(x_B)
    task.embedder.train(was_training)
    return (~emb_BD.isfinite().all(dim=1)).nonzero().flatten().tolist()
