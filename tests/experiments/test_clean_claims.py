"""The check of what `clean` finds: the faults that it plants, and how it counts."""

import re
from collections import Counter

import clean_claims
import numpy as np
import pytest
from clean_claims import Claims, Corpus, Tally, plant
from clean_claims import test_claims as count_claims
from scipy.stats import binomtest

from speakerlab.experiments import cleaning
from speakerlab.scoring.speaker_labels import Judgement

NUM_SPEAKERS = 30
PER_SPEAKER = 7
NUM_UTTERANCES = NUM_SPEAKERS * PER_SPEAKER
DIM = 24


def make_corpus(noise: float) -> Corpus:
    """Utterances of Gaussian speakers; noise: their spread, relative to that of the speakers."""
    rng = np.random.default_rng(0)
    centre_SD = rng.normal(size=(NUM_SPEAKERS, DIM))
    emb_ND = centre_SD.repeat(PER_SPEAKER, axis=0)
    emb_ND += noise * rng.normal(size=emb_ND.shape)
    ids: list[str] = []
    speakers: list[str] = []
    for speaker in range(NUM_SPEAKERS):
        for number in range(PER_SPEAKER):
            ids.append(f"s{speaker:02d}-{number}")
            speakers.append(f"s{speaker:02d}")
    copies = [[row, NUM_UTTERANCES + row] for row in range(NUM_UTTERANCES)]
    return Corpus(ids, speakers, emb_ND, copies)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return make_corpus(noise=0.3)


def outcome(planting, dropped=(), *, pairs=()) -> cleaning.Cleaning:
    """Return a cleaning that drops these ids, all as of another speaker, and lists these pairs."""
    findings = []
    for utterance in dropped:
        row = planting.ids.index(utterance)
        finding = cleaning.Finding(
            id=utterance,
            kind=cleaning.OTHER_SPEAKER,
            speaker=planting.speakers[row],
            action="drop",
            suggested=planting.right[row],
        )
        findings.append(finding)
    for first, second in pairs:
        finding = cleaning.Finding(
            id=second,
            kind=cleaning.SAME_PERSON,
            speaker=second,
            action="list",
            match=first,
        )
        findings.append(finding)
    labels = dict(zip(planting.ids, planting.speakers))
    for utterance in dropped:
        del labels[utterance]
    nothing_N = np.zeros(0)
    judgement = Judgement(nothing_N, nothing_N, nothing_N.astype(int), 0.0, [], None)
    return cleaning.Cleaning(findings, labels, {}, judgement)


