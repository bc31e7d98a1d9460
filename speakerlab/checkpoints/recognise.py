"""The architecture of a foreign checkpoint, by the names and shapes of its tensors alone.

In: published name -> shape. Out: our model, its arguments, and our name of every tensor; or one
ValueError with the missing, unexpected and misshaped tensors of the nearest architecture.
"""

import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from speakerlab.checkpoints.architectures import ARCHITECTURES, Architecture, to_our_name
from speakerlab.checkpoints.toolkit_config import Toolkit
from speakerlab.core.faults import Faults
from speakerlab.core.shapes import shapes_only
from speakerlab.models import MODELS

Shape = tuple[int, ...]
COUNTER = "num_batches_tracked"  # of BatchNorm; unused, and missing in old checkpoints
ASTP_TENSOR = "pool.linear1.weight"  # other poolings are known by the configuration only


@dataclass(frozen=True)
class Recognised:
    """The content of a checkpoint in our terms."""

    row: Architecture
    args: dict[str, object]  # all arguments of our constructor except `feat_dim`
    names: dict[str, str]  # our name -> published name
    is_of_both: bool = False  # networks of two toolkits fit


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
    fits, nearest, likeness, verdict = list[Recognised](), Faults(), (0, 0), ""
    known = [row for toolkit in toolkits for row in ARCHITECTURES if row.toolkit == toolkit]
    for row in known:
        for found, wanted in _interpret(row, shapes, pooling=pooling, feat_dim=feat_dim):
            faults, num_fitting = _compare(found.names, wanted, shapes)
            if not faults:
                fits.append(found)
            like = num_fitting, -sum(map(len, faults.lines.values()))
            if like > likeness:
                nearest, likeness = faults, like
                count = sum(not name.endswith(COUNTER) for name in wanted)
                verdict = f"{num_fitting} of {count} tensors fit the nearest, {row.title()}"
    if fits:
        return replace(fits[0], is_of_both=len({found.row.toolkit for found in fits}) > 1)
    if not nearest:
        raise ValueError(
            f"{where}: holds no known architecture, but {len(shapes)} tensors "
            f"({', '.join(list(shapes)[:3])}, ...); known are "
            f"{', '.join(sorted({row.title() for row in known}))}"
        )
    verdict = f"{where}: matches no known architecture; {verdict}; {outcome}"
    raise ValueError(nearest.report(verdict))


def complete_args(model: str, args: Mapping[str, object]) -> dict[str, object]:
    """Return all arguments of our constructor except `feat_dim`, with its defaults."""
    parameters = inspect.signature(MODELS[model]).parameters
    defaults = {name: p.default for name, p in parameters.items() if name != "feat_dim"}
    return {**defaults, **args}


def _interpret(
    row: Architecture, shapes: Mapping[str, Shape], *, pooling: str | None, feat_dim: int
) -> Iterator[tuple[Recognised, dict[str, Shape]]]:
    """Yield each combination of arguments that a row leaves open, and the shapes of its tensors."""
    names: dict[str, str] = {}
    for published in shapes:
        ours = to_our_name(published, model=row.model, toolkit=row.toolkit)
        if ours:
            names[published if ours in names else ours] = published  # keep duplicates apart
    own = {name: shapes[published] for name, published in names.items()}
    if not own.keys() & row.sizes.values():
        return
    args = {**_args_from_shapes(row, own), **row.args}
    known = inspect.signature(MODELS[row.model]).parameters
    if "pooling" in known and "pooling" not in args:
        shown = "astp" if ASTP_TENSOR in own else known["pooling"].default
        args["pooling"] = pooling or shown
    args = {name: value for name, value in args.items() if name in known}
    for values in itertools.product(*row.choices.values()):
        full = complete_args(row.model, {**args, **dict(zip(row.choices, values))})
        wanted = _shapes_of(row.model, feat_dim, tuple(full.items()))
        if wanted is not None:
            yield Recognised(row, full, names), wanted


def _compare(
    names: Mapping[str, str], wanted: Mapping[str, Shape], shapes: Mapping[str, Shape]
) -> tuple[Faults, int]:
    """Return how the published tensors differ from the wanted ones, and how many fit."""
    faults, num_fitting = Faults(), 0
    for name, shape in wanted.items():
        if name.endswith(COUNTER):
            continue
        found = shapes[names[name]] if name in names else None
        if found is None:
            faults.add("missing tensors", f"{name}: is missing, with shape {list(shape)}")
        elif found != shape:
            line = f"{names[name]}: has shape {list(found)} instead of {list(shape)}"
            faults.add("misshaped tensors", line)
        else:
            num_fitting += 1
    for name, published in names.items():
        if name not in wanted:
            faults.add("unexpected tensors", f"{published}: is not expected")
    return faults, num_fitting


def _args_from_shapes(row: Architecture, own: Mapping[str, Shape]) -> dict[str, object]:
    """Return the arguments that names and shapes determine."""
    args: dict[str, object] = {}
    for arg, tensor in row.sizes.items():
        if shape := own.get(tensor):
            args[arg] = shape[0]
    if blocks := _count_blocks(own):
        args["blocks"] = blocks
    for arg, tensor in row.flags.items():
        args[arg] = tensor in own
    return args


def _count_blocks(names: Iterable[str]) -> tuple[int, ...]:
    """Return the number of blocks of each stage `layer<n>`, from the largest number of each."""
    last: dict[int, int] = {}
    for name in names:
        if found := re.match(r"layer(\d)\.(\d+)\.", name):
            stage, block = int(found[1]), int(found[2])
            last[stage] = max(block, last.get(stage, 0))
    return tuple(last[stage] + 1 for stage in sorted(last))


@lru_cache(maxsize=64)
def _shapes_of(
    model: str, feat_dim: int, args: tuple[tuple[str, object], ...]
) -> dict[str, Shape] | None:
    """Return our name -> shape of a model's tensors; None if these arguments are invalid."""
    with shapes_only():
        try:
            backbone = MODELS[model](feat_dim=feat_dim, **dict(args))
        except (ValueError, KeyError):  # such as an unknown pooling
            return None
    return {name: tuple(value.shape) for name, value in backbone.state_dict().items()}
