"""One side of a comparison of models: waits on stdin, and computes what it is told to.

In: lines of JSON, {"do": "values" | "train" | "infer", ...}. Out: a line of JSON for each.

Started by models.py with the tree to import `speakerlab` from in PYTHONPATH: ours, or 3D-Speaker's,
whose package has the same name. Everything but the backbone is the code below for both sides.

Letters: B batch, T frames, F mel bins, C classes, D embedding.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sides import Answer, Order, import_from_root, serve
from torch import Tensor, nn
from torch.nn import functional as F

NUM_CLASSES = 1000
EMBED_DIM = {"campplus": 512, "eres2net": 192}  # as the recipes of both sides have it
SCALE, MARGIN = 32.0, 0.2
SIDES: dict[str, dict[str, tuple[str, str, dict[str, Any]]]] = {
    "ours": {
        "campplus": ("speakerlab.models.campplus", "CAMPPlus", {"embed_dim": 512}),
        "eres2net": ("speakerlab.models.eres2net", "ERes2Net", {"embed_dim": 192}),
    },
    "3dspeaker": {
        "campplus": (
            "speakerlab.models.campplus.DTDNN",
            "CAMPPlus",
            {"feat_dim": 80, "embedding_size": 512},
        ),
        "eres2net": (
            "speakerlab.models.eres2net.ERes2Net",
            "ERes2Net",
            {"feat_dim": 80, "embedding_size": 192, "m_channels": 32},
        ),
    },
}


def build(side: str, model: str, more: dict[str, Any]) -> nn.Module:
    module, name, args = SIDES[side][model]
    return getattr(import_from_root(module), name)(**args, **more)


class Side:
    """A model, its head and its optimizer, on one device."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = torch.device(options.device)
        torch.backends.cudnn.benchmark = True
        model = build(options.side, options.model, json.loads(options.args))
        weights = Path(options.weights)
        if weights.exists():
            model.load_state_dict(torch.load(weights, weights_only=True))
        else:
            torch.save(model.state_dict(), weights)
        self.weights = weights
        self.model = model.to(self.device)
        generator = torch.Generator().manual_seed(1)
        shape = (options.micro_batch, options.frames, 80)
        self.feats_BTF = torch.randn(shape, generator=generator).to(self.device)
        self.label_B = torch.randint(NUM_CLASSES, shape[:1], generator=generator).to(self.device)
        head = torch.randn(NUM_CLASSES, EMBED_DIM[options.model], generator=generator)
        self.head_CD = nn.Parameter(head.to(self.device))
        self.optimizer: torch.optim.Optimizer | None = None

    def embed(self, precision: str) -> Tensor:
        feats_BTF = self.feats_BTF.to(next(self.model.parameters()).dtype)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16"):
            return self.model(feats_BTF)

    def loss(self, precision: str) -> Tensor:
        """Additive-margin softmax of the cosines, in at least fp32."""
        emb_BD = self.embed(precision)
        emb_BD = emb_BD.to(torch.promote_types(emb_BD.dtype, torch.float32))
        head_CD = self.head_CD.to(emb_BD.dtype)
        cos_BC = F.normalize(emb_BD) @ F.normalize(head_CD).T
        shift_BC = MARGIN * F.one_hot(self.label_B, NUM_CLASSES)
        return F.cross_entropy(SCALE * (cos_BC - shift_BC), self.label_B)

    def step(self, precision: str) -> None:
        if self.optimizer is None:  # here, so that what only infers has no momentum
            parameters = [*self.model.parameters(), self.head_CD]
            self.optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=1e-4)
        self.optimizer.zero_grad()
        self.loss(precision).backward()
        self.optimizer.step()

    def values(self, path: str, dtype: str) -> None:
        """Write what must be equal: embeddings in evaluation, then loss, gradients, statistics."""
        weights = torch.load(self.weights, weights_only=True)
        self.model.load_state_dict(weights)
        self.model.to(getattr(torch, dtype)).eval()
        with torch.no_grad():
            found = {"embeddings": self.embed("fp32")}
        self.model.train()
        loss = self.loss("fp32")
        # Before the backward pass: 3D-Speaker's repeated forward passes count batches twice.
        statistics = [b.clone() for name, b in self.model.named_buffers() if "running" in name]
        loss.backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        found |= {"loss": loss.detach(), "gradients": torch.cat([g.flatten() for g in grads])}
        found |= {"running statistics": torch.cat([b.flatten() for b in statistics])}
        torch.save({name: value.cpu() for name, value in found.items()}, path)
        self.model.zero_grad()
        self.model.float().load_state_dict(weights)

    def run(self, work: str, precision: str, steps: int) -> float:
        """Seconds that so many steps take."""
        self.model.train(work == "train")
        self._wait()
        start = time.perf_counter()
        for _ in range(steps):
            if work == "train":
                self.step(precision)
            else:
                with torch.no_grad():
                    self.embed(precision)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("side", "model", "args", "weights", "device"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("micro-batch", "frames"):
        parser.add_argument(f"--{name}", type=int, required=True)

    def start() -> Callable[[Order], Answer]:
        side = Side(parser.parse_args())

        def answer(order: Order) -> Answer:
            if order["do"] == "values":
                side.values(order["path"], order["dtype"])
                return {"written": True}
            return {"seconds": side.run(order["do"], order["precision"], order["steps"])}

        return answer

    serve(start)


if __name__ == "__main__":
    main()
