"""Validation metrics: the EER of held-out speakers, or the error rate of held-out utterances.

Letters: N pieces, D embedding.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from speakerlab.config.embedder import Embedder
from speakerlab.data.manifest import Manifest, Piece
from speakerlab.experiments.plots import plot_det
from speakerlab.inference.batches import embed_pieces, utterance_pieces
from speakerlab.inference.torch_model import Classifier
from speakerlab.losses.head import Head
from speakerlab.scoring.backend import pairwise_eer
from speakerlab.scoring.calibration import Calibration, fit_calibration
from speakerlab.scoring.metrics import operating_points
from speakerlab.training.distributed import Ranks
from speakerlab.training.monitor import Pictures

log = logging.getLogger(__name__)
MAX_UTTERANCES_PER_VALID_SPEAKER = 10
MAX_UTTERANCES_PER_VALID_CLASS = 500
FEW_SPEAKERS = 10  # a threshold from fewer is unreliable


class Validation:
    """The EER of all pairs of utterances of the validation speakers.

    At most ten utterances per speaker; a speaker with one utterance contributes its two halves.
    """

    metric = "eer"

    def __init__(self, manifest: Manifest) -> None:
        self.pieces: list[Piece] = []
        self.speaker_N: list[int] = []
        self.num_halved = 0
        self.emb_ND: np.ndarray | None = None  # of the last `run`
        whole = utterance_pieces(manifest)
        for speaker in range(len(manifest.speakers)):
            rows = np.flatnonzero(manifest.speaker_N == speaker)[:MAX_UTTERANCES_PER_VALID_SPEAKER]
            pieces = [whole[row] for row in rows]
            if len(pieces) == 1:
                row, start, half = pieces[0].row, pieces[0].start, pieces[0].num_samples // 2
                pieces = [Piece(manifest, row, start + at, half) for at in (0, half)]
                self.num_halved += 1
            self.pieces += pieces
            self.speaker_N += [speaker] * len(pieces)

    def run(
        self, embedder: Embedder, ranks: Ranks, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Return {"eer": fraction} of rank 0's embedder, or None if `stop()` on any rank.

        Every rank computes a share. Raises FloatingPointError, on every rank, for embeddings that
        are not finite.
        """
        self.emb_ND = embed_together(embedder, self.pieces, ranks, stop)
        if self.emb_ND is None:
            return None
        return {"eer": pairwise_eer(self.emb_ND, np.array(self.speaker_N))[0]}

    def calibrate(
        self, embedder: Embedder, device: torch.device, *, source: str, fars: Sequence[float] = ()
    ) -> Calibration:
        """Fit a calibration to all pairs; fars: false alarm rates to find thresholds for."""
        emb_ND = embed_pieces(embedder, self.pieces, device=device)
        _, scores_N, is_target_N = pairwise_eer(emb_ND, np.array(self.speaker_N))
        num_speakers = len(set(self.speaker_N))
        if num_speakers < FEW_SPEAKERS:
            text = "the threshold comes from %d speakers only and is unreliable"
            log.warning(text, num_speakers)
        source = f"{source}: {num_speakers} speakers, {len(self.pieces)} recordings"
        if self.num_halved:
            source += f", {self.num_halved} of the speakers with two halves of one recording"
        return fit_calibration(scores_N, is_target_N, source=source, false_alarm_rates=fars)


class ClassValidation:
    """The share of held-out utterances that the head classifies wrongly, at most 500 per class.

    classes: names of the head's rows, those of the manifest among them.
    """

    metric = "error"

    def __init__(self, manifest: Manifest, *, head: Head, classes: Sequence[str]) -> None:
        self.classifier = Classifier(head, classes)
        self.pieces: list[Piece] = []
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
        """Return {"error": fraction}; otherwise like `Validation.run`."""
        self.emb_ND = emb_ND = embed_together(embedder, self.pieces, ranks, stop)
        if emb_ND is None:
            return None

        def error() -> float:
            found_N = self.classifier.logits(emb_ND).argmax(axis=1)
            return float((found_N != np.array(self.label_N)).mean())

        return {"error": ranks.on_first(error)}


def embed_together(
    embedder: Embedder, pieces: Sequence[Piece], ranks: Ranks, stop: Callable[[], bool]
) -> np.ndarray | None:
    """Return emb_ND of rank 0's embedder on every rank; None if `stop()` on any rank.

    BatchNorm's statistics are copied from rank 0: in training each rank has its own and uses none.
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


def pictures_of(validation: Validation | ClassValidation) -> Pictures | None:
    """Return pictures of the last run, if any; without matplotlib there is no DET curve.

    An identification has no curve; its embeddings are shown with their classes.
    """
    emb_ND, det_png = validation.emb_ND, None
    if emb_ND is None:
        return None
    if isinstance(validation, Validation):
        _, scores_N, is_target_N = pairwise_eer(emb_ND, np.array(validation.speaker_N))
        det_png = _draw_det(scores_N, is_target_N)
    pieces = validation.pieces
    return Pictures(
        det_png,
        emb_ND,
        [p.manifest.speakers[p.manifest.speaker_N[p.row]] for p in pieces],
        [p.manifest.ids[p.row] for p in pieces],
    )


def _draw_det(scores_N: np.ndarray, is_target_N: np.ndarray) -> bytes | None:
    """Return the DET curve as a PNG."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "det.png"
        try:
            plot_det(path, {"validation": operating_points(scores_N, is_target_N)[:2]})
        except (ImportError, OSError) as error:  # must not end a training
            _log_once(f"TensorBoard: no DET curve: {error}")
            return None
        return path.read_bytes()


@cache
def _log_once(line: str) -> None:
    log.info("%s", line)
