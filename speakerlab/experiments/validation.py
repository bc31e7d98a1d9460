"""Validation metrics: the EER of held-out speakers, or the error rate of held-out utterances.

Letters: N pieces, D embedding.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from speakerlab.config.embedder import Embedder
from speakerlab.data.manifest import Manifest, Piece
from speakerlab.data.workers import auto_workers, fit_workers
from speakerlab.inference.batches import MAX_BATCH_SECONDS, embed_pieces, utterance_pieces
from speakerlab.inference.torch_model import Classifier
from speakerlab.losses.head import Head
from speakerlab.scoring.calibration import Calibration, fit_calibration
from speakerlab.scoring.pair_scores import pairwise_eer
from speakerlab.training.distributed import Ranks

log = logging.getLogger(__name__)
MAX_UTTERANCES_PER_VALID_SPEAKER = 10
MAX_UTTERANCES_PER_VALID_CLASS = 500
MAX_CUTS, MIN_CUT_SECONDS = 4, 2.0  # of the only utterance of a speaker
FEW_SPEAKERS = 10  # a threshold from fewer is unreliable


class HeldOut:
    """Held-out utterances with their labels, and a metric of their embeddings."""

    metric: str  # its name

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.label_N: list[int] = []

    def run(
        self, embedder: Embedder, ranks: Ranks, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Return {metric: fraction} of rank 0's embedder, or None if `stop()` on any rank.

        Every rank computes a share. BatchNorm's statistics are copied from rank 0: in training each
        rank has its own and uses none. Raises FloatingPointError, on every rank, for embeddings
        that are not finite.
        """
        ranks.copy_from_first(list(embedder.buffers()))
        emb_ND = embed_pieces(
            embedder,
            self.pieces,
            device=ranks.device,
            share=(ranks.rank, ranks.world_size),
            stop=stop,
            num_workers=num_readers(embedder, ranks),
        )
        if any(ranks.every(stop())):
            return None
        emb_ND = ranks.sum(torch.from_numpy(emb_ND)).numpy()
        num_bad = int((~np.isfinite(emb_ND).all(axis=1)).sum())
        if num_bad:
            text = f"{num_bad} of {len(emb_ND)} validation embeddings are not finite"
            raise FloatingPointError(text)
        return {self.metric: ranks.on_first(lambda: self.measure(emb_ND))}

    def measure(self, emb_ND: np.ndarray) -> float:
        raise NotImplementedError


class Validation(HeldOut):
    """The EER of all pairs of utterances of the validation speakers.

    At most ten utterances per speaker; the only utterance of a speaker is cut into pieces.
    """

    metric = "eer"

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self.num_cut = 0  # speakers
        for speaker, pieces in utterances_of_each(manifest, MAX_UTTERANCES_PER_VALID_SPEAKER):
            if len(pieces) == 1:
                pieces = cut(pieces[0])
                self.num_cut += 1
            self.pieces += pieces
            self.label_N += [speaker] * len(pieces)

    def measure(self, emb_ND: np.ndarray) -> float:
        return pairwise_eer(emb_ND, np.array(self.label_N))[0]

    def calibrate(
        self, emb_ND: np.ndarray, *, source: str, fars: Sequence[float] = ()
    ) -> Calibration:
        """Fit a calibration to all pairs; fars: false alarm rates to find thresholds for."""
        _, scores_N, is_target_N = pairwise_eer(emb_ND, np.array(self.label_N))
        num_speakers = len(set(self.label_N))
        if num_speakers < FEW_SPEAKERS:
            text = "the threshold is unreliable: it was learned from only %d speakers"
            log.warning(text, num_speakers)
        num_recordings = len({piece.row for piece in self.pieces})
        source = f"{source}: {num_speakers} speakers, {num_recordings} recordings"
        if self.num_cut:
            source += f", {self.num_cut} of the speakers with pieces of one recording"
        return fit_calibration(scores_N, is_target_N, source=source, false_alarm_rates=fars)


class ClassValidation(HeldOut):
    """The share of held-out utterances that the head classifies wrongly, at most 500 per class."""

    metric = "error"

    def __init__(self, manifest: Manifest, *, head: Head, classes: Sequence[str]) -> None:
        super().__init__()
        self.classifier = Classifier(head, classes)
        row_of = {name: row for row, name in enumerate(classes)}
        for number, pieces in utterances_of_each(manifest, MAX_UTTERANCES_PER_VALID_CLASS):
            self.pieces += pieces
            self.label_N += [row_of[manifest.speakers[number]]] * len(pieces)

    def measure(self, emb_ND: np.ndarray) -> float:
        found_N = self.classifier.logits(emb_ND).argmax(axis=1)
        return float((found_N != np.array(self.label_N)).mean())


def num_readers(embedder: Embedder, ranks: Ranks) -> int:
    """Return how many processes read for a rank; none on a CPU, where reading takes little time."""
    if ranks.device.type == "cpu":
        return 0
    largest = max(MAX_BATCH_SECONDS * embedder.sample_rate, embedder.max_samples)
    size, num_ranks = 2 * largest, ranks.local_size
    wanted = auto_workers(num_ranks)
    return fit_workers(wanted, batch_bytes=size, local_ranks=num_ranks, gpus=num_ranks)


def cut(piece: Piece) -> list[Piece]:
    """Return two to four pieces of equal length, of at least 2 s if `piece` has 4 s."""
    seconds = piece.num_samples / piece.manifest.sample_rate
    num = max(2, min(MAX_CUTS, int(seconds / MIN_CUT_SECONDS)))
    size = piece.num_samples // num
    return [replace(piece, start=piece.start + i * size, num_samples=size) for i in range(num)]


def utterances_of_each(manifest: Manifest, most: int) -> Iterator[tuple[int, list[Piece]]]:
    """Yield the number of each speaker or class, and its first utterances, at most `most`."""
    whole = utterance_pieces(manifest)
    for number in range(len(manifest.speakers)):
        yield number, [whole[row] for row in np.flatnonzero(manifest.speaker_N == number)[:most]]
