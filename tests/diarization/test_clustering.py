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
from speakerlab.diarization.clustering import METHODS, cluster, drop_tiny, merge_groups
from speakerlab.diarization.spectral import Spectral, divide
from speakerlab.diarization.vbx import Vbx

TESTS = Path(__file__).parent


def vbx() -> Vbx:
    """The model that conversations are drawn from, but for unit lengths and the mean."""
    dim, between, within = 64, 0.4 / 64, 0.5 / 64
    return Vbx(
        mean_D=np.zeros(dim),
        transform_DD=np.eye(dim) / np.sqrt(within),
        psi_D=np.full(dim, between / within),
    )


METHODS_TESTED = [Spectral(), Ahc(threshold=0.3), vbx()]
IDS = ["spectral", "ahc", "vbx"]
if outside.KIND == "clustering":
    METHODS_TESTED, IDS = [METHODS[outside.NAME](**outside.ARGS)], ["outside"]
each_method = pytest.mark.parametrize("method", METHODS_TESTED, ids=IDS)


def parts(*sizes: int, seed: int = 0) -> np.ndarray:
    """Embeddings of speakers with these numbers of windows, one after the other."""
    speaker_N = np.repeat(np.arange(len(sizes)), sizes)
    return embed(np.random.default_rng(seed), np.eye(len(sizes))[speaker_N])


def test_every_method_of_the_registry_is_tested():
    assert {type(method) for method in METHODS_TESTED} == set(METHODS.values())


@each_method
@pytest.mark.parametrize("num_speakers", [1, 2, 3, 4, 6])
def test_speakers_of_a_conversation_are_found(method, num_speakers):
    talk = converse(1, num_speakers)
    found, again = cluster(talk.emb_ND, method), cluster(talk.emb_ND, method)
    assert np.array_equal(found.cosine_NK, again.cosine_NK)
    assert found.centre_KD.shape == (num_speakers, 64)
    assert found.speaker_N[0] == 0
    assert agreement(found.speaker_N, talk.speaker_N) > 0.95
    own_N = found.cosine_NK[np.arange(len(talk.windows)), found.speaker_N]
    assert np.mean(own_N == found.cosine_NK.max(axis=1)) > 0.98


@pytest.mark.slow
def test_spectral_finds_the_number_of_speakers_of_most_conversations():
    talks = [(converse(seed, 1 + seed % 8), 1 + seed % 8) for seed in range(40)]
    right = [len(cluster(talk.emb_ND, Spectral()).centre_KD) == num for talk, num in talks]
    assert np.mean(right) >= 0.95


@each_method
def test_hours_are_clustered_through_a_sample(method):
    emb_ND = parts(3000, 1500, 150)
    found = cluster(emb_ND, method)
    assert np.bincount(found.speaker_N).tolist() == [3000, 1500, 150]


@each_method
@pytest.mark.parametrize("num_speakers", [1, 2, 5])
def test_a_given_number_of_speakers_is_found(method, num_speakers):
    talk = converse(2, 3)
    found = cluster(talk.emb_ND, method, min_speakers=num_speakers, max_speakers=num_speakers)
    assert len(np.unique(found.speaker_N)) == num_speakers


@each_method
def test_the_number_of_speakers_is_bounded(method):
    talk = converse(3, 4)
    few = cluster(talk.emb_ND, method, max_speakers=2)
    many = cluster(talk.emb_ND, method, min_speakers=6, max_speakers=8)
    assert len(few.centre_KD) <= 2
    assert 6 <= len(many.centre_KD) <= 8


@each_method
def test_fifty_speakers(method):
    emb_ND = parts(*[20] * 50)
    assert len(cluster(emb_ND, method).centre_KD) <= clustering.MAX_SPEAKERS
    found = cluster(emb_ND, method, min_speakers=50, max_speakers=60)
    assert len(found.centre_KD) == 50
    assert agreement(found.speaker_N, np.repeat(np.arange(50), 20)) > 0.98


def test_spectral_does_not_join_more_speakers_than_allowed_into_one():
    found = cluster(parts(*[20] * 30), Spectral())
    assert len(found.centre_KD) > 0.5 * clustering.MAX_SPEAKERS


@each_method
@pytest.mark.parametrize("num_windows", [0, 1, 2, 3, 6])
def test_a_few_windows_are_one_speaker(method, num_windows):
    found = cluster(parts(num_windows), method)
    assert found.speaker_N.tolist() == [0] * num_windows
    assert found.centre_KD.shape == (min(num_windows, 1), 64)


@pytest.mark.parametrize("sizes", [(14, 5), (12, 3), (18, 4, 3)])
def test_spectral_finds_who_says_little_in_a_short_recording(sizes):
    found = [len(cluster(parts(*sizes, seed=seed), Spectral()).centre_KD) for seed in range(20)]
    assert found.count(len(sizes)) >= 18


@pytest.mark.parametrize(("seed", "variance"), [(3, 0.25), (27, 0.4)])
def test_spectral_takes_no_turn_for_another_speaker(seed, variance):
    """Windows of one turn are more alike than other windows of its speaker."""
    talk, rng = converse(seed, 5), np.random.default_rng(seed)
    turn_ND = rng.normal(size=(len(talk.turns) + 1, 64)) * np.sqrt(variance / 64)
    middles = [(start + end) / 2 for start, end in talk.windows]
    turn_N = np.searchsorted([turn.start for turn in talk.turns], middles)
    emb_ND = talk.emb_ND + turn_ND[turn_N].astype(np.float32)
    assert len(cluster(emb_ND, Spectral()).centre_KD) == 5


