"""Wrong labels and split speakers among Gaussian speakers are found, and hardly anything else."""

import numpy as np
import pytest
from refusals import refuses
from scipy.stats import multivariate_normal

from speakerlab.scoring.pair_scores import unit_rows
from speakerlab.scoring.speaker_labels import (
    Spread,
    find_threshold,
    group_speakers,
    judge,
    log_ratio,
)

DIM = 32


def make_speakers(
    num_speakers: int, num_utterances: int, *, seed: int = 0, noise: float = 0.6
) -> tuple[np.ndarray, np.ndarray]:
    """Return (unit_ND, speaker_N): an utterance is the direction of its speaker plus noise."""
    rng = np.random.default_rng(seed)
    speaker_N = np.repeat(np.arange(num_speakers), num_utterances)
    centre_SD = rng.normal(size=(num_speakers, DIM))
    noise_ND = rng.normal(size=(len(speaker_N), DIM))
    emb_ND = centre_SD[speaker_N] + noise * noise_ND
    ids = [f"u{row}" for row in range(len(emb_ND))]
    return unit_rows(emb_ND.astype(np.float32), ids), speaker_N


def move(speaker_N: np.ndarray, rows: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Return labels of which those of some rows are of another speaker."""
    rng = np.random.default_rng(seed)
    num_speakers = speaker_N.max() + 1
    moved_N = speaker_N.copy()
    step = rng.integers(1, num_speakers, size=len(rows))
    moved_N[rows] = (speaker_N[rows] + step) % num_speakers
    return moved_N


def suspects_of(judgement) -> list[int]:
    return np.flatnonzero(judgement.is_suspect_N).tolist()


def test_the_ratio_is_that_of_joint_gaussian_densities():
    spread = Spread(between=2.0, session=0.3, utterance=1.2)
    first_count, second_count = 3, 5
    rng = np.random.default_rng(0)
    first_D = rng.normal(size=2)
    second_D = rng.normal(size=2)

    # Per dimension; the dimensions are independent.
    between = 2.0 / 2
    first = between + (0.3 + 1.2 / first_count) / 2
    second = between + (0.3 + 1.2 / second_count) / 2
    expected = 0.0
    for pair in zip(first_D, second_D):
        together = [[first, between], [between, second]]
        apart = [[first, 0], [0, second]]
        expected += multivariate_normal(cov=together).logpdf(pair)
        expected -= multivariate_normal(cov=apart).logpdf(pair)
    ratio = log_ratio(
        dot=first_D @ second_D,
        first_square=first_D @ first_D,
        second_square=second_D @ second_D,
        first_count=first_count,
        second_count=second_count,
        spread=spread,
        dim=2,
    )
    assert ratio == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1])
def test_wrong_labels_are_found(share):
    num_wrong = 0
    num_wrong_suspects = 0
    num_good = 0
    num_good_suspects = 0
    for seed in range(5):
        unit_ND, speaker_N = make_speakers(60, 6, seed=seed)
        num_utterances = len(speaker_N)
        rng = np.random.default_rng([seed, 1])
        wrong = rng.choice(num_utterances, round(share * num_utterances), replace=False)
        judgement = judge(unit_ND, move(speaker_N, wrong, seed=seed), far=0.01)
        suspects = suspects_of(judgement)
        is_wrong = np.isin(suspects, wrong)
        num_wrong += len(wrong)
        num_wrong_suspects += np.count_nonzero(is_wrong)
        num_good += num_utterances - len(wrong)
        num_good_suspects += np.count_nonzero(~is_wrong)
    assert num_wrong_suspects >= 0.95 * num_wrong
    assert num_good_suspects <= 0.01 * num_good


def test_the_nearest_speaker_is_the_right_one():
    unit_ND, speaker_N = make_speakers(20, 6)
    wrong = np.array([3, 50, 77])
    judgement = judge(unit_ND, move(speaker_N, wrong), far=0.01)
    assert suspects_of(judgement) == wrong.tolist()
    assert judgement.nearest_speaker_N[wrong].tolist() == speaker_N[wrong].tolist()
    assert (judgement.other_score_N[wrong] > judgement.threshold).all()


def test_two_wrong_utterances_of_one_person_are_found():
    """They are alike, and two of five in the mean that they are compared with."""
    unit_ND, speaker_N = make_speakers(30, 5)
    label_N = speaker_N.copy()
    wrong = [5, 6]  # of speaker 1
    label_N[wrong] = 0
    judgement = judge(unit_ND, label_N, far=0.01)
    assert suspects_of(judgement) == wrong


def test_of_two_utterances_the_wrong_one_is_found():
    """Each is unlike the other, but only one is like another speaker."""
    unit_ND, speaker_N = make_speakers(40, 6)
    is_left_N = np.ones(len(speaker_N), dtype=bool)
    is_left_N[2:6] = False  # two utterances of speaker 0 remain
    label_N = speaker_N.copy()
    label_N[1] = 0
    unit_ND[1] = unit_ND[200]  # the voice of another speaker
    unit_ND[200] = unit_ND[199]
    judgement = judge(unit_ND[is_left_N], label_N[is_left_N], far=0.01)
    assert suspects_of(judgement) == [1]
    assert np.isnan(judgement.own_score_N[0])  # nothing is left to compare it with


def test_split_speakers_are_found_and_are_not_other_speakers():
    unit_ND, speaker_N = make_speakers(40, 8)
    label_N = speaker_N.copy()
    for new, speaker in enumerate([3, 17]):
        rows = np.flatnonzero(speaker_N == speaker)
        label_N[rows[4:]] = 40 + new
    judgement = judge(unit_ND, label_N, far=0.01)
    pairs = {(pair.first, pair.second) for pair in judgement.pairs}
    assert pairs == {(3, 40), (17, 41)}
    # Half of their utterances are nearer to the other half of the same person.
    for speaker, new in pairs:
        of_split = speaker_N == speaker
        assert not judgement.is_suspect_N[of_split].any()
        assert not np.isin(judgement.nearest_speaker_N[of_split], [speaker, new]).any()


def test_weak_embeddings_give_few_pairs():
    """The halves of a speaker are hardly more alike than two speakers."""
    num_pairs = 0
    for seed in range(5):
        unit_ND, speaker_N = make_speakers(60, 6, seed=seed, noise=2.5)
        judgement = judge(unit_ND, speaker_N, far=0.01)
        num_pairs += len(judgement.pairs)
        assert judgement.pair_threshold >= np.log(60 * 59 / 2)
    assert num_pairs <= 10


def test_too_few_speakers_with_halves_give_no_pairs():
    unit_ND, speaker_N = make_speakers(4, 8)
    judgement = judge(unit_ND, speaker_N, far=0.01)
    assert judgement.pair_threshold is None
    assert judgement.pairs == []


def test_the_smallest_set_is_judged():
    """Two speakers with two utterances each."""
    unit_ND, speaker_N = make_speakers(2, 2)
    judgement = judge(unit_ND, speaker_N, far=0.01)
    assert suspects_of(judgement) == []
    assert np.isfinite(judgement.own_score_N).all()


@pytest.mark.parametrize("share", [0.0, 0.03, 0.2])
def test_the_threshold_is_that_of_the_good_scores(share):
    rng = np.random.default_rng(0)
    good = rng.normal(10, 3, size=10_000)
    drawn_M = rng.normal(-10, 5, size=100_000)
    num_wrong = round(share * len(good))
    own_N = np.concatenate([good, rng.normal(-10, 5, size=num_wrong)])
    threshold = find_threshold(own_N, drawn_M, far=0.01)
    assert 0.005 <= np.mean(good < threshold) <= 0.02


def test_labels_without_meaning_are_refused():
    unit_ND, speaker_N = make_speakers(20, 5)
    rng = np.random.default_rng(0)
    with refuses("labels", "%"):
        judge(unit_ND, rng.permutation(speaker_N), far=0.01)


def test_groups_of_pairs():
    unit_ND, speaker_N = make_speakers(10, 12)
    label_N = speaker_N.copy()
    label_N[4:8] = 10
    label_N[8:12] = 11  # speaker 0 has three ids
    judgement = judge(unit_ND, label_N, far=0.01)
    group_S = group_speakers(judgement.pairs, 12)
    assert group_S[0] == group_S[10] == group_S[11]
    assert len(set(group_S.tolist())) == 10
