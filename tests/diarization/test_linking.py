"""Linking of speakers: weighted average linkage with pairs that stay apart, purity, coverage."""

import numpy as np
import pytest
from refusals import refuses
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.sparse import coo_array, csr_array

from speakerlab.diarization import linking
from speakerlab.diarization.ahc import merge_weighted
from speakerlab.diarization.linking import link_speakers, purity_and_coverage
from speakerlab.diarization.regions import Turn

DIM = 32


def draw(
    seed: int, num_recordings: int, num_people: int, *, between: float = 0.5
) -> tuple[np.ndarray, np.ndarray, csr_array]:
    """Return unit_ND, person_N and the sparse (N, R) of two to four people in each recording.

    between: share of the variance between people; the rest is noise within them.
    """
    rng = np.random.default_rng([seed, num_recordings, num_people])
    voice_PD = rng.normal(size=(num_people, DIM))
    people: list[int] = []
    recordings: list[int] = []
    for recording in range(num_recordings):
        present = rng.choice(num_people, rng.integers(2, 5), replace=False)
        people += present.tolist()
        recordings += [recording] * len(present)
    # `between` is the share of the variance between people, the rest is within them.
    noise_ND = rng.normal(size=(len(people), DIM))
    voice_ND = voice_PD[people]
    emb_ND = np.sqrt(between) * voice_ND + np.sqrt(1 - between) * noise_ND
    norm_N1 = np.linalg.norm(emb_ND, axis=1, keepdims=True)
    return emb_ND / norm_N1, np.array(people), apart_in(recordings)


def apart_in(recordings: list[int]) -> csr_array:
    """Return the sparse (N, R) with a 1 in the column of each speaker's recording."""
    num_speakers = len(recordings)
    rows = np.arange(num_speakers)
    return coo_array((np.ones(num_speakers), (rows, recordings))).tocsr()


def nothing_apart(num_speakers: int) -> csr_array:
    return csr_array((num_speakers, 1))


