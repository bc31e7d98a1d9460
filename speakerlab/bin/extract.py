"""Extract the embeddings of a data directory with an experiment's model.

Computes the chunks that are missing, and joins them once all are there.
"""

import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from speakerlab.bin.command import parser
from speakerlab.core import process
from speakerlab.core.atomic import check_writable

if TYPE_CHECKING:
    from speakerlab.config.embedder import Embedder
    from speakerlab.inference.extraction import Extraction

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    process.die_with_launcher()
    args = parse(words)
    from speakerlab.checkpoints.model_files import embeddings_stem
    from speakerlab.checkpoints.published import load_initial, load_published
    from speakerlab.data.manifest import read_manifest
    from speakerlab.data.treatments import UNTREATED, read_treatments
    from speakerlab.inference.extraction import plan_extraction
    from speakerlab.inference.workers import precision_here, share_threads

    treatments = read_treatments(args.durations, args.codecs)
    num_threads = share_threads(args.nproc)
    published = load_published(args.exp)
    embedder = published.embedder
    if args.untrained:
        embedder = load_initial(args.exp, published.config)
    precision = precision_here(args.precision)
    if precision.name != "fp32" or args.precision == "auto":
        log.info("precision: %s, %s", precision.name, precision.reason)
    # The VAD is in no tensor, so it is not part of the model's hash.
    facts = {"precision": precision.name, "untrained": args.untrained, "vad": published.config.vad}
    manifest = read_manifest([args.data], sample_rate=embedder.sample_rate)
    tables: list[Extraction] = []
    for treatment in {one.name: one for one in (UNTREATED, *treatments)}.values():
        which = {"untrained": args.untrained, "treatment": treatment.name}
        stem = embeddings_stem(args.exp, args.data.name, **which)
        check_writable(stem.with_name(f"{stem.name}.json"))
        work = plan_extraction(
            stem,
            manifest,
            embedder,
            model_sha256=published.sha256,
            facts=facts,
            per_speaker=args.per_speaker,
            treatment=treatment,
        )
        tables.append(work)
    embedder = embedder.for_inference(precision, in_place=True)
    for work in tables:
        compute(work, embedder, args, num_threads=num_threads)


def compute(work: "Extraction", embedder: "Embedder", args: Namespace, *, num_threads: int) -> None:
    """Compute what is missing of a table; join it, or wait for it, as the options say."""
    from speakerlab.inference.extraction import name_jobs
    from speakerlab.inference.workers import embed_chunks

    todo = work.todo(args.job)
    if todo is None:
        log.info("%s: already extracted with this model and data, kept", work.stem)
        return
    if kept := len(work.of_job(args.job)) - len(todo):
        log.info("%s: %d of %d chunks are finished, kept", work.stem, kept, kept + len(todo))
    embed_chunks(work, embedder, todo, nproc=args.nproc, num_threads=num_threads)
    missing = work.join()
    if missing and args.wait_minutes is None:
        counts = (len(missing), len(work.chunks), name_jobs(missing, args.job[1]))
        log.info("%s: %d of %d chunks remain, of %s", work.stem, *counts)
        return
    if missing:
        work.wait(args.job[1], minutes=args.wait_minutes)
    log.info("%s: %d embeddings of %d dimensions", work.stem, len(work.pieces), embedder.embed_dim)


def parse(words: Sequence[str]) -> Namespace:
    options = parser("extract", __doc__)
    options.add("--exp DIR", "experiment", required=True)
    options.add("--data DIR", "data directory", required=True)
    options.add("--untrained", "use the weights that the training started with")
    options.add("--per-speaker K", "extract at most K utterances of each speaker", least=1)
    options.add_nproc()
    options.add_treatments("also extract with utterances")
    options.add_precision()
    options.add_job("compute part I of N; run the others elsewhere or later")
    wait = "wait for the other jobs; fail if none finishes a chunk for M minutes"
    options.add("--wait-minutes M", wait, least=0.0)
    return options.parse_args(words)
