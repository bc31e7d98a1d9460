"""Intervals of EERs and of their differences that also hold with few errors.

In: scores of trials. Out: an EER with its 95 % interval, and differences between systems on the
same trials. The replicates of a bootstrap (scoring/bootstrap.py) can only repeat the errors of a
sample: without an error, its interval is [0, 0]. Here an interval has four parts:

1. The influence of a speaker is how far the EER lies, because of this speaker's trials, above the
   EER with trials of average difficulty, to first order. If the miss rate at the threshold rises by
   m and the false-alarm rate by a, the EER rises by w m + (1 - w) a, with
   w = f_non / (f_non + f_tar), where f_non and f_tar are the densities of the scores of non-targets
   and targets at the threshold. A target trial counts for its speaker, and a non-target trial for
   both of its speakers. The sum of the squared influences estimates the variance of the EER.
2. With few errors this measured variance is itself uncertain. It is mixed with that of independent
   trials: variance = k / (k + 1) * measured + 1 / (k + 1) * independent, where k is the number of
   speakers with a missed target.
3. The interval is that of a proportion with the same variance (Korn and Graubard, "Confidence
   intervals for proportions with small expected number of positive counts estimated from survey
   data", Survey Methodology 24(2), 1998), with Jeffreys' bounds, widened by Student's quantile. Its
   degrees of freedom follow from the fourth moments of the influences (Satterthwaite, "An
   approximate distribution of estimates of variance components", Biometrics Bulletin 2(6), 1946):
   a few speakers with most of the errors show the variance less well than equal ones.
4. Each bound misses the truth in 2.5 % of the samples, except where one of them hardly can. This
   is so for a true EER so low that more than 2.5 % of the samples have no error: it is in the
   interval of such a sample, and below the upper bound of every other sample. The lower bound may
   then miss it in 5 %, as in the exact intervals of Blaker ("Confidence curves and improved exact
   confidence intervals for discrete distributions", Canadian Journal of Statistics 28(4), 2000).
   With 2.5 %, intervals of 6 to 20 speakers and EERs of 1 to 3 % would hold the truth in 98 to
   99 %.

The interval of a difference joins those of both systems, with equal tails (Zou and Donner,
"Construction of confidence limits about effect measures", Statistics in Medicine 27(10), 2008), and
with the correlation of the influences. tests/choose_claims.py measures how often these intervals
hold the truth.
Letters: N trials, M targets, S speakers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtri, stdtrit

from speakerlab.core.intervals import MIN_GROUPS
from speakerlab.scoring.metrics import checked, eer

LEVEL = 0.05  # probability that an interval misses the truth
# In part 2, each utterance of a speaker after the first counts as this number of independent
# trials. It is above one, because an EER changes by only a part of a change of the miss rate. It
# was chosen so that the intervals of tests/choose_claims.py hold the truth in 95 % of the corpora.
TRIALS_PER_REPEAT = 2.5
MIN_FREEDOM = 3.0  # degrees of freedom
# Of a density, in standard deviations times M ** -0.2 (Silverman's rule of thumb).
BANDWIDTH = 0.9
MAX_TRIALS = 1e6  # effective number
NUM_HALVINGS = 20  # of the search for a p-value, which is then exact to 1e-6


@dataclass(frozen=True)
class EerEstimate:
    """EER of a sample of speakers, and what its interval depends on."""

    eer: float
    threshold: float
    influence_S: NDArray[np.float64]
    # The smaller of the numbers of speakers with target and with non-target trials.
    num_speakers: int
    num_erring: int  # speakers with a missed target at the threshold; 0 for an EER of 0
    # Utterances of the speakers with target trials, without the first of each.
    num_repeats: int

    @property
    def variance(self) -> float:
        """Return the variance of the EER between samples of speakers."""
        return self.covariance(self)

    def covariance(self, other: "EerEstimate") -> float:
        """Return the covariance with the EER of another system on the same trials."""
        product = float(self.influence_S @ other.influence_S)
        # One speaker shows no variance, and has no interval.
        return product * self.num_speakers / max(self.num_speakers - 1, 1)

    def interval(self) -> list[float] | None:
        """Return the interval [low, high], which misses the truth with the probability LEVEL.

        Without the minimum number of speakers, None.
        """
        limits = self.equal_tails(LEVEL)
        if limits is None or self.eer == 0:
            return limits
        low, high = limits
        # Part 4 of the docstring of this file. The interval of a sample without errors ends here.
        num_independent = TRIALS_PER_REPEAT * self.num_repeats
        errorless_high = float(betaincinv(0.5, num_independent + 0.5, 1 - LEVEL / 2))
        # A true EER below is missed by lower bounds only, in twice as many samples.
        one_sided = self.equal_tails(2 * LEVEL)
        assert one_sided is not None
        highest_low, _ = one_sided
        return [min(max(low, errorless_high), highest_low), high]

    def equal_tails(self, level: float) -> list[float] | None:
        """Return the interval, each bound of which misses the truth with half of `level`."""
        if self.num_speakers < MIN_GROUPS:
            return None
        tail = level / 2
        # Part 2: mix both variances. The rate is kept away from 0 and 1, where a proportion would
        # have no variance.
        rate = (self.eer * self.num_repeats + 1) / (self.num_repeats + 2)
        variance_of_trial = rate * (1 - rate)
        num_independent = TRIALS_PER_REPEAT * self.num_repeats
        independent = variance_of_trial / num_independent
        weight = self.num_erring / (self.num_erring + 1)
        variance = weight * self.variance + (1 - weight) * independent

        # Part 3: the number of independent trials whose proportion has this variance.
        num_trials = min(variance_of_trial / variance, MAX_TRIALS)
        # Student's quantile is further out than the normal one; fewer trials widen the interval.
        freedom = self._degrees_of_freedom()
        widening = stdtrit(freedom, tail) / ndtri(tail)
        num_trials /= widening**2
        num_errors = self.eer * num_trials
        # Jeffreys' prior has half a trial of each kind.
        errors = num_errors + 0.5
        successes = num_trials - num_errors + 0.5
        low = float(betaincinv(errors, successes, tail))
        high = float(betaincinv(errors, successes, 1 - tail))
        low = min(low, self.eer)
        if self.eer == 0:
            low = 0.0  # Jeffreys' lower bound is above 0 without errors
        return [low, max(high, self.eer)]

    def _degrees_of_freedom(self) -> float:
        """Return the degrees of freedom of the variance: about S if no speaker stands out."""
        most = self.num_speakers - 1
        squares_S = self.influence_S**2
        total = float(squares_S.sum())
        if self.num_erring == 0 or total == 0:
            return most
        kurtosis = self.num_speakers * float(squares_S @ squares_S) / total**2
        freedom = 2 * self.num_speakers / max(kurtosis - 1, 1e-9)
        return min(max(freedom, MIN_FREEDOM), most)


@dataclass(frozen=True)
class Difference:
    """EER of one system minus that of another, on the same trials."""

    difference: float
    ci95: list[float] | None  # None: too few speakers
    p_value: float | None  # two-sided
    standard_error: float


def estimate_eer(
    scores: ArrayLike,
    is_target: ArrayLike,
    enrol_speaker_N: np.ndarray,
    test_speaker_N: np.ndarray,
    *,
    num_repeats: int,
) -> EerEstimate:
    """Estimate the EER and the influence of each speaker. Speakers (N) are numbers from 0.

    num_repeats: number of utterances of the speakers with target trials, without the first of each.
    """
    scores_N, is_target_N = checked(scores, is_target)
    target_scores = scores_N[is_target_N]
    other_scores = scores_N[~is_target_N]
    threshold = _find_crossing(target_scores, other_scores)
    is_missed = target_scores <= threshold
    is_accepted = other_scores >= threshold

    # What each trial adds to the EER, compared with a trial of average difficulty.
    miss_weight = _weight_of_misses(target_scores, other_scores, threshold)
    excess_miss = is_missed - is_missed.mean()
    excess_alarm = is_accepted - is_accepted.mean()
    miss_influence = miss_weight * excess_miss / len(target_scores)
    alarm_influence = (1 - miss_weight) * excess_alarm / len(other_scores)

    # Sum over the trials of each speaker.
    target_speaker = enrol_speaker_N[is_target_N]
    enrol_speaker = enrol_speaker_N[~is_target_N]
    test_speaker = test_speaker_N[~is_target_N]
    highest_number = int(max(enrol_speaker_N.max(), test_speaker_N.max()))
    size = highest_number + 1
    influence_S = np.zeros(size)
    influence_S += np.bincount(target_speaker, miss_influence, size)
    influence_S += np.bincount(enrol_speaker, alarm_influence, size)
    influence_S += np.bincount(test_speaker, alarm_influence, size)

    num_with_targets = len(np.unique(target_speaker))
    num_with_nontargets = len(np.union1d(enrol_speaker, test_speaker))
    rate = eer(scores_N, is_target_N)
    # Even without errors, the lowest target counts as missed above.
    num_erring = len(np.unique(target_speaker[is_missed])) if rate > 0 else 0
    return EerEstimate(
        eer=rate,
        threshold=threshold,
        influence_S=influence_S,
        num_speakers=min(num_with_targets, num_with_nontargets),
        num_erring=num_erring,
        num_repeats=num_repeats,
    )


def compare_eers(first: EerEstimate, second: EerEstimate) -> Difference:
    """Compare two systems on the same trials; the difference is first minus second."""
    difference = first.eer - second.eer
    covariance = first.covariance(second)
    variance = first.variance + second.variance - 2 * covariance
    standard_error = float(np.sqrt(max(variance, 0.0)))
    ci95 = _difference_interval(first, second, LEVEL)
    if ci95 is None:
        return Difference(difference, None, None, standard_error)

    # The p-value is the smallest level at which the interval excludes zero.
    low_level = 0.0
    high_level = 1.0
    for _ in range(NUM_HALVINGS):
        level = (low_level + high_level) / 2
        interval = _difference_interval(first, second, level)
        assert interval is not None
        low, high = interval
        if low > 0 or high < 0:
            high_level = level
        else:
            low_level = level
    return Difference(difference, ci95, high_level, standard_error)


def _difference_interval(
    first: EerEstimate, second: EerEstimate, level: float
) -> list[float] | None:
    """Join the intervals of both EERs into that of their difference."""
    first_interval = first.equal_tails(level)
    second_interval = second.equal_tails(level)
    if first_interval is None or second_interval is None:
        return None
    first_low, first_high = first_interval
    second_low, second_high = second_interval
    deviations = np.sqrt(first.variance * second.variance)
    correlation = 0.0
    if deviations > 0:
        correlation = first.covariance(second) / deviations

    def join(first_distance: float, second_distance: float) -> float:
        """Return the distance of the difference from its bound, given those of both EERs."""
        square = first_distance**2 + second_distance**2
        square -= 2 * correlation * first_distance * second_distance
        return float(np.sqrt(max(square, 0.0)))

    # The difference is lowest where the first EER is low and the second one high.
    difference = first.eer - second.eer
    below = join(first.eer - first_low, second_high - second.eer)
    above = join(first_high - first.eer, second.eer - second_low)
    return [difference - below, difference + above]


def _find_crossing(target_scores: np.ndarray, other_scores: np.ndarray) -> float:
    """Return the score of the target at which misses reach the false alarms."""
    ascending = np.sort(target_scores)
    num_targets = len(ascending)
    miss_M = np.arange(1, num_targets + 1) / num_targets
    num_below_M = np.searchsorted(np.sort(other_scores), ascending)
    alarm_M = 1 - num_below_M / len(other_scores)
    # Misses rise and false alarms fall, so the smaller of them is largest at the crossing.
    crossing = int(np.minimum(miss_M, alarm_M).argmax())
    return float(ascending[crossing])


def _weight_of_misses(
    target_scores: np.ndarray, other_scores: np.ndarray, threshold: float
) -> float:
    """Return the weight w of the miss rate in the EER, as in the docstring of this file."""
    # The targets are fewer. Their number determines both widths, so that the two densities are
    # equally smooth.
    num_targets = len(target_scores)
    target_density = _density(target_scores, at=threshold, num_values=num_targets)
    other_density = _density(other_scores, at=threshold, num_values=num_targets)
    total_density = target_density + other_density
    if total_density > 0:
        return other_density / total_density
    return 0.5


def _density(values: np.ndarray, *, at: float, num_values: int) -> float:
    """Return the density of values at a point by a Gaussian kernel, without its constant factor.

    num_values: the number that determines the width of the kernel.
    """
    width = BANDWIDTH * values.std() * num_values**-0.2
    if width == 0:
        return 0.0
    distance = (values - at) / width
    return float(np.exp(-0.5 * distance**2).mean() / width)
