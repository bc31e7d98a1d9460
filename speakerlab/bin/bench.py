"""How fast training gets its data on this machine, hop by hop, and what its crops sound like."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from speakerlab import process
from speakerlab.bin.command import parser
from speakerlab.config import load_config
from speakerlab.data_bench import (
    build_bench,
    measure_hops,
    measure_loader,
    measure_training,
    write_crops,
)
from speakerlab.training.distributed import start_ranks

LISTEN_CROPS = 10


def main(words: Sequence[str]) -> None:
    """`speakerlab bench data --config YAML... [--set key=value ...] [--listen DIR]`"""
    args = parse(words)
    config = load_config(args.config, args.set)
    bench = build_bench(config, start_ranks(timeout_minutes=config.runtime.timeout_minutes))
    if args.listen is not None:
        write_crops(bench, args.listen, count=LISTEN_CROPS)
        print(f"{args.listen}: {LISTEN_CROPS} crops, and crops.tsv says what was done to each")
    if not args.seconds:
        return
    print(
        f"{process.available_cpus()} CPUs, {bench.num_workers} loader workers, model on "
        f"{bench.device}, micro-batches of {bench.micro_batch} crops of "
        f"{config.data.crop_seconds:g} s; noise on the "
        f"{'device' if bench.corpus.noise_on_device else 'host'}"
    )
    print(f"loader alone: {measure_loader(bench, seconds=args.seconds):.0f} crops/s")
    rate, waited = measure_training(bench, seconds=args.seconds)
    print(f"{config.model.name} training: {rate:.0f} crops/s, {waited:.1%} of it waiting for data")
    seconds = measure_hops(bench, seconds=args.seconds)
    total = sum(seconds.values())
    print(f"one process, hop after hop: {1 / total:.0f} crops/s")
    for hop, took in seconds.items():
        print(f"  {hop:10} {1e6 * took:8.0f} us a crop {took / total:7.1%}")


def parse(words: Sequence[str]) -> Namespace:
    options = parser("bench", __doc__)
    options.add_argument("what", choices=["data"])
    options.add_argument("--config", type=Path, nargs="+", required=True, metavar="YAML")
    options.add_argument(
        "--set", nargs="*", action="extend", default=[], metavar="KEY=VALUE", help="as in train"
    )
    options.add_argument("--listen", type=Path, metavar="DIR", help="write ten crops as wav")
    options.add_argument(
        "--seconds", type=float, default=5.0, help="of each measurement (default 5), 0 for none"
    )
    return options.parse_args(words)
