"""Scores of speaker labels: utterances of other speakers, and speakers who are one person.

In: embeddings and labels, of which some are wrong. Out: a `Judgement`.

Scores are log-likelihood ratios, of two sets of utterances being of one person against two, under
the two-covariance model (Brümmer and De Villiers, "The speaker partitioning problem", Odyssey 2010)
with equal variances in all dimensions. Unlike the cosine, the ratio takes into account that the
mean of two utterances says less about a speaker than the mean of a hundred.
Letters: N utterances, D dimensions, S speakers, B utterances or speakers of a block, K speakers
drawn for an utterance, M scores against drawn speakers, H speakers that are halved, P pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

MAX_ROUNDS = 20
MAX_SHARE_PER_ROUND = 0.25  # of a speaker's utterances, at least one
NUM_DRAWN = 20  # other speakers that each utterance is compared with for the threshold
MIN_HALVED = 4  # utterances of a speaker who is halved
MIN_HALVED_SPEAKERS = 5  # fewer do not show how alike halves are
MISSED_HALVES = 0.02  # share of the halves below the threshold of pairs
LOW_QUANTILES = (0.25, 0.5)  # of drawn scores, which few good utterances are below
MIN_VARIANCE = 1e-6  # identical embeddings have none
VALUES_AT_ONCE = 2_000_000  # scores of a block (16 MB)


@dataclass(frozen=True)
class Spread:
    """Variances, summed over the dimensions; those of a unit vector add up to about 1."""

    between: float  # of speakers
    session: float  # within a speaker, common to neighbouring utterances
    utterance: float  # within a session


@dataclass(frozen=True, eq=False)
class SpeakerSums:
    """Numbers and sums of the utterances of each speaker."""

    count_S: NDArray[np.int64]
    sum_SD: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        unit_ND: np.ndarray,
        speaker_N: np.ndarray,
        num_speakers: int,
    ) -> "SpeakerSums":
        sum_SD = np.zeros((num_speakers, unit_ND.shape[1]))
        np.add.at(sum_SD, speaker_N, unit_ND)
        return cls(np.bincount(speaker_N, minlength=num_speakers), sum_SD)

    @property
    def mean_SD(self) -> NDArray[np.float64]:
        return self.sum_SD / self.count_S[:, None]

    def variances(self) -> NDArray[np.float64]:
        """Return the variance within each speaker of several utterances, which are unit vectors."""
        has_several_S = self.count_S > 1
        count = self.count_S[has_several_S]
        squared_length = (self.sum_SD[has_several_S] ** 2).sum(axis=1)
        return (count - squared_length / count) / (count - 1)


@dataclass(frozen=True, eq=False)
class Halves:
    """Speakers whose utterances are divided in two, in the order of the rows."""

    first: SpeakerSums  # of H speakers
    second: SpeakerSums

    @classmethod
    def of(cls, unit_ND: np.ndarray, speaker_N: np.ndarray) -> "Halves":
        # The rows of one speaker after the other. All arrays (N) below are in this order.
        row_N = np.argsort(speaker_N, kind="stable")
        _, start_S, count_S = np.unique(
            speaker_N[row_N], return_index=True, return_counts=True
        )
        # The speakers who are halved get consecutive numbers.
        is_halved_S = count_S >= MIN_HALVED
        number_S = np.cumsum(is_halved_S) - 1

        # The same for each utterance, and its place among the utterances of its speaker.
        is_halved_N = np.repeat(is_halved_S, count_S)
        number_N = np.repeat(number_S, count_S)
        place_N = np.arange(len(speaker_N)) - np.repeat(start_S, count_S)
        is_first_N = place_N < np.repeat(count_S // 2, count_S)

        num_halved = int(is_halved_S.sum())
        halves: list[SpeakerSums] = []
        for is_in_half_N in (is_first_N, ~is_first_N):
            chosen_N = is_halved_N & is_in_half_N
            unit_of_half = unit_ND[row_N[chosen_N]]
            sums = SpeakerSums.of(unit_of_half, number_N[chosen_N], num_halved)
            halves.append(sums)
        first, second = halves
        return cls(first, second)

    def __len__(self) -> int:
        return len(self.first.count_S)

    def session_variance(self) -> float:
        """Return by how much halves differ more than their utterances explain."""
        if not len(self):
            return 0.0
        difference_HD = self.first.mean_SD - self.second.mean_SD
        explained_H = self.first.variances() / self.first.count_S
        explained_H += self.second.variances() / self.second.count_S
        excess_H = (difference_HD**2).sum(axis=1) - explained_H
        # Two sessions differ by the variance of both.
        return float(np.median(excess_H)) / 2

    def ratios(self, spread: Spread) -> NDArray[np.float64]:
        """Return the log-likelihood ratio of the halves of each speaker, (H)."""
        first_HD = self.first.mean_SD
        second_HD = self.second.mean_SD
        return log_ratio(
            dot=(first_HD * second_HD).sum(axis=1),
            first_square=(first_HD**2).sum(axis=1),
            second_square=(second_HD**2).sum(axis=1),
            first_count=self.first.count_S,
            second_count=self.second.count_S,
            spread=spread,
            dim=first_HD.shape[1],
        )


@dataclass(frozen=True)
class Pair:
    """Two speakers who are probably one person, by their indices."""

    first: int
    second: int
    score: float


@dataclass(frozen=True, eq=False)
class Judgement:
    """Scores of all utterances, and what follows from them; scores are log-likelihood ratios."""

    # Against the speaker of the label; NaN if this speaker has no other utterance.
    own_score_N: NDArray[np.float64]
    other_score_N: NDArray[np.float64]  # against the nearest other speaker
    nearest_speaker_N: NDArray[np.int64]  # the number of this other speaker
    threshold: float  # of `own_score_N`
    pairs: Sequence[Pair]  # the highest score first
    pair_threshold: float | None  # None: too few speakers have enough utterances

    @property
    def is_suspect_N(self) -> NDArray[np.bool_]:
        """Return which utterances do not sound like their speaker; NaN compares as false."""
        is_low_N = self.own_score_N < self.threshold
        is_like_another_N = self.own_score_N < self.other_score_N
        return is_low_N & is_like_another_N


def log_ratio(
    *,
    dot: Any,
    first_square: Any,
    second_square: Any,
    first_count: Any,
    second_count: Any,
    spread: Spread,
    dim: int,
) -> Any:
    """Return the log-likelihood ratio of two means of utterances, one person against two.

    dot: inner product of the means. first_square, second_square: the squared length of each mean.
    first_count, second_count: the number of utterances of each mean. All are numbers, or arrays
    that can be broadcast together.
    """
    # In each dimension, the means have the variances `first` and `second`. Their covariance is
    # `between` if they are of one person, and 0 if they are of two.
    between = spread.between / dim
    first = between + (spread.session + spread.utterance / first_count) / dim
    second = between + (spread.session + spread.utterance / second_count) / dim
    determinant = first * second - between**2

    together = second * first_square - 2 * between * dot + first * second_square
    apart = first_square / first + second_square / second
    volumes = np.log(first) + np.log(second) - np.log(determinant)
    return 0.5 * (dim * volumes + apart - together / determinant)


def judge(unit_ND: np.ndarray, speaker_N: np.ndarray, *, far: float) -> Judgement:
    """Compare each utterance with its speaker and all others, and the speakers with each other.

    unit_ND: embeddings without their common mean, of length 1; rows of a speaker are in the order
    of recording, as far as it is known. speaker_N: 0 to S - 1, all of which occur. far: share of
    the good utterances that may be suspect. Raises ValueError, one line, if embeddings and labels
    hardly agree.
    """
    is_trusted_N = np.ones(len(speaker_N), dtype=bool)
    judgement = _judge_once(unit_ND, speaker_N, is_trusted_N, far=far)
    for _ in range(MAX_ROUNDS):
        # Suspects do not count in the means of the next round: wrong utterances in a mean make each
        # other look right. Only the worst suspects are left out at once, because beside a majority
        # of wrong utterances, a good one is a suspect, too.
        worst = _worst_of_each(judgement, speaker_N, is_trusted_N)
        is_trusted_N[worst] = False
        # The variances need a speaker with several utterances.
        has_several = np.bincount(speaker_N[is_trusted_N]).max() > 1
        if not len(worst) or not has_several:
            break
        judgement = _judge_once(unit_ND, speaker_N, is_trusted_N, far=far)
    return judgement


def _worst_of_each(
    judgement: Judgement, speaker_N: np.ndarray, is_trusted_N: np.ndarray
) -> NDArray[np.int64]:
    """Return the trusted suspects, of each speaker only those that are most like another one."""
    rows = np.flatnonzero(judgement.is_suspect_N & is_trusted_N)
    margin = judgement.other_score_N[rows] - judgement.own_score_N[rows]
    rows = rows[np.argsort(-margin, kind="stable")]

    num_trusted_S = np.bincount(speaker_N[is_trusted_N])
    num_allowed_S = np.maximum(1, MAX_SHARE_PER_ROUND * num_trusted_S).astype(int)
    worst: list[int] = []
    for row in rows.tolist():
        speaker = speaker_N[row]
        if num_allowed_S[speaker]:
            num_allowed_S[speaker] -= 1
            worst.append(row)
    return np.array(worst, dtype=np.int64)


def _judge_once(
    unit_ND: np.ndarray,
    speaker_N: np.ndarray,
    is_trusted_N: np.ndarray,
    *,
    far: float,
) -> Judgement:
    """Judge all utterances by the means of those that are trusted, at least one of a speaker."""
    trusted_ND = unit_ND[is_trusted_N]
    trusted_speaker_N = speaker_N[is_trusted_N]
    num_speakers = int(speaker_N.max()) + 1
    means = SpeakerSums.of(trusted_ND, trusted_speaker_N, num_speakers)
    halves = Halves.of(trusted_ND, trusted_speaker_N)
    spread = estimate_spread(means, halves)

    pairs: list[Pair] = []
    pair_threshold = None
    if len(halves) >= MIN_HALVED_SPEAKERS:
        # A pair must score as high as the halves of one speaker do. It must also score so high that
        # at most one pair of different people is expected to: a log-likelihood ratio of at least t
        # has a probability of at most e^-t among them.
        half_ratio = float(np.quantile(halves.ratios(spread), MISSED_HALVES))
        num_pairs = num_speakers * (num_speakers - 1) / 2
        pair_threshold = max(half_ratio, float(np.log(num_pairs)))
        pairs = find_pairs(means, spread, pair_threshold)
    group_S = group_speakers(pairs, num_speakers)

    own_N = _own_scores(unit_ND, speaker_N, is_trusted_N, means, spread)
    other_N, nearest_N, drawn_M = _other_scores(
        unit_ND, speaker_N, means, spread, group_S
    )
    is_judged_N = ~np.isnan(own_N)
    threshold = find_threshold(own_N[is_judged_N], drawn_M, far=far)
    return Judgement(
        own_score_N=own_N,
        other_score_N=other_N,
        nearest_speaker_N=nearest_N,
        threshold=threshold,
        pairs=pairs,
        pair_threshold=pair_threshold,
    )


def estimate_spread(means: SpeakerSums, halves: Halves) -> Spread:
    """Estimate the variances by medians over speakers, which a few wrong labels do not change."""
    within = float(np.median(means.variances()))
    within = float(np.clip(within, 2 * MIN_VARIANCE, 1 - MIN_VARIANCE))
    session = np.clip(halves.session_variance(), 0, within - MIN_VARIANCE)
    return Spread(
        between=1 - within,
        session=float(session),
        utterance=within - float(session),
    )


def find_pairs(means: SpeakerSums, spread: Spread, threshold: float) -> list[Pair]:
    """Return the pairs of speakers of several utterances with at least this score."""
    numbers = np.flatnonzero(means.count_S > 1)
    mean_SD = means.mean_SD[numbers]
    square_S = (mean_SD**2).sum(axis=1)
    count_S = means.count_S[numbers]
    pairs: list[Pair] = []
    rows_at_once = max(1, VALUES_AT_ONCE // len(numbers))
    for start in range(0, len(numbers), rows_at_once):
        block = slice(start, start + rows_at_once)
        ratio_BS = log_ratio(
            dot=mean_SD[block] @ mean_SD.T,
            first_square=square_S[block, None],
            second_square=square_S,
            first_count=count_S[block, None],
            second_count=count_S,
            spread=spread,
            dim=mean_SD.shape[1],
        )
        # Each pair once, without pairs of a speaker with itself.
        for row, column in np.argwhere(ratio_BS >= threshold).tolist():
            if start + row < column:
                pair = Pair(
                    first=int(numbers[start + row]),
                    second=int(numbers[column]),
                    score=float(ratio_BS[row, column]),
                )
                pairs.append(pair)
    return sorted(pairs, key=lambda pair: -pair.score)


def group_speakers(pairs: Sequence[Pair], num_speakers: int) -> NDArray[np.int64]:
    """Return the number of the group of each speaker, (S); pairs are in one group."""
    first_P = [pair.first for pair in pairs]
    second_P = [pair.second for pair in pairs]
    links = coo_array(
        (np.ones(len(pairs)), (first_P, second_P)), shape=(num_speakers, num_speakers)
    )
    _, group_S = connected_components(links, directed=False)
    return group_S.astype(np.int64)


def _own_scores(
    unit_ND: np.ndarray,
    speaker_N: np.ndarray,
    is_trusted_N: np.ndarray,
    means: SpeakerSums,
    spread: Spread,
) -> NDArray[np.float64]:
    """Score each utterance against the other trusted utterances of its speaker; NaN if none."""
    num_others_N = means.count_S[speaker_N] - is_trusted_N
    has_others_N = num_others_N > 0
    rows = np.flatnonzero(has_others_N)
    num_others = num_others_N[rows]
    unit_RD = unit_ND[rows]
    sum_RD = means.sum_SD[speaker_N[rows]]
    # An utterance does not count in the mean that it is compared with.
    mean_RD = sum_RD - unit_RD * is_trusted_N[rows, None]
    mean_RD /= num_others[:, None]
    own_N = np.full(len(unit_ND), np.nan)
    own_N[rows] = log_ratio(
        dot=(unit_RD * mean_RD).sum(axis=1),
        first_square=1.0,
        second_square=(mean_RD**2).sum(axis=1),
        first_count=1,
        second_count=num_others,
        spread=spread,
        dim=unit_ND.shape[1],
    )
    return own_N


def _other_scores(
    unit_ND: np.ndarray,
    speaker_N: np.ndarray,
    means: SpeakerSums,
    spread: Spread,
    group_S: np.ndarray,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """Return the score and number of the nearest speaker of another group, and drawn scores."""
    rng = np.random.default_rng(0)
    num_speakers = len(group_S)
    mean_SD = means.mean_SD
    square_S = (mean_SD**2).sum(axis=1)
    other_N = np.empty(len(unit_ND))
    nearest_N = np.empty(len(unit_ND), dtype=np.int64)
    drawn: list[np.ndarray] = []
    rows_at_once = max(1, VALUES_AT_ONCE // num_speakers)
    for start in range(0, len(unit_ND), rows_at_once):
        block = slice(start, start + rows_at_once)
        speaker_B = speaker_N[block]
        ratio_BS = log_ratio(
            dot=unit_ND[block] @ mean_SD.T,
            first_square=1.0,
            second_square=square_S,
            first_count=1,
            second_count=means.count_S,
            spread=spread,
            dim=unit_ND.shape[1],
        )
        # Draw other speakers, each with the same probability.
        shape = (len(speaker_B), NUM_DRAWN)
        step_BK = rng.integers(1, num_speakers, size=shape)
        drawn_BK = (speaker_B[:, None] + step_BK) % num_speakers
        ratio_BK = np.take_along_axis(ratio_BS, drawn_BK, axis=1)
        drawn.append(ratio_BK.ravel())

        group_B = group_S[speaker_B]
        is_own_group_BS = group_B[:, None] == group_S
        ratio_BS[is_own_group_BS] = -np.inf
        nearest_B = ratio_BS.argmax(axis=1)
        nearest_N[block] = nearest_B
        other_N[block] = ratio_BS.max(axis=1)
    return other_N, nearest_N, np.concatenate(drawn)


def find_threshold(own_N: np.ndarray, drawn_M: np.ndarray, *, far: float) -> float:
    """Return the largest score below which at most `far` of the good utterances seem to be.

    own_N: scores of utterances against the speakers of their labels, of which an unknown share is
    wrong. drawn_M: scores against speakers drawn at random; those of wrong labels are distributed
    like these. Raises ValueError, one line, if half of the labels or more seem wrong.
    """
    own_N = np.sort(own_N)
    drawn_M = np.sort(drawn_M)
    # Estimate the share of wrong labels as Storey counts null hypotheses ("A direct approach to
    # false discovery rates", 2002). Below the q-quantile of the drawn scores are a share q of the
    # wrong utterances, and hardly any good one: the number there, divided by q, is the number of
    # wrong ones. One is added, because a small set may have its only wrong utterance above the
    # quantile. A high quantile is more exact, but counts good utterances if the model is weak.
    num_low = np.searchsorted(own_N, np.quantile(drawn_M, LOW_QUANTILES)) + 1
    wrong_shares = num_low / np.array(LOW_QUANTILES) / len(own_N)
    wrong_share = float(wrong_shares.min())
    if wrong_share >= 0.5 and num_low.max() > 1:
        raise ValueError(
            f"labels: {100 * min(wrong_share, 1):.0f} % of the utterances are no more"
            " like their speaker than like any other; check utt2spk, and the model"
        )
    wrong_share = min(wrong_share, 0.5)

    # For each score: the shares of all, of the wrong and of the good utterances below it.
    below_N = np.arange(len(own_N)) / len(own_N)
    wrong_below_N = wrong_share * np.searchsorted(drawn_M, own_N) / len(drawn_M)
    good_below_N = (below_N - wrong_below_N) / (1 - wrong_share)
    index = int(np.flatnonzero(good_below_N <= far)[-1])
    return float(own_N[index])