def renumbered(group_N: np.ndarray) -> list[int]:
    """Return groups numbered by appearance, to compare partitions."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(group, len(numbers)) for group in group_N.tolist()]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5])
def test_without_weights_and_recordings_it_is_average_linkage(seed, threshold):
    unit_ND, _, _ = draw(seed, 20, 8)
    distance_NN = 1 - unit_ND @ unit_ND.T
    tree = linkage(distance_NN[np.triu_indices(len(unit_ND), k=1)], method="average")
    expected_N = fcluster(tree, 1 - threshold, criterion="distance")
    found_N = link_speakers(
        unit_ND,
        np.ones(len(unit_ND)),
        nothing_apart(len(unit_ND)),
        threshold=threshold,
    )
    assert renumbered(found_N) == renumbered(expected_N)


def test_a_speaker_with_twice_the_seconds_counts_as_two():
    unit_ND, _, _ = draw(3, 12, 6)
    weight_N = np.random.default_rng(0).integers(1, 4, size=len(unit_ND))
    copied = np.repeat(np.arange(len(unit_ND)), weight_N)
    copies_ND = unit_ND[copied]
    expected_N = link_speakers(
        copies_ND,
        np.ones(len(copied)),
        nothing_apart(len(copied)),
        threshold=0.3,
        start_N=copied,  # copies are one from the start
    )
    # Weights 3, 1 and 2 have their first copies at 0, 3 and 4.
    first_copy_N = np.cumsum(weight_N) - weight_N
    found_N = link_speakers(
        unit_ND,
        weight_N.astype(float),
        nothing_apart(len(unit_ND)),
        threshold=0.3,
    )
    assert renumbered(found_N) == renumbered(expected_N[first_copy_N])


def test_weights_decide_who_is_linked():
    # The first and the second are one person. The third is like the first, not like the second.
    cosine_NN = np.array(
        [
            [1.0, 0.9, 0.6],
            [0.9, 1.0, 0.2],
            [0.6, 0.2, 1.0],
        ]
    )
    threshold = 0.45
    # The third has a mean cosine of (0.6 + 0.2) / 2 = 0.4 with the two.
    equal_seconds_N = np.array([1.0, 1.0, 1.0])
    group_N = merge_weighted(cosine_NN, equal_seconds_N, threshold=threshold)
    assert group_N.tolist() == [0, 0, 1]
    # It has (3 * 0.6 + 0.2) / 4 = 0.5 if the first speaks three times as long.
    seconds_N = np.array([3.0, 1.0, 1.0])
    group_N = merge_weighted(cosine_NN, seconds_N, threshold=threshold)
    assert group_N.tolist() == [0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_the_people_are_found(seed):
    unit_ND, person_N, apart = draw(seed, 60, 12, between=0.8)
    rng = np.random.default_rng(seed)
    seconds_N = rng.uniform(3, 60, size=len(unit_ND))
    group_N = link_speakers(unit_ND, seconds_N, apart, threshold=0.45)
    assert renumbered(group_N) == renumbered(person_N)


def test_speakers_of_one_recording_stay_apart():
    unit_ND, _, apart = draw(0, 30, 6)
    seconds_N = np.ones(len(unit_ND))
    recording_N = apart.indices
    # At such a threshold all would be one.
    group_N = link_speakers(unit_ND, seconds_N, apart, threshold=-1.0)
    pairs = set(zip(group_N.tolist(), recording_N.tolist()))
    assert len(pairs) == len(unit_ND)
    everyone = link_speakers(
        unit_ND, seconds_N, nothing_apart(len(unit_ND)), threshold=-1.0
    )
    assert set(everyone.tolist()) == {0}


@pytest.mark.parametrize("threshold", [0.2, 0.4])
def test_components_change_nothing(threshold, monkeypatch):
    unit_ND, _, apart = draw(1, 80, 15)
    seconds_N = np.random.default_rng(1).uniform(1, 9, size=len(unit_ND))
    monkeypatch.setattr(linking, "VALUES_AT_ONCE", 700)  # several blocks
    group_N = link_speakers(unit_ND, seconds_N, apart, threshold=threshold)
    cosine_NN = unit_ND @ unit_ND.T
    shared = coo_array(apart @ apart.T)
    cosine_NN[shared.row, shared.col] = -np.inf
    expected_N = merge_weighted(cosine_NN, seconds_N, threshold=threshold)
    assert renumbered(group_N) == renumbered(expected_N)


def test_the_number_of_people_may_be_given():
    unit_ND, person_N, apart = draw(5, 40, 7, between=0.7)
    group_N = link_speakers(
        unit_ND, np.ones(len(unit_ND)), apart, threshold=0.99, num_groups=7
    )
    assert renumbered(group_N) == renumbered(person_N)


def test_of_no_speakers_there_are_no_groups():
    group_N = link_speakers(
        np.zeros((0, DIM)), np.zeros(0), csr_array((0, 1)), threshold=0.5
    )
    assert group_N.shape == (0,)


def test_purity_and_coverage_of_turns():
    reference = {
        "a": [Turn(0, 10, "Ann"), Turn(10, 14, "Bob")],
        "b": [Turn(0, 6, "Ann")],
    }
    hypothesis = {
        # One second of Bob goes to the speaker who is mostly Ann, and 5 to 6 s to nobody.
        "a": [Turn(0, 5, "x"), Turn(6, 11, "x"), Turn(11, 20, "y")],
        "b": [Turn(0, 6, "z")],
    }
    purity, coverage = purity_and_coverage(reference, hypothesis)
    # x speaks for 10 s and has 9 of Ann, y 9 s and 3 of Bob, z 6 s of Ann.
    assert purity == pytest.approx((9 + 3 + 6) / 25)
    # Ann speaks for 16 s and has 9 of x, Bob 4 s and 3 of y.
    assert coverage == pytest.approx((9 + 3) / 20)
    assert purity_and_coverage(reference, reference) == (1.0, 1.0)
    with refuses("purity"):
        purity_and_coverage(reference, {"a": []})
