"""The architecture of a foreign checkpoint, by the names and shapes of its tensors alone.

In: published name -> shape. Out: our model, its arguments, and our name of every tensor; or one
ValueError with the missing, unexpected and misshaped tensors of the nearest architecture.
"""

import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from speakerlab.checkpoints.architectures import ARCHITECTURES, Architecture, to_our_name
from speakerlab.checkpoints.toolkit_config import Toolkit
from speakerlab.core.faults import Faults
from speakerlab.models import MODELS

Shape = tuple[int, ...]
COUNTER = "num_batches_tracked"  # of BatchNorm; unused, and missing in old checkpoints
# Poolings that have tensors of their own; the others are known by the configuration only.
POOLING_TENSORS = {"astp": "pool.linear1.weight", "mqmhastp": "pool.n_query.0."}


@dataclass(frozen=True)
class Recognised:
    """The content of a checkpoint in our terms."""

    model: str
    toolkit: Toolkit
    args: dict[str, object]  # all arguments of our constructor except `feat_dim`
    names: dict[str, str]  # our name -> published name
    title: str


@dataclass(frozen=True)
class Comparison:
    """One interpretation of the tensors; it fits if there are no faults."""

    recognised: Recognised
    faults: Faults
    num_wanted: int
    num_fitting: int


def recognise(
    shapes: Mapping[str, Shape],
    *,
    toolkits: Iterable[Toolkit] = ("3dspeaker", "wespeaker"),
    pooling: str | None = None,
    feat_dim: int = 80,
    where: str,
    outcome: str = "nothing was imported",
) -> Recognised:
    """Return the architecture whose tensors have exactly these names and shapes.

    If networks of both toolkits fit, that of the first of `toolkits` is taken. pooling: from the
    configuration, as two poolings without tensors look alike. outcome: ends the ValueError that
    reports a partial match.
    """
    tried: list[Comparison] = []
    known = [a for t in toolkits for a in ARCHITECTURES if a.toolkit == t and a.model in MODELS]
    for architecture in known:
        for comparison in _compare_all(architecture, shapes, pooling=pooling, feat_dim=feat_dim):
            if not comparison.faults:
                return comparison.recognised
            tried.append(comparison)

    def likeness(found: Comparison) -> tuple[int, int]:
        return found.num_fitting, -sum(map(len, found.faults.lines.values()))

    nearest = max(tried, key=likeness, default=None)
    if nearest is None or nearest.num_fitting == 0:
        raise ValueError(
            f"{where}: holds no known architecture, but {len(shapes)} tensors "
            f"({', '.join(list(shapes)[:3])}, ...); known are "
            f"{', '.join(sorted({a.title() for a in known}))}"
        )
    verdict = (
        f"{where}: matches no known architecture; {nearest.num_fitting} of {nearest.num_wanted} "
        f"tensors fit the nearest, {nearest.recognised.title}; {outcome}"
    )
    raise ValueError(nearest.faults.report(verdict))


def complete_args(model: str, args: Mapping[str, object]) -> dict[str, object]:
    """Return all arguments of our constructor except `feat_dim`, with its defaults."""
    parameters = inspect.signature(MODELS[model]).parameters
    defaults = {name: p.default for name, p in parameters.items() if name != "feat_dim"}
    return {**defaults, **args}


def _compare_all(
    architecture: Architecture, shapes: Mapping[str, Shape], *, pooling: str | None, feat_dim: int
) -> Iterator[Comparison]:
    """Compare the tensors with every combination of arguments that a row leaves open."""
    names: dict[str, str] = {}
    for published in shapes:
        ours = to_our_name(published, model=architecture.model, toolkit=architecture.toolkit)
        if ours:
            names[published if ours in names else ours] = published  # keep duplicates apart
    own = {name: shapes[published] for name, published in names.items()}
    if not any(tensor in own for tensor, _ in architecture.sizes.values()):
        return
    args = {**_args_from_shapes(architecture, own), **architecture.args}
    known = inspect.signature(MODELS[architecture.model]).parameters
    if "pooling" in known and "pooling" not in args:
        starts = POOLING_TENSORS.items()
        shown = (name for name, start in starts if any(key.startswith(start) for key in own))
        args["pooling"] = pooling or next(shown, known["pooling"].default)
    args = {name: value for name, value in args.items() if name in known}
    for values in itertools.product(*architecture.choices.values()):
        chosen = dict(zip(architecture.choices, values))
        full = complete_args(architecture.model, {**args, **chosen})
        wanted = _shapes_of(architecture.model, feat_dim, tuple(full.items()))
        if wanted is None:
            continue
        title = architecture.title()
        found = Recognised(architecture.model, architecture.toolkit, full, names, title)
        yield _compare(found, wanted, own)


def _compare(
    found: Recognised, wanted: Mapping[str, Shape], own: Mapping[str, Shape]
) -> Comparison:
    faults, num_fitting, names = Faults(), 0, found.names
    counted = {name: shape for name, shape in wanted.items() if not name.endswith(COUNTER)}
    for name, shape in counted.items():
        if name not in own:
            faults.add("missing tensors", f"{name}: is missing, with shape {list(shape)}")
        elif own[name] != shape:
            line = f"{names[name]}: has shape {list(own[name])}, must have {list(shape)}"
            faults.add("misshaped tensors", line)
        else:
            num_fitting += 1
    for name in own:
        if name not in wanted:
            faults.add("unexpected tensors", f"{names[name]}: is not expected")
    return Comparison(found, faults, len(counted), num_fitting)


def _args_from_shapes(architecture: Architecture, own: Mapping[str, Shape]) -> dict[str, object]:
    """Return the arguments that names and shapes determine."""
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
    """Return the number of blocks of each stage, from the largest block number of each."""
    last: dict[int, int] = {}
    for name in names:
        if found := re.match(pattern, name):
            stage, block = int(found[1]), int(found[2])
            last[stage] = max(block, last.get(stage, 0))
    return tuple(last[stage] + 1 for stage in sorted(last))


@lru_cache(maxsize=64)
def _shapes_of(
    model: str, feat_dim: int, args: tuple[tuple[str, object], ...]
) -> dict[str, Shape] | None:
    """Return our name -> shape of a model's tensors; None if these arguments are invalid."""
    with torch.random.fork_rng(devices=[]):
        try:
            backbone = MODELS[model](feat_dim=feat_dim, **dict(args))
        except ValueError:
            return None
    return {name: tuple(value.shape) for name, value in backbone.state_dict().items()}
