"""Errors of diarization: by hand, against md-eval-22.pl and dscore."""

import json
import math
import os
from pathlib import Path

import pytest
from md_eval import PROTOCOLS, STORED, random_pair, run_md_eval
from pyannote_metrics import STORED as STORED_PYANNOTE
from refusals import refuses

from speakerlab.diarization.regions import Turn, read_rttm
from speakerlab.diarization.scoring import (
    Errors,
    errors_by_minute,
    extent,
    score,
    score_recordings,
    total,
)

DSCORE = os.environ.get("SPEAKERLAB_DSCORE")  # a checkout
needs_dscore = pytest.mark.skipif(DSCORE is None, reason="SPEAKERLAB_DSCORE is not set")
CASES = json.loads(STORED.read_text())
PYANNOTE = json.loads(STORED_PYANNOTE.read_text())


def seconds(errors: Errors) -> list[float]:
    return [
        errors.scored,
        errors.missed,
        errors.false_alarm,
        errors.confusion,
    ]


def turns(*rows: tuple[float, float, str]) -> list[Turn]:
    return [Turn(start, end, speaker) for start, end, speaker in rows]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_errors_are_those_of_md_eval(index):
    reference, hypothesis, regions, figures = CASES[index]
    reference = turns(*reference)
    hypothesis = turns(*hypothesis)
    rows = zip(PROTOCOLS, figures, strict=True)
    for (collar, skip_overlap), expected in rows:
        regions = regions or extent(reference)  # md-eval's default
        errors = score(
            reference,
            hypothesis,
            regions=regions,
            collar=collar,
            skip_overlap=skip_overlap,
        )
        assert seconds(errors) == pytest.approx(expected, abs=1e-9)
        by_minute = errors_by_minute(
            reference,
            hypothesis,
            regions=regions,
            collar=collar,
            skip_overlap=skip_overlap,
        )
        assert by_minute.sum() == pytest.approx(errors.wrong)


@pytest.mark.parametrize("row", range(len(PROTOCOLS)))
def test_errors_are_those_of_pyannote_metrics(row):
    """It leaves out collar and overlap before it maps speakers, so it confuses no more of them."""
    collar, skip_overlap = PROTOCOLS[row]
    differences: list[list[float]] = []
    rows = zip(CASES, PYANNOTE, strict=True)
    for (reference, hypothesis, regions, _), (figures, _) in rows:
        # pyannote.metrics has no collar around a turn without length
        is_empty = [start == end for start, end, _ in reference]
        if collar and any(is_empty):
            continue
        reference = turns(*reference)
        errors = score(
            reference,
            turns(*hypothesis),
            regions=regions or extent(reference),
            collar=collar,
            skip_overlap=skip_overlap,
        )
        actual = seconds(errors)
        expected = figures[row]
        differences.append([a - b for a, b in zip(actual, expected)])

    *times, confusion = zip(*differences)
    assert len(confusion) >= 30
    for values in times:
        largest = max(abs(value) for value in values)
        assert largest < 1e-9
    assert min(confusion) > -1e-9
    assert row > 0 or max(confusion) < 1e-9


def test_jaccard_errors_are_at_most_those_of_pyannote_metrics():
    """It maps speakers by their common time; bounds are in milliseconds, frames in 10 of them."""
    differences: list[float] = []
    rows = zip(CASES, PYANNOTE, strict=True)
    for (reference, hypothesis, regions, _), (_, expected_jer) in rows:
        reference = turns(*reference)
        errors = score(
            reference,
            turns(*hypothesis),
            regions=regions or extent(reference),
        )
        jer = errors.jer or 0
        differences.append(jer - expected_jer)
    assert max(differences) < 0.005
    num_equal = sum(abs(value) < 0.002 for value in differences)
    assert num_equal >= 38


