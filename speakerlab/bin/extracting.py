"""What `speakerlab extract` does when its options are right: options in, a table out."""

import logging
from argparse import Namespace

from speakerlab.checkpoints.model_files import embeddings_stem
from speakerlab.checkpoints.published import load_initial, load_published
from speakerlab.config.embedder import Embedder
from speakerlab.data.manifest import read_manifest
from speakerlab.inference.jobs import (
    Extraction,
    join,
    left_of_job,
    name_jobs,
    plan_extraction,
    wait_for_jobs,
)
from speakerlab.inference.shares import embed_left, precision_here, share_threads

log = logging.getLogger(__name__)


def extract(args: Namespace) -> None:
    """Embed what is not there yet, and join the chunks when all are."""
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
    return work, embedder.folded(precision, in_place=True)
