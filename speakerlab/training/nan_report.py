"""Where a step went wrong. In: the step's batches, read again. Out: plain values for a report.

A batch is a function of its key, so that of a bad step can be had again; the parameters are those
it met, since it was skipped. It is computed once more outside DDP, every output watched.
Letters: B rows, T frames, F mel bins.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from speakerlab.training.guard import Guard
from speakerlab.training.prefetch import Prefetcher
from speakerlab.training.task import SpeakerTask


def examine_step(
    task: SpeakerTask, inputs: Prefetcher, num: int, *, margin: float, guard: Guard
) -> list[dict[str, Any]]:
    """What is not finite in this rank's `num` micro-batches of a step; BatchNorm is put back.

    Each entry: `index` of the micro-batch, `loss`, `module`, `gradient`, `rows` of the
    manifest, `is_finite`, and `is_finite_in_fp32` where that was tried.
    """
    guard.before_step()
    found = []
    for index in range(num):  # every rank does so many: norms and heads may be joined
        number = inputs.number
        feats_BTF, label_B, _, _, row_B = inputs.take()
        one = examine(task, feats_BTF, label_B, margin, seed=partial(inputs.begin, number))
        chosen = one.pop("rows") or list(range(len(row_B)))
        found.append({"index": index, "rows": row_B[chosen].tolist(), **one})
        guard.restore()
    inputs.close()
    return found


def examine(
    task: SpeakerTask,
    feats_BTF: Tensor,
    label_B: Tensor,
    margin: float,
    *,
    seed: Callable[[], None],
) -> dict[str, Any]:
    """What is not finite in one micro-batch; gradients are made and thrown away.

    seed: sets modes and generators as for this micro-batch. `rows`: of the batch, those whose
    features are not finite or, alone in eval mode, whose embedding is not; empty if it takes all.
    """
    compiled, task.compiled = task.compiled, ()  # what is compiled has no outputs to watch
    seed()
    found = _run(task, feats_BTF, label_B, margin)
    found["rows"] = _bad_rows(task, feats_BTF)
    if task.precision.name != "fp32" and not found["is_finite"]:
        used = task.precision
        task.precision = replace(used, name="fp32")
        seed()
        found["is_finite_in_fp32"] = _run(task, feats_BTF, label_B, margin)["is_finite"]
        task.precision = used
    task.compiled = compiled
    return found


def _run(task: SpeakerTask, feats_BTF: Tensor, label_B: Tensor, margin: float) -> dict[str, Any]:
    """Forward and backward; what fails first, of outputs by time, of gradients by place."""
    if not bool(feats_BTF.isfinite().all()):
        first: list[str] = ["the front end"]
    else:
        first = []
    with watched_outputs(task, first):
        output = task(feats_BTF, label_B, margin)
        output.loss.backward()
    failed = [
        name
        for name, parameter in task.named_parameters()
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
    ]
    task.zero_grad(set_to_none=True)
    loss = float(output.loss.detach())
    return {
        "loss": loss if math.isfinite(loss) else str(loss),  # JSON has no NaN
        "module": first[0] if first else None,
        "gradient": failed[-1] if failed else None,  # the nearest to the loss fails first
        "is_finite": not first and not failed,
    }


@contextmanager
def watched_outputs(module: nn.Module, first: list[str]) -> Iterator[None]:
    """Append to `first`, while it is empty, the name of a module whose output is not finite."""

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple | list) else [output]
            floats = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]
            if not first and not all(bool(tensor.isfinite().all()) for tensor in floats):
                first.append(name)

        return hook

    handles = [
        part.register_forward_hook(hook_of(name)) for name, part in module.named_modules() if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _bad_rows(task: SpeakerTask, feats_BTF: Tensor) -> list[int]:
    finite_B = feats_BTF.isfinite().flatten(1).all(dim=1)
    embedder = task.embedder
    was_training = embedder.training
    embedder.eval()
    with task.precision.autocast():
        emb_BD: Tensor = embedder.get_submodule("backbone")(feats_BTF)
    embedder.train(was_training)
    finite_B &= emb_BD.isfinite().all(dim=1)
    return (~finite_B).nonzero().flatten().tolist()