@pytest.mark.slow
@needs_dscore
@pytest.mark.parametrize(("collar", "skip_overlap"), PROTOCOLS)
def test_errors_of_a_thousand_pairs_are_those_of_md_eval(collar, skip_overlap):
    """With perl, and SPEAKERLAB_DSCORE naming a checkout of dscore, which has the script."""
    pairs = {}
    for seed in range(1000):
        pairs[str(seed)] = random_pair(seed)
    expected = run_md_eval(
        Path(str(DSCORE)),
        pairs,
        collar=collar,
        skip_overlap=skip_overlap,
    )
    assert expected.keys() == pairs.keys()
    for name, (reference, hypothesis, regions) in pairs.items():
        errors = score(
            reference,
            hypothesis,
            regions=regions or extent(reference),
            collar=collar,
            skip_overlap=skip_overlap,
        )
        expected_seconds = pytest.approx(expected[name], abs=1e-9)
        assert seconds(errors) == expected_seconds, name


@needs_dscore
def test_rates_are_those_that_dscore_publishes():
    folder = Path(str(DSCORE), "scorelib/tests")
    reference = read_rttm(folder / "ref.rttm")["FILE1"]
    hypothesis = read_rttm(folder / "sys.rttm")["FILE1"]
    # collar, whether overlap is left out, DER in per cent
    published = [
        (0, False, 26.39),
        (0.1, False, 24.99),
        (0.25, False, 24.01),
        (0, True, 23.36),
        (0.1, True, 22.31),
        (0.25, True, 21.53),
    ]
    for collar, skip_overlap, der in published:
        errors = score(
            reference,
            hypothesis,
            collar=collar,
            skip_overlap=skip_overlap,
        )
        der_percent = 100 * (errors.der or 0)
        assert der_percent == pytest.approx(der, abs=0.005)
        jer_percent = 100 * (errors.jer or 0)
        assert jer_percent == pytest.approx(33.24631, abs=5e-6)


REFERENCE = turns(
    (0, 10, "ann"),
    (8, 12, "bob"),
    (20, 22, "cid"),
)


def test_errors_by_hand():
    # 1 speaks ann's time up to 9, then bob's; 2 speaks 2 s of silence
    hypothesis = turns(
        (0, 9, "1"),
        (9, 12, "2"),
        (14, 16, "2"),
    )
    errors = score(REFERENCE, hypothesis)

    # one speaker of two is missed from 8 to 10, and cid
    assert errors.scored == 16
    assert errors.missed == 4
    assert errors.false_alarm == 2
    assert errors.confusion == 0
    assert errors.der == 6 / 16

    # ann 9 of 10, bob 3 of 4 + 2, cid none
    expected_jaccard = (0.1, 0.5, 1)
    assert errors.jaccard == pytest.approx(expected_jaccard)
    assert errors.jer == pytest.approx(1.6 / 3)
    assert errors.num_speakers == 3
    assert errors.num_found == 2
    assert errors.overlap == 2 / 14

    # 1 is ann, and neither 2 from 5 to 9 nor bob from 10 to 12 is
    exchanged = turns(
        (0, 5, "1"),
        (5, 9, "2"),
        (9, 12, "1"),
    )
    assert score(REFERENCE, exchanged).confusion == 5


def test_time_outside_of_the_regions_has_no_effect():
    hypothesis = turns(
        (0, 9, "1"),
        (9, 12, "2"),
        (14, 16, "3"),
    )
    regions = [(4, 6), (8, 9)]
    errors = score(REFERENCE, hypothesis, regions=regions)
    assert errors.scored == 4
    assert errors.missed == 1
    assert errors.false_alarm == 0
    assert errors.confusion == 0
    assert errors.num_speakers == 2
    assert errors.num_found == 1
    assert errors.speech == 3


def test_the_collar_is_around_the_bounds_of_the_reference():
    hypothesis = turns(
        (0.4, 10.5, "1"),
        (12.3, 13, "1"),
    )
    reference = turns((0, 10, "ann"))
    errors = score(reference, hypothesis, collar=0.25)
    assert errors.scored == pytest.approx(9.5)
    assert errors.missed == pytest.approx(0.15)
    assert errors.false_alarm == pytest.approx(0.25 + 0.7)
    assert errors.confusion == pytest.approx(0)

    # the two collars cover a turn of 0.4 s
    short = turns((0, 0.4, "ann"))
    errors = score(short, [], collar=0.25)
    assert errors.der is None


