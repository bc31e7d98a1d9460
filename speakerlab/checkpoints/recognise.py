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

from speakerlab.checkpoints.architectures import (
    ARCHITECTURES,
    Architecture,
    to_our_name,
)
from speakerlab.checkpoints.toolkit_config import Toolkit
from speakerlab.core.faults import Faults
from speakerlab.core.shapes import shapes_only
from speakerlab.models import MODELS

Shape = tuple[int, ...]
# The batch counter of BatchNorm: unused, and missing in old checkpoints.
COUNTER = "num_batches_tracked"
# Attentive pooling has this tensor; other poolings have none, and show in the configuration only.
ASTP_TENSOR = "pool.linear1.weight"


@dataclass(frozen=True)
class Recognised:
    """The content of a checkpoint in our terms."""

    row: Architecture
    args: dict[str, object]  # all arguments of our constructor except `feat_dim`
    names: dict[str, str]  # our name -> published name
    is_of_both: bool = False  # networks of both toolkits fit


@dataclass(frozen=True)
class _Comparison:
    """A checkpoint beside one row and choice of arguments."""

    candidate: Recognised
    faults: Faults
    num_fitting: int  # tensors
    num_wanted: int

    @property
    def likeness(self) -> tuple[int, int]:
        """Return a key: the largest has the most fitting tensors, then the fewest faults."""
        num_faults = sum(len(lines) for lines in self.faults.lines.values())
        return self.num_fitting, -num_faults


class UnknownNetworkError(ValueError):
    """Tensors that are of no known architecture; nearest: the one with the most of them."""

    def __init__(self, text: str, nearest: Recognised | None = None) -> None:
        super().__init__(text)
        self.nearest = nearest


def recognise(
    shapes: Mapping[str, Shape],
    *,
    toolkits: Iterable[Toolkit] = ("3dspeaker", "wespeaker"),
    pooling: str | None = None,
    feat_dim: int = 80,
    where: str,
) -> Recognised:
    """Return the architecture whose tensors have exactly these names and shapes.

    If networks of both toolkits fit, the network of the first of `toolkits` is taken. pooling: from
    the configuration, as two poolings without tensors look alike. Raises UnknownNetworkError if
    none fits.
    """
    rows = _rows_of(toolkits)

    # Compare with every row and choice of arguments. The nearest is only used in the message.
    fits: list[Recognised] = []
    nearest: _Comparison | None = None
    for row in rows:
        candidates = _interpret(row, shapes, pooling=pooling, feat_dim=feat_dim)
        for candidate, wanted in candidates:
            comparison = _compare(candidate, wanted, shapes)
            if not comparison.faults:
                fits.append(candidate)
            # Without any fitting tensor, it is not near. The first of several is the nearest.
            is_nearer = nearest is None or comparison.likeness > nearest.likeness
            if comparison.num_fitting and is_nearer:
                nearest = comparison

    if fits:
        fitting_toolkits = {fit.row.toolkit for fit in fits}
        is_of_both = len(fitting_toolkits) > 1
        return replace(fits[0], is_of_both=is_of_both)
    if nearest is None:
        titles = sorted({row.title() for row in rows})
        raise UnknownNetworkError(
            f"{where}: holds no known architecture, but {len(shapes)} tensors"
            f" ({', '.join(list(shapes)[:3])}, ...); known are {', '.join(titles)}"
        )
    title = nearest.candidate.row.title()
    verdict = (
        f"{where}: matches no known architecture; {nearest.num_fitting} of"
        f" {nearest.num_wanted} tensors fit the nearest, {title}; nothing was imported"
    )
    raise UnknownNetworkError(nearest.faults.report(verdict), nearest.candidate)


def _rows_of(toolkits: Iterable[Toolkit]) -> list[Architecture]:
    """Return the rows of some toolkits, in the order of `toolkits`; the first fit is taken."""
    rows: list[Architecture] = []
    for toolkit in toolkits:
        for row in ARCHITECTURES:
            if row.toolkit == toolkit:
                rows.append(row)
    return rows


def complete_args(model: str, args: Mapping[str, object]) -> dict[str, object]:
    """Return all arguments of our constructor except `feat_dim`, with its defaults."""
    complete: dict[str, object] = {}
    parameters = inspect.signature(MODELS[model]).parameters
    for name, parameter in parameters.items():
        if name != "feat_dim":
            complete[name] = parameter.default
    return {**complete, **args}


