"""Pack checked data directories into shards that training reads from."""

import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from speakerlab.bin.command import parser
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.remote import parse_store
from speakerlab.data.shards import Layout

if TYPE_CHECKING:
    from speakerlab.experiments.stored_features import StoredFbank

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    layout = Layout.of_waves(args.codec, sample_rate=args.sample_rate)
    features = None
    if args.features == "fbank":
        features = stored_features(args)
        layout = features.layout
    store = None
    if args.out is not None:
        store = parse_store(args.out)
        if len(args.folders) > 1:
            raise ValueError(
                f"--out: takes one data directory, got {len(args.folders)}; pack each to"
                " an address of its own"
            )
    # The facts describe the features: training refuses shards with other features.
    for folder in args.folders:
        line = pack_data_dir(
            folder,
            layout=layout,
            features=features,
            facts=None if features is None else features.facts,
            allow_rejected=args.allow_rejected,
            num_workers=args.num_workers,
            part=args.job,
            store=store,
        )
        log.info("%s", line)


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("pack", __doc__)
    options.add("folders DIR", "checked data directories", nargs="+")
    codecs = (
        "pcm (default), or flac: two thirds of the disk, several times the CPU time to"
        " read"
    )
    options.add("--codec", codecs, choices=["pcm", "flac"], default="pcm")
    features = "audio (wave), or the features of a configuration (fbank)"
    options.add("--features", features, choices=["wave", "fbank"], default="wave")
    options.add("--config YAML", "configuration files of the features", nargs="+")
    options.add_settings()
    out = "write the shards to an object store, such as s3://bucket/folder, not to DIR"
    options.add("--out URL", out)
    options.add_job("pack part I of N; run the others elsewhere or later")
    options.add(
        "--allow-rejected SHARE", "share of utterances that may be broken", default=0.01
    )
    options.add_rate_and_workers()
    return options.parse_args(arguments)


def stored_features(args: Namespace) -> "StoredFbank":
    """Return the features of the configuration; only this function imports torch."""
    from speakerlab.config.schema import load_config
    from speakerlab.experiments.stored_features import StoredFbank

    if not args.config:
        raise ValueError("--features: fbank needs a configuration; give --config")
    config = load_config(args.config, args.set)
    return StoredFbank(config.frontend)
