"""Pack checked data directories into shards that training reads from."""

import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from speakerlab.bin.command import parser
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.shards import Layout

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    args = parse(words)
    options: dict[str, Any] = {"layout": Layout.of_waves(args.codec, sample_rate=args.sample_rate)}
    if args.features == "fbank":
        options = features_options(args)
    for folder in args.folders:
        line = pack_data_dir(
            folder,
            allow_rejected=args.allow_rejected,
            num_workers=args.num_workers,
            part=args.job,
            **options,
        )
        log.info("%s", line)


def parse(words: Sequence[str]) -> Namespace:
    options = parser("pack", __doc__)
    options.add("folders DIR", "checked data directories", nargs="+")
    codecs = "pcm (default), or flac: two thirds of the disk, several times the CPU time to read"
    options.add("--codec", codecs, choices=["pcm", "flac"], default="pcm")
    what = "audio (wave), or the features of a configuration (fbank)"
    options.add("--features", what, choices=["wave", "fbank"], default="wave")
    options.add("--config YAML", "configuration files of the features", nargs="+")
    options.add_settings()
    options.add_job("pack part I of N; run the others elsewhere or later")
    options.add("--allow-rejected SHARE", "share of utterances that may be broken", default=0.01)
    options.add_rate_and_workers()
    return options.parse_args(words)


def features_options(args: Namespace) -> dict[str, Any]:
    """Return how the features of a configuration are packed; only this imports torch."""
    from speakerlab.config.schema import load_config
    from speakerlab.experiments.stored_features import StoredFbank

    if not args.config:
        raise ValueError("--features: fbank needs a configuration; give --config")
    stored = StoredFbank(load_config(args.config, args.set).frontend)
    return {"layout": stored.layout, "features": stored, "facts": stored.facts}