def _interpret(
    row: Architecture,
    shapes: Mapping[str, Shape],
    *,
    pooling: str | None,
    feat_dim: int,
) -> Iterator[tuple[Recognised, dict[str, Shape]]]:
    """Yield each combination of arguments that a row leaves open, and the shapes of its tensors."""
    names = _our_names(row, shapes)
    our_shapes: dict[str, Shape] = {}
    for our_name, published_name in names.items():
        our_shapes[our_name] = shapes[published_name]
    # Without any tensor that shows a size, the checkpoint is of another architecture: there is no
    # need to build models and compare them.
    size_tensors = set(row.sizes.values())
    if size_tensors.isdisjoint(our_shapes):
        return

    shape_args = _args_from_shapes(row, our_shapes)
    args = {**shape_args, **row.args}
    constructor = MODELS[row.model]
    parameters = inspect.signature(constructor).parameters
    if "pooling" in parameters and "pooling" not in args:
        usual_pooling = parameters["pooling"].default
        if ASTP_TENSOR in our_shapes:
            usual_pooling = "astp"
        args["pooling"] = pooling or usual_pooling
    # The shapes may also show arguments that this constructor does not have, such as `blocks`.
    our_args = {name: value for name, value in args.items() if name in parameters}

    # Each combination of the choices; one without any, if there are none.
    for values in itertools.product(*row.choices.values()):
        chosen_args = dict(zip(row.choices, values))
        full_args = complete_args(row.model, {**our_args, **chosen_args})
        # A tuple, because the cache of `_shapes_of` needs arguments that can be hashed.
        items = tuple(full_args.items())
        wanted = _shapes_of(row.model, feat_dim, items)
        if wanted is not None:
            yield Recognised(row, full_args, names), wanted


def _our_names(row: Architecture, published_names: Iterable[str]) -> dict[str, str]:
    """Return our name -> published name of the tensors that have a part in the embedding."""
    names: dict[str, str] = {}
    for published_name in published_names:
        our_name = to_our_name(published_name, model=row.model, toolkit=row.toolkit)
        if not our_name:
            continue
        # If two published tensors would get one name, the second keeps its own, so that it counts
        # as unexpected instead of replacing the first.
        if our_name in names:
            our_name = published_name
        names[our_name] = published_name
    return names


def _compare(
    candidate: Recognised,
    wanted: Mapping[str, Shape],
    shapes: Mapping[str, Shape],
) -> _Comparison:
    """Compare the published tensors, of the given shapes, with those wanted for a candidate."""
    names = candidate.names
    faults = Faults()
    num_fitting = 0
    num_wanted = 0
    for name, shape in wanted.items():
        if name.endswith(COUNTER):
            continue
        num_wanted += 1
        if name not in names:
            faults.add(
                "missing tensors", f"{name}: is missing, with shape {list(shape)}"
            )
            continue
        published = names[name]
        published_shape = shapes[published]
        if published_shape != shape:
            faults.add(
                "misshaped tensors",
                f"{published}: has shape {list(published_shape)} instead of"
                f" {list(shape)}",
            )
        else:
            num_fitting += 1
    for name, published in names.items():
        if name not in wanted:
            faults.add("unexpected tensors", f"{published}: is not expected")
    return _Comparison(candidate, faults, num_fitting, num_wanted)


def _args_from_shapes(
    row: Architecture, shapes: Mapping[str, Shape]
) -> dict[str, object]:
    """Return the arguments that the names (ours) and shapes of the tensors determine."""
    args: dict[str, object] = {}
    for arg, tensor in row.sizes.items():
        shape = shapes.get(tensor)
        if shape:
            args[arg] = shape[0]
    blocks = _count_blocks(shapes)
    if blocks:
        args["blocks"] = blocks
    for arg, tensor in row.flags.items():
        args[arg] = tensor in shapes
    return args


def _count_blocks(names: Iterable[str]) -> tuple[int, ...]:
    """Return the number of blocks of each stage `layer<n>`, from the largest number of each."""
    last_block: dict[int, int] = {}
    for name in names:
        match = re.match(r"layer(\d)\.(\d+)\.", name)
        if match is None:
            continue
        stage = int(match[1])
        block = int(match[2])
        last_so_far = last_block.get(stage, 0)
        last_block[stage] = max(block, last_so_far)
    # Blocks are numbered from 0.
    stages = sorted(last_block)
    return tuple(last_block[stage] + 1 for stage in stages)


@lru_cache(maxsize=64)
def _shapes_of(
    model: str, feat_dim: int, args: tuple[tuple[str, object], ...]
) -> dict[str, Shape] | None:
    """Return our name -> shape of a model's tensors; None if these arguments are invalid."""
    constructor = MODELS[model]
    # A model on the meta device, which takes no memory: many are built for one checkpoint.
    with shapes_only():
        try:
            backbone = constructor(feat_dim=feat_dim, **dict(args))
        except (ValueError, KeyError):  # such as an unknown pooling
            return None
    shapes: dict[str, Shape] = {}
    for name, value in backbone.state_dict().items():
        shapes[name] = tuple(value.shape)
    return shapes
