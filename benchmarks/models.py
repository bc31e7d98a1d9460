"""Training steps and inference of models, beside 3D-Speaker's, WeSpeaker's and SpeechBrain's own.

    python benchmarks/models.py --peer DIR [DIR ...] --json FILE     # checkouts of any of the three

In: fixed features, the same weights on both sides. Out: a row for each model, work, precision and
peer, with peak memory.

Before anything is timed, both must give the same embeddings, loss, gradients and statistics, on few
features. A training step is the backbone with a margin head of 1,000 classes, forward and backward,
and an SGD step; inference is the backbone alone. Ours is what training and extraction build from
`conf/<model>.yaml`: with their kernels, for inference with BatchNorm folded. A peer is its module,
in eval mode for inference, and torch's SGD, as its recipes have it.

Rows beside 3D-Speaker have no suffix, the others `.wespeaker` or `.speechbrain`. A bf16 row has
ours in bf16 and the peer as it ships: in fp32 where it has no mixed precision (3D-Speaker,
WeSpeaker). `...peer_bf16` puts that peer's module under autocast, too. 3D-Speaker's CAM++
recomputes a part of each dense layer in the backward pass by default; in `...peer_stores` rows
recomputation is off. fp16 (only on a GPU) is timed without loss scaling. Settings of ours that
--set changes, such as runtime.compile=true, are at the end of the row's name.

Letters: B batch, T frames, F mel bins, C classes, D embedding.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from models_cases import (
    ALLOWED,
    CASES,
    EMBED_DIMS,
    PRECISIONS,
    QUICK_ROWS,
    WORKS,
    Case,
    require_equal,
    rows_of,
)
from peak import peak_memory
from sides import (
    ROOT,
    add_seconds,
    close_sides,
    import_peer,
    report,
    run_case,
    run_of,
    start_sides,
    take_turns,
    timed,
)
from torch import Tensor, nn
from torch.nn import functional as F

PEERS = ("3dspeaker", "wespeaker", "speechbrain")
QUICK = ("--seconds=3", "--rows", *QUICK_ROWS)
NUM_CLASSES = 1000
SCALE, MARGIN = 32.0, 0.2
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SGD = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}
# Crops of a step. The recipes train with 64, but ERes2Net in fp32 would need 40 GiB for both sides.
ON_CPU, ON_GPU = 32, 64
COMPARED = (2, 64)  # crops and frames of what must be equal: float64 takes its time


class Side:
    """A backbone (feats_BTF -> emb_BD), a head and an optimizer on one device."""

    def __init__(
        self,
        model: str,
        number: int,
        device: str,
        shape: Sequence[int],
        settings: Sequence[str],
    ) -> None:
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        self.device = device
        self.settings = settings  # only of ours
        self.model = self.build(model, number)
        self.feats_BTF, self.label_B = self._batch(*shape)
        self.head_CD = nn.Parameter(
            torch.empty(NUM_CLASSES, EMBED_DIMS[model], device=device)
        )
        self._fill_head()
        self.optimizer: torch.optim.Optimizer | None = None
        self.trains = ""  # the precision that kernels and momentum are for
        self.infers: dict[str, nn.Module] = {}  # by precision

    def build(self, model: str, number: int) -> nn.Module:
        """Return the peer's module, which flattens its embeddings; `number`: of the case."""
        case = CASES[model][number]
        module, _, name = case.path.partition(":")
        return getattr(import_peer(module), name)(**case.args).to(self.device)

    def for_inference(self, precision: str) -> nn.Module:
        return self.model

    def new_optimizer(self, precision: str) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.model.parameters(), self.head_CD], **SGD)

    def _batch(self, num_crops: int, num_frames: int) -> tuple[Tensor, Tensor]:
        """Return feats_BTF and label_B, the same on every side."""
        generator = torch.Generator().manual_seed(num_crops)
        feats_BTF = torch.randn((num_crops, num_frames, 80), generator=generator)
        label_B = torch.randint(NUM_CLASSES, (num_crops,), generator=generator)
        return feats_BTF.to(self.device), label_B.to(self.device)

    @torch.no_grad()
    def _fill_head(self) -> None:
        """Set the head to the same values on every side."""
        generator = torch.Generator().manual_seed(1)
        self.head_CD.copy_(torch.randn(self.head_CD.shape, generator=generator))

    def embed(self, model: nn.Module, feats_BTF: Tensor, precision: str) -> Tensor:
        with torch.autocast(
            self.device, HALVES.get(precision), enabled=precision in HALVES
        ):
            output = model(feats_BTF)
        # Some of the peers' models return (features, embedding).
        emb = output[-1] if isinstance(output, tuple | list) else output
        return emb.flatten(1)

    def loss(self, feats_BTF: Tensor, label_B: Tensor, precision: str) -> Tensor:
        """Return the additive-margin softmax of the cosines, in at least fp32."""
        emb_BD = self.embed(self.model, feats_BTF, precision)
        wide_type = torch.promote_types(emb_BD.dtype, torch.float32)
        emb_BD = F.normalize(emb_BD.to(wide_type))
        rows_CD = F.normalize(self.head_CD.to(wide_type))
        cos_BC = emb_BD @ rows_CD.T
        # Only the cosine to the own class is made smaller.
        label_B1 = label_B[:, None]
        margin_BC = torch.zeros_like(cos_BC).scatter(1, label_B1, MARGIN)
        logits_BC = SCALE * (cos_BC - margin_BC)
        return F.cross_entropy(logits_BC, label_B)

    def prepare(self, work: str, precision: str) -> None:
        """Build what the work needs, and free what only the other kind needs."""
        if work == "train":
            self.infers.clear()
            self.model.train()
            if self.optimizer is None or self.trains != precision:
                self.optimizer, self.trains = self.new_optimizer(precision), precision
        elif precision not in self.infers:
            self.model.zero_grad()
            self.optimizer, self.head_CD.grad = None, None
            self.model.eval()
            self.infers[precision] = self.for_inference(precision)

    def step(self, work: str, precision: str) -> None:
        if work == "infer":
            with torch.inference_mode():
                self.embed(self.infers[precision], self.feats_BTF, precision)
            return
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        self.loss(self.feats_BTF, self.label_B, self.trains).backward()
        self.optimizer.step()

    def run(self, work: str, precision: str, steps: int) -> float:
        """Return the seconds of so many steps."""
        self.prepare(work, precision)
        return timed(lambda: self.step(work, precision), self.device, steps=steps)

    def peak(self, work: str, precision: str) -> float | None:
        """Return the MiB of weights and momentum, and what a step takes beside them at most."""
        self.run(work, precision, steps=1)  # momentum is made, kernels are chosen
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        with peak_memory(torch.device(self.device)) as peak:
            self.run(work, precision, steps=1)
        model = self.model if work == "train" else self.infers[precision]
        held = [*model.parameters(), *model.buffers()]
        if work == "train" and self.optimizer is not None:
            states = self.optimizer.state.values()
            held += [
                self.head_CD,
                *(v for s in states for v in s.values() if torch.is_tensor(v)),
            ]
        return (sum(t.nbytes for t in held) + peak[0]) / 2**20 if peak else None

    def values(self, dtype: str, precision: str) -> dict[str, dict[str, Tensor]]:
        """Return what must be equal: embeddings, loss, gradients and running statistics."""
        self._fill_head()
        self.model.to(getattr(torch, dtype))
        self.infers.clear()
        self.prepare("infer", precision)
        feats_BTF, label_B = self._batch(*COMPARED)
        feats_BTF = feats_BTF.to(getattr(torch, dtype))
        with torch.no_grad():
            emb_BD = self.embed(self.infers[precision], feats_BTF, precision)
        self.prepare("train", precision)
        loss = self.loss(feats_BTF, label_B, precision)
        # Before the backward pass: 3D-Speaker's repeated forward passes count batches twice.
        buffers = self.model.named_buffers()
        statistics = {name: b.clone() for name, b in buffers if "running" in name}
        loss.backward()
        named = self.model.named_parameters()
        gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        self.model.zero_grad()
        self.model.float()
        self.infers.clear()
        return {
            "embeddings": {"": emb_BD},
            "loss": {"": loss.detach()},
            "gradients": gradients,
            "statistics": statistics,
        }

    def save(self, path: str, dtype: str) -> None:
        """Write the weights, then the values computed from them in fp32 or float64."""
        weights = {
            name: value.clone() for name, value in self.model.state_dict().items()
        }
        torch.save({"weights": weights, **self.values(dtype, "fp32")}, path)
        self.model.load_state_dict(weights)


