"""The least that each step of a back end can learn from. With less, it does more harm than good.

Measured on simulated speakers and on those of the recipe mini, as the EER against plain cosine:

- mean: 50 speakers. The mean of n speakers is off by 1/n of the variance between speakers; with 10
  speakers the EER rose by 1 to 3 points, with 50 by less than half a point.
- snorm, asnorm: a cohort of 100 speakers, which gives the deviation of scores to 7 %. With 30, the
  EER rose by 2 points.
- lda, whiten, plda: 4 repeated recordings (those after the first of a speaker) and half a speaker
  for each dimension, as each estimates a covariance matrix. With 2 repeats, the EER rose by 3
  points.
- logistic regression (calibration, quality measures, fusion): 5 speakers for each weight, at least
  10. Seven weights learned from 7 speakers raised the EER by 4 points and doubled Cllr.
"""

COHORT_SPEAKERS = {"mean": 50, "snorm": 100, "asnorm": 100}
REPEATS_PER_DIM, SPEAKERS_PER_DIM = 4, 0.5
SPEAKERS_PER_WEIGHT, REGRESSION_SPEAKERS = 5, 10


class TooFewError(ValueError):
    """A step has too little to learn from; back ends without it can be scored."""


def require_development(step: str, num_utterances: int, num_speakers: int, num_dims: int) -> None:
    """Raise TooFewError if the development set is too small for a step on num_dims dimensions."""
    least, num_repeats = COHORT_SPEAKERS.get(step, 0), num_utterances - num_speakers
    least_repeats = 0
    if step in ("lda", "whiten", "plda"):
        least, least_repeats = round(SPEAKERS_PER_DIM * num_dims), REPEATS_PER_DIM * num_dims
    if num_speakers < least or num_repeats < least_repeats:
        and_repeats = f" and {least_repeats} repeated recordings" if least_repeats else ""
        got = f"{num_speakers}{f' and {num_repeats}' if least_repeats else ''}"
        raise TooFewError(
            f"{step}: needs at least {least} speakers{and_repeats}, got {got}; embed more of "
            f"the training set, or score without {step}"
        )


def min_speakers(num_weights: int) -> int:
    """Return how many speakers logistic regression needs to learn these weights."""
    return max(REGRESSION_SPEAKERS, SPEAKERS_PER_WEIGHT * num_weights)
