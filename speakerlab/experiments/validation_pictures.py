"""Pictures of a validation for TensorBoard: the DET curve and the embeddings. Letters: N trials."""

import logging
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from speakerlab.experiments.plots import plot_det
from speakerlab.experiments.validation import ClassValidation, Validation
from speakerlab.scoring.backend import pairwise_eer
from speakerlab.scoring.metrics import operating_points
from speakerlab.training.events import Pictures

log = logging.getLogger(__name__)


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
