"""The models that models.py compares, and the rows of each.

Each is built from `conf/<model>.yaml` on our side and from a class of the peer's on the other.
"""

import argparse
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from sides import Process, say, wants

WORKS = ("infer", "train")  # inference first: after trainings in one process it was slower
PRECISIONS = ("fp32", "bf16")
HAS_BF16 = ("speechbrain",)  # its recipes take `--precision=bf16`

QUICK_ROWS = (
    f"{work}.{model}.{precision}"
    for model, work, precision in product(("campplus", "eres2net"), WORKS, PRECISIONS)
)
# The largest difference over the largest value. Float64 shows that both compute the same; in fp32
# rounding alone moves some gradients of these networks by a hundredth. In bf16 only ours is.
ALLOWED = {
    ("float64", "fp32"): {"embeddings": 1e-6, "loss": 1e-6, "gradients": 1e-6, "statistics": 1e-6},
    ("float32", "fp32"): {"embeddings": 0.1, "loss": 0.1, "gradients": 0.1, "statistics": 0.1},
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
        parts = ("" if self.peer == "3dspeaker" else self.peer, self.variant)
        return "".join(f".{part}" for part in parts if part)


CAMPPLUS = "speakerlab.models.campplus.DTDNN:CAMPPlus"
ERES2NET = "speakerlab.models.eres2net.ERes2Net:ERes2Net"
OF_3DSPEAKER = {"feat_dim": 80, "embedding_size": 512}
STORING = {**OF_3DSPEAKER, "memory_efficient": False}
EPS = {"pool_eps": 1e-7}  # as WeSpeaker's pooling
W, ECAPA, FEATS = "wespeaker.models", "ECAPA_TDNN:ECAPA_TDNN", {"input_size": 80}
CASES: dict[str, tuple[int, list[Case]]] = {  # conf/<model>.yaml -> embedding size, peers
    "campplus": (
        512,
        [
            Case("3dspeaker", CAMPPLUS, OF_3DSPEAKER),
            Case("3dspeaker", CAMPPLUS, STORING, variant="peer_stores", works=("train",)),
            Case("wespeaker", f"{W}.campplus:CAMPPlus", {"feat_dim": 80, "embed_dim": 512}, EPS),
        ],
    ),
    "eres2net": (
        192,
        [
            Case("3dspeaker", ERES2NET, {**OF_3DSPEAKER, "embedding_size": 192, "m_channels": 32}),
            Case(
                "wespeaker",
                f"{W}.eres2net:ERes2Net34_Base",
                {"feat_dim": 80, "embed_dim": 192},
                EPS,
            ),
        ],
    ),
    "ecapa_tdnn": (
        192,
        [
            Case("3dspeaker", f"speakerlab.models.ecapa_tdnn.{ECAPA}", FEATS),
            Case("speechbrain", f"speechbrain.lobes.models.{ECAPA}", FEATS),
        ],
    ),
    "ecapa_tdnn_wespeaker": (
        192,
        [
            Case(
                "wespeaker",
                f"{W}.ecapa_tdnn:ECAPA_TDNN_GLOB_c512",
                {"feat_dim": 80, "embed_dim": 192},
            )
        ],
    ),
    "resnet34": (
        256,
        [Case("wespeaker", f"{W}.resnet:ResNet34", {"feat_dim": 80, "embed_dim": 256})],
    ),
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
        found = [(name, precision if ships_bf16 else "fp32")]
        if precision == "bf16" and case is not None:
            if case.variant:
                continue
            if not ships_bf16:
                found.append((f"{name}.peer_bf16", "bf16"))
        for name, of_peer in found:
            if wants(options, name):
                yield name, work, precision, of_peer


def require_equal(ours: Process, peer: Process, name: str, options: argparse.Namespace) -> None:
    """Print how far the sides are apart; exit where they do not compute the same."""
    for (dtype, precision), allowed in ALLOWED.items():
        if precision not in options.precisions and dtype != "float64":
            continue
        path = options.folder / "peer.values"
        peer.ask("save", path=path, dtype=dtype)
        errors = ours.ask("differences", path=path, dtype=dtype, precision=precision)
        listed = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
        kind = dtype if precision == "fp32" else "bf16 (ours) against float32"
        say(f"{name} in {kind}, largest difference: {listed}")
        wrong = [what for what, error in errors.items() if not error <= allowed[what]]
        if wrong:
            raise SystemExit(f"{name}: {' and '.join(wrong)} are not equal; nothing was timed")
