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
DEVELOPMENT = draw(
    100,
    8,
    DIM,
    seed=1,
    mean=1.5,
    name="d",
)
TEST = draw(30, 3, DIM, seed=2, mean=1.5)
TRIALS = all_pairs(TEST, TEST)
CENTRED = ["mean+cosine", "mean+whiten+cosine", "mean+lda+length+plda+asnorm"]


def shifted(development, by):
    table = development.table
    emb_ND = table.emb_ND + by
    emb_ND = emb_ND.astype(np.float32)
    moved = EmbeddingTable(table.ids, emb_ND, MODEL)
    return Development(moved, development.speaker_M)


def score(spec, development=DEVELOPMENT, test=TEST, **options):
    chain = build_chain(spec, development, **options)
    return chain.score(test.table, test.table, TRIALS)


def test_cosine_needs_no_development_set():
    plain = score("cosine", development=None)
    scored = score("cosine+qmf", development=None)
    np.testing.assert_array_equal(scored.scores_N, plain.scores_N)
    assert plain.quality == {}

    # the only quality measure is the length of the embedding, of both sides of a trial
    assert list(scored.quality) == ["norm"]
    norm_N = np.linalg.norm(TEST.table.emb_ND, axis=1)
    enrol_norm_N = norm_N[TRIALS.enrol_N]
    test_norm_N = norm_N[TRIALS.test_N]
    np.testing.assert_allclose(
        scored.quality["norm"],
        (enrol_norm_N, test_norm_N),
        rtol=1e-6,
    )


@pytest.mark.parametrize("spec", CENTRED)
def test_a_constant_added_to_all_embeddings_changes_nothing(spec):
    by = np.linspace(-20, 20, DIM)
    moved_development = shifted(DEVELOPMENT, by)
    moved_test = shifted(TEST, by)
    plain = score(spec)
    moved = score(spec, moved_development, moved_test)
    tolerance = 2e-3 if "plda" in spec else 1e-4
    np.testing.assert_allclose(
        moved.scores_N,
        plain.scores_N,
        atol=tolerance,
    )

    # scores that are not centred do change
    plain = score("cosine")
    moved = score("cosine", test=moved_test)
    change_N = np.abs(moved.scores_N - plain.scores_N)
    assert change_N.max() > 0.1


def test_steps_are_learned_from_what_the_steps_before_them_leave():
    scored = score("mean+lda+plda", lda_dim=4)

    speaker_M = DEVELOPMENT.speaker_M
    centred = learn_mean(DEVELOPMENT)
    centred_table = centred(DEVELOPMENT.table)
    centred_development = Development(centred_table, speaker_M)
    reduced = learn_lda(centred_development, dim=4)
    reduced_development = Development(reduced(centred_table), speaker_M)
    plda = learn_plda(reduced_development)

    emb_ND = reduced(centred(TEST.table)).emb_ND
    enrol_NK = plda.enrol_side(emb_ND)
    test_NK = plda.test_side(emb_ND)
    expected_NN = enrol_NK @ test_NK.T
    expected_N = expected_NN[TRIALS.enrol_N, TRIALS.test_N]
    np.testing.assert_allclose(
        scored.scores_N,
        expected_N,
        rtol=1e-4,
        atol=1e-4,
    )


def test_the_cohort_is_one_unit_mean_a_development_speaker():
    """mean+cosine+asnorm from its parts, of raw embeddings averaged by speaker, then centred."""
    emb_MD = DEVELOPMENT.table.emb_ND
    speakers = np.array(DEVELOPMENT.speaker_M)
    mean_D = emb_MD.mean(axis=0)

    def unit(rows):
        centred = rows - mean_D
        length = np.linalg.norm(centred, axis=1, keepdims=True)
        return centred / length

    speaker_means = []
    for name in set(speakers):
        mean = emb_MD[speakers == name].mean(axis=0)
        speaker_means.append(mean)
    cohort_CD = unit(np.stack(speaker_means))
    unit_ND = unit(TEST.table.emb_ND)
    to_cohort_NC = unit_ND @ cohort_CD.T
    nearest_N10 = np.sort(to_cohort_NC, axis=1)[:, -10:]
    mean_N = nearest_N10.mean(axis=1)
    deviation_N = nearest_N10.std(axis=1)
    raw_NN = unit_ND @ unit_ND.T
    centred_NN = raw_NN - mean_N[:, None]
    by_enrol_NN = centred_NN / deviation_N[:, None]
    expected_NN = (by_enrol_NN + by_enrol_NN.T) / 2
    expected_N = expected_NN[TRIALS.enrol_N, TRIALS.test_N]
    scored = score("mean+cosine+asnorm+qmf", top_n=10)
    np.testing.assert_allclose(
        scored.scores_N,
        expected_N,
        rtol=1e-3,
        atol=1e-3,
    )
    _, test_mean_N = scored.quality["cohort_mean"]
    np.testing.assert_allclose(
        test_mean_N,
        mean_N[TRIALS.test_N],
        atol=1e-5,
    )


