"""Plan the memory of a training on a GPU, without the GPU and without a corpus."""

import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speakerlab.bin.command import parser
from speakerlab.core.faults import nearest

if TYPE_CHECKING:  # they import torch, which is slow: not before the options are valid
    from speakerlab.config.schema import Config
    from speakerlab.experiments.planning import CardPlan, Footprint

ROOT = Path(__file__).parents[2]
TABLE_MODELS, TABLE_CARDS_GB = ("campplus", "eres2net"), (11, 24, 32)
AUTO = {"fp32": "auto below capability 8.0", "bf16": "auto from capability 8.0 on"}


def main(words: Sequence[str]) -> None:
    """`speakerlab plan --model M [--recipe NAME] --gpu-mem 24 [--gpus 4] [--set key=value ...]`"""
    args = parse(words)
    from speakerlab.experiments.planning import CARDS_GB, CardPlan

    if args.table:
        for model in TABLE_MODELS:
            args.model = model
            print_table(load(args), args, TABLE_CARDS_GB)
        return
    config = load(args)
    if args.gpu_mem is None:
        print_table(config, args, CARDS_GB)
        return
    for found in footprints(config, args):
        print_card(CardPlan(config, found, args.gpu_mem, args.gpus, args.bank_gb), config, args)


def parse(words: Sequence[str]) -> Namespace:
    options = parser("plan", __doc__)
    what = options.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="NAME", help="conf/NAME.yaml")
    what.add_argument("--config", type=Path, nargs="+", metavar="YAML", help="as in train")
    table = "CAM++ and ERes2Net base on cards of 11, 24 and 32 GB"
    what.add_argument("--table", action="store_true", help=table)
    recipe = "add the layers of a recipe to --model"
    options.add_argument("--recipe", metavar="NAME", help=recipe)
    memory = "memory of one card; without it, a table of cards"
    options.add_argument("--gpu-mem", type=float, metavar="GB", help=memory)
    options.add_argument("--gpus", type=int, default=1, metavar="N", help="number of cards (1)")
    formats = ("auto", "fp32", "bf16", "fp16")
    both = "auto: both formats that auto may choose"
    options.add_argument("--precision", choices=formats, default="auto", help=both)
    rows = "speakers of the training set (10000); each speed adds as many classes"
    options.add_argument("--speakers", type=int, default=10000, metavar="N", help=rows)
    banks = "noise and rooms on the card (0), at most runtime.bank_gb"
    options.add_argument("--bank-gb", type=float, default=0.0, metavar="GB", help=banks)
    options.add_argument(
        "--set", nargs="*", action="extend", default=[], metavar="KEY=VALUE", help="as in train"
    )
    args = options.parse_args(words)
    for name in ("gpu_mem", "gpus", "speakers"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')}: {value:g} is not a number above 0")
    if not 0 <= args.bank_gb < math.inf:
        raise ValueError(f"--bank-gb: {args.bank_gb:g} is not a number from 0 on")
    if args.recipe is not None and args.model is None and not args.table:
        raise ValueError(f"--recipe: {args.recipe} needs --model; with --config list its conf.yaml")
    return args


def load(args: Namespace) -> "Config":
    """Load the configuration that the recipe would train."""
    from speakerlab.config.schema import load_config

    if args.config is not None:
        return load_config(args.config, args.set)
    layers = [model_layer(args.model)]
    if args.recipe is not None:
        recipe = ROOT / "egs" / args.recipe
        if not (recipe / "conf.yaml").exists():
            known = (path.parent.name for path in ROOT.glob("egs/*/conf.yaml"))
            hint = nearest(args.recipe, known, otherwise="recipes are in a clone of the repository")
            raise ValueError(f"--recipe: {args.recipe}: no such recipe{hint}")
        own = recipe / "conf" / layers[0].name
        layers += [recipe / "conf.yaml", *([own] if own.exists() else [])]
    return load_config(layers, args.set)


def model_layer(name: str) -> Path:
    """Return the file of `--model NAME`."""
    from speakerlab.config.layers import find_layer

    try:
        return find_layer(Path(name))
    except FileNotFoundError as error:
        raise ValueError(f"--model: {error}") from None


def footprints(config: "Config", args: Namespace) -> "list[Footprint]":
    """Return one footprint per format."""
    from speakerlab.config import build
    from speakerlab.experiments.planning import footprint

    names = ("fp32", "bf16") if args.precision == "auto" else (args.precision,)
    num_classes = args.speakers * len(config.augment.speeds)
    split_over = args.gpus if build.is_head_split(config, args.gpus, num_classes) else 1
    rows = math.ceil(num_classes / split_over)
    return [
        footprint(config, num_classes=rows, precision=name, split_over=split_over) for name in names
    ]


def headline(config: "Config", args: Namespace) -> str:
    num_classes = args.speakers * len(config.augment.speeds)
    return f"{config.model.name}, {num_classes} classes, crops of {config.data.crop_seconds:g} s"


def print_card(plan: "CardPlan", config: "Config", args: Namespace) -> None:
    """Print one format on one kind of card, part by part."""
    found = plan.found
    why = f" ({AUTO[found.precision]})" if args.precision == "auto" else ""
    print(f"{headline(config, args)}, {found.precision}{why}")
    print(f"  a crop keeps {found.crop / 2**20:.1f} MiB for the backward pass")
    print(f"  {plan.card_gb:6.2f} GiB, of which")
    for gib, what in plan.parts():
        print(f"  {gib:6.2f}     {what}")
    try:
        batch = plan.batch()
        print(f"  {batch}")
        joined = f" of {batch.joined_ranks} ranks" if batch.joined_ranks > 1 else ""
        print(f"  BatchNorm sees {batch.bn_batch} crops{joined} at once")
    except ValueError as error:
        print(f"  refused: {error}")


def print_table(config: "Config", args: Namespace, cards_gb: Sequence[float]) -> None:
    """Print one line per card and format."""
    from speakerlab.experiments.planning import CardPlan

    training = config.training
    print(
        f"{headline(config, args)}, global batch {training.global_batch}, "
        f"training.bn_batch {training.bn_batch or 'unset'}"
    )
    print("  card    format   MiB/crop   crops that fit   micro-batch x ranks x accumulation   BN")
    found = footprints(config, args)
    for card_gb in cards_gb:
        for one in found:
            plan = CardPlan(config, one, card_gb, args.gpus, args.bank_gb)
            line = (
                f"  {card_gb:2g} GB   {one.precision:6}   {one.crop / 2**20:8.1f}   {plan.fit:14}"
            )
            try:
                batch = plan.batch()
                product = f"{batch.micro_batch} x {batch.world_size} x {batch.accumulation}"
                print(f"{line}   {product:34}   {batch.bn_batch}")
            except ValueError as error:
                print(f"{line}   refused: {error}")
