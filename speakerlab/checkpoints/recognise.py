"""Which architecture a foreign checkpoint holds, from the names and shapes of its tensors alone.

In: published name -> shape. Out: our model and its arguments, and our name of every tensor; or one
ValueError that lists what is missing, unexpected and of another shape beside the nearest one.
"""

import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from speakerlab.checkpoints.architectures import ARCHITECTURES, Architecture
from speakerlab.checkpoints.names import Toolkit, to_our_name
from speakerlab.core.faults import Faults
from speakerlab.models import MODELS
from speakerlab.models.pooling import POOLINGS

Shape = tuple[int, ...]
# A counter that BatchNorm keeps for itself; old checkpoints lack it and nothing reads it.
COUNTER = "num_batches_tracked"
# What tensor of a pooling tells its name; the others have none, and stand in the configuration.
POOLING_TENSORS = {"astp": "pool.linear1.weight", "mqmhastp": "pool.n_query.0."}


@dataclass(frozen=True)
class Recognised:
    """What a checkpoint holds, in our words."""

    model: str
    toolkit: Toolkit
    args: dict[str, object]  # all arguments of our constructor but `feat_dim`
    names: dict[str, str]  # our name -> published name
    title: str


@dataclass(frozen=True)
class Comparison:
    """One way to read the tensors, and how well it fits."""

    recognised: Recognised
    missing: dict[str, Shape]  # our name -> wanted shape
    unexpected: list[str]  # published names
    misshaped: list[tuple[str, Shape, Shape]]  # published name, its shape, the wanted one
    num_wanted: int

    @property
    def num_fitting(self) -> int:
        return self.num_wanted - len(self.missing) - len(self.misshaped)

    @property
    def fits(self) -> bool:
        return not (self.missing or self.unexpected or self.misshaped)

    @property
    def distance(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.misshaped)


def recognise(
    shapes: Mapping[str, Shape],
    *,
    toolkits: Iterable[Toolkit] = ("3dspeaker", "wespeaker"),
    pooling: str | None = None,
    feat_dim: int = 80,
    where: str,
    outcome: str = "nothing was imported",
) -> Recognised:
    """The architecture whose tensors have exactly these names and shapes, or a ValueError.

    Where tensors of both toolkits look the same, the first of `toolkits` is taken. `pooling` is
    what a configuration says of it; two poolings without tensors look alike. `outcome` ends what is
    said of a partial match.
    """
    tried: list[Comparison] = []
    wanted = [a for t in toolkits for a in ARCHITECTURES if a.toolkit == t and a.model in MODELS]
    for architecture in wanted:
        for comparison in _readings(architecture, shapes, pooling=pooling, feat_dim=feat_dim):
            if comparison.fits:
                return comparison.recognised
            tried.append(comparison)
    nearest = min(tried, key=lambda c: (-c.num_fitting, c.distance), default=None)
    if nearest is None or nearest.num_fitting == 0:
        first = ", ".join(list(shapes)[:3])
        raise ValueError(
            f"{where}: holds no architecture known here, got {len(shapes)} tensors ({first}, ...); "
            f"known are {', '.join(sorted({a.title() for a in wanted}))}"
        )
    raise ValueError(_report(nearest, where=where, outcome=outcome))


def complete_args(model: str, args: Mapping[str, object]) -> dict[str, object]:
    """All arguments of our constructor but `feat_dim`, defaults where `args` has none."""
    parameters = inspect.signature(MODELS[model]).parameters
    defaults = {name: p.default for name, p in parameters.items() if name != "feat_dim"}
    return {**defaults, **args}


