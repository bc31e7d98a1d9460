"""Plan the memory of a training on a GPU, without the GPU and without a corpus."""

import textwrap
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from speakerlab.bin.command import parser
from speakerlab.core.counting import count_of
from speakerlab.core.faults import nearest

if TYPE_CHECKING:  # these import torch, which is slow: only for valid options
    from speakerlab.config.schema import Config
    from speakerlab.experiments.device_memory import Memory
    from speakerlab.experiments.footprint import Footprint
    from speakerlab.training.batch_size import BatchPlan

ROOT = Path(__file__).parents[2]
CARDS_GB = (11, 16, 24, 32, 40, 80)
# Models in the table of --table.
TABLE_MODELS = ("campplus", "eres2net")
TABLE_CARDS_GB = (11, 24, 32)
# Assumed for rooms, unless runtime.bank_gb is a number: 1,600 of a second at 16 kHz.
ROOMS_GB = 0.1
COLUMNS = 100  # longest line
MAX_GB = 1000  # of a GPU; more are MiB, as nvidia-smi prints them


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    if args.table:
        for model in TABLE_MODELS:
            args.model = model
            print_plans(load(args), args, TABLE_CARDS_GB)
        return
    cards_gb = [args.gpu_mem] if args.gpu_mem else CARDS_GB
    print_plans(load(args), args, cards_gb)


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("plan", __doc__)
    subject = options.add_mutually_exclusive_group(required=True)
    options.add("--model NAME", "name of a configuration in conf/", group=subject)
    options.add(
        "--config YAML", "files, as in `speakerlab train`", group=subject, nargs="+"
    )
    options.add(
        "--table",
        "table of CAM++ and ERes2Net base on 11, 24 and 32 GB",
        group=subject,
    )
    options.add("--recipe NAME", "add a recipe's configuration to --model")
    options.add(
        "--gpu-mem GB",
        "memory of one GPU (default: a table of common sizes)",
        least=0.1,
    )
    options.add("--gpus N", "number of GPUs", least=1, default=1)
    formats = "default: runtime.precision; auto: plan both fp32 and bf16"
    options.add("--precision", formats, choices=("auto", "fp32", "bf16", "fp16"))
    rows = "training speakers, each speed other than 1 counted as another"
    options.add("--speakers N", rows, least=1, default=10000)
    options.add(
        "--bank-gb GB",
        "noise and rooms on the GPU (default: runtime.bank_gb; auto: 0.1 for rooms)",
        least=0.0,
    )
    options.add_settings()
    args = options.parse_args(arguments)
    for option, size_gb in (("--gpu-mem", args.gpu_mem), ("--bank-gb", args.bank_gb)):
        if size_gb is not None and size_gb > MAX_GB:
            raise ValueError(
                f"{option}: must be GB, at most {MAX_GB}, got {size_gb:g}; for MiB, as"
                f" nvidia-smi prints them, give {size_gb / 1024:.3g}"
            )
    has_model = args.model is not None or args.table
    if args.recipe is not None and not has_model:
        raise ValueError(
            f"--recipe: {args.recipe} needs --model; with --config list its conf.yaml"
        )
    return args


def load(args: Namespace) -> "Config":
    """Load the configuration that the recipe would train."""
    from speakerlab.config.schema import load_config

    settings = list(args.set)
    if args.precision:
        settings.append(f"runtime.precision={args.precision}")
    if args.config is not None:
        return load_config(args.config, settings)
    layers = [Path(args.model)]
    if args.recipe is not None:
        recipe = ROOT / "egs" / args.recipe
        if not (recipe / "conf.yaml").exists():
            layer_files = ROOT.glob("egs/*/conf.yaml")
            recipes = [path.parent.name for path in layer_files]
            hint = nearest(
                args.recipe,
                recipes,
                otherwise="recipes are in a clone of the repository",
            )
            raise ValueError(f"--recipe: {args.recipe}: no such recipe{hint}")
        layers.append(recipe / "conf.yaml")
        # A recipe may have additional settings for a model.
        model_name = layers[0].stem
        of_model = recipe / "conf" / f"{model_name}.yaml"
        if of_model.exists():
            layers.append(of_model)
    return load_config(layers, settings)