def test_overlap_is_left_out_after_the_speakers_are_mapped():
    """1 is bob by the overlap, although ann is the longer alone."""
    reference = turns(
        (0, 8, "ann"),
        (4, 9, "bob"),
    )
    hypothesis = turns(
        (3, 9, "1"),
        (4, 8, "2"),
        (0, 1, "2"),
    )
    errors = score(reference, hypothesis, skip_overlap=True)
    assert errors.scored == 5
    assert errors.missed == 2
    assert errors.false_alarm == 0
    assert errors.confusion == 1
    # of all speech
    assert errors.overlap == 4 / 9


def test_overlapping_turns_of_one_speaker_are_one():
    twice = turns(
        (0, 6, "ann"),
        (5, 10, "ann"),
    )
    once = turns((0, 10, "ann"))
    for collar, skip_overlap in PROTOCOLS:
        for reference, hypothesis in [(twice, once), (once, twice)]:
            errors = score(
                reference,
                hypothesis,
                collar=collar,
                skip_overlap=skip_overlap,
            )
            assert errors.scored == 10 - 2 * collar
            assert errors.missed == 0
            assert errors.false_alarm == 0
            assert errors.confusion == 0


def test_jaccard_errors_are_of_frames_that_start_within_a_turn():
    reference = turns((0.001, 1, "ann"))
    hypothesis = turns((0.011, 1.019, "1"))
    # frames at 0.01 ... 0.99, and at 0.02 ... 1.01
    expected_jer = pytest.approx(1 - 98 / 101)
    assert score(reference, hypothesis).jer == expected_jer


def test_recordings_without_speech_have_no_rate():
    assert score([], []).der is None
    hypothesis = turns((0, 3, "1"))
    alarm = score([], hypothesis)
    assert alarm.false_alarm == 3
    assert alarm.der is None
    assert alarm.jer is None

    all_missed = score(REFERENCE, [])
    errors = total([alarm, all_missed])
    assert errors.der == 19 / 16


def test_errors_are_in_the_minute_that_they_are_made_in():
    """The mapping is that of the whole recording: in the second minute, 1 and 2 are swapped."""
    reference = turns(
        (0, 50, "ann"),
        (50, 70, "bob"),
        (130, 131, "ann"),
    )
    hypothesis = turns(
        (0, 55, "1"),
        (55, 62, "2"),
        (62, 70, "1"),
    )
    by_minute = errors_by_minute(reference, hypothesis)
    assert by_minute.tolist() == [5, 8, 1]
    of_region = errors_by_minute(
        reference,
        hypothesis,
        regions=[(58, 64)],
    )
    assert of_region.tolist() == [0, 2, 0]
    of_nothing = errors_by_minute([], [])
    assert of_nothing.tolist() == []


def test_a_total_weighs_speech_and_speakers_alike():
    without_errors = score(REFERENCE, REFERENCE)
    reference = turns((0, 4, "ann"))
    hypothesis = turns((0, 1, "1"))
    with_errors = score(reference, hypothesis)
    both = total([without_errors, with_errors])
    assert both.der == 3 / 20
    assert both.jer == 0.75 / 4
    assert both.num_speakers == 4
    assert both.num_found == 4


def test_recordings_are_matched_by_name():
    references = {"a": REFERENCE, "b": REFERENCE}
    hypotheses = {"b": REFERENCE, "a": []}
    errors = score_recordings(references, hypotheses)
    assert list(errors) == ["a", "b"]
    assert errors["a"].der == 1
    assert errors["b"].der == 0

    regions = {
        "a": [(0, 1)],
        "c": [(0, 5)],
        "d": [(0, 5)],
    }
    hypothesis = turns((3, 9, "1"))
    errors = score_recordings(
        {"a": REFERENCE},
        {"c": hypothesis},
        regions=regions,
    )
    assert errors.keys() == {"a", "c"}
    assert seconds(errors["a"]) == [1, 1, 0, 0]
    # silence, by the UEM file
    assert seconds(errors["c"]) == [0, 0, 2, 0]

    with refuses("b"):
        score_recordings({"a": REFERENCE}, {"b": REFERENCE})
    with refuses("b", "regions"):
        score_recordings(references, {}, regions=regions)


def test_a_jaccard_error_is_at_most_one():
    for case in CASES[:10]:
        reference = turns(*case[0])
        hypothesis = turns(*case[1])
        errors = score(reference, hypothesis)
        for error in errors.jaccard:
            assert math.isfinite(error)
            assert 0 <= error <= 1
