"""Errors of diarization: by hand, against md-eval-22.pl and dscore."""

import json
import math
import os
from functools import partial
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
    return [errors.scored, errors.missed, errors.false_alarm, errors.confusion]


def turns(*rows: tuple[float, float, str]) -> list[Turn]:
    return [Turn(start, end, speaker) for start, end, speaker in rows]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_errors_are_those_of_md_eval(index):
    reference, hypothesis, regions, figures = CASES[index]
    reference, hypothesis = turns(*reference), turns(*hypothesis)
    for (collar, skip_overlap), expected in zip(PROTOCOLS, figures, strict=True):
        regions = regions or extent(reference)  # md-eval's default
        found = score(
            reference, hypothesis, regions=regions, collar=collar, skip_overlap=skip_overlap
        )
        assert seconds(found) == pytest.approx(expected, abs=1e-9)
        by_minute = errors_by_minute(
            reference, hypothesis, regions=regions, collar=collar, skip_overlap=skip_overlap
        )
        assert by_minute.sum() == pytest.approx(found.wrong)


@pytest.mark.parametrize("row", range(len(PROTOCOLS)))
def test_errors_are_those_of_pyannote_metrics(row):
    """It leaves out collar and overlap before it maps speakers, so it confuses no more of them."""
    collar, skip_overlap = PROTOCOLS[row]
    differences: list[list[float]] = []
    for (reference, hypothesis, regions, _), (figures, _) in zip(CASES, PYANNOTE, strict=True):
        if collar and any(start == end for start, end, _ in reference):
            continue  # it has no collar around a turn without length
        reference = turns(*reference)
        options = {"regions": regions or extent(reference), "collar": collar}
        found = score(reference, turns(*hypothesis), **options, skip_overlap=skip_overlap)
        differences.append([a - b for a, b in zip(seconds(found), figures[row])])
    *times, confusion = zip(*differences)
    assert len(confusion) >= 30 and max(abs(value) for own in times for value in own) < 1e-9
    assert min(confusion) > -1e-9 and (row > 0 or max(confusion) < 1e-9)


def test_jaccard_errors_are_at_most_those_of_pyannote_metrics():
    """It maps speakers by their common time; bounds are in milliseconds, frames in 10 of them."""
    differences: list[float] = []
    for (reference, hypothesis, regions, _), (_, jer) in zip(CASES, PYANNOTE, strict=True):
        reference = turns(*reference)
        found = score(reference, turns(*hypothesis), regions=regions or extent(reference))
        differences.append((found.jer or 0) - jer)
    assert max(differences) < 0.005 and sum(abs(value) < 0.002 for value in differences) >= 38


@pytest.mark.slow
@needs_dscore
@pytest.mark.parametrize(("collar", "skip_overlap"), PROTOCOLS)
def test_errors_of_a_thousand_pairs_are_those_of_md_eval(collar, skip_overlap):
    """With perl, and SPEAKERLAB_DSCORE naming a checkout of dscore, which has the script."""
    pairs = {str(seed): random_pair(seed) for seed in range(1000)}
    score_pair = partial(score, collar=collar, skip_overlap=skip_overlap)
    expected = run_md_eval(Path(str(DSCORE)), pairs, collar=collar, skip_overlap=skip_overlap)
    assert expected.keys() == pairs.keys()
    for name, (reference, hypothesis, regions) in pairs.items():
        found = score_pair(reference, hypothesis, regions=regions or extent(reference))
        assert seconds(found) == pytest.approx(expected[name], abs=1e-9), name


@needs_dscore
def test_rates_are_those_that_dscore_publishes():
    folder = Path(str(DSCORE), "scorelib/tests")
    pair = [read_rttm(folder / name)["FILE1"] for name in ("ref.rttm", "sys.rttm")]
    for skip_overlap, ders in ((False, (26.39, 24.99, 24.01)), (True, (23.36, 22.31, 21.53))):
        for collar, der in zip((0, 0.1, 0.25), ders):
            found = score(*pair, collar=collar, skip_overlap=skip_overlap)
            assert 100 * (found.der or 0) == pytest.approx(der, abs=0.005)
            assert 100 * (found.jer or 0) == pytest.approx(33.24631, abs=5e-6)


REFERENCE = turns((0, 10, "ann"), (8, 12, "bob"), (20, 22, "cid"))


def test_errors_by_hand():
    # 1 speaks ann's time up to 9, then bob's; 2 speaks 2 s of silence
    hypothesis = turns((0, 9, "1"), (9, 12, "2"), (14, 16, "2"))
    found = score(REFERENCE, hypothesis)
    # one speaker of two is missed from 8 to 10, and cid
    assert seconds(found) == [16, 4, 2, 0]
    assert found.der == 6 / 16
    # ann 9 of 10, bob 3 of 4 + 2, cid none
    assert found.jaccard == pytest.approx((0.1, 0.5, 1))
    assert found.jer == pytest.approx(1.6 / 3)
    assert (found.num_speakers, found.num_found) == (3, 2)
    assert found.overlap == 2 / 14
    swapped = score(REFERENCE, turns((0, 5, "1"), (5, 9, "2"), (9, 12, "1")))
    assert swapped.confusion == 5  # 1 is ann, and neither 2 from 5 to 9 nor bob from 10 to 12 is