def target_of(config: "Config", num_classes: int) -> str:
    """Return what the model learns, for the first line."""
    if config.objective is not None:
        return config.objective.name
    if config.task == "segmentation":
        return "who speaks when"
    if not config.has_head:
        teachers = " and ".join(config.distil.teachers) or "a teacher"
        return f"taught by {teachers}"
    return count_of(num_classes, "class")


def print_plans(config: "Config", args: Namespace, cards_gb: Sequence[float]) -> None:
    """Print a line per card and format, with --gpu-mem also the parts; ValueError if none fits."""
    from speakerlab.config import build
    from speakerlab.experiments.corpus import class_speeds
    from speakerlab.experiments.device_memory import lacks_bf16
    from speakerlab.training.batch_size import MemoryTooSmall

    num_classes = args.speakers * len(class_speeds(config))
    target = target_of(config, num_classes)
    unit, length = build.batch_unit(config)
    training = config.training
    print_wrapped(
        f"{config.model.name}, {target}, {unit}s{length}, global batch"
        f" {training.global_batch}, training.bn_batch {training.bn_batch or 'unset'}",
    )
    size_head = f"MiB/{unit}"
    fit_head = f"{unit}s that fit"
    print(
        f"  GPU     format   {size_head}   {fit_head}   micro-batch x ranks x steps   BN"
        "   GiB left"
    )

    card_plans = plan_cards(config, args, cards_gb, num_classes)
    refusals: list[MemoryTooSmall] = []
    for card_gb, memory in card_plans:
        batch = None
        try:
            batch = memory.plan_batch()
            result = describe_batch(memory, batch)
        # The table also has rows for cards that are too small.
        except MemoryTooSmall as error:
            refusals.append(error)
            result = f"refused: {error}"
        precision = memory.footprint.precision
        size = f"{memory.footprint.saved_per_crop / 2**20:{len(size_head)}.1f}"
        num_fitting = f"{memory.max_crops:{len(fit_head)}}"
        print_wrapped(
            f"  {card_gb:2g} GB   {precision:6}   {size}   {num_fitting}   {result}"
        )
        if args.gpu_mem and batch:
            print_parts(memory, batch, card_gb, unit)

    if config.runtime.precision == "auto":
        print(
            "runtime.precision auto: bf16 from capability 8.0 on, fp32 below; fp16 only"
            " if set"
        )
    elif config.runtime.precision == "bf16" and any(map(lacks_bf16, cards_gb)):
        print(
            "cards of 11 GB (GTX 1080 Ti, RTX 2080 Ti) have no bf16 and emulate it"
            " slowly; use fp16"
        )
    if banks_gb(config, args):
        print_wrapped(describe_banks(config, args))
    # The exit code is 0 if any of the cards is large enough.
    if len(refusals) == len(card_plans):
        raise refusals[-1]


def describe_batch(memory: "Memory", batch: "BatchPlan") -> str:
    """Return the columns of the table that tell how a batch is divided, and what is left."""
    sizes = f"{batch.micro_batch} x {batch.world_size} x {batch.accumulation}"
    left_gib = memory.left(batch.micro_batch) / 2**30
    columns = f"{sizes:27}   {batch.bn_batch:<4} {left_gib:8.1f}"
    if memory.config.runtime.checkpoint_layers is True:
        columns += "   layers computed again (runtime.checkpoint_layers)"
    return columns