def test_windows_of_groups_that_are_dropped_are_counted():
    def divide(unit_ND: np.ndarray, least: int, most: int) -> np.ndarray:
        return np.repeat([0, 1, 2, -1], [30, 25, 4, 1])  # -1: outside of the sample

    assert cluster(parts(30, 25, 5), divide).num_dropped == 4
    assert cluster(parts(30, 25, 5), divide, min_speakers=3).num_dropped == 0


@each_method
def test_a_few_windows_of_a_given_number_of_speakers(method):
    found = cluster(parts(3, 3, 3), method, min_speakers=3, max_speakers=3)
    assert found.speaker_N.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    all_apart = cluster(parts(1, 1, 1), method, min_speakers=3, max_speakers=3)
    assert all_apart.speaker_N.tolist() == [0, 1, 2]


@each_method
def test_equal_windows_are_one_speaker(method):
    emb_ND = np.tile(parts(1), (30, 1))  # the cosine of some is above 1 by rounding
    assert cluster(emb_ND, method).speaker_N.tolist() == [0] * 30


def test_impossible_numbers_and_embeddings_are_refused():
    emb_ND = parts(6)
    with refuses("speakers", 3, 2):
        cluster(emb_ND, Spectral(), min_speakers=3, max_speakers=2)
    with refuses("speakers", 0):
        cluster(emb_ND, Spectral(), min_speakers=0)
    with refuses("speakers", 7, 6):
        cluster(emb_ND, Spectral(), min_speakers=7, max_speakers=7)
    emb_ND[4, 2] = np.nan
    with refuses("embeddings", 4, "nan"):
        cluster(emb_ND, Spectral())
    emb_ND[4] = 0
    with refuses("embeddings", 4, 0):
        cluster(emb_ND, Spectral())


def test_tiny_groups_are_dropped_unless_they_are_needed():
    group_N = np.repeat([3, 7, 1, 0, -1], [4, 19, 22, 2, 5])
    assert drop_tiny(group_N, 1).tolist() == [-1] * 4 + [1] * 19 + [0] * 22 + [-1] * 7
    assert drop_tiny(group_N, 3).tolist() == [2] * 4 + [1] * 19 + [0] * 22 + [-1] * 7
    short_N = group_N[19:]  # of 33 windows, 3 are enough
    assert drop_tiny(short_N, 1).tolist() == [1] * 4 + [0] * 22 + [-1] * 7


def test_groups_of_one_voice_are_merged():
    emb_ND = parts(40, 20)
    unit_ND = emb_ND / np.linalg.norm(emb_ND, axis=1, keepdims=True)
    group_N = np.repeat([0, 1, 2, -1], [20, 20, 15, 5])
    merged_N = merge_groups(unit_ND, group_N, 1)
    assert merged_N.tolist() == [0] * 40 + [1] * 15 + [-1] * 5
    assert merge_groups(unit_ND, group_N, 3).tolist() == group_N.tolist()


def test_windows_of_tiny_groups_show_that_others_are_of_one_voice():
    emb_ND = parts(60)
    emb_ND += 0.1 * np.random.default_rng(1).normal(size=emb_ND.shape)

    def divide(unit_ND: np.ndarray, least: int, most: int) -> np.ndarray:
        return np.concatenate([np.repeat([0, 1], 5), np.arange(2, 52)])

    assert len(cluster(emb_ND[:10], lambda *_: np.repeat([0, 1], 5)).centre_KD) == 2
    assert len(cluster(emb_ND, divide).centre_KD) == 1


def test_disjoint_graphs_are_divided_exactly():
    joined = np.zeros((9, 9))
    for rows in ([0, 3, 6], [1, 4, 7], [2, 5, 8]):
        joined[np.ix_(rows, rows)] = 1.0
    laplacian = np.diag(joined.sum(axis=1)) - joined
    group_N = divide(laplacian, 3)
    assert group_N[:3].tolist() == group_N[3:6].tolist() == group_N[6:].tolist()
    assert sorted(group_N[:3].tolist()) == [0, 1, 2]


def test_the_threshold_of_ahc_decides():
    talk = converse(1, 3)
    assert len(cluster(talk.emb_ND, Ahc(threshold=-0.9)).centre_KD) == 1
    assert len(cluster(talk.emb_ND, Ahc(threshold=0.3)).centre_KD) == 3


def test_vbx_keeps_only_the_speakers_that_explain_windows():
    rng = np.random.default_rng(0)
    psi_D = np.full(8, 4.0)
    voice_KD = rng.normal(size=(2, 8)) * np.sqrt(psi_D)
    true_N = rng.integers(2, size=60)
    u_ND = voice_KD[true_N] + rng.normal(size=(60, 8))
    start_NK = rng.dirichlet(np.ones(5), size=60)
    vbx = Vbx(mean_D=np.zeros(8), transform_DD=np.eye(8), psi_D=psi_D, fa=1.0)
    post_NK = vbx.posteriors(u_ND, start_NK)
    assert post_NK.shape == (60, 2)
    np.testing.assert_allclose(post_NK.sum(axis=1), 1.0)
    assert agreement(post_NK.argmax(axis=1), true_N) == 1.0


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


def test_equal_for_any_number_of_threads():
    path = os.pathsep.join([str(TESTS.parent), *sys.path])
    texts = set()
    for threads in ("1", "2"):
        more = {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "PYTHONPATH": path}
        words = [sys.executable, "-c", CODE.format(tests=str(TESTS))]
        texts.add(subprocess.check_output(words, env={**os.environ, **more}))
    assert len(texts) == 1
    assert len(texts.pop().split()) == len(METHODS_TESTED)
