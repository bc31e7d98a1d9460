"""The figure of validation. In: a manifest of what is held out. Out: an EER, or a share of errors.

Verification compares held-out speakers, all their pairs; identification names the classes of
held-out utterances. Letters: N pieces, D embedding.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch

from speakerlab.config.embedder import Embedder
from speakerlab.data.manifest import Manifest
from speakerlab.data.pieces import Stretch
from speakerlab.inference.batches import embed_pieces, utterance_pieces
from speakerlab.inference.torch_model import Classifier
from speakerlab.losses.head import Head
from speakerlab.scoring.backend import pairwise_eer
from speakerlab.scoring.calibration import Calibration, fit_calibration
from speakerlab.training.distributed import Ranks

log = logging.getLogger(__name__)
MAX_UTTERANCES_PER_VALID_SPEAKER = 10
MAX_UTTERANCES_PER_VALID_CLASS = 500
FEW_SPEAKERS = 10  # whose threshold is not to be trusted


class Validation:
    """The EER of all pairs of utterances of the validation speakers.

    At most ten utterances a speaker; a speaker with one utterance gives its two halves.
    """

    figure = "eer"

    def __init__(self, manifest: Manifest) -> None:
        self.pieces: list[Stretch] = []
        self.speaker_N: list[int] = []
        self.num_halved = 0
        self.emb_ND: np.ndarray | None = None  # of the last `run`
        whole = utterance_pieces(manifest)
        for speaker in range(len(manifest.speakers)):
            rows = np.flatnonzero(manifest.speaker_N == speaker)[:MAX_UTTERANCES_PER_VALID_SPEAKER]
            pieces = [whole[row] for row in rows]
            if len(pieces) == 1:
                pieces = _halves(pieces[0])
                self.num_halved += 1
            self.pieces += pieces
            self.speaker_N += [speaker] * len(pieces)

    def run(
        self, embedder: Embedder, ranks: Ranks, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """{"eer": fraction} of rank 0's embedder as it is now; every rank does its share.

        None where `stop` said on any rank that there is no time. Raises FloatingPointError, on
        every rank, for embeddings that are not finite.
        """
        emb_ND = embed_together(embedder, self.pieces, ranks, stop)
        if emb_ND is None:
            return None
        self.emb_ND = emb_ND
        return {"eer": pairwise_eer(emb_ND, np.array(self.speaker_N))[0]}

    def calibrate(
        self, embedder: Embedder, device: torch.device, *, source: str, fars: Sequence[float] = ()
    ) -> Calibration:
        """What the embedder's scores mean, learned from all pairs; `fars` are rates to know."""
        emb_ND = embed_pieces(embedder, self.pieces, device=device)
        _, scores_N, is_target_N = pairwise_eer(emb_ND, np.array(self.speaker_N))
        num_speakers = len(set(self.speaker_N))
        if num_speakers < FEW_SPEAKERS:
            text = "the threshold is learned from %d speakers only: it is rough"
            log.warning(text, num_speakers)
        source = f"{source}: {num_speakers} speakers, {len(self.pieces)} recordings"
        if self.num_halved:
            source += f", {self.num_halved} of the speakers with two halves of one recording"
        return fit_calibration(scores_N, is_target_N, source=source, false_alarm_rates=fars)


class ClassValidation:
    """The share of held-out utterances whose class the head does not find, at most 500 a class."""

    figure = "error"

    def __init__(self, manifest: Manifest, *, head: Head, classes: Sequence[str]) -> None:
        """classes: the names of the head's rows, those of the manifest among them."""
        self.classifier = Classifier(head, classes)
        self.pieces: list[Stretch] = []
        self.label_N: list[int] = []
        self.emb_ND: np.ndarray | None = None  # of the last `run`
        row_of = {name: row for row, name in enumerate(classes)}
        whole = utterance_pieces(manifest)
        for number, name in enumerate(manifest.speakers):
            rows = np.flatnonzero(manifest.speaker_N == number)[:MAX_UTTERANCES_PER_VALID_CLASS]
            self.pieces += [whole[row] for row in rows]
            self.label_N += [row_of[name]] * len(rows)

    def run(
        self, embedder: Embedder, ranks: Ranks, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """{"error": fraction}; the rest is as in `Validation.run`."""
        emb_ND = embed_together(embedder, self.pieces, ranks, stop)
        if emb_ND is None:
            return None
        self.emb_ND = emb_ND

        def error() -> float:
            found_N = self.classifier.logits(emb_ND).argmax(axis=1)
            return float((found_N != np.array(self.label_N)).mean())

        return {"error": ranks.on_first(error)}


def embed_together(
    embedder: Embedder, pieces: Sequence[Stretch], ranks: Ranks, stop: Callable[[], bool]
) -> np.ndarray | None:
    """emb_ND of rank 0's embedder, the same on every rank; None where a rank has to stop.

    BatchNorm's statistics are taken from rank 0, whose they are: in training each rank has its
    own, and uses none of them.
    """
    ranks.copy_from_first(list(embedder.buffers()))
    share = (ranks.rank, ranks.world_size)
    emb_ND = embed_pieces(embedder, pieces, device=ranks.device, share=share, stop=stop)
    if any(ranks.every(stop())):
        return None
    emb_ND = ranks.sum(torch.from_numpy(emb_ND)).numpy()
    num_bad = int((~np.isfinite(emb_ND).all(axis=1)).sum())
    if num_bad:
        raise FloatingPointError(f"{num_bad} of {len(emb_ND)} validation embeddings are not finite")
    return emb_ND


def _halves(piece: Stretch) -> list[Stretch]:
    half = piece.num_samples // 2
    manifest, row, start = piece.manifest, piece.row, piece.start
    return [Stretch(manifest, row, start, half), Stretch(manifest, row, start + half, half)]
