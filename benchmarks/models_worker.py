"""One side of a comparison of models: waits on stdin, and computes what it is told to.

In: lines of JSON, {"do": "save" | "values" | "train" | "infer" | "peak" | "convolutions", ...}.
Out: a line of JSON for each.

Started by models.py with the tree to import from in PYTHONPATH: ours, or a peer's, whose package
may have the same name. The backbone is the side's own (models_sides.py); the head is the code below
for both sides. Ours infers with the copy that extraction uses and steps with the optimizer that
training uses; a peer with its module in eval mode and torch's SGD, as its recipes do.

Letters: B batch, T frames, F mel bins, C classes, D embedding.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from models_sides import CASES, EMBED_DIM, Ours, Peer
from sides import ROOT, Answer, Order, serve
from torch import Tensor, nn
from torch.nn import functional as F

NUM_CLASSES = 1000
SCALE, MARGIN = 32.0, 0.2
SGD = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}
PEAK_MEMORY = ROOT / "speakerlab/bench/memory.py"
COMPARED = (2, 64)  # crops and frames of what must be equal: float64 takes its time


class Side:
    """A model, its head and its optimizer, on one device."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.options, self.device = options, torch.device(options.device)
        torch.backends.cudnn.benchmark = True
        self.ours: Ours | None = None
        if options.case < 0:
            self.ours = Ours(options.model, json.loads(options.args), self.device)
            self.model = self.ours.backbone
        else:
            self.model = Peer(CASES[options.model][options.case]).to(self.device)
        self.feats_BTF, self.label_B = self._batch(options.micro_batch, options.frames)
        dim = EMBED_DIM[options.model]
        self.head_CD = nn.Parameter(torch.empty(NUM_CLASSES, dim, device=self.device))
        self._fill_head()
        self.optimizer: torch.optim.Optimizer | None = None
        self.trains = ""  # the precision that kernels and momentum are for
        self.infers: dict[str, nn.Module] = {}  # by precision

    @property
    def named(self) -> nn.Module:
        """What has the names of the published parameters."""
        return self.model.module if isinstance(self.model, Peer) else self.model

    def _batch(self, num_crops: int, num_frames: int) -> tuple[Tensor, Tensor]:
        """feats_BTF and label_B, the same on every side."""
        generator = torch.Generator().manual_seed(num_crops)
        feats_BTF = torch.randn((num_crops, num_frames, 80), generator=generator)
        label_B = torch.randint(NUM_CLASSES, (num_crops,), generator=generator)
        return feats_BTF.to(self.device), label_B.to(self.device)

    @torch.no_grad()
    def _fill_head(self) -> None:
        """The same on every side, also where steps have changed it."""
        generator = torch.Generator().manual_seed(1)
        self.head_CD.copy_(torch.randn(self.head_CD.shape, generator=generator))

    def autocast(self, precision: str) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")

    def loss(self, feats_BTF: Tensor, label_B: Tensor, precision: str) -> Tensor:
        """Additive-margin softmax of the cosines, in at least fp32."""
        with self.autocast(precision):
            emb_BD = self.model(feats_BTF)
        emb_BD = emb_BD.to(torch.promote_types(emb_BD.dtype, torch.float32))
        head_CD = self.head_CD.to(emb_BD.dtype)
        cos_BC = F.normalize(emb_BD) @ F.normalize(head_CD).T
        shift_BC = MARGIN * F.one_hot(label_B, NUM_CLASSES)
        return F.cross_entropy(SCALE * (cos_BC - shift_BC), label_B)

    def prepare(self, work: str, precision: str) -> None:
        """Make what the work needs, and let go of what only the other kind needs."""
        if work == "train":
            self.infers.clear()
            self.model.train()
            if self.optimizer is None or self.trains != precision:
                if self.ours is not None:
                    self.ours.choose_kernels(precision)
                self.optimizer = self._optimizer([*self.model.parameters(), self.head_CD])
                self.trains = precision
        elif precision not in self.infers:
            self.model.zero_grad()
            self.optimizer, self.head_CD.grad = None, None
            self.model.eval()
            model = self.model if self.ours is None else self.ours.for_inference(precision)
            self.infers[precision] = model

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.ours is None:
            return torch.optim.SGD(parameters, **SGD)
        from speakerlab.training.optim import OPTIMIZERS

        return OPTIMIZERS["sgd"](parameters, **SGD)

    def step(self, work: str, precision: str) -> None:
        if work == "infer":
            with torch.inference_mode(), self.autocast(precision):
                self.infers[precision](self.feats_BTF)
            return
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        self.loss(self.feats_BTF, self.label_B, precision).backward()
        self.optimizer.step()

    def save(self, weights: str) -> Answer:
        torch.save(self.named.state_dict(), weights)
        return {"written": True}

    def values(self, weights: str, path: str, dtype: str, precision: str) -> Answer:
        """Write what must be equal: embeddings, then loss, gradients and statistics."""
        self.named.load_state_dict(torch.load(weights, weights_only=True))
        self._fill_head()
        wide = getattr(torch, dtype)
        self.model.to(wide)
        self.infers.clear()
        self.prepare("infer", precision)
        feats_BTF, label_B = self._batch(*COMPARED)
        with torch.no_grad(), self.autocast(precision):
            found = {"embeddings": {"": self.infers[precision](feats_BTF.to(wide))}}
        self.prepare("train", precision)
        loss = self.loss(feats_BTF.to(wide), label_B, precision)
        # Before the backward pass: 3D-Speaker's repeated forward passes count batches twice.
        buffers = self.named.named_buffers()
        statistics = {name: b.clone() for name, b in buffers if "running" in name}
        loss.backward()
        grads = {name: p.grad for name, p in self.named.named_parameters() if p.grad is not None}
        found |= {"loss": {"": loss.detach()}, "gradients": grads, "statistics": statistics}
        torch.save(found, path)
        self.model.zero_grad()
        self.model.float()
        self.infers.clear()
        return {"written": True}

    def run(self, work: str, precision: str, steps: int) -> Answer:
        """Seconds that so many steps take."""
        self.prepare(work, precision)
        self._wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(work, precision)
        self._wait()
        return {"seconds": time.perf_counter() - start}

    def peak(self, work: str, precision: str) -> Answer:
        """MiB of weights and momentum, and what a step takes beside them at most."""
        self.run(work, precision, steps=1)  # momentum is made, kernels are chosen
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        with peak_memory(self.device) as peak:
            self.run(work, precision, steps=1)
        held = sum(tensor.nbytes for tensor in self._held(work, precision))
        return {"mib": None if peak.bytes is None else (held + peak.bytes) / 2**20}

    def _held(self, work: str, precision: str) -> Iterator[Tensor]:
        """What stays from step to step."""
        model = self.model if work == "train" else self.infers[precision]
        yield from (*model.parameters(), *model.buffers())
        if work == "train" and self.optimizer is not None:
            yield self.head_CD
            for state in self.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def convolutions(self, work: str, precision: str, seconds: float) -> Answer:
        """Seconds that the model's convolutions and linear layers alone need for a step."""
        from speakerlab.bench.convolutions import measure_convolutions

        self.model.train(work == "train")
        found = measure_convolutions(
            self.model,
            self.feats_BTF,
            precision=precision,
            train=work == "train",
            seconds=seconds,
        )
        return {"seconds": found.seconds, "gflop": found.gflop}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def peak_memory(device: torch.device) -> Any:
    """Our `PeakMemory`, on a peer's side too, where our package cannot be imported."""
    spec = importlib.util.spec_from_file_location("peak", PEAK_MEMORY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PeakMemory(device)


def start() -> Callable[[Order], Answer]:
    parser = argparse.ArgumentParser()
    for name in ("model", "args", "device"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("case", "micro-batch", "frames"):
        parser.add_argument(f"--{name}", type=int, required=True)
    side = Side(parser.parse_args())
    answers: dict[str, Callable[..., Answer]] = {
        "save": side.save,
        "values": side.values,
        "peak": side.peak,
        "convolutions": side.convolutions,
    }

    def answer(order: Order) -> Answer:
        what = order.pop("do")
        if what in answers:
            return answers[what](**order)
        return side.run(what, order["precision"], order["steps"])

    return answer


if __name__ == "__main__":
    serve(start)
