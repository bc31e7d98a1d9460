"""The models that models.py compares, and the rows of each.

Each is built from `conf/<model>.yaml` on our side and from a class of the peer's on the other.
"""

import argparse
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from sides import Process, require_close, suffix, wants

# Inference first: after trainings in one process it was slower.
WORKS = ("infer", "train")
PRECISIONS = ("fp32", "bf16")
HAS_BF16 = ("speechbrain",)  # its recipes take `--precision=bf16`

QUICK_ROWS = (
    f"{work}.{model}.{precision}"
    for model, work, precision in product(("campplus", "eres2net"), WORKS, PRECISIONS)
)
VALUES = ("embeddings", "loss", "gradients", "statistics")
# The largest difference over the largest value. Float64 shows that both compute the same; in fp32
# rounding alone moves some gradients of these networks by a hundredth. In bf16 only ours is.
ALLOWED = {
    ("float64", "fp32"): dict.fromkeys(VALUES, 1e-6),
    ("float32", "fp32"): dict.fromkeys(VALUES, 0.1),
    ("float32", "bf16"): {"embeddings": 0.1, "loss": 0.3},
}


class Case(NamedTuple):
    """A peer's model: `module:class` and its arguments; `ours` is set in ours."""

    peer: str
    path: str
    args: Mapping[str, Any]
    ours: Mapping[str, Any] = {}
    variant: str = ""  # of the peer, at the end of the row's name; only in fp32
    works: tuple[str, ...] = WORKS

    @property
    def suffix(self) -> str:
        return suffix(self.peer) + (f".{self.variant}" if self.variant else "")


CAMPPLUS = "speakerlab.models.campplus.DTDNN:CAMPPlus"
ERES2NET = "speakerlab.models.eres2net.ERes2Net:ERes2Net"
ECAPA = "ECAPA_TDNN:ECAPA_TDNN"
W = "wespeaker.models"
CAMPPLUS_ARGS = {"feat_dim": 80, "embedding_size": 512}
ERES2NET_ARGS = {"feat_dim": 80, "embedding_size": 192, "m_channels": 32}
STORING = {**CAMPPLUS_ARGS, "memory_efficient": False}
ECAPA_ARGS = {"input_size": 80}
W_192 = {"feat_dim": 80, "embed_dim": 192}
W_256 = {"feat_dim": 80, "embed_dim": 256}
W_512 = {"feat_dim": 80, "embed_dim": 512}
EPS = {"pool_eps": 1e-7}  # as WeSpeaker's pooling

EMBED_DIMS = {
    "campplus": 512,
    "eres2net": 192,
    "ecapa_tdnn": 192,
    "ecapa_tdnn_wespeaker": 192,
    "resnet34": 256,
}
# conf/<model>.yaml -> the peers' models to compare it with.
CASES: dict[str, list[Case]] = {
    "campplus": [
        Case("3dspeaker", CAMPPLUS, CAMPPLUS_ARGS),
        Case("3dspeaker", CAMPPLUS, STORING, variant="peer_stores", works=("train",)),
        Case("wespeaker", f"{W}.campplus:CAMPPlus", W_512, EPS),
    ],
    "eres2net": [
        Case("3dspeaker", ERES2NET, ERES2NET_ARGS),
        Case("wespeaker", f"{W}.eres2net:ERes2Net34_Base", W_192, EPS),
    ],
    "ecapa_tdnn": [
        Case("3dspeaker", f"speakerlab.models.ecapa_tdnn.{ECAPA}", ECAPA_ARGS),
        Case("speechbrain", f"speechbrain.lobes.models.{ECAPA}", ECAPA_ARGS),
    ],
    "ecapa_tdnn_wespeaker": [
        Case("wespeaker", f"{W}.ecapa_tdnn:ECAPA_TDNN_GLOB_c512", W_192),
    ],
    "resnet34": [Case("wespeaker", f"{W}.resnet:ResNet34", W_256)],
}


def rows_of(
    model: str, case: Case | None, options: argparse.Namespace
) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, work, our precision, the peer's) of the rows beside one peer, or alone."""
    ships_bf16 = case is not None and case.peer in HAS_BF16
    for work, precision in product(WORKS, options.precisions):
        if work not in options.work or (case is not None and work not in case.works):
            continue
        name = f"{work}.{model}.{precision}{case.suffix if case else ''}"
        name = ".".join([name, *options.set])
        named_precisions = [(name, precision if ships_bf16 else "fp32")]
        if precision == "bf16" and case is not None:
            if case.variant:
                continue
            if not ships_bf16:
                named_precisions.append((f"{name}.peer_bf16", "bf16"))
        for name, of_peer in named_precisions:
            if wants(options, name):
                yield name, work, precision, of_peer


def require_equal(
    ours: Process, peer: Process, name: str, options: argparse.Namespace
) -> None:
    """Exit where the sides do not compute the same."""
    for (dtype, precision), allowed in ALLOWED.items():
        if precision not in options.precisions and dtype != "float64":
            continue
        path = options.folder / "peer.values"
        peer.ask("save", path=path, dtype=dtype)
        errors = ours.ask("differences", path=path, dtype=dtype, precision=precision)
        kind = dtype if precision == "fp32" else "bf16 (ours) against float32"
        for values, error in errors.items():
            require_close(f"{name}: in {kind}, {values}", error, allowed[values])
