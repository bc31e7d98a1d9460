"""Speakers of windows: their number, who they are, limits, bad input, equal for any threads."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import outside
import pytest
from conversations import agreement, converse, embed
from refusals import refuses

from speakerlab.diarization import clustering
from speakerlab.diarization.ahc import Ahc
from speakerlab.diarization.clustering import (
    METHODS,
    cluster,
    drop_tiny,
    merge_groups,
    number_by_appearance,
)
from speakerlab.diarization.spectral import Spectral, divide
from speakerlab.diarization.vbx import Vbx

TESTS = Path(__file__).parent


def vbx() -> Vbx:
    """The model that conversations are drawn from, but for unit lengths and the mean."""
    dim = 64
    between = 0.4 / 64
    within = 0.5 / 64
    return Vbx(
        mean_D=np.zeros(dim),
        transform_DD=np.eye(dim) / np.sqrt(within),
        psi_D=np.full(dim, between / within),
    )


METHODS_TESTED = [Spectral(), Ahc(threshold=0.3), vbx()]
IDS = ["spectral", "ahc", "vbx"]
if outside.KIND == "clustering":
    METHODS_TESTED = [METHODS[outside.NAME](**outside.ARGS)]
    IDS = ["outside"]
each_method = pytest.mark.parametrize("method", METHODS_TESTED, ids=IDS)


def parts(*sizes: int, seed: int = 0) -> np.ndarray:
    """Embeddings of speakers with these numbers of windows, one after the other."""
    num_speakers = len(sizes)
    speaker_N = np.repeat(np.arange(num_speakers), sizes)
    share_NK = np.eye(num_speakers)[speaker_N]
    rng = np.random.default_rng(seed)
    return embed(rng, share_NK)


def test_every_method_of_the_registry_is_tested():
    tested = {type(method) for method in METHODS_TESTED}
    registered = set(METHODS.values())
    assert tested == registered


@each_method
@pytest.mark.parametrize("num_speakers", [1, 2, 3, 4, 6])
def test_speakers_of_a_conversation_are_found(method, num_speakers):
    talk = converse(1, num_speakers)
    label_N = cluster(talk.emb_ND, method)
    again = cluster(talk.emb_ND, method)
    assert np.array_equal(label_N.cosine_NK, again.cosine_NK)
    assert label_N.centre_KD.shape == (num_speakers, 64)
    assert label_N.speaker_N[0] == 0
    assert agreement(label_N.speaker_N, talk.speaker_N) > 0.95

    # the speaker of nearly every window is the speaker with the nearest centre
    num_windows = len(talk.windows)
    rows = np.arange(num_windows)
    speaker_cosine_N = label_N.cosine_NK[rows, label_N.speaker_N]
    nearest_cosine_N = label_N.cosine_NK.max(axis=1)
    is_nearest_N = speaker_cosine_N == nearest_cosine_N
    assert np.mean(is_nearest_N) > 0.98


@pytest.mark.slow
def test_spectral_finds_the_number_of_speakers_of_most_conversations():
    is_right = []
    for seed in range(40):
        num_speakers = 1 + seed % 8
        talk = converse(seed, num_speakers)
        label_N = cluster(talk.emb_ND, Spectral())
        is_right.append(len(label_N.centre_KD) == num_speakers)
    assert np.mean(is_right) >= 0.95


@each_method
def test_hours_are_clustered_through_a_sample(method):
    emb_ND = parts(3000, 1500, 150)
    label_N = cluster(emb_ND, method)
    num_windows_K = np.bincount(label_N.speaker_N)
    assert num_windows_K.tolist() == [3000, 1500, 150]


@each_method
@pytest.mark.parametrize("num_speakers", [1, 2, 5])
def test_a_given_number_of_speakers_is_found(method, num_speakers):
    talk = converse(2, 3)
    label_N = cluster(
        talk.emb_ND, method, min_speakers=num_speakers, max_speakers=num_speakers
    )
    speakers = np.unique(label_N.speaker_N)
    assert len(speakers) == num_speakers


@each_method
def test_the_number_of_speakers_is_bounded(method):
    talk = converse(3, 4)
    at_most_2 = cluster(talk.emb_ND, method, max_speakers=2)
    assert len(at_most_2.centre_KD) <= 2

    from_6_to_8 = cluster(
        talk.emb_ND,
        method,
        min_speakers=6,
        max_speakers=8,
    )
    assert 6 <= len(from_6_to_8.centre_KD) <= 8


@pytest.mark.slow
@each_method
def test_fifty_speakers(method):
    sizes = [20] * 50
    emb_ND = parts(*sizes)

    by_default = cluster(emb_ND, method)
    assert len(by_default.centre_KD) <= clustering.MAX_SPEAKERS

    label_N = cluster(
        emb_ND,
        method,
        min_speakers=50,
        max_speakers=60,
    )
    assert len(label_N.centre_KD) == 50
    true_N = np.repeat(range(50), 20)
    assert agreement(label_N.speaker_N, true_N) > 0.98


def test_spectral_does_not_join_more_speakers_than_allowed_into_one():
    sizes = [20] * 30
    label_N = cluster(parts(*sizes), Spectral())
    assert len(label_N.centre_KD) > 0.5 * clustering.MAX_SPEAKERS


@each_method
@pytest.mark.parametrize("num_windows", [0, 1, 2, 3, 6])
def test_a_few_windows_are_one_speaker(method, num_windows):
    label_N = cluster(parts(num_windows), method)
    assert len(label_N.speaker_N) == num_windows
    assert np.all(label_N.speaker_N == 0)
    expected_speakers = min(num_windows, 1)
    assert label_N.centre_KD.shape == (expected_speakers, 64)


@pytest.mark.parametrize("sizes", [(14, 5), (12, 3), (18, 4, 3)])
def test_spectral_finds_who_says_little_in_a_short_recording(sizes):
    num_speakers = []
    for seed in range(20):
        emb_ND = parts(*sizes, seed=seed)
        label_N = cluster(emb_ND, Spectral())
        num_speakers.append(len(label_N.centre_KD))
    assert num_speakers.count(len(sizes)) >= 18


@pytest.mark.parametrize(("seed", "variance"), [(3, 0.25), (27, 0.4)])
def test_spectral_takes_no_turn_for_another_speaker(seed, variance):
    """Windows of one turn are more alike than other windows of its speaker."""
    talk = converse(seed, 5)
    rng = np.random.default_rng(seed)
    num_offsets = len(talk.turns) + 1
    turn_ND = rng.normal(size=(num_offsets, 64))
    turn_ND *= np.sqrt(variance / 64)

    # every window gets the offset of the turn in its middle
    middles = [(start + end) / 2 for start, end in talk.windows]
    starts = [turn.start for turn in talk.turns]
    turn_N = np.searchsorted(starts, middles)
    offset_ND = turn_ND[turn_N].astype(np.float32)
    emb_ND = talk.emb_ND + offset_ND
    label_N = cluster(emb_ND, Spectral())
    assert len(label_N.centre_KD) == 5


def test_windows_of_groups_that_are_dropped_are_counted():
    def divide(unit_ND: np.ndarray, least: int, most: int) -> np.ndarray:
        # -1: outside of the sample
        groups = [0, 1, 2, -1]
        sizes = [30, 25, 4, 1]
        return np.repeat(groups, sizes)

    emb_ND = parts(30, 25, 5)
    label_N = cluster(emb_ND, divide)
    assert label_N.num_dropped == 4
    label_N = cluster(emb_ND, divide, min_speakers=3)
    assert label_N.num_dropped == 0


@each_method
def test_a_few_windows_of_a_given_number_of_speakers(method):
    three_each_ND = parts(3, 3, 3)
    label_N = cluster(
        three_each_ND,
        method,
        min_speakers=3,
        max_speakers=3,
    )
    assert label_N.speaker_N.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]

    one_each_ND = parts(1, 1, 1)
    label_N = cluster(
        one_each_ND,
        method,
        min_speakers=3,
        max_speakers=3,
    )
    assert label_N.speaker_N.tolist() == [0, 1, 2]


@each_method
def test_equal_windows_are_one_speaker(method):
    # the cosine of some pairs is above 1 by rounding
    emb_ND = np.tile(parts(1), (30, 1))
    label_N = cluster(emb_ND, method)
    assert label_N.speaker_N.tolist() == [0] * 30


def test_impossible_numbers_and_embeddings_are_refused():
    emb_ND = parts(6)
    with refuses("speakers", 3, 2):
        cluster(emb_ND, Spectral(), min_speakers=3, max_speakers=2)
    with refuses("speakers", 0):
        cluster(emb_ND, Spectral(), min_speakers=0)
    # The command has no option for shorter windows.
    with refuses("speakers", 7, 6, "lower the number", "in Python", "window_seconds"):
        cluster(emb_ND, Spectral(), min_speakers=7, max_speakers=7)
    emb_ND[4, 2] = np.nan
    with refuses("embeddings", 4, "nan"):
        cluster(emb_ND, Spectral())
    emb_ND[4] = 0
    with refuses("embeddings", 4, 0):
        cluster(emb_ND, Spectral())


def test_tiny_groups_are_dropped_unless_they_are_needed():
    sizes = [4, 19, 22, 2, 5]
    group_N = np.repeat([3, 7, 1, 0, -1], sizes)
    dropped_N = drop_tiny(group_N, 1)
    expected_N = np.repeat([-1, 1, 0, -1, -1], sizes)
    assert dropped_N.tolist() == expected_N.tolist()

    # Three speakers are required, so the largest of the tiny groups stays.
    dropped_N = drop_tiny(group_N, 3)
    expected_N = np.repeat([2, 1, 0, -1, -1], sizes)
    assert dropped_N.tolist() == expected_N.tolist()

    # Of 33 windows, 3 are enough: a tenth.
    short_sizes = [4, 22, 2, 5]
    short_N = np.repeat([7, 1, 0, -1], short_sizes)
    dropped_N = drop_tiny(short_N, 1)
    expected_N = np.repeat([1, 0, -1, -1], short_sizes)
    assert dropped_N.tolist() == expected_N.tolist()


def test_groups_are_numbered_by_appearance():
    group_N = np.array([7, 3, 7, 5, 3])
    assert number_by_appearance(group_N).tolist() == [0, 1, 0, 2, 1]


def test_groups_of_one_voice_are_merged():
    emb_ND = parts(40, 20)
    length_N = np.linalg.norm(emb_ND, axis=1, keepdims=True)
    unit_ND = emb_ND / length_N
    # 40 windows of the first speaker in two groups, -1: of no group
    groups = [0, 1, 2, -1]
    sizes = [20, 20, 15, 5]
    group_N = np.repeat(groups, sizes)

    merged_N = merge_groups(unit_ND, group_N, 1)
    expected = [0] * 40 + [1] * 15 + [-1] * 5
    assert merged_N.tolist() == expected

    merged_N = merge_groups(unit_ND, group_N, 3)
    assert merged_N.tolist() == group_N.tolist()


def test_windows_of_tiny_groups_show_that_others_are_of_one_voice():
    emb_ND = parts(60)
    rng = np.random.default_rng(1)
    emb_ND += 0.1 * rng.normal(size=emb_ND.shape)

    two_groups_N = np.repeat([0, 1], 5)

    def divide_two(unit_ND: np.ndarray, least: int, most: int) -> np.ndarray:
        return two_groups_N

    def divide_all(unit_ND: np.ndarray, least: int, most: int) -> np.ndarray:
        tiny_groups_N = np.arange(2, 52)
        return np.concatenate([two_groups_N, tiny_groups_N])

    without_tiny = cluster(emb_ND[:10], divide_two)
    assert len(without_tiny.centre_KD) == 2
    with_tiny = cluster(emb_ND, divide_all)
    assert len(with_tiny.centre_KD) == 1


def test_disjoint_graphs_are_divided_exactly():
    joined = np.zeros((9, 9))
    graphs = [
        [0, 3, 6],
        [1, 4, 7],
        [2, 5, 8],
    ]
    for rows in graphs:
        joined[np.ix_(rows, rows)] = 1.0
    degree = np.diag(joined.sum(axis=1))
    laplacian = degree - joined
    group_N = divide(laplacian, 3)
    first, second, third = group_N.reshape(3, 3).tolist()
    assert first == second
    assert second == third
    assert sorted(first) == [0, 1, 2]


def test_the_threshold_of_ahc_decides():
    talk = converse(1, 3)
    low_threshold = Ahc(threshold=-0.9)
    joined = cluster(talk.emb_ND, low_threshold)
    assert len(joined.centre_KD) == 1

    high_threshold = Ahc(threshold=0.3)
    apart = cluster(talk.emb_ND, high_threshold)
    assert len(apart.centre_KD) == 3


def test_vbx_keeps_only_the_speakers_that_explain_windows():
    rng = np.random.default_rng(0)
    psi_D = np.full(8, 4.0)
    voice_KD = rng.normal(size=(2, 8))
    voice_KD *= np.sqrt(psi_D)
    true_N = rng.integers(2, size=60)
    within_ND = rng.normal(size=(60, 8))
    u_ND = voice_KD[true_N] + within_ND
    concentration_K = np.ones(5)
    start_NK = rng.dirichlet(concentration_K, size=60)
    vbx = Vbx(
        mean_D=np.zeros(8),
        transform_DD=np.eye(8),
        psi_D=psi_D,
        fa=1.0,
    )

    # two of the five speakers of the start remain
    post_NK = vbx.posteriors(u_ND, start_NK)
    assert post_NK.shape == (60, 2)
    sum_N = post_NK.sum(axis=1)
    np.testing.assert_allclose(sum_N, 1.0)
    speaker_N = post_NK.argmax(axis=1)
    assert agreement(speaker_N, true_N) == 1.0


CODE = """
import sys
sys.path.insert(0, {tests!r})
from conversations import converse
from test_clustering import METHODS_TESTED
from speakerlab.diarization.clustering import cluster
for method in METHODS_TESTED:
    found = cluster(converse(5, 5).emb_ND, method)
    print(found.speaker_N.tobytes().hex())
"""


@pytest.mark.slow
def test_equal_for_any_number_of_threads():
    folders = [str(TESTS.parent), *sys.path]
    path = os.pathsep.join(folders)
    code = CODE.format(tests=str(TESTS))
    arguments = [sys.executable, "-c", code]
    texts = set()
    for threads in ("1", "2"):
        environment = {
            **os.environ,
            "OPENBLAS_NUM_THREADS": threads,
            "OMP_NUM_THREADS": threads,
            "PYTHONPATH": path,
        }
        text = subprocess.check_output(arguments, env=environment)
        texts.add(text)
    assert len(texts) == 1
    lines = texts.pop().split()
    assert len(lines) == len(METHODS_TESTED)
