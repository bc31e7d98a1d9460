"""Find and report the values of a bad step that are not finite: `exp/<name>/nan_report.json`.

A bad step can be computed again: batches are a function of their key, and the weights have not
changed, because the step was skipped. It is computed outside DDP, with a hook on every module.
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
MAX_LINES = 3  # logged about bad micro-batches; the file has all


def write_report(
    findings: dict[str, Any],
    *,
    path: Path,
    utterances: Sequence[str],
    facts: Mapping[str, Any],
) -> None:
    """Write the findings of a step, and log the main points.

    findings: `micro_batches` holds results of `examine`; their `rows` of the manifest are replaced
    by names. utterances: the name of each row. facts: about the run.
    """
    # Names, because row numbers mean nothing to a reader of the report.
    bad_micro_batches: list[dict[str, Any]] = []
    for micro_batch in findings["micro_batches"]:
        rows = micro_batch.pop("rows")
        micro_batch["utterances"] = [utterances[row] for row in rows]
        if not micro_batch["is_finite"]:
            bad_micro_batches.append(micro_batch)
    run_facts: dict[str, Any] = {}
    for name in ("device", "precision", "torch", "commit"):
        run_facts[name] = facts.get(name)
    write_json(path, {**findings, **run_facts})

    log.error("%s", findings["error"])
    for micro_batch in bad_micro_batches[:MAX_LINES]:
        _log_micro_batch(micro_batch)
    # Possible on a GPU, whose sums depend on the order of its threads.
    if not bad_micro_batches:
        log.error("computed again, all values of step %d are finite", findings["step"])
    log.error("details in %s", path)


def _log_micro_batch(micro_batch: Mapping[str, Any]) -> None:
    """Log where a micro-batch first has a value that is not finite."""
    kind = "gradient" if micro_batch["module"] is None else "output"
    utterances = micro_batch["utterances"]
    names = ", ".join(utterances[:3])
    if len(utterances) > 3:
        names += " and others"
    # True if the number format is the cause, and not the data.
    is_fault_of_format = micro_batch.get("is_finite_in_fp32")
    log.error(
        "rank %d: the first non-finite %s is in %s, utterances %s%s",
        micro_batch["rank"],
        kind,
        micro_batch["module"] or micro_batch["gradient"],
        names,
        "; in fp32 it is finite" if is_fault_of_format else "",
    )


def examine(
    task: Task, inputs: MicroBatch, margin: float, *, seed: int
) -> dict[str, Any]:
    """Find the values of a micro-batch that are not finite; discards its gradients.

    Returned keys: `loss`; `module`, the first whose output is not finite; `gradient`, the parameter
    nearest to the loss whose gradient is not finite; `is_finite`; `is_finite_in_fp32`, if fp32 was
    tried; and `rows` of the manifest: the utterances whose embedding in eval mode is not finite, or
    all if there are none.
    """
    embedder: Any = task.embedder
    # Compiled modules have no hooks.
    compiled = embedder.compiled
    embedder.compiled = ()
    findings = _run(task, inputs, margin, seed)
    num_rows = len(inputs.x_B)
    rows = _find_bad_rows(task, inputs.x_B) or list(range(num_rows))
    manifest_rows = inputs.batch.row_B[rows]
    findings["rows"] = manifest_rows.tolist()

    # The same pass in fp32 shows whether the range of the number format is the cause.
    precision = task.precision
    if precision.name != "fp32" and not findings["is_finite"]:
        task.set_precision(replace(precision, name="fp32"))
        in_fp32 = _run(task, inputs, margin, seed)
        findings["is_finite_in_fp32"] = in_fp32["is_finite"]
        task.set_precision(precision)
    embedder.compiled = compiled
    return findings


def _run(task: Task, inputs: MicroBatch, margin: float, seed: int) -> dict[str, Any]:
    """Run forward and backward; find the first output and the gradient nearest to the loss."""
    # The seed of the bad step: dropout and dither must be the same again.
    torch.manual_seed(seed)
    failed: list[str] = []  # modules, in the order of computation
    if not _is_finite(inputs.x_B):
        failed.append("the augmentation")

    # torch calls this function with the output of each module.
    def note_failure(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if not _is_output_finite(output):
            failed.append(name)

    hooks: list[Any] = []
    for name, module in task.named_modules():
        # The task itself has an empty name.
        if name:
            hook = module.register_forward_hook(partial(note_failure, name))
            hooks.append(hook)
    output = task(
        inputs.x_B,
        inputs.batch.label_B,
        margin,
        batch=inputs.batch,
    )
    output.loss.backward()
    for hook in hooks:
        hook.remove()

    # Parameters are listed about in the order of the forward pass, so the last one is nearest to
    # the loss.
    bad_gradients = _list_bad_gradients(task)
    task.zero_grad(set_to_none=True)
    loss = float(output.loss.detach())
    # JSON has no NaN.
    loss_value = loss if math.isfinite(loss) else str(loss)
    return {
        "loss": loss_value,
        "module": failed[0] if failed else None,
        "gradient": bad_gradients[-1] if bad_gradients else None,
        "is_finite": not failed and not bad_gradients,
    }


def _list_bad_gradients(task: Task) -> list[str]:
    """Return the names of the parameters whose gradient is not finite, in the task's order."""
    names: list[str] = []
    for name, parameter in task.named_parameters():
        gradient = parameter.grad
        if gradient is not None and not _is_finite(gradient):
            names.append(name)
    return names


def _is_output_finite(output: Any) -> bool:
    """Return whether all tensors in a module's output are finite: a tensor, or several values."""
    values = output if isinstance(output, tuple | list) else [output]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return all(_is_finite(tensor) for tensor in tensors)


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


@torch.no_grad()
def _find_bad_rows(task: Task, x_B: Tensor) -> list[int]:
    """Return the rows whose embedding is not finite, without the influence of other rows."""
    # In eval mode BatchNorm uses its running statistics. In training mode a single bad row would
    # spoil the statistics of the batch, and so all rows.
    was_training = task.embedder.training
    task.embedder.eval()
    with task.autocast:
        emb_BD: Tensor = task.embedder(x_B)
    task.embedder.train(was_training)
    is_finite_B = emb_BD.isfinite().all(dim=1)
    bad_rows = (~is_finite_B).nonzero().flatten()
    return bad_rows.tolist()
