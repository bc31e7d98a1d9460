"""The models that models.py compares, and how each side builds them.

In: the name of a model, and the side. Out: cases, and a backbone, feats_BTF -> emb_BD, ready to be
trained or to infer. Ours is built from `conf/<model>.yaml` as the commands build it; the peers'
modules are called by their recipes' arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from sides import ROOT, import_from_root
from torch import nn

MARKS = {  # peer -> what only its checkout has
    "3dspeaker": "speakerlab/models/campplus",
    "wespeaker": "wespeaker/models/speaker_model.py",
    "speechbrain": "speechbrain/lobes/models/ECAPA_TDNN.py",
}
# Packages whose own `__init__` would import whole toolkits.
BARE = {
    "3dspeaker": [],
    "wespeaker": ["wespeaker"],
    "speechbrain": [
        f"speechbrain{part}"
        for part in ("", ".dataio", ".lobes", ".lobes.models", ".nnet", ".utils")
    ],
}
HAS_BF16 = ("speechbrain",)  # its recipes take `--precision=bf16`; the others have no such thing
EMBED_DIM = {
    "campplus": 512,
    "eres2net": 192,
    "ecapa_tdnn": 192,
    "ecapa_tdnn_wespeaker": 192,
    "resnet34": 256,
}
REGISTERED = {"resnet34": "resnet"}  # conf/<model>.yaml -> name in speakerlab.models, if another
ON_CPU = {"campplus": 16, "eres2net": 8, "ecapa_tdnn": 16, "ecapa_tdnn_wespeaker": 16}
ON_CPU["resnet34"] = 8
ON_GPU = 64


@dataclass(frozen=True)
class Case:
    """A model beside a peer's: the peer's class and its arguments, and what is set in ours."""

    peer: str
    module: str
    name: str
    args: Mapping[str, Any]
    ours: Mapping[str, object] = field(default_factory=dict)  # beside conf/<model>.yaml
    variant: str = ""  # of the peer, at the end of the row's name
    works: tuple[str, ...] = ("train", "infer")

    def has(self, work: str, precision: str) -> bool:
        """Whether there is a row; a variant of a peer stands beside ours in fp32 only."""
        return work in self.works and (not self.variant or precision == "fp32")

    @property
    def suffix(self) -> str:
        """What tells this case's rows from those beside 3D-Speaker as it ships."""
        parts = ("" if self.peer == "3dspeaker" else self.peer, self.variant)
        return "".join(f".{part}" for part in parts if part)


_SIZES = {"feat_dim": 80, "embedding_size": 512}
_OF_WESPEAKER = {"pool_eps": 1e-7}
CASES: dict[str, list[Case]] = {
    "campplus": [
        Case("3dspeaker", "speakerlab.models.campplus.DTDNN", "CAMPPlus", _SIZES),
        Case(
            "3dspeaker",
            "speakerlab.models.campplus.DTDNN",
            "CAMPPlus",
            {**_SIZES, "memory_efficient": False},
            variant="peer_stores",
            works=("train",),
        ),
        Case(
            "wespeaker",
            "wespeaker.models.campplus",
            "CAMPPlus",
            {"feat_dim": 80, "embed_dim": 512},
            ours=_OF_WESPEAKER,
        ),
    ],
    "eres2net": [
        Case(
            "3dspeaker",
            "speakerlab.models.eres2net.ERes2Net",
            "ERes2Net",
            {"feat_dim": 80, "embedding_size": 192, "m_channels": 32},
        ),
        Case(
            "wespeaker",
            "wespeaker.models.eres2net",
            "ERes2Net34_Base",
            {"feat_dim": 80, "embed_dim": 192},
            ours=_OF_WESPEAKER,
        ),
    ],
    "ecapa_tdnn": [
        Case(
            "3dspeaker",
            "speakerlab.models.ecapa_tdnn.ECAPA_TDNN",
            "ECAPA_TDNN",
            {"input_size": 80},
        ),
        Case(
            "speechbrain",
            "speechbrain.lobes.models.ECAPA_TDNN",
            "ECAPA_TDNN",
            {"input_size": 80},
        ),
    ],
    "ecapa_tdnn_wespeaker": [
        Case(
            "wespeaker",
            "wespeaker.models.ecapa_tdnn",
            "ECAPA_TDNN_GLOB_c512",
            {"feat_dim": 80, "embed_dim": 192},
        ),
    ],
    "resnet34": [
        Case(
            "wespeaker",
            "wespeaker.models.resnet",
            "ResNet34",
            {"feat_dim": 80, "embed_dim": 256},
        ),
    ],
}


def micro_batch(model: str, device: str) -> int:
    """Crops of a step: what fits into the caches of a CPU, and what fills a GPU."""
    return ON_CPU[model] if device == "cpu" else ON_GPU


class Peer(nn.Module):
    """A peer's module, whatever shape and number its outputs have."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        module = import_from_root(case.module, bare=BARE[case.peer])
        self.module: nn.Module = getattr(module, case.name)(**case.args)

    def forward(self, feats_BTF: torch.Tensor) -> torch.Tensor:
        found = self.module(feats_BTF)
        emb = found[-1] if isinstance(found, tuple | list) else found
        return emb.flatten(1)


class Ours:
    """Our backbone as the commands build it: for training, and its copy for inference."""

    def __init__(self, model: str, args: Mapping[str, object], device: torch.device) -> None:
        from speakerlab.bench.steps import NUM_CLASSES
        from speakerlab.config.build import build_task
        from speakerlab.config.schema import load_config
        from speakerlab.training.precision import apply_backend_settings, resolve_precision

        words = [f"model.args.{name}={value}" for name, value in args.items()]
        self.config = load_config([ROOT / "conf" / f"{model}.yaml"], words)
        apply_backend_settings(deterministic=False)
        precision = resolve_precision("fp32", device)
        self.task = build_task(self.config, num_classes=NUM_CLASSES, precision=precision)
        self.task.to(device)
        self.device = device

    @property
    def backbone(self) -> nn.Module:
        return self.task.embedder.get_submodule("backbone")

    def choose_kernels(self, precision: str) -> None:
        """As training does, also where training of another format has chosen before."""
        from speakerlab.core import process
        from speakerlab.experiments import setup as setup_training
        from speakerlab.training.precision import resolve_precision

        self.backbone.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
        self.task.precision = resolve_precision(precision, self.device)
        if self.device.type == "cpu":
            process.keep_freed_memory()
        setup_training.choose_kernels(self.config, self.task)

    def for_inference(self, precision: str) -> nn.Module:
        """The copy that extraction uses, from the weights of now."""
        from speakerlab.training.precision import resolve_precision

        folded: Any = self.task.embedder.for_inference
        return folded(resolve_precision(precision, self.device)).get_submodule("backbone")
