"""What a validation shows beside its EER. In: a `Validation` that was run. Out: `Pictures`.

Letters: N trials.
"""

import logging
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from speakerlab.extraction import Validation
from speakerlab.scoring.backend import pairwise_eer
from speakerlab.scoring.metrics import operating_points
from speakerlab.scoring.plots import plot_det
from speakerlab.training.events import Pictures

log = logging.getLogger(__name__)


def pictures_of(validation: Validation) -> Pictures | None:
    """Of the last run, if there was one; without matplotlib there is no curve, which is told."""
    emb_ND = validation.emb_ND
    if emb_ND is None:
        return None
    _, scores_N, is_target_N = pairwise_eer(emb_ND, np.array(validation.speaker_N))
    pieces = validation.pieces
    return Pictures(
        _draw_det(scores_N, is_target_N),
        emb_ND,
        [p.manifest.speakers[number] for p, number in zip(pieces, validation.speaker_N)],
        [p.manifest.ids[p.row] for p in pieces],
    )


def _draw_det(scores_N: np.ndarray, is_target_N: np.ndarray) -> bytes | None:
    """The DET curve as a PNG."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "det.png"
        try:
            plot_det(path, {"validation": operating_points(scores_N, is_target_N)[:2]})
        except (ImportError, OSError) as error:  # a picture is not worth a training
            _tell_once(f"TensorBoard gets no DET curve: {error}")
            return None
        return path.read_bytes()


@cache
def _tell_once(line: str) -> None:
    log.info("%s", line)
