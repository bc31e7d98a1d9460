"""Validate on held-out data: the EER between speakers, or the error rate of a classifier.

Letters: N pieces, D embedding dimensions.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from speakerlab.data.manifest import Manifest, Piece
from speakerlab.data.workers import auto_workers, fit_workers
from speakerlab.embedder import Embedder
from speakerlab.inference.batches import (
    MAX_BATCH_SECONDS,
    embed_pieces,
)
from speakerlab.inference.torch_model import Classifier
from speakerlab.losses.head import Head
from speakerlab.scoring.calibration import Calibration, fit_calibration
from speakerlab.scoring.pair_scores import pairwise_eer
from speakerlab.training.distributed import Ranks

log = logging.getLogger(__name__)
MAX_UTTERANCES_PER_VALID_SPEAKER = 10
MAX_UTTERANCES_PER_VALID_CLASS = 500
# Pieces of a speaker's only utterance.
MAX_CUTS = 4
MIN_CUT_SECONDS = 2.0
FEW_SPEAKERS = 10  # a threshold from fewer speakers is unreliable


class HeldOutValidation:
    """Held-out utterances with their labels, and a metric of their embeddings."""

    metric: str  # name of the metric

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.label_N: list[int] = []

    def run(
        self,
        embedder: Embedder,
        ranks: Ranks,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:
        """Return {metric: fraction}, or None on all ranks if `stop()` is true on any rank.

        Every rank embeds a share of the pieces. In training, each rank collects its own running
        statistics of BatchNorm; all ranks validate with rank 0's statistics, which are published.
        Raises FloatingPointError on every rank if an embedding is not finite.
        """
        # With different buffers, each rank would validate a different model.
        ranks.copy_from_first(list(embedder.buffers()))
        emb_ND = embed_pieces(
            embedder,
            self.pieces,
            device=ranks.device,
            share=(ranks.rank, ranks.world_size),
            stop=stop,
            num_workers=num_readers(embedder, ranks),
        )
        # All ranks leave together: otherwise one of them would wait for the others in the sum.
        if any(ranks.gather_objects(stop())):
            return None

        # Each rank has zeros for the other ranks' pieces.
        emb_ND = ranks.sum(torch.from_numpy(emb_ND)).numpy()
        is_finite_N = np.isfinite(emb_ND).all(axis=1)
        num_bad = np.count_nonzero(~is_finite_N)
        if num_bad:
            text = f"{num_bad} of {len(emb_ND)} validation embeddings are not finite"
            raise FloatingPointError(text)
        return ranks.on_first(lambda: self.metrics(emb_ND))

    def metrics(self, emb_ND: np.ndarray) -> dict[str, float]:
        """Return all metrics of the embeddings of `pieces`, `metric` among them."""
        return {self.metric: self.measure(emb_ND)}

    def measure(self, emb_ND: np.ndarray) -> float:
        """Return the metric that chooses the best checkpoint; smaller is better."""
        raise NotImplementedError


class PairValidation(HeldOutValidation):
    """Equal error rate over all pairs of utterances of the validation speakers.

    At most ten utterances per speaker are used. If a speaker has only one utterance, it is cut into
    pieces, which are compared instead.
    """

    metric = "eer"

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self.num_cut = 0  # speakers
        utterances = utterances_of_each(manifest, MAX_UTTERANCES_PER_VALID_SPEAKER)
        for speaker, pieces in utterances:
            # Without target trials, a speaker would only appear in non-target trials.
            if len(pieces) == 1:
                pieces = cut(pieces[0])
                self.num_cut += 1
            self.pieces += pieces
            self.label_N += [speaker] * len(pieces)

    def measure(self, emb_ND: np.ndarray) -> float:
        eer, _, _ = pairwise_eer(emb_ND, np.array(self.label_N))
        return eer

    def metrics(self, emb_ND: np.ndarray) -> dict[str, float]:
        """Return the EER, and that within each corpus of several."""
        metrics = super().metrics(emb_ND)
        return metrics | eer_of_corpora(self.pieces, self.label_N, emb_ND)

    def calibrate(
        self,
        emb_ND: np.ndarray,
        *,
        source: str,
        fars: Sequence[float] = (),
    ) -> Calibration:
        """Fit a calibration to all pairs; fars: false-alarm rates to find thresholds for."""
        _, scores_N, is_target_N = pairwise_eer(emb_ND, np.array(self.label_N))
        num_speakers = len(set(self.label_N))
        if num_speakers < FEW_SPEAKERS:
            log.warning(
                "the threshold is unreliable: it was learned from only %d speakers",
                num_speakers,
            )

        # Results name the source of a calibration and its amount of data.
        num_recordings = len({piece.row for piece in self.pieces})
        source = f"{source}: {num_speakers} speakers, {num_recordings} recordings"
        if self.num_cut:
            source += f", {self.num_cut} of the speakers with pieces of one recording"
        return fit_calibration(
            scores_N,
            is_target_N,
            source=source,
            false_alarm_rates=fars,
        )


class ClassValidation(HeldOutValidation):
    """Share of held-out utterances that the head classifies wrongly; at most 500 per class."""

    metric = "error"

    def __init__(
        self,
        manifest: Manifest,
        *,
        head: Head,
        classes: Sequence[str],
    ) -> None:
        super().__init__()
        self.classifier = Classifier(head, classes)
        # Validation may lack classes, so its class numbers are not rows of the head.
        row_of = {name: row for row, name in enumerate(classes)}
        utterances = utterances_of_each(manifest, MAX_UTTERANCES_PER_VALID_CLASS)
        for number, pieces in utterances:
            row = row_of[manifest.speakers[number]]
            self.pieces += pieces
            self.label_N += [row] * len(pieces)

    def measure(self, emb_ND: np.ndarray) -> float:
        predicted_N = self.classifier.logits(emb_ND).argmax(axis=1)
        is_wrong_N = predicted_N != np.array(self.label_N)
        return float(is_wrong_N.mean())


class TeacherValidation(HeldOutValidation):
    """Distance from the teacher on held-out utterances, and the EER where they have labels.

    target_ND: the teacher's direction for each utterance, of length 1. project: maps the student's
    embeddings to directions. The labels decide nothing.
    """

    metric = "teacher_distance"

    def __init__(
        self,
        manifest: Manifest,
        *,
        target_ND: np.ndarray,
        project: Callable[[np.ndarray], np.ndarray],
        has_labels: bool,
    ) -> None:
        super().__init__()
        self.pieces = manifest.pieces()
        self.label_N = manifest.speaker_N.tolist()
        self.target_ND = target_ND
        self.project = project
        # To calibrate with, after the training.
        self.pairs: PairValidation | None = None
        if has_labels and _has_both_kinds(manifest.speaker_N):
            self.pairs = PairValidation(manifest)

    def measure(self, emb_ND: np.ndarray) -> float:
        """Return 1 minus the mean cosine of student and teacher."""
        cosine_N = (self.project(emb_ND) * self.target_ND).sum(axis=1)
        return float(1 - cosine_N.mean())

    def metrics(self, emb_ND: np.ndarray) -> dict[str, float]:
        metrics = super().metrics(emb_ND)
        if self.pairs is not None:
            metrics["eer"], _, _ = pairwise_eer(emb_ND, np.array(self.label_N))
            metrics |= eer_of_corpora(self.pieces, self.label_N, emb_ND)
        return metrics


def eer_of_corpora(
    pieces: Sequence[Piece], labels: Sequence[int], emb_ND: np.ndarray
) -> dict[str, float]:
    """Return `eer/NAME` over the pairs within each corpus; empty for one corpus."""
    manifest = pieces[0].manifest
    if len(manifest.parts) == 1:
        return {}
    part_N = manifest.part_N[[piece.row for piece in pieces]]
    label_N = np.array(labels)
    metrics: dict[str, float] = {}
    for number, name in enumerate(manifest.names):
        is_here_N = part_N == number
        if _has_both_kinds(label_N[is_here_N]):
            eer, _, _ = pairwise_eer(emb_ND[is_here_N], label_N[is_here_N])
            metrics[f"eer/{name.strip('/')}"] = eer
    return metrics


def _has_both_kinds(label_N: np.ndarray) -> bool:
    """Return whether utterances have target pairs and non-target pairs."""
    num_labels = len(np.unique(label_N))
    return 1 < num_labels < len(label_N)


def num_readers(embedder: Embedder, ranks: Ranks) -> int:
    """Return the number of reader processes of a rank; 0 on a CPU, where embedding is slower."""
    if ranks.device.type == "cpu":
        return 0
    # A batch has at least one piece, which may be longer than MAX_BATCH_SECONDS.
    batch_samples = MAX_BATCH_SECONDS * embedder.sample_rate
    largest = max(batch_samples, embedder.max_samples)
    num_ranks = ranks.local_size
    return fit_workers(
        auto_workers(num_ranks),
        batch_bytes=2 * largest,  # int16
        local_ranks=num_ranks,
        gpus=num_ranks,
    )


def cut(piece: Piece) -> list[Piece]:
    """Return two to four pieces of equal length, at least 2 s each if `piece` has 4 s or more."""
    seconds = piece.num_samples / piece.manifest.sample_rate
    num_long_enough = int(seconds / MIN_CUT_SECONDS)
    num_cuts = max(2, min(MAX_CUTS, num_long_enough))
    size = piece.num_samples // num_cuts
    cuts: list[Piece] = []
    for number in range(num_cuts):
        start = piece.start + number * size
        cuts.append(replace(piece, start=start, num_samples=size))
    return cuts


def utterances_of_each(
    manifest: Manifest,
    most: int,
) -> Iterator[tuple[int, list[Piece]]]:
    """Yield the number of each speaker or class, and its first utterances, at most `most`."""
    utterances = manifest.pieces()
    for number in range(len(manifest.speakers)):
        rows = np.flatnonzero(manifest.speaker_N == number)
        yield number, [utterances[row] for row in rows[:most]]