@pytest.mark.parametrize("scorer", ["mean+cosine", "mean+lda+length+plda"])
def test_s_norm_is_as_norm_with_the_whole_cohort(scorer):
    whole = score(f"{scorer}+asnorm", top_n=100).scores_N
    s_norm = score(f"{scorer}+snorm", top_n=5).scores_N
    np.testing.assert_array_equal(s_norm, whole)
    as_norm = score(f"{scorer}+asnorm", top_n=5).scores_N
    change_N = np.abs(as_norm - whole)
    assert change_N.max() > 0.1


def test_models_of_several_recordings_count_for_plda_alone():
    enrol = draw(30, 1, DIM, seed=7)
    trials = all_pairs(enrol, TEST)
    # the first ten models are of five recordings each, the others of one
    first_ids = enrol.table.ids[:10]
    num_enrol = dict.fromkeys(first_ids, 5)
    has_five_N = trials.enrol_N < 10
    for spec, changes in [("mean+plda", True), ("mean+cosine", False)]:
        chain = build_chain(spec, DEVELOPMENT)
        plain = chain.score(enrol.table, TEST.table, trials)
        counted = chain.score(
            enrol.table,
            TEST.table,
            trials,
            num_enrol=num_enrol,
        )
        change_N = np.abs(counted.scores_N - plain.scores_N)
        is_other_N = change_N > 1e-3
        assert is_other_N[has_five_N].any() == changes
        assert not is_other_N[~has_five_N].any()


def test_a_plda_adapted_to_a_louder_domain_scores_it_better():
    """The domain of the trials differs in one direction, where recordings vary 10 times as much."""

    def other_domain(development):
        num_utterances = len(development.speaker_M)
        rng = np.random.default_rng(3)
        noise = 10 * rng.normal(size=(num_utterances, 1))
        direction = np.eye(DIM)[2]
        return shifted(development, noise * direction + 4)

    # the adaptation set has other speakers than the test set
    test = other_domain(TEST)
    adaptation = other_domain(draw(60, 3, DIM, seed=4))
    plain = score("plda", test=test)
    adapted = score(
        "plda",
        test=test,
        adapt=("x", adaptation.table),
    )
    before = eer(plain.scores_N, TRIALS.is_target_N)
    after = eer(adapted.scores_N, TRIALS.is_target_N)
    assert after < before - 0.05


def test_the_protocol_says_what_was_done():
    chain = build_chain(
        "mean+lda+length+plda+asnorm", DEVELOPMENT, adapt=("x", TEST.table)
    )
    assert chain.name == "mean+lda+length+plda+asnorm,adapt=x"
    for shown in (
        "90 utterances",
        "6 dimensions",
        "100 (300 ",
        "learned from 800 utterances of 100 ",
    ):
        assert shown in chain.protocol
    as_norm = build_chain("cosine+asnorm", DEVELOPMENT, top_n=20)
    assert "the 20 nearest of a" in as_norm.protocol
    s_norm = build_chain("cosine+snorm", DEVELOPMENT)
    assert "nearest" not in s_norm.protocol
    lda = build_chain("lda+cosine", DEVELOPMENT, lda_dim=4)
    assert lda.name == "lda+cosine,lda-dim=4"


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("mean+cosin", "'cosin'"),
        ("", "''"),
        ("qmf", "'qmf'"),
        ("mean", "'mean'"),
        ("asnorm", "order"),
        ("cosine+mean", "order"),
        ("cosine+plda", "order"),
        ("cosine+asnorm+snorm", "order"),
        ("mean+mean+cosine", "order"),
    ],
)
def test_a_spec_that_cannot_be_run_is_one_line(spec, value):
    with refuses("backend", value) as error:
        build_chain(spec, DEVELOPMENT)
    assert "\n" not in str(error.value)


