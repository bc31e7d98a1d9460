"""Quality measures of trials, for a calibration that knows more than the score.

Letters: N trials, F features.
In: scored trials and the seconds of either side. Out: features for `linear.fit_linear`.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.scoring.chain import Scored


def quality_features(
    scored: Scored,
    seconds_enrol_N: ArrayLike | None = None,
    seconds_test_N: ArrayLike | None = None,
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """(features (N, F), their names): the score, then the lower and the higher of each measure.

    The measures are the logarithm of the durations where both sides' are given, and the qualities
    that the chain found: the length of the embeddings, their mean score against the cohort. They
    are those of Thienpondt, Desplanques and Demuynck, "The IDLAB VoxSRC-20 submission" (ICASSP
    2021), ordered, so that which side is called enrolment does not matter. Raises ValueError for a
    duration that is not above 0.
    """
    pairs = {
        name: (values_N, scored.test_quality[name])
        for name, values_N in scored.enrol_quality.items()
    }
    if seconds_enrol_N is not None and seconds_test_N is not None:
        pairs["log_seconds"] = (_log_seconds(seconds_enrol_N), _log_seconds(seconds_test_N))
    names, columns = ["score"], [scored.scores_N]
    for name, sides in pairs.items():
        names += [f"lower_{name}", f"higher_{name}"]
        columns += [np.minimum(*sides), np.maximum(*sides)]
    return np.stack(columns, axis=1).astype(np.float32), tuple(names)


def _log_seconds(seconds_N: ArrayLike) -> NDArray[np.float64]:
    seconds_N = np.asarray(seconds_N, dtype=np.float64)
    wrong_N = ~(seconds_N > 0)
    if wrong_N.any():
        first = int(wrong_N.argmax())
        raise ValueError(
            f"durations: {np.count_nonzero(wrong_N)} are not above 0 seconds, got "
            f"{seconds_N[first]:g} at trial {first}; mend utt2dur"
        )
    return np.log(seconds_N)
