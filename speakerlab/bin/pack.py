"""Pack checked data directories into shards that training reads from."""

import logging
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from speakerlab.bin.command import parser
from speakerlab.core.process import available_cpus
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.shards import Layout

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab pack DIR... [--codec flac | --features fbank --config YAML...] [--job I/N]`"""
    args = parse(words)
    options = features_options(args) if args.features == "fbank" else wave_options(args)
    for folder in args.folders:
        with tqdm(unit=" utterances", disable=None) as bar:  # None: only on a terminal

            def show(done: int, total: int, bar: tqdm = bar) -> None:
                bar.total = total
                bar.update(done - bar.n)

            line = pack_data_dir(
                folder,
                allow_rejected=args.allow_rejected,
                num_workers=args.num_workers,
                part=args.job,
                progress=show,
                **options,
            )
        log.info("%s", line)


def parse(words: Sequence[str]) -> Namespace:
    options = parser("pack", __doc__)
    options.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    codecs = "16-bit PCM, or FLAC: two thirds of the size, several times the work"
    options.add_argument("--codec", choices=["pcm", "flac"], default="pcm", help=codecs)
    what = "audio (wave), or the features of a configuration (fbank)"
    options.add_argument("--features", choices=["wave", "fbank"], default="wave", help=what)
    options.add_argument("--config", type=Path, nargs="+", metavar="YAML", help="with fbank")
    options.add_argument("--set", nargs="*", action="extend", default=[], metavar="KEY=VALUE")
    options.add_argument("--job", type=job, default=(1, 1), metavar="I/N", help="pack part I of N")
    share = "share of utterances that may be broken (0.01)"
    options.add_argument("--allow-rejected", type=float, default=0.01, metavar="SHARE", help=share)
    options.add_argument(
        "--sample-rate", type=int, default=16000, metavar="HZ", help="of all files (16000)"
    )
    options.add_argument("--num-workers", type=int, default=available_cpus(), metavar="N")
    return options.parse_args(words)


def job(text: str) -> tuple[int, int]:
    """ "I/N", I from 1 to N."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not found or int(found[1]) > int(found[2]):
        raise ValueError(f"--job: must be I/N with I from 1 to N, got {text}; for example 1/4")
    return int(found[1]), int(found[2])


def wave_options(args: Namespace) -> dict[str, Any]:
    """How waves are packed."""
    return {"layout": Layout.of_waves(args.codec, sample_rate=args.sample_rate)}


def features_options(args: Namespace) -> dict[str, Any]:
    """How the features of a configuration are; torch is needed here alone."""
    from speakerlab.config.schema import load_config
    from speakerlab.experiments.stored_features import StoredFbank

    if not args.config:
        raise ValueError("--features fbank: needs a configuration, got no --config; give one")
    stored = StoredFbank(load_config(args.config, args.set).frontend)
    return {"layout": stored.layout, "features": stored, "facts": stored.facts}
