"""Chains of steps: what each makes of scores, what is refused, and what is reported."""

import numpy as np
import pytest
from gaussian_speakers import MODEL, all_pairs, draw
from refusals import refuses

from speakerlab.scoring.bootstrap import bootstrap
from speakerlab.scoring.chain import Chain, Development, Scored, build_chain
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.metrics import eer
from speakerlab.scoring.minima import TooFewError
from speakerlab.scoring.plda import learn_plda
from speakerlab.scoring.transforms import learn_lda, learn_mean

DIM = 6
DEVELOPMENT = draw(100, 8, DIM, seed=1, mean=1.5, name="d")
TEST = draw(30, 3, DIM, seed=2, mean=1.5)
TRIALS = all_pairs(TEST, TEST)
CENTRED = ["mean+cosine", "mean+whiten+cosine", "mean+lda+length+plda+asnorm"]


def shifted(development, by):
    table = development.table
    moved = EmbeddingTable(table.ids, (table.emb_ND + by).astype(np.float32), MODEL)
    return Development(moved, development.speaker_M)


def score(spec, development=DEVELOPMENT, test=TEST, **options):
    return build_chain(spec, development, **options).score(test.table, test.table, TRIALS)


def test_cosine_needs_no_development_set():
    plain, scored = (
        build_chain(spec, None).score(TEST.table, TEST.table, TRIALS)
        for spec in ("cosine", "cosine+qmf")
    )
    np.testing.assert_array_equal(scored.scores_N, plain.scores_N)
    norm_N = np.linalg.norm(TEST.table.emb_ND, axis=1)
    assert plain.quality == {} and list(scored.quality) == ["norm"]
    sides = norm_N[TRIALS.enrol_N], norm_N[TRIALS.test_N]
    np.testing.assert_allclose(scored.quality["norm"], sides, rtol=1e-6)


@pytest.mark.parametrize("spec", CENTRED)
def test_a_constant_added_to_all_embeddings_changes_nothing(spec):
    by = np.linspace(-20, 20, DIM)
    moved = score(spec, shifted(DEVELOPMENT, by), shifted(TEST, by)).scores_N
    np.testing.assert_allclose(moved, score(spec).scores_N, atol=2e-3 if "plda" in spec else 1e-4)
    plain = score("cosine").scores_N
    assert np.abs(score("cosine", test=shifted(TEST, by)).scores_N - plain).max() > 0.1


def test_steps_are_learned_from_what_the_steps_before_them_leave():
    found_N = score("mean+lda+plda", lda_dim=4).scores_N
    centred = learn_mean(DEVELOPMENT)
    at = Development(centred(DEVELOPMENT.table), DEVELOPMENT.speaker_M)
    reduced = learn_lda(at, dim=4)
    plda = learn_plda(Development(reduced(at.table), DEVELOPMENT.speaker_M))
    emb_ND = reduced(centred(TEST.table)).emb_ND
    expected_NN = plda.enrol_side(emb_ND) @ plda.test_side(emb_ND).T
    expected_N = expected_NN[TRIALS.enrol_N, TRIALS.test_N]
    np.testing.assert_allclose(found_N, expected_N, rtol=1e-4, atol=1e-4)


def test_the_cohort_is_one_unit_mean_a_development_speaker():
    """mean+cosine+asnorm from its parts, of raw embeddings averaged by speaker, then centred."""
    emb_MD, speakers = DEVELOPMENT.table.emb_ND, np.array(DEVELOPMENT.speaker_M)
    mean_D = emb_MD.mean(axis=0)

    def unit(rows):
        return (rows - mean_D) / np.linalg.norm(rows - mean_D, axis=1, keepdims=True)

    cohort_CD = unit(np.stack([emb_MD[speakers == name].mean(axis=0) for name in set(speakers)]))
    unit_ND = unit(TEST.table.emb_ND)
    nearest_N10 = np.sort(unit_ND @ cohort_CD.T, axis=1)[:, -10:]
    mean_N, deviation_N = nearest_N10.mean(axis=1), nearest_N10.std(axis=1)
    raw_NN = unit_ND @ unit_ND.T
    by_enrol_NN = (raw_NN - mean_N[:, None]) / deviation_N[:, None]
    expected_N = ((by_enrol_NN + by_enrol_NN.T) / 2)[TRIALS.enrol_N, TRIALS.test_N]
    scored = score("mean+cosine+asnorm+qmf", top_n=10)
    np.testing.assert_allclose(scored.scores_N, expected_N, rtol=1e-3, atol=1e-3)
    _, found_N = scored.quality["cohort_mean"]
    np.testing.assert_allclose(found_N, mean_N[TRIALS.test_N], atol=1e-5)