def _readings(
    architecture: Architecture, shapes: Mapping[str, Shape], *, pooling: str | None, feat_dim: int
) -> Iterator[Comparison]:
    """The tensors compared with every combination of arguments that a row leaves open."""
    names: dict[str, str] = {}
    for published in shapes:
        ours = to_our_name(published, model=architecture.model, toolkit=architecture.toolkit)
        if ours:
            names[published if ours in names else ours] = published  # one that is there twice stays
    own = {name: shapes[published] for name, published in names.items()}
    if not any(tensor in own for tensor, _ in architecture.sizes.values()):
        return
    args = {**architecture.args, **_shown(architecture, own)}
    known = inspect.signature(MODELS[architecture.model]).parameters
    if "pooling" in known and "pooling" not in args:
        args["pooling"] = pooling or _shown_pooling(own) or known["pooling"].default
    args = {name: value for name, value in args.items() if name in known}
    for values in itertools.product(*architecture.choices.values()):
        full = complete_args(
            architecture.model, {**args, **dict(zip(architecture.choices, values))}
        )
        wanted = _shapes_of(architecture.model, feat_dim, tuple(full.items()))
        if wanted is not None:
            title = architecture.title()
            reading = Recognised(architecture.model, architecture.toolkit, full, names, title)
            yield _compare(reading, wanted, own)


def _shown(architecture: Architecture, own: Mapping[str, Shape]) -> dict[str, object]:
    """The arguments that names and shapes give away."""
    args: dict[str, object] = {}
    for arg, (tensor, axis) in architecture.sizes.items():
        if len(own.get(tensor, ())) > axis:
            args[arg] = own[tensor][axis]
    for arg, pattern in architecture.blocks.items():
        counts = _count_blocks(pattern, own)
        if not architecture.depths and counts:
            args[arg] = counts
        elif counts in architecture.depths:
            args[arg] = architecture.depths[counts]
    for arg, tensor in architecture.flags.items():
        args[arg] = tensor in own
    return args


def _count_blocks(pattern: str, names: Iterable[str]) -> tuple[int, ...]:
    """Blocks of each stage, from the largest number of each."""
    last: dict[int, int] = {}
    for name in names:
        if found := re.match(pattern, name):
            stage, block = int(found[1]), int(found[2])
            last[stage] = max(block, last.get(stage, 0))
    return tuple(last[stage] + 1 for stage in sorted(last))


def _shown_pooling(own: Mapping[str, Shape]) -> str | None:
    for name, start in POOLING_TENSORS.items():
        assert name in POOLINGS
        if any(key.startswith(start) for key in own):
            return name
    return None


@lru_cache(maxsize=64)
def _shapes_of(
    model: str, feat_dim: int, args: tuple[tuple[str, object], ...]
) -> dict[str, Shape] | None:
    """Our name -> shape of the tensors of a model; None where it cannot be built so."""
    with torch.random.fork_rng(devices=[]):
        try:
            backbone = MODELS[model](feat_dim=feat_dim, **dict(args))
        except ValueError:
            return None
    return {name: tuple(value.shape) for name, value in backbone.state_dict().items()}


def _compare(
    reading: Recognised, wanted: Mapping[str, Shape], own: Mapping[str, Shape]
) -> Comparison:
    counted = {name: shape for name, shape in wanted.items() if not name.endswith(COUNTER)}
    return Comparison(
        reading,
        missing={name: shape for name, shape in counted.items() if name not in own},
        unexpected=[reading.names[name] for name in own if name not in wanted],
        misshaped=[
            (reading.names[name], own[name], shape)
            for name, shape in counted.items()
            if name in own and own[name] != shape
        ],
        num_wanted=len(counted),
    )


def _report(nearest: Comparison, *, where: str, outcome: str) -> str:
    faults = Faults()
    for name, shape in nearest.missing.items():
        faults.add("missing tensors", f"{name}: is missing, got no tensor; wanted {list(shape)}")
    for name in nearest.unexpected:
        faults.add("unexpected tensors", f"{name}: is unexpected, got it in the checkpoint; no use")
    for name, shape, wanted in nearest.misshaped:
        faults.add(
            "mis-shaped tensors",
            f"{name}: has another shape, got {list(shape)}; wanted {list(wanted)}",
        )
    return faults.report(
        f"{where}: is no architecture known here, got {nearest.num_fitting} of "
        f"{nearest.num_wanted} tensors of the nearest, {nearest.recognised.title}; "
        f"{outcome}"
    )
