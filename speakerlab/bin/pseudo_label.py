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
from speakerlab.core.process import available_cpus
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import relabel_data_dir

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    args = parse(words)
    if args.out.exists():
        raise ValueError(f"--out: {args.out} already exists; choose another path, or remove it")
    check_writable(args.out)
    model = local(args.model)
    sample_rate = read_settings(model)["frontend"]["sample_rate"]
    manifest = read_manifest([args.data], sample_rate=sample_rate)
    most = len(manifest) // args.min_utterances
    if args.speakers > most:
        raise ValueError(
            f"--speakers: {args.speakers} requested, but {args.data} has {len(manifest)} "
            f"utterances, enough for {most} of {args.min_utterances}; lower it, or "
            "--min-utterances"
        )
    from speakerlab.experiments.embedded import read_embedded
    from speakerlab.scoring.kmeans import agreement, kmeans
    from speakerlab.scoring.transforms import to_unit_length

    how = ["--nproc", str(args.nproc), "--precision", args.precision]
    extract.main(["--exp", str(model), "--data", str(args.data), *how])
    table = to_unit_length(read_embedded(model, args.data))
    assert table.ids == list(manifest.ids)
    log.info("%s: clustering", args.data)
    cluster_N = kmeans(table.emb_ND, args.speakers, num_threads=available_cpus(), seed=args.seed)
    size_K = np.bincount(cluster_N, minlength=args.speakers)
    kept_N = np.flatnonzero(size_K[cluster_N] >= args.min_utterances)
    lines = describe(size_K, args)
    # Clusters of another model or data have other names, so that no head of theirs is kept.
    made_from = f"{table.model_sha256} {manifest.sha256()} {args.speakers} {args.seed}"
    name = hashlib.sha256(made_from.encode()).hexdigest()[:8]
    speakers = {table.ids[row]: f"{name}-{cluster_N[row]:05d}" for row in kept_N.tolist()}
    relabel_data_dir(args.data, args.out, speakers)
    if (labels := args.data / "utt2spk").exists():
        purity, shared = agreement(cluster_N[kept_N], manifest.speaker_N[kept_N])
        lines.append(f"{labels}: purity {purity:.4f}, normalised mutual information {shared:.4f}")
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def describe(size_K: np.ndarray, args: Namespace) -> list[str]:
    """Return lines on the clusters that are kept; ValueError if they are fewer than two."""
    kept_K, least = size_K[size_K >= args.min_utterances], args.min_utterances
    if len(kept_K) < 2:
        raise ValueError(
            f"--min-utterances: {len(kept_K)} of {len(size_K)} clusters have {least} utterances, "
            "training needs two; lower it, or --speakers"
        )
    low, median, high = np.percentile(kept_K, [25, 50, 75])
    num_dropped, lost = len(size_K) - len(kept_K), size_K.sum() - kept_K.sum()
    return [
        f"{args.out}: {len(kept_K)} clusters, {kept_K.sum()} utterances; dropped: {num_dropped} "
        f"clusters of fewer than {least} utterances, {lost} utterances",
        f"sizes: {kept_K.min()} to {kept_K.max()}, quartiles {low:g}, {median:g}, {high:g}",
    ]


def parse(words: Sequence[str]) -> Namespace:
    options = parser("pseudo-label", __doc__)
    options.add("--model MODEL", "experiment, model folder or hub:NAME", required=True)
    options.add("--data DIR", "checked data directory, with or without labels", required=True)
    options.add("--speakers N", "number of clusters, the new speakers", least=2, required=True)
    options.add("--out DIR", "data directory to write", required=True)
    options.add("--min-utterances M", "drop clusters of fewer utterances", least=1, default=10)
    options.add("--seed N", "random seed of the clustering", least=0, default=0)
    options.add_nproc()
    options.add_precision()
    return options.parse_args(words)
