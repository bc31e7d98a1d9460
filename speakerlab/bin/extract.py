"""Embed every utterance of a data directory with an experiment's model."""

import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from speakerlab import process
from speakerlab.bin.command import parser
from speakerlab.bin.model_options import add_precision
from speakerlab.bin.pack import job
from speakerlab.data.manifest import read_manifest
from speakerlab.embedder import Embedder
from speakerlab.extraction.jobs import (
    Extraction,
    join,
    left_of_job,
    name_jobs,
    plan_extraction,
    wait_for_jobs,
)
from speakerlab.extraction.shares import embed_left, precision_here, share_threads
from speakerlab.model_files import embeddings_stem
from speakerlab.published import load_initial, load_published

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab extract --exp DIR --data DIR [--precision bf16] [--nproc N] [--job I/N] ...`"""
    process.die_with_launcher()
    args = parse(words)
    num_threads = share_threads(args.nproc)
    work, embedder = plan(args)
    left = left_of_job(work, args.job)
    if left is None:
        log.info("%s: done before with this model and data, kept", work.stem)
        return
    kept = len(work.of_job(args.job)) - len(left)
    if kept:
        log.info("%s: %d of %d chunks are there, kept", work.stem, kept, kept + len(left))
    embed_left(work, embedder, left, nproc=args.nproc, num_threads=num_threads)
    missing = join(work)
    if missing and args.wait_minutes is not None:
        wait_for_jobs(work, args.job[1], minutes=args.wait_minutes)
    elif missing:
        jobs = name_jobs(missing, args.job[1])
        counts = (len(missing), len(work.chunks))
        log.info("%s: %d of %d chunks are left to %s", work.stem, *counts, jobs)
        return
    log.info("%s: %d embeddings of %d dimensions", work.stem, len(work.pieces), embedder.embed_dim)


def parse(words: Sequence[str]) -> Namespace:
    options = parser("extract", __doc__)
    options.add_argument("--exp", type=Path, required=True, metavar="DIR")
    options.add_argument("--data", type=Path, required=True, metavar="DIR")
    options.add_argument("--untrained", action="store_true", help="as training began")
    options.add_argument("--per-speaker", type=int, metavar="K", help="at most K of each speaker")
    options.add_argument("--nproc", type=int, default=1, help="processes, one a GPU")
    add_precision(options)
    options.add_argument("--job", type=job, default=(1, 1), metavar="I/N", help="of N at a time")
    wait = "for the other jobs; give up when none has finished a chunk for so long"
    options.add_argument("--wait-minutes", type=float, metavar="M", help=wait)
    args = options.parse_args(words)
    for name in ("nproc", "per_speaker"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: is at least 1, got {value}; see --help")
    return args


def plan(args: Namespace) -> tuple[Extraction, Embedder]:
    """What is to be done, and the model for it."""
    published = load_published(args.exp)
    embedder = published.embedder
    if args.untrained:
        embedder = load_initial(args.exp, published.config)
    manifest = read_manifest([args.data], sample_rate=embedder.sample_rate)
    precision = precision_here(args.precision)
    if precision.name != "fp32" or args.precision == "auto":
        log.info("precision: %s, %s", precision.name, precision.reason)
    facts = {"precision": precision.name, "untrained": args.untrained}
    facts["vad"] = published.config.vad  # in no tensor, so no part of the model's hash
    work = plan_extraction(
        embeddings_stem(args.exp, args.data.name, untrained=args.untrained),
        manifest,
        embedder,
        model_sha256=published.sha256,
        facts=facts,
        per_speaker=args.per_speaker,
    )
    return work, embedder.folded(precision)