def test_time_outside_of_the_regions_has_no_effect():
    hypothesis = turns((0, 9, "1"), (9, 12, "2"), (14, 16, "3"))
    found = score(REFERENCE, hypothesis, regions=[(4, 6), (8, 9)])
    assert seconds(found) == [4, 1, 0, 0]
    assert (found.num_speakers, found.num_found, found.speech) == (2, 1, 3)


def test_the_collar_is_around_the_bounds_of_the_reference():
    hypothesis = turns((0.4, 10.5, "1"), (12.3, 13, "1"))
    found = score(turns((0, 10, "ann")), hypothesis, collar=0.25)
    assert seconds(found) == pytest.approx([9.5, 0.15, 0.25 + 0.7, 0])
    assert score(turns((0, 0.4, "ann")), [], collar=0.25).der is None


def test_overlap_is_left_out_after_the_speakers_are_mapped():
    """1 is bob by the overlap, although ann is the longer alone."""
    reference = turns((0, 8, "ann"), (4, 9, "bob"))
    hypothesis = turns((3, 9, "1"), (4, 8, "2"), (0, 1, "2"))
    found = score(reference, hypothesis, skip_overlap=True)
    assert seconds(found) == [5, 2, 0, 1]
    assert found.overlap == 4 / 9  # of all speech


def test_overlapping_turns_of_one_speaker_are_one():
    twice = turns((0, 6, "ann"), (5, 10, "ann"))
    once = turns((0, 10, "ann"))
    for collar, skip_overlap in PROTOCOLS:
        for pair in ((twice, once), (once, twice)):
            found = score(*pair, collar=collar, skip_overlap=skip_overlap)
            assert seconds(found) == [10 - 2 * collar, 0, 0, 0]


def test_jaccard_errors_are_of_frames_that_start_within_a_turn():
    reference, hypothesis = turns((0.001, 1, "ann")), turns((0.011, 1.019, "1"))
    # frames at 0.01 ... 0.99, and at 0.02 ... 1.01
    assert score(reference, hypothesis).jer == pytest.approx(1 - 98 / 101)


def test_recordings_without_speech_have_no_rate():
    assert score([], []).der is None
    alarm = score([], turns((0, 3, "1")))
    assert (alarm.false_alarm, alarm.der, alarm.jer) == (3, None, None)
    assert total([alarm, score(REFERENCE, [])]).der == 19 / 16


def test_errors_are_in_the_minute_that_they_are_made_in():
    """The mapping is that of the whole recording: in the second minute, 1 and 2 are swapped."""
    reference = turns((0, 50, "ann"), (50, 70, "bob"), (130, 131, "ann"))
    hypothesis = turns((0, 55, "1"), (55, 62, "2"), (62, 70, "1"))
    assert errors_by_minute(reference, hypothesis).tolist() == [5, 8, 1]
    assert errors_by_minute(reference, hypothesis, regions=[(58, 64)]).tolist() == [0, 2, 0]
    assert errors_by_minute([], []).tolist() == []


def test_a_total_weighs_speech_and_speakers_alike():
    one, two = score(REFERENCE, REFERENCE), score(turns((0, 4, "ann")), turns((0, 1, "1")))
    both = total([one, two])
    assert both.der == 3 / 20
    assert both.jer == 0.75 / 4
    assert (both.num_speakers, both.num_found) == (4, 4)


def test_recordings_are_matched_by_name():
    found = score_recordings({"a": REFERENCE, "b": REFERENCE}, {"b": REFERENCE, "a": []})
    assert [errors.der for errors in found.values()] == [1, 0]
    regions = {"a": [(0, 1)], "c": [(0, 5)], "d": [(0, 5)]}
    found = score_recordings({"a": REFERENCE}, {"c": turns((3, 9, "1"))}, regions=regions)
    assert {name: seconds(errors) for name, errors in found.items()} == {
        "a": [1, 1, 0, 0],
        "c": [0, 0, 2, 0],  # silence, by the UEM file
    }
    with refuses("b"):
        score_recordings({"a": REFERENCE}, {"b": REFERENCE})
    with refuses("b", "regions"):
        score_recordings({"a": REFERENCE, "b": REFERENCE}, {}, regions=regions)


def test_a_jaccard_error_is_at_most_one():
    for case in CASES[:10]:
        found = score(turns(*case[0]), turns(*case[1]))
        assert all(0 <= error <= 1 and math.isfinite(error) for error in found.jaccard)