class Ours(Side):
    """Our backbone as the commands build it, for training and for inference."""

    def build(self, model: str, number: int) -> nn.Module:
        from speakerlab.config.build import build_task
        from speakerlab.config.schema import load_config
        from speakerlab.core import system
        from speakerlab.training.precision import (
            apply_backend_settings,
            resolve_precision,
        )

        if self.device == "cpu":
            system.keep_freed_memory()
        self.case = CASES[model][number] if number >= 0 else None
        args = self.case.ours.items() if self.case else ()
        overrides = [
            *(f"model.args.{name}={value}" for name, value in args),
            *self.settings,
        ]
        self.config = load_config([ROOT / "conf" / f"{model}.yaml"], overrides)
        apply_backend_settings(
            deterministic=False, conv_tf32=self.config.runtime.tf32 == "auto"
        )
        precision = resolve_precision("fp32", torch.device(self.device))
        self.task = build_task(
            self.config, num_classes=NUM_CLASSES, precision=precision
        )
        self.task.to(self.device)
        return self.task.embedder.get_submodule("backbone")

    def for_inference(self, precision: str) -> nn.Module:
        """Return the copy that extraction uses, of the current weights."""
        from speakerlab.training.precision import resolve_precision

        used = resolve_precision(precision, torch.device(self.device))
        return self.task.embedder.for_inference(used).get_submodule("backbone")

    def new_optimizer(self, precision: str) -> torch.optim.Optimizer:
        """Choose kernels as training does, even after another precision, and its optimizer."""
        from speakerlab.experiments.hardware import choose_kernels
        from speakerlab.training.optimizers import OPTIMIZERS
        from speakerlab.training.precision import resolve_precision

        self.model.to(memory_format=torch.contiguous_format)
        self.task.set_precision(resolve_precision(precision, torch.device(self.device)))
        choose_kernels(self.config, self.task)
        self.model = (*self.task.embedder.compiled, self.model)[0]
        parameters = [*self.model.parameters(), self.head_CD]
        return OPTIMIZERS["sgd"](parameters, **SGD)

    def differences(self, path: str, dtype: str, precision: str) -> dict[str, float]:
        """Return the largest differences to a peer's values, over its largest, by `ALLOWED`."""
        theirs = torch.load(path)
        self.model.load_state_dict(self._our_names(theirs["weights"]))
        ours = self.values(dtype, precision)
        errors: dict[str, float] = {}
        for name in ALLOWED[dtype, precision]:
            expected = self._our_names(theirs[name])
            largest = max(float(value.abs().max()) for value in expected.values())
            apart = (
                float((ours[name][n] - v).abs().max()) for n, v in expected.items()
            )
            errors[name] = max(apart) / largest
        return errors

    def _our_names(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename a peer's tensors as ours."""
        from speakerlab.checkpoints.architectures import to_our_name

        model = self.config.model.name
        toolkit = self.case.peer if self.case else ""
        renamed: dict[str, Tensor] = {}
        for name, value in values.items():
            # The output has no name.
            our_name = to_our_name(name, model=model, toolkit=toolkit) if name else ""
            renamed[our_name] = value
        return renamed


SIDES = {"ours": Ours, **dict.fromkeys(PEERS, Side)}


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the rows of every model: beside each peer that has it, or alone."""
    for model in options.models:
        cases = [
            (i, case)
            for i, case in enumerate(CASES[model])
            if case.peer in options.peers
        ]
        for number, case in cases or [(-1, None)]:
            rows = list(rows_of(model, case, options))
            if rows:
                yield from compare_with(model, number, case, rows, options)


def compare_with(
    model: str,
    number: int,
    case: Case | None,
    rows: list[tuple[str, str, str, str]],
    options: argparse.Namespace,
) -> Iterator[Any]:
    """Yield the rows of one model beside one peer."""
    size = options.micro_batch or (ON_CPU if options.device == "cpu" else ON_GPU)
    new_sides = partial(
        start_sides,
        "models",
        options.threads,
        {} if case is None else {case.peer: options.peers[case.peer]},
        model=model,
        number=number,
        device=options.device,
        shape=(size, options.frames),
        settings=options.set,
    )
    if case is not None:
        sides = new_sides()
        require_equal(*sides, f"{model}{case.suffix}", options)
        close_sides(sides)
    for name, work, *precisions in rows:
        # New processes: what earlier rows have freed and kept would not leave room for the two
        # sides of ERes2Net, 20 GB in fp32.
        sides = new_sides()
        runs = [
            run_of(side, work=work, precision=precision)
            for side, precision in zip(sides, precisions)
        ]
        turns = take_turns(runs, amount=size, seconds=options.seconds)
        peaks = [
            s.ask("peak", work=work, precision=p) for s, p in zip(sides, precisions)
        ]
        close_sides(sides)
        peak_fields = dict(zip(("peak_mib", "peer_peak_mib"), peaks))
        yield report(name, turns, **peak_fields)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    formats = ["fp32", *HALVES]
    add("--models", nargs="+", default=list(CASES), choices=list(CASES))
    add("--work", nargs="+", default=WORKS, choices=WORKS)
    add("--precisions", nargs="+", default=PRECISIONS, choices=formats)
    add("--micro-batch", type=int, help=f"default: {ON_CPU}, on a GPU {ON_GPU}")
    add("--frames", type=int, default=298, help="default: a crop of 3 s")
    add_seconds(parser, 8.0)
    add("--set", nargs="+", default=[], help="KEY=VALUE: settings of ours")


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