def print_parts(
    memory: "Memory", batch: "BatchPlan", card_gb: float, unit: str
) -> None:
    """Print what takes the memory of a card, and the batch; the parts add up to the card."""
    from speakerlab.experiments.device_memory import (
        GPU_USABLE_SHARE,
        taken_before,
        why_fewer,
    )

    free_gib = memory.free / 2**30
    crops_gib = batch.micro_batch * memory.peak_per_crop / 2**30
    state_gib = memory.state_and_libraries / 2**30
    parts = {
        **taken_before(memory.world_size),
        "libraries, weights, gradients and optimizer": state_gib,
        "noise and rooms": memory.bank_bytes / 2**30,
        f"{batch.micro_batch} {unit}s": crops_gib,
    }
    # A configured micro-batch may take the reserve.
    rest_gib = card_gb - sum(parts.values())
    parts["reserve"] = min(rest_gib, free_gib * (1 - GPU_USABLE_SHARE))
    parts["left"] = rest_gib - parts["reserve"]
    for name, gib in parts.items():
        print(f"    {gib:6.2f} GiB  {name}")
    print_wrapped(f"    {batch}")
    reason = why_fewer(memory, batch, memory.max_crops)
    if reason:
        print_wrapped(f"    {reason}")


def banks_gb(config: "Config", args: Namespace) -> float:
    """Return the GB of noise and rooms to count on each GPU."""
    if args.bank_gb is not None:
        return args.bank_gb
    bank_gb = config.runtime.bank_gb
    if bank_gb == "auto":
        return ROOMS_GB if config.augment.room_prob else 0.0
    uses_banks = config.augment.noise_prob or config.augment.room_prob
    return bank_gb if uses_banks else 0.0


def describe_banks(config: "Config", args: Namespace) -> str:
    """Return which noise and rooms are counted."""
    gb = banks_gb(config, args)
    if args.bank_gb is not None:
        return f"counted: {gb:g} GB for noise and rooms (--bank-gb)"
    if config.runtime.bank_gb != "auto":
        return f"counted: {gb:g} GB, the most for noise and rooms (runtime.bank_gb)"
    return (
        f"counted: {gb:g} GB for rooms (see --bank-gb); noise may take the GiB left"
        " (runtime.bank_gb auto), or else the data workers read it; all of MUSAN takes"
        " 12 GB"
    )


def plan_cards(
    config: "Config",
    args: Namespace,
    cards_gb: Sequence[float],
    num_classes: int,
) -> "list[tuple[float, Memory]]":
    """Return (GB, memory) of each card with each format."""
    from speakerlab.experiments.device_memory import card_memory
    from speakerlab.experiments.footprint import rank_footprint
    from speakerlab.experiments.planning import fitting_memory

    # Computed once: a training needs the same memory on every card. The key is the format, and
    # whether layers of a pretrained model are kept.
    footprints: dict[tuple[str, object], Footprint] = {}
    bank_gb = banks_gb(config, args)

    def measure(config: "Config", *, card_gb: float, precision: str) -> "Memory":
        key = (precision, config.runtime.checkpoint_layers)
        if key not in footprints:
            footprints[key] = rank_footprint(
                config,
                world_size=args.gpus,
                num_classes=num_classes,
                precision=precision,
            )
        return card_memory(config, footprints[key], card_gb, args.gpus, bank_gb)

    memories: list[tuple[float, Memory]] = []
    for card_gb in cards_gb:
        for precision in formats(config, card_gb):
            on_card = partial(measure, card_gb=card_gb, precision=precision)
            memory = fitting_memory(config, args.gpus, on_card)
            memories.append((card_gb, memory))
    return memories


def formats(config: "Config", card_gb: float) -> list[str]:
    """Return the formats to plan a card with: the configured format, or all that it can use."""
    from speakerlab.experiments.device_memory import lacks_bf16

    if config.runtime.precision != "auto":
        return [config.runtime.precision]
    return ["fp32", "fp16" if lacks_bf16(card_gb) else "bf16"]


def print_wrapped(line: str) -> None:
    """Print a line; break it between words where it is too long."""
    lines = textwrap.wrap(
        line,
        COLUMNS,
        subsequent_indent=" " * 6,
        drop_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for part in lines:
        print(part.rstrip())