def test_what_has_to_be_learned_needs_a_development_set():
    with refuses("backend", "mean, plda, asnorm"):
        build_chain("mean+length+plda+asnorm", None)
    # neither step learns
    chain = build_chain("length+cosine", None)
    assert chain.score(TEST.table, TEST.table, TRIALS)


@pytest.mark.parametrize(
    ("spec", "num_speakers", "per_speaker", "got"),
    [
        ("mean+cosine", 50, 1, "got 49"),
        ("cosine+snorm", 100, 1, "got 99"),
        ("cosine+asnorm", 100, 1, "got 99"),
        ("lda+cosine", 12, 9, "got 11 and 88"),
        ("whiten+cosine", 12, 9, "got 11 and 88"),
        ("plda", 24, 5, "got 23 and 92"),
    ],
)
def test_what_is_too_little_to_learn_from_is_refused(
    spec, num_speakers, per_speaker, got
):
    build_chain(spec, draw(num_speakers, per_speaker, 24))
    with pytest.raises(TooFewError) as error:
        fewer = draw(num_speakers - 1, per_speaker, 24)
        build_chain(spec, fewer)
    step = spec.split("+")[0]
    if step == "cosine":
        step = spec.split("+")[1]
    assert str(error.value).startswith(f"{step}: ")
    assert got in str(error.value)


@pytest.mark.parametrize(
    "spec", ["mean+cosine", "mean+cosine+asnorm", "mean+lda+length+plda"]
)
def test_a_back_end_that_learned_from_the_minimum_is_not_worse_than_cosine(spec):
    test = draw(40, 6, 24, seed=5)
    development = draw(100, 3, 24, seed=6, name="d")
    trials = all_pairs(test, test)
    speaker_by_id = dict(zip(test.table.ids, test.speaker_M))
    speakers = trials.speakers(speaker_by_id)

    def replicates(steps):
        chain = build_chain(steps, development)
        table = test.table
        scored = chain.score(table, table, trials)
        return bootstrap(
            scored.scores_N,
            trials.is_target_N,
            *speakers,
            p_targets=(),
            num_replicates=200,
        )

    learned = replicates(spec)
    plain = replicates("cosine")
    interval, _ = learned.paired(plain, "eer")
    lowest_difference = interval[0]
    assert lowest_difference < 0.01


@pytest.mark.parametrize(
    "spec", ["cosine", "mean+cosine", "mean+plda", "mean+cosine+asnorm"]
)
def test_an_embedding_without_direction_is_refused_by_its_id(spec):
    def silenced(development, row):
        emb_ND = development.table.emb_ND.copy()
        emb_ND[row] = 0
        ids = development.table.ids
        table = EmbeddingTable(ids, emb_ND, MODEL)
        return Development(table, development.speaker_M)

    with refuses("enrolment embeddings", TEST.table.ids[4]):
        score(spec, test=silenced(TEST, 4))
    if spec != "cosine":
        with refuses("development embeddings", "d0-7"):
            score(spec, silenced(DEVELOPMENT, 7))


def test_tables_of_another_model_are_refused():
    table = TEST.table
    other = EmbeddingTable(table.ids, table.emb_ND, "cd" * 32)
    chain = build_chain("mean+cosine", DEVELOPMENT)
    with refuses("embeddings", "cdcdcdcd"):
        chain.score(other, other, TRIALS)
    with refuses("embeddings", "cdcdcdcd"):
        build_chain("plda", DEVELOPMENT, adapt=("x", other))


QMF = Chain("x+qmf", "", (), with_quality=True)


def scored(**sides):
    quality = {}
    for name, (enrol, test) in sides.items():
        quality[name] = (np.array(enrol), np.array(test))
    scores_N = np.array([0.5, 0.25], dtype=np.float32)
    return Scored(scores_N, quality)


def test_features_by_hand():
    norms = scored(norm=([3, 4], [5, 1]))
    enrol_seconds = np.array([1.0, 8.0])
    test_seconds = np.array([4.0, 2.0])
    seconds = (enrol_seconds, test_seconds)
    features_NF, names = QMF.features(norms, seconds)
    assert names == (
        "score",
        "lower_norm",
        "higher_norm",
        "lower_log_seconds",
        "higher_log_seconds",
    )
    # each measure as the lower and the higher of its two sides
    expected = [
        [0.5, 3, 5, 0, np.log(4)],
        [0.25, 1, 4, np.log(2), np.log(8)],
    ]
    np.testing.assert_allclose(features_NF, expected, rtol=1e-6)
    _, names = QMF.features(scored(), None)
    assert names == ("score",)
