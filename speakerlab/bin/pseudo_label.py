"""Cluster the embeddings of a data directory; write a copy with the clusters as speakers."""

import hashlib
import logging
import sys
from argparse import Namespace
from collections.abc import Sequence

import numpy as np

from speakerlab.bin import extract
from speakerlab.bin.command import parser
from speakerlab.checkpoints.hub import local
from speakerlab.checkpoints.model_files import read_settings
from speakerlab.core.atomic import check_writable
from speakerlab.core.counting import count_of
from speakerlab.core.system import available_cpus
from speakerlab.data.columns import copy_rate
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import relabel_data_dir

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    if args.out.exists():
        raise ValueError(
            f"--out: {args.out} already exists; choose another path, or remove it"
        )
    check_writable(args.out)
    model = local(args.model)
    sample_rate = read_settings(model)["frontend"]["sample_rate"]
    manifest = read_manifest([args.data], sample_rate=sample_rate)
    # With more clusters, some are too small even if all have the same size.
    max_speakers = len(manifest) // args.min_utterances
    if args.speakers > max_speakers:
        raise ValueError(
            f"--speakers: {args.speakers} requested, but {args.data} has"
            f" {count_of(len(manifest), 'utterance')}, enough for {max_speakers} of"
            f" {args.min_utterances}; lower it, or --min-utterances"
        )

    from speakerlab.experiments.embedded import read_embedded
    from speakerlab.scoring.kmeans import agreement, kmeans
    from speakerlab.scoring.transforms import to_unit_length

    # Existing embeddings are kept.
    extract.extract(model, args.data, nproc=args.nproc, precision=args.precision)
    table = to_unit_length(read_embedded(model, args.data))
    assert table.ids == list(manifest.ids)
    log.info("%s: clustering", args.data)
    cluster_N = kmeans(
        table.emb_ND,
        args.speakers,
        num_threads=available_cpus(),
        seed=args.seed,
    )
    size_K = np.bincount(cluster_N, minlength=args.speakers)
    is_kept_N = size_K[cluster_N] >= args.min_utterances
    kept_rows = np.flatnonzero(is_kept_N)
    lines = describe(size_K, args)

    # Clusters of another model or of other data get other names, because a training keeps the rows
    # of an initial head for speakers with the same names.
    made_from = f"{table.model_sha256} {manifest.sha256()} {args.speakers} {args.seed}"
    digest = hashlib.sha256(made_from.encode()).hexdigest()
    speakers: dict[str, str] = {}
    for row in kept_rows.tolist():
        speakers[table.ids[row]] = f"{digest[:8]}-{cluster_N[row]:05d}"
    relabel_data_dir(args.data, args.out, speakers)
    copy_rate(args.data, args.out)

    # True labels are only used to measure the quality of the clusters.
    labels = args.data / "utt2spk"
    if labels.exists():
        true_speakers = manifest.speaker_N[kept_rows]
        purity, information = agreement(cluster_N[kept_rows], true_speakers)
        lines.append(
            f"{labels}: purity {purity:.4f}, normalised mutual information"
            f" {information:.4f}"
        )
    for line in lines:
        sys.stdout.write(f"{line}\n")


def describe(size_K: np.ndarray, args: Namespace) -> list[str]:
    """Return lines about the kept clusters; ValueError if fewer than two are kept.

    size_K: the number of utterances of each of K clusters.
    """
    min_utterances = args.min_utterances
    kept_K = size_K[size_K >= min_utterances]
    if len(kept_K) < 2:
        raise ValueError(
            f"--min-utterances: {len(kept_K)} of {count_of(len(size_K), 'cluster')}"
            f" with {count_of(min_utterances, 'utterance')}, training needs two;"
            " lower it, or --speakers"
        )
    quartiles = [25, 50, 75]
    low, median, high = np.percentile(kept_K, quartiles)
    num_dropped_clusters = len(size_K) - len(kept_K)
    num_dropped_utterances = size_K.sum() - kept_K.sum()
    return [
        (
            f"{args.out}: {count_of(len(kept_K), 'cluster')},"
            f" {count_of(kept_K.sum(), 'utterance')}; dropped:"
            f" {count_of(num_dropped_clusters, 'cluster')} of fewer than"
            f" {count_of(min_utterances, 'utterance')},"
            f" {count_of(num_dropped_utterances, 'utterance')}"
        ),
        (
            f"sizes: {kept_K.min()} to {kept_K.max()}, quartiles {low:g}, {median:g},"
            f" {high:g}"
        ),
    ]


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("pseudo-label", __doc__)
    options.add(
        "--model MODEL",
        "experiment, model folder, hub:NAME or hf:owner/name",
        required=True,
    )
    options.add(
        "--data DIR", "checked data directory, with or without labels", required=True
    )
    options.add(
        "--speakers N", "number of clusters, the new speakers", least=2, required=True
    )
    options.add("--out DIR", "data directory to write", required=True)
    options.add(
        "--min-utterances M", "drop clusters of fewer utterances", least=1, default=10
    )
    options.add("--seed N", "random seed of the clustering", least=0, default=0)
    options.add_nproc()
    options.add_precision()
    return options.parse_args(arguments)
