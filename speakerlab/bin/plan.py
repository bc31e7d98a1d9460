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
    from speakerlab.experiments.planning import Memory

ROOT = Path(__file__).parents[2]
TABLE_MODELS, TABLE_CARDS_GB = ("campplus", "eres2net"), (11, 24, 32)
CARDS_GB = (11, 16, 24, 32, 40, 80)


def main(words: Sequence[str]) -> None:
    args = parse(words)
    cards_gb = TABLE_CARDS_GB if args.table else [args.gpu_mem] if args.gpu_mem else CARDS_GB
    models = TABLE_MODELS if args.table else [args.model]
    for args.model in models:
        print_plans(load(args), args, cards_gb)


def parse(words: Sequence[str]) -> Namespace:
    options = parser("plan", __doc__)
    what = options.add_mutually_exclusive_group(required=True)
    options.add("--model NAME", "configuration conf/NAME.yaml", group=what)
    options.add("--config YAML", "files, as in `speakerlab train`", group=what, nargs="+")
    options.add("--table", "table of CAM++ and ERes2Net base on 11, 24 and 32 GB", group=what)
    options.add("--recipe NAME", "add a recipe's configuration to --model")
    options.add("--gpu-mem GB", "memory of one GPU (default: a table of common sizes)", least=0.1)
    options.add("--gpus N", "number of GPUs", least=1, default=1)
    formats = "default: runtime.precision; auto: plan both fp32 and bf16"
    options.add("--precision", formats, choices=("auto", "fp32", "bf16", "fp16"))
    rows = "training speakers, each speed other than 1 counted as another"
    options.add("--speakers N", rows, least=1, default=10000)
    options.add("--bank-gb GB", "for noise and rooms on the GPU (default: not counted)", least=0.0)
    options.add_settings()
    args = options.parse_args(words)
    if args.recipe is not None and args.model is None and not args.table:
        raise ValueError(f"--recipe: {args.recipe} needs --model; with --config list its conf.yaml")
    return args


def load(args: Namespace) -> "Config":
    """Load the configuration that the recipe would train."""
    from speakerlab.config.schema import load_config

    settings = [*args.set, *([f"runtime.precision={args.precision}"] if args.precision else [])]
    if args.config is not None:
        return load_config(args.config, settings)
    layers = [Path(args.model)]
    if args.recipe is not None:
        recipe = ROOT / "egs" / args.recipe
        if not (recipe / "conf.yaml").exists():
            known = (path.parent.name for path in ROOT.glob("egs/*/conf.yaml"))
            hint = nearest(args.recipe, known, otherwise="recipes are in a clone of the repository")
            raise ValueError(f"--recipe: {args.recipe}: no such recipe{hint}")
        own = recipe / "conf" / f"{layers[0].stem}.yaml"
        layers += [recipe / "conf.yaml", *([own] if own.exists() else [])]
    return load_config(layers, settings)


def print_plans(config: "Config", args: Namespace, cards_gb: Sequence[float]) -> None:
    """Print a line per card and format, with --gpu-mem also its parts; ValueError if none fits."""
    from speakerlab.config import build
    from speakerlab.experiments.corpus import class_speeds
    from speakerlab.training.batch_size import MemoryTooSmall

    num_classes, refused = args.speakers * len(class_speeds(config)), list[MemoryTooSmall]()
    (unit, length), training = build.batch_unit(config), config.training
    aim = config.objective.name if config.objective else f"{num_classes} classes"
    batches = f"global batch {training.global_batch}, training.bn_batch "
    print(f"{config.model.name}, {aim}, {unit}s{length}, {batches}{training.bn_batch or 'unset'}")
    size, fit = f"MiB/{unit}", f"{unit}s that fit"
    print(f"  GPU     format   {size}   {fit}   micro-batch x ranks x accumulation   BN")
    made = plans(config, args, cards_gb, num_classes)
    for card_gb, plan in made:
        batch = None
        try:
            batch = plan.batch()
            sizes = f"{batch.micro_batch} x {batch.world_size} x {batch.accumulation}"
            result = f"{sizes:34}   {batch.bn_batch}"
        except MemoryTooSmall as error:
            refused.append(error)
            result = f"refused: {error}"
        mib = f"{plan.found.crop / 2**20:{len(size)}.1f}   {plan.fit:{len(fit)}}"
        print(f"  {card_gb:2g} GB   {plan.found.precision:6}   {mib}   {result}")
        if args.gpu_mem and plan.fit:
            fixed, crops = plan.fixed / 2**30, plan.fit * plan.crop / 2**30
            parts = f"{fixed:.2f} GiB for CUDA, weights and optimizer, {crops:.2f} GiB for"
            print(f"    {parts} {plan.fit} {unit}s")
            print(f"    {batch or 'does not fit'}")
    if config.runtime.precision == "auto":
        print("runtime.precision auto: bf16 from capability 8.0 on, fp32 below")
    if args.bank_gb is None and (config.augment.noise_prob or config.augment.room_prob):
        most = config.runtime.bank_gb
        print(f"not counted: noise and rooms, up to {most:g} GB (runtime.bank_gb); see --bank-gb")
    if len(refused) == len(made):
        raise refused[-1]


def plans(
    config: "Config", args: Namespace, cards_gb: Sequence[float], num_classes: int
) -> "list[tuple[float, Memory]]":
    """Return (GB, memory) of each card with each format."""
    from speakerlab.config import build
    from speakerlab.experiments.planning import card_memory, footprint

    split_over = args.gpus if build.is_head_split(config, args.gpus, num_classes) else 1
    rows, asked = math.ceil(num_classes / split_over), config.runtime.precision
    found = [
        footprint(config, num_classes=rows, precision=name, split_over=split_over)
        for name in (("fp32", "bf16") if asked == "auto" else (asked,))
    ]
    more = (args.gpus, args.bank_gb or 0.0)
    return [(gb, card_memory(config, one, gb, *more)) for gb in cards_gb for one in found]
