"""Minimum amount of data for each step of a back end. With less, it does more harm than good.

Measured on simulated speakers and on the speakers of the recipe mini, as the EER against plain
cosine:

- mean: 50 speakers. The mean of n speakers has an error of 1/n of the variance between speakers;
  with 10 speakers the EER rose by 1 to 3 points, with 50 by less than half a point.
- snorm, asnorm: a cohort of 100 speakers, which estimates the deviation of scores to within 7 %.
  With 30, the EER rose by 2 points.
- lda, whiten, plda: 4 repeated recordings (recordings after the first of a speaker) and half a
  speaker for each dimension, because each estimates a covariance matrix. With 2 repeats, the EER
  rose by 3 points.
- logistic regression (calibration, quality measures, fusion): 5 speakers for each weight, at least
  10. Seven weights learned from 7 speakers raised the EER by 4 points and doubled Cllr.
"""

from speakerlab.core.counting import count_of

COHORT_SPEAKERS = {"mean": 50, "snorm": 100, "asnorm": 100}
# For each dimension, in steps that estimate a covariance matrix.
REPEATS_PER_DIM = 4
SPEAKERS_PER_DIM = 0.5
# For logistic regression: per weight, and the minimum.
SPEAKERS_PER_WEIGHT = 5
REGRESSION_SPEAKERS = 10


class TooFewError(ValueError):
    """Error for a step with too little data; back ends without the step can be scored."""


def require_development(
    step: str,
    num_utterances: int,
    num_speakers: int,
    num_dims: int,
) -> None:
    """Raise TooFewError if the development set is too small for a step on num_dims dimensions."""
    num_repeats = num_utterances - num_speakers
    least_speakers = COHORT_SPEAKERS.get(step, 0)
    least_repeats = 0
    if step in ("lda", "whiten", "plda"):
        least_speakers = round(SPEAKERS_PER_DIM * num_dims)
        least_repeats = REPEATS_PER_DIM * num_dims
    if num_speakers < least_speakers or num_repeats < least_repeats:
        needs = count_of(least_speakers, "speaker")
        got = f"{num_speakers}"
        # Name repeats only for steps that need them.
        if least_repeats:
            needs += f" and {count_of(least_repeats, 'repeated recording')}"
            got += f" and {num_repeats}"
        raise TooFewError(
            f"{step}: needs at least {needs}, got {got}; embed"
            f" more of the training set, or score without {step}"
        )


def min_speakers(num_weights: int) -> int:
    """Return the number of speakers that logistic regression needs for `num_weights` weights."""
    return max(REGRESSION_SPEAKERS, SPEAKERS_PER_WEIGHT * num_weights)
