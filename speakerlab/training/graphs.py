"""CUDA graphs: replay the kernels of a micro-batch with one launch.

A small model launches thousands of kernels per micro-batch, each of which takes the host longer
than the GPU. A capture records those of backbone, head, loss and backward pass, with the addresses
of all their tensors; a replay launches all of them at once, on what is at these addresses then.
Nguyen et al., Accelerating PyTorch with CUDA Graphs, PyTorch blog, 2021.

Not `torch.cuda.make_graphed_callables`: it forbids other threads to allocate, as the one that pins
batches does, and a second micro-batch overwrites its gradients (pytorch issue 181723).
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from speakerlab.training.distributed import Ranks
from speakerlab.training.task import MicroBatch, SpeakerTask, Task, TaskOutput
from speakerlab.training.update import Updater

log = logging.getLogger(__name__)
WARM_UP = 3  # calls in which libraries choose kernels and allocate

zero_all = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage]


class Graphed:
    """A function of tensors, replayed by a CUDA graph of its kernels after some calls.

    function: takes tensors on the GPU, always of the same shapes, adds to the gradients of
    `parameters`, returns tensors that need no gradient. It must not wait for the device or upload
    anything, and must launch the same kernels at each call: numbers and control flow of the host
    are those of the capture. Raises ValueError if the capture fails.

    The outputs are overwritten by the next call. The gradients, too, keep their addresses:
    parameters without one get theirs back, filled with zeros.
    """

    def __init__(self, function: Callable[..., Any], parameters: Iterable[nn.Parameter]) -> None:
        self.function, self.parameters = function, list(parameters)
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []  # of parameters that are used
        self.stream = torch.cuda.Stream()
        self.inputs: tuple[Tensor, ...] = ()  # they and the outputs keep their addresses
        self.outputs: Any = None
        self.graph: Any = None  # torch.cuda.CUDAGraph
        self.num_calls = 0

    def __call__(self, *inputs: Tensor) -> Any:
        self._restore_gradients()
        self.inputs = self.inputs or tuple(map(torch.empty_like, inputs))
        for static, value in zip(self.inputs, inputs):
            static.copy_(value)
        self.num_calls += 1
        if self.num_calls <= WARM_UP:
            self._warm_up()
        else:
            self.graph = self.graph or self._capture()
            self.graph.replay()
        return self.outputs

    def _restore_gradients(self) -> None:
        """Give parameters their gradients, as zeros, if the optimizer has used them up."""
        if self.gradients and self.gradients[0][0].grad is None:
            zero_all([grad for _, grad in self.gradients])
            for parameter, grad in self.gradients:
                parameter.grad = grad

    def _warm_up(self) -> None:
        """Compute on the stream of the capture; the first gradients are the ones that stay."""
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            self.outputs = self.function(*self.inputs)
        main.wait_stream(self.stream)
        if not self.gradients:
            self.gradients = [(p, p.grad) for p in self.parameters if p.grad is not None]

    def _capture(self) -> Any:
        """Return a graph of the kernels, which are not run."""
        graph = torch.cuda.CUDAGraph()
        # `thread_local`: other threads may allocate, as the one that pins batches does.
        how: Any = {"stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.stream(self.stream), torch.cuda.graph(graph, **how):
                self.outputs = self.function(*self.inputs)
        except Exception as error:
            cause = error.__context__ or error  # the end of a capture that has failed fails, too
            line = f"{type(cause).__name__}: {cause}".partition("\n")[0]
            raise ValueError(f"runtime.cuda_graph: capture failed ({line}); use off") from error
        return graph


class GraphedTask:
    """Forward and backward passes of micro-batches, all of one size, by CUDA graphs.

    Features are computed before: SpecAugment has other masks in each batch.
    """

    def __init__(self, task: SpeakerTask, updater: Updater, *, accumulation: int) -> None:
        self.task, self.updater, self.accumulation = task, updater, accumulation
        self.graphed = Graphed(self._add_gradients, task.parameters())

    def __call__(self, inputs: MicroBatch, margin: float) -> TaskOutput:
        """Return the loss, and add the gradients, as the mean over `accumulation` calls."""
        with record_function("step/forward"):
            feats_BTF = self.task.features(inputs.x_B, inputs.batch)
        with record_function("step/replay"):
            return self.graphed(feats_BTF, inputs.batch.label_B, feats_BTF.new_full((), margin))

    def _add_gradients(self, feats_BTF: Tensor, label_B: Tensor, margin: Tensor) -> TaskOutput:
        with record_function("step/forward"):
            output = self.task.classify(feats_BTF, label_B, margin)
        with record_function("step/backward"):
            self.updater.scale_loss(output.loss / self.accumulation).backward()
        return output._replace(loss=output.loss.detach())


def graph_task(
    asked: Literal["auto", "on", "off"],
    task: Task,
    updater: Updater,
    ranks: Ranks,
    *,
    accumulation: int,
    crop_samples: int,
) -> GraphedTask | None:
    """Return what replays the passes of a training; None, and the reason in the log, if none can.

    Raises ValueError if they cannot be captured but are asked for by `on`.
    """
    if asked == "off":
        return None
    reason = why_not(task, ranks, crop_samples)
    if asked == "on" and reason:
        raise ValueError(f"runtime.cuda_graph: on, but {reason}; use auto or off")
    log.info("CUDA graphs: %s", f"not used, because {reason}" if reason else "used")
    if reason:
        return None
    assert isinstance(task, SpeakerTask)
    return GraphedTask(task, updater, accumulation=accumulation)


def why_not(task: Task, ranks: Ranks, crop_samples: int) -> str:
    """Return why the passes of a training cannot be captured; "" if they can."""
    embedder: Any = task.embedder
    if ranks.device.type != "cuda":
        return "there is no GPU"
    if ranks.world_size > 1:
        return "there are several ranks, which exchange gradients and statistics during the passes"
    if not isinstance(task, SpeakerTask):
        return "a self-supervised step has other numbers of the host each time"
    if task.head.is_split:
        return "the head is split or samples classes"
    if embedder.compiled:
        return "runtime.compile is on"
    if crop_samples > embedder.max_samples:
        return "crops are longer than model.max_seconds"
    return ""
