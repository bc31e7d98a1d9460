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
    truth = np.array([speakers[a] == speakers[b] for a, b in zip(first, second)])
    numbers = np.array([ord(speaker) for speaker in speakers])
    trials = Trials(ids, ids, first.astype(np.int32), second.astype(np.int32), truth)
    return trials, (numbers[first], numbers[second])


def counts(rows):
    return [(r["condition"], r["value"], r["num_target"], r["num_nontarget"]) for r in rows]


def test_values_of_both_sides():
    trials, speakers = all_pairs("aaabbb")
    device = dict(zip(trials.enrol_ids, ["tel", "tel", "mic", "tel", "mic", "mic"]))
    scores = np.arange(len(trials)) % 7
    rows = condition_rows(scores, trials, speakers, {"device": device}, {})
    # tel: a0 a1 b3, mic: a2 b4 b5
    assert counts(rows) == [
        ("device", "mic", 1, 2),
        ("device", "mic / tel", 4, 5),
        ("device", "tel", 1, 2),
    ]
    both = np.array(["tel", "tel", "mic", "tel", "mic", "mic"])
    crossed = both[trials.enrol_N] != both[trials.test_N]
    assert rows[1]["eer"] == eer(scores[crossed], trials.is_target_N[crossed])
    assert rows[1]["min_dcf"] == {"0.01": min_dcf(scores[crossed], trials.is_target_N[crossed])}
    assert (rows[1]["eer_ci95"], rows[1]["num_speakers"]) == (None, 2)


def test_values_with_five_speakers_have_an_interval():
    trials, speakers = all_pairs("aaaabbbbccccddddeeee")
    device = dict(zip(trials.enrol_ids, ["tel", "mic"] * 10))
    rows = condition_rows(np.arange(len(trials)) % 7, trials, speakers, {"device": device}, {})
    for row in rows:
        low, high = row["eer_ci95"]
        assert 0 <= low <= row["eer"] <= high <= 1 and row["num_speakers"] == 5


def test_one_kind_of_trials_gives_counts_alone():
    trials, speakers = all_pairs("aabb")
    sex = {"a0": "f", "a1": "f", "b2": "m", "b3": "m"}
    rows = condition_rows(np.arange(6.0), trials, speakers, {"gender": sex}, {})
    assert counts(rows) == [("gender", "f", 1, 0), ("gender", "f / m", 0, 4), ("gender", "m", 1, 0)]
    assert [row["eer"] for row in rows] == [None, None, None]


def test_an_unknown_side_is_in_no_row_and_one_value_is_no_condition():
    trials, speakers = all_pairs("aabb")
    columns = {"device": {"a0": "tel", "b2": "tel"}, "room": {"a0": "hall", "a1": "den"}}
    rows = condition_rows(np.arange(6.0), trials, speakers, columns, {})
    assert counts(rows) == []  # of the rooms, only the pair a0 a1 is known
    columns["room"]["b2"] = "den"
    rows = condition_rows(np.arange(6.0), trials, speakers, columns, {})
    assert counts(rows) == [("room", "den", 0, 1), ("room", "den / hall", 1, 1)]


def test_many_values_are_grouped_by_the_test_side():
    speakers_of = "aabbccddeeffgg"
    trials, speakers = all_pairs(speakers_of)
    genres = [f"g{i % 5}" for i in range(len(speakers_of))]  # 15 pairs of 5 values
    assert MAX_PAIRS < 15
    table = dict(zip(trials.enrol_ids, genres))
    rows = condition_rows(np.arange(len(trials)) % 11, trials, speakers, {"genre": table}, {})
    names = [row["value"] for row in rows]
    assert names == ["same", "different", *(f"test side: g{i}" for i in range(5))]
    total = sum(row["num_target"] + row["num_nontarget"] for row in rows[:2])
    assert total == len(trials)
    g3 = sum(genres[b] == "g3" for b in trials.test_N)
    assert rows[5]["num_target"] + rows[5]["num_nontarget"] == g3


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
    assert rows[0]["eer"] == pytest.approx(eer([0, 1, 2], [1, 0, 0]))