@pytest.mark.parametrize("scorer", ["mean+cosine", "mean+lda+length+plda"])
def test_s_norm_is_as_norm_with_the_whole_cohort(scorer):
    whole = score(f"{scorer}+asnorm", top_n=100).scores_N
    np.testing.assert_array_equal(score(f"{scorer}+snorm", top_n=5).scores_N, whole)
    assert np.abs(score(f"{scorer}+asnorm", top_n=5).scores_N - whole).max() > 0.1


def test_models_of_several_recordings_count_for_plda_alone():
    enrol = draw(30, 1, DIM, seed=7)
    trials = all_pairs(enrol, TEST)
    five = dict.fromkeys(enrol.table.ids[:10], 5)
    for spec, changes in (("mean+plda", True), ("mean+cosine", False)):
        chain = build_chain(spec, DEVELOPMENT)
        plain = chain.score(enrol.table, TEST.table, trials).scores_N
        counted = chain.score(enrol.table, TEST.table, trials, num_enrol=five).scores_N
        is_other_N = np.abs(counted - plain) > 1e-3
        assert is_other_N[trials.enrol_N < 10].any() == changes
        assert not is_other_N[trials.enrol_N >= 10].any()


def test_a_plda_adapted_to_a_louder_domain_scores_it_better():
    """The domain of the trials differs in one direction, where recordings vary 10 times as much."""

    def other_domain(development):
        noise = 10 * np.random.default_rng(3).normal(size=(len(development.speaker_M), 1))
        return shifted(development, noise * np.eye(DIM)[2] + 4)

    test, adaptation = other_domain(TEST), other_domain(draw(60, 3, DIM, seed=4))
    plain = score("plda", test=test)
    adapted = score("plda", test=test, adapt=("x", adaptation.table))
    before, after = (eer(s.scores_N, TRIALS.is_target_N) for s in (plain, adapted))
    assert after < before - 0.05


def test_the_protocol_says_what_was_done():
    chain = build_chain("mean+lda+length+plda+asnorm", DEVELOPMENT, adapt=("x", TEST.table))
    assert chain.name == "mean+lda+length+plda+asnorm,adapt=x"
    for shown in (
        "90 utterances",
        "6 dimensions",
        "100 (300 ",
        "learned from 800 utterances of 100 ",
    ):
        assert shown in chain.protocol
    assert "the 20 nearest of a" in build_chain("cosine+asnorm", DEVELOPMENT, top_n=20).protocol
    assert "nearest" not in build_chain("cosine+snorm", DEVELOPMENT).protocol
    assert build_chain("lda+cosine", DEVELOPMENT, lda_dim=4).name == "lda+cosine,lda-dim=4"


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        *(("mean+cosin", "'cosin'"), ("", "''"), ("qmf", "'qmf'"), ("mean", "'mean'")),
        *(("asnorm", "order"), ("cosine+mean", "order"), ("cosine+plda", "order")),
        *(("cosine+asnorm+snorm", "order"), ("mean+mean+cosine", "order")),
    ],
)
def test_a_spec_that_cannot_be_run_is_one_line(spec, value):
    with refuses("backend", value) as error:
        build_chain(spec, DEVELOPMENT)
    assert "\n" not in str(error.value)


