"""Which trials a condition's rows are counted over, by hand."""

import numpy as np
import pytest

from speakerlab.scoring.conditions import MAX_PAIRS, condition_rows
from speakerlab.scoring.metrics import eer, min_dcf
from speakerlab.scoring.trials import Trials


def all_pairs(speakers):
    """Trials of all pairs of utterances, named by speaker and number."""
    ids = [f"{speaker}{i}" for i, speaker in enumerate(speakers)]
    first, second = np.triu_indices(len(ids), 1)
    numbers = np.array([ord(speaker) for speaker in speakers])
    enrol_speaker_N = numbers[first]
    test_speaker_N = numbers[second]
    trials = Trials(
        enrol_ids=ids,
        test_ids=ids,
        enrol_N=first.astype(np.int32),
        test_N=second.astype(np.int32),
        is_target_N=enrol_speaker_N == test_speaker_N,
    )
    return trials, (enrol_speaker_N, test_speaker_N)


def counts(rows):
    values = []
    for row in rows:
        num_trials = (row["num_target"], row["num_nontarget"])
        values.append((row["condition"], row["value"], *num_trials))
    return values


def test_values_of_both_sides():
    trials, speakers = all_pairs("aaabbb")
    devices = ["tel", "tel", "mic", "tel", "mic", "mic"]
    device = dict(zip(trials.enrol_ids, devices))
    scores = np.arange(len(trials)) % 7
    rows = condition_rows(scores, trials, speakers, {"device": device}, {})
    # tel: a0 a1 b3, mic: a2 b4 b5
    assert counts(rows) == [
        ("device", "mic", 1, 2),
        ("device", "mic / tel", 4, 5),
        ("device", "tel", 1, 2),
    ]
    device_N = np.array(devices)
    enrol_device_N = device_N[trials.enrol_N]
    test_device_N = device_N[trials.test_N]
    is_crossed_N = enrol_device_N != test_device_N
    crossed_scores = scores[is_crossed_N]
    crossed_truth = trials.is_target_N[is_crossed_N]
    crossed_row = rows[1]
    assert crossed_row["eer"] == eer(crossed_scores, crossed_truth)
    expected_dcf = min_dcf(crossed_scores, crossed_truth)
    assert crossed_row["min_dcf"] == {"0.01": expected_dcf}
    assert crossed_row["eer_ci95"] is None
    assert crossed_row["num_speakers"] == 2


def test_values_with_five_speakers_have_an_interval():
    trials, speakers = all_pairs("aaaabbbbccccddddeeee")
    devices = ["tel", "mic"] * 10
    device = dict(zip(trials.enrol_ids, devices))
    scores = np.arange(len(trials)) % 7
    rows = condition_rows(scores, trials, speakers, {"device": device}, {})
    for row in rows:
        low, high = row["eer_ci95"]
        assert 0 <= low <= row["eer"] <= high <= 1
        assert row["num_speakers"] == 5


def test_one_kind_of_trials_gives_counts_alone():
    trials, speakers = all_pairs("aabb")
    sex = {"a0": "f", "a1": "f", "b2": "m", "b3": "m"}
    rows = condition_rows(np.arange(6.0), trials, speakers, {"gender": sex}, {})
    assert counts(rows) == [
        ("gender", "f", 1, 0),
        ("gender", "f / m", 0, 4),
        ("gender", "m", 1, 0),
    ]
    for row in rows:
        assert row["eer"] is None


def test_an_unknown_side_is_in_no_row_and_one_value_is_no_condition():
    trials, speakers = all_pairs("aabb")
    columns = {
        "device": {"a0": "tel", "b2": "tel"},
        "room": {"a0": "hall", "a1": "den"},
    }
    scores = np.arange(6.0)
    rows = condition_rows(scores, trials, speakers, columns, {})
    # of the rooms, only the pair a0 a1 is known
    assert counts(rows) == []
    columns["room"]["b2"] = "den"
    rows = condition_rows(scores, trials, speakers, columns, {})
    assert counts(rows) == [
        ("room", "den", 0, 1),
        ("room", "den / hall", 1, 1),
    ]


def test_many_values_are_grouped_by_the_test_side():
    speakers_of = "aabbccddeeffgg"
    trials, speakers = all_pairs(speakers_of)
    # 15 pairs of 5 values
    genres = [f"g{i % 5}" for i in range(len(speakers_of))]
    assert MAX_PAIRS < 15
    table = dict(zip(trials.enrol_ids, genres))
    scores = np.arange(len(trials)) % 11
    rows = condition_rows(scores, trials, speakers, {"genre": table}, {})
    names = [row["value"] for row in rows]
    by_test_side = [f"test side: g{i}" for i in range(5)]
    assert names == ["same", "different", *by_test_side]
    num_trials = [row["num_target"] + row["num_nontarget"] for row in rows]
    num_same, num_different = num_trials[:2]
    assert num_same + num_different == len(trials)
    num_g3 = 0
    for test in trials.test_N:
        num_g3 += genres[test] == "g3"
    assert num_trials[5] == num_g3


def test_durations_are_those_of_the_shorter_side():
    trials, speakers = all_pairs("aabb")
    seconds = {"a0": 1.9, "a1": 30.0, "b2": 2.0, "b3": 16.0}
    rows = condition_rows(np.arange(6.0), trials, speakers, {}, seconds)
    # shorter sides: a0a1 1.9, a0b2 1.9, a0b3 1.9, a1b2 2, a1b3 16, b2b3 2
    assert counts(rows) == [
        ("shorter side", "0 to 2 s", 1, 2),
        ("shorter side", "2 to 4 s", 1, 1),
        ("shorter side", "16 s and more", 0, 1),
    ]
    expected_eer = eer([0, 1, 2], [1, 0, 0])
    assert rows[0]["eer"] == pytest.approx(expected_eer)