@pytest.mark.parametrize(
    ("wrong_share", "num_wrong"), [(0.0, 0), (0.02, 4), (0.1, 21), (0.2, 42)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_plants_what_it_says(corpus, wrong_share, num_wrong, seed):
    planting = plant(corpus, wrong_share, seed)
    person_of = dict(zip(corpus.ids, corpus.speakers))

    # Five speakers of seven utterances are divided, into three and four.
    assert len(planting.divided) == 5
    assert len({speaker for speaker, _ in planting.divided}) == 5
    sizes = Counter(planting.right[:NUM_UTTERANCES])
    assert len(sizes) == NUM_SPEAKERS + 5
    for speaker, new in planting.divided:
        assert planting.persons[new] == speaker
        assert (sizes[speaker], sizes[new]) == (3, 4)
    for utterance, right in zip(planting.ids[:NUM_UTTERANCES], planting.right):
        assert planting.persons[right] == person_of[utterance]

    # Wrong labels are those of other people, and all others are right.
    assert planting.ids[:NUM_UTTERANCES] == corpus.ids
    wrong = []
    for row in range(NUM_UTTERANCES):
        if planting.speakers[row] != planting.right[row]:
            wrong.append(row)
            person = planting.persons[planting.speakers[row]]
            assert person != person_of[planting.ids[row]]
    assert len(wrong) == num_wrong
    assert sorted(planting.wrong) == wrong

    # Two utterances with the right label have a copy; one copy has a wrong label.
    copies = planting.copies()
    assert len(planting.ids) == len(set(planting.ids)) == NUM_UTTERANCES + 2
    assert sorted(rows[1] for rows in copies) == [NUM_UTTERANCES, NUM_UTTERANCES + 1]
    persons = []
    for row, copy in copies:
        assert planting.ids[copy] == f"{planting.ids[row]}-again"
        assert row not in wrong
        assert planting.right[copy] == planting.right[row]
        persons.append(planting.persons[planting.speakers[copy]])
    right = [person_of[planting.ids[row]] for row, _ in copies]
    assert sum(a != b for a, b in zip(persons, right)) == 1


def test_a_seed_plants_the_same_faults_and_another_one_others(corpus):
    first = plant(corpus, 0.1, 3)
    again = plant(corpus, 0.1, 3)
    other = plant(corpus, 0.1, 4)
    assert (first.ids, first.speakers) == (again.ids, again.speakers)
    assert set(first.wrong) != set(other.wrong)
    assert set(first.divided) != set(other.divided)
    # The corpus is as before.
    assert corpus.without_faults().speakers == corpus.speakers


def test_too_few_speakers_to_divide_are_refused(corpus):
    first_N = np.arange(4 * PER_SPEAKER)
    few = Corpus(
        [corpus.ids[row] for row in first_N],
        [corpus.speakers[row] for row in first_N],
        corpus.emb_ND[first_N],
        copies=[],
    )
    with pytest.raises(ValueError, match="4 speakers have 4 utterances"):
        plant(few, 0.02, 0)


def test_faults_are_found_in_good_embeddings_and_missed_in_bad_ones(corpus):
    claims = count_claims(corpus, 0.05, num_plantings=5, far=0.01)
    assert claims.wrong.total == 5 * 10
    assert claims.copies.total == 5 * 2
    assert claims.divided.total == 5 * 5
    assert claims.dropped.total == 5 * (NUM_UTTERANCES - 10)
    assert claims.wrong.share > 0.9
    assert claims.suggested.share == 1
    assert claims.copies.share == claims.right_copies.share == 1
    assert claims.divided.share > 0.9
    assert claims.dropped.share < 0.01
    assert claims.failures() == []

    claims = count_claims(make_corpus(noise=4.0), 0.05, num_plantings=5, far=0.01)
    assert claims.copies.share == 1
    failures = "\n".join(claims.failures())
    assert "wrong labels: less than 80% found" in failures
    assert "divided speakers: less than 80% found" in failures


def test_a_cleaning_that_finds_nothing_counts_as_such(corpus):
    planting = plant(corpus, 0.1, 0)
    claims = Claims()
    claims.add(planting, outcome(planting, pairs=[("s00", "s01")]))
    assert (claims.wrong.count, claims.wrong.total) == (0, 21)
    assert (claims.copies.count, claims.copies.total) == (0, 2)
    assert (claims.divided.count, claims.divided.total) == (0, 5)
    assert (claims.dropped.count, claims.dropped.total) == (0, NUM_UTTERANCES - 21)
    assert claims.num_other_pairs == 1
    assert claims.suggested.total == 0
    assert len(claims.failures()) == 3


def test_a_cleaning_that_drops_too_much_counts_as_such(corpus):
    """All wrong utterances, three good ones, and the wrong one of two copies."""
    planting = plant(corpus, 0.1, 0)
    copies = planting.copies()
    copied = {row for rows in copies for row in rows}
    wrong = [planting.ids[row] for row in planting.wrong]
    good = []
    for row in range(NUM_UTTERANCES):
        if row not in copied and row not in planting.wrong:
            good.append(planting.ids[row])
    # Of the first pair, the copy has the right label, of the second, it has a wrong one.
    copies.sort(key=lambda rows: rows[1])
    originals = [planting.ids[rows[0]] for rows in copies]
    claims = Claims()
    claims.add(
        planting,
        outcome(planting, [*wrong, *good[:3], *originals], pairs=planting.divided[:2]),
    )
    assert claims.wrong.share == claims.suggested.share == 1
    assert claims.copies.count == 2
    assert claims.right_copies.count == 1
    # The utterance whose copy has a wrong label is lost, too.
    assert claims.dropped.count == 3 + 1
    assert claims.divided.count == 2
    assert claims.num_other_pairs == 0
    # 4 of 189 are more than 2 %.
    failures = [
        "divided speakers: less than 80% found",
        "good utterances: more than 2% dropped",
    ]
    assert claims.failures() == failures


def test_rows_of_the_table_have_intervals():
    same = Tally([4, 4], [5, 5])
    # Plantings are as alike as can be, so this is the interval of independent cases.
    expected = binomtest(8, 10).proportion_ci(method="wilson")
    assert same.interval() == pytest.approx((expected.low, expected.high))
    assert same.cells() == "8 of 10, 80.0 % | 49.0 to 94.3 % | 80.0 to 80.0 %"
    few = Tally([0, 1], [2500, 2500])
    assert few.cells() == "1 of 5,000, 0.02 % | 0.0035 to 0.11 % | 0.0 to 0.04 %"
    assert Tally([0], [0]).cells() == "none | - | -"


def test_intervals_hold_the_share_although_plantings_differ():
    """In a planting, either all of 20 faults are found, or half of them."""
    rng = np.random.default_rng(0)
    held: list[bool] = []
    held_if_independent: list[bool] = []
    for _ in range(400):
        found = 10 * rng.integers(1, 3, size=100)
        tally = Tally(found.tolist(), [20] * 100)
        low, high = tally.interval()
        held.append(low <= 0.75 <= high)
        low, high = Tally([tally.count], [tally.total]).interval()
        held_if_independent.append(low <= 0.75 <= high)
    assert 0.92 <= np.mean(held) <= 0.98
    assert np.mean(held_if_independent) < 0.7


@pytest.mark.parametrize(
    "options", [["--wrong", "0.6"], ["--wrong", "2"], ["--plantings", "0"]]
)
def test_senseless_options_are_refused(options, capsys):
    with pytest.raises(SystemExit) as request:
        clean_claims.main(["--model", "m", "--data", "d", *options])
    assert request.value.code == 2
    assert re.search("must be (from 0 to 0.5|at least 1)", capsys.readouterr().err)