def test_what_has_to_be_learned_needs_a_development_set():
    with refuses("backend", "mean, plda, asnorm"):
        build_chain("mean+length+plda+asnorm", None)
    assert build_chain("length+cosine", None).score(TEST.table, TEST.table, TRIALS)


@pytest.mark.parametrize(
    ("spec", "num_speakers", "per_speaker", "got"),
    [
        ("mean+cosine", 50, 1, "got 49"),
        *((f"cosine+{step}", 100, 1, "got 99") for step in ("snorm", "asnorm")),
        ("lda+cosine", 12, 9, "got 11 and 88"),
        ("whiten+cosine", 12, 9, "got 11 and 88"),
        ("plda", 24, 5, "got 23 and 92"),
    ],
)
def test_what_is_too_little_to_learn_from_is_refused(spec, num_speakers, per_speaker, got):
    build_chain(spec, draw(num_speakers, per_speaker, 24))
    with pytest.raises(TooFewError) as error:
        build_chain(spec, draw(num_speakers - 1, per_speaker, 24))
    step = next(step for step in spec.split("+") if step != "cosine")
    assert str(error.value).startswith(f"{step}: ") and got in str(error.value)


@pytest.mark.parametrize("spec", ["mean+cosine", "mean+cosine+asnorm", "mean+lda+length+plda"])
def test_a_back_end_that_learned_from_the_minimum_is_not_worse_than_cosine(spec):
    test, development = draw(40, 6, 24, seed=5), draw(100, 3, 24, seed=6, name="d")
    trials = all_pairs(test, test)
    speakers = trials.speakers(dict(zip(test.table.ids, test.speaker_M)))
    learned, plain = (
        bootstrap(
            build_chain(steps, development).score(test.table, test.table, trials).scores_N,
            *(trials.is_target_N, *speakers),
            p_targets=(),
            num_replicates=200,
        )
        for steps in (spec, "cosine")
    )
    (low, _), _ = learned.paired(plain, "eer")
    assert low < 0.01


@pytest.mark.parametrize("spec", ["cosine", "mean+cosine", "mean+plda", "mean+cosine+asnorm"])
def test_an_embedding_without_direction_is_refused_by_its_id(spec):
    def silenced(development, row):
        emb_ND = development.table.emb_ND.copy()
        emb_ND[row] = 0
        ids = development.table.ids
        return Development(EmbeddingTable(ids, emb_ND, MODEL), development.speaker_M)

    with refuses("enrolment embeddings", TEST.table.ids[4]):
        score(spec, test=silenced(TEST, 4))
    if spec != "cosine":
        with refuses("development embeddings", "d0-7"):
            score(spec, silenced(DEVELOPMENT, 7))


def test_tables_of_another_model_are_refused():
    other = EmbeddingTable(TEST.table.ids, TEST.table.emb_ND, "cd" * 32)
    chain = build_chain("mean+cosine", DEVELOPMENT)
    with refuses("embeddings", "cdcdcdcd"):
        chain.score(other, other, TRIALS)
    with refuses("embeddings", "cdcdcdcd"):
        build_chain("plda", DEVELOPMENT, adapt=("x", other))


QMF = Chain("x+qmf", "", (), with_quality=True)


def scored(**sides):
    quality = {name: (np.array(enrol), np.array(test)) for name, (enrol, test) in sides.items()}
    return Scored(np.array([0.5, 0.25], dtype=np.float32), quality)


def test_features_by_hand():
    features_NF, names = QMF.features(
        scored(norm=([3, 4], [5, 1])), (np.array([1.0, 8.0]), np.array([4.0, 2.0]))
    )
    assert names == (
        "score",
        "lower_norm",
        "higher_norm",
        "lower_log_seconds",
        "higher_log_seconds",
    )
    expected = [[0.5, 3, 5, 0, np.log(4)], [0.25, 1, 4, np.log(2), np.log(8)]]
    np.testing.assert_allclose(features_NF, expected, rtol=1e-6)
    assert QMF.features(scored(), None)[1] == ("score",)
