"""Embed every utterance of a data directory with an experiment's model."""

import logging
import multiprocessing
import shutil
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from speakerlab import process
from speakerlab.bin.command import parser
from speakerlab.data.loader import auto_workers
from speakerlab.data.manifest import read_manifest
from speakerlab.extraction import embed_pieces, utterance_pieces
from speakerlab.inference.progress import Progress
from speakerlab.published import load_initial, load_published
from speakerlab.scoring.embeddings import EmbeddingTable

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab extract --exp DIR --data DIR [--untrained] [--nproc N]`"""
    process.die_with_launcher()
    options = parser("extract", __doc__)
    options.add_argument("--exp", type=Path, required=True, metavar="DIR")
    options.add_argument("--data", type=Path, required=True, metavar="DIR")
    options.add_argument("--untrained", action="store_true", help="as training began")
    options.add_argument("--nproc", type=int, default=1, help="processes, one a GPU")
    args = options.parse_args(words)
    published = load_published(args.exp)
    manifest = read_manifest([args.data], sample_rate=published.embedder.sample_rate)
    stem = embeddings_stem(args.exp, args.data.name, untrained=args.untrained)
    facts = {"precision": "fp32", "data_sha256": manifest.sha256(), "untrained": args.untrained}
    facts["vad"] = published.config.vad  # in no tensor, so no part of the model's hash
    if is_done(stem, published.sha256, facts):
        log.info("%s: done before with this model and data, kept", stem)
        return
    parts = stem.with_name(f".{stem.name}.parts")
    shutil.rmtree(parts, ignore_errors=True)
    jobs = [(args, index, parts / str(index), facts) for index in range(args.nproc)]
    if args.nproc == 1:
        embed_part(*jobs[0])
    else:
        # Started afresh: a forked process cannot use CUDA.
        with ProcessPoolExecutor(args.nproc, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(embed_part, *zip(*jobs)))
    tables = [EmbeddingTable.load(part) for _, _, part, _ in jobs]
    EmbeddingTable.merge(tables, list(manifest.ids)).save(stem)
    shutil.rmtree(parts)
    log.info("%s: %d embeddings of %d dimensions", stem, len(manifest), tables[0].emb_ND.shape[1])


def embeddings_stem(exp_dir: Path, data_name: str, *, untrained: bool) -> Path:
    """Where the embeddings of a test set are, without endings."""
    return exp_dir / "embeddings" / data_name / ("untrained" if untrained else "trained")


def is_done(stem: Path, model_sha256: str, facts: dict[str, object]) -> bool:
    """Whether finished embeddings of this model and data are there already."""
    if not stem.with_suffix(".json").exists():
        return False
    table = EmbeddingTable.load(stem)
    return table.model_sha256 == model_sha256 and dict(table.facts) == facts


def embed_part(args: Namespace, index: int, stem: Path, facts: dict[str, object]) -> None:
    """One process's share: every nproc-th utterance, on a GPU of its own where there are any."""
    process.die_with_parent()
    published = load_published(args.exp)
    embedder = published.embedder
    if args.untrained:
        embedder = load_initial(args.exp, published.config)
    manifest = read_manifest([args.data], sample_rate=embedder.sample_rate)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", index % torch.cuda.device_count())
    rows = range(index, len(manifest), args.nproc)
    pieces = utterance_pieces(manifest)[index :: args.nproc]
    emb_ND = embed_pieces(
        embedder.folded(),
        pieces,
        device=device,
        num_workers=auto_workers(args.nproc),
        progress=Progress(len(pieces), what="utterances", bar=args.nproc == 1).tell,
    )
    stem.parent.mkdir(parents=True, exist_ok=True)
    ids = [manifest.ids[row] for row in rows]
    EmbeddingTable(ids, emb_ND, published.sha256, facts).save(stem)
