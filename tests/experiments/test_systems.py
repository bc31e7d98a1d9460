"""Systems and lists by name: what a text names, and what is refused."""

import json
from typing import Any

import pytest
from compared_runs import LIST, make_run
from paper_systems import draw_scores, make_list, write_system
from refusals import refuses

from speakerlab.experiments.systems import (
    read_lists,
    read_systems,
    score_systems,
    split_name,
)
from speakerlab.scoring.metrics import eer, min_dcf


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Two experiments with results, two lists, a score file for each."""
    listed = make_list(tmp_path / "data/test")
    make_run(tmp_path / "exp/a", seed=0, lr=0.1, spread=0.3)
    make_run(tmp_path / "exp/b_x=1", seed=1, lr=0.1, spread=0.5)
    write_system(tmp_path / "s.txt", listed)
    other = make_list(tmp_path / "data/other", num_speakers=6)
    write_system(tmp_path / "o.txt", other)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scored(systems, lists=()) -> Any:
    named = read_systems(systems, num_lists=len(lists))
    return score_systems(named, read_lists(lists, named))


def test_a_text_that_is_a_path_has_no_name(world):
    for text, name, path in [
        ("exp/a", None, "exp/a"),
        ("x=exp/a", "x", "exp/a"),
        ("exp/b_x=1", None, "exp/b_x=1"),
        ("y=1=exp/b_x=1", "y=1", "exp/b_x=1"),
        ("x=gone", "x", "gone"),
        ("=exp/a", None, "=exp/a"),
        ("gone", None, "gone"),
    ]:
        found, where = split_name(text)
        assert (found, str(where)) == (name, path)


def test_names_are_short_or_whole_paths(world):
    names = [s.name for s in read_systems(["exp/a", "s.txt"], num_lists=1)]
    assert names == ["a", "s"]
    (world / "more").mkdir()
    (world / "exp/a").rename(world / "more/a")
    make_run(world / "exp/a", seed=3, lr=0.1, spread=0.3)
    texts = ["exp/a", "more/a", "z=exp/a"]
    assert [s.name for s in read_systems(texts, num_lists=0)] == [
        "exp/a",
        "more/a",
        "z",
    ]
    names = [s.name for s in read_systems(["s.txt"], num_lists=1, short_names=False)]
    assert names == ["s.txt"]


def test_a_score_file_has_its_own_metrics(world):
    (((result),),) = scored(["s.txt"], ["vox=data/test/trials"])
    listed = result.listed
    scores_N = draw_scores(listed, 0.3, 0)
    assert result.trial_list.name == "vox"
    assert result.metric("eer") == eer(scores_N, listed.trials.is_target_N)
    expected = min_dcf(scores_N, listed.trials.is_target_N, p_target=0.05)
    assert result.metric("min_dcf_0.05") == expected
    low, high = result.interval("eer")
    assert low < result.metric("eer") < high


def test_an_experiment_has_the_metrics_of_its_results(world):
    ((result,),) = scored(["exp/a"])
    (row,) = json.loads((world / "exp/a/results.json").read_text())
    assert result.trial_list.name == LIST
    assert result.metric("eer") == row["eer"]
    assert result.interval("eer") == row["eer_ci95"]
    assert result.metric("min_dcf_0.01") == row["min_dcf"]["0.01"]
    # Of a prior that the results do not have, from the stored scores.
    is_target_N = result.is_target_N
    expected = min_dcf(result.scores_N, is_target_N, p_target=0.25)
    assert result.metric("min_dcf_0.25") == expected


def test_several_score_files_of_a_name_are_of_several_lists(world):
    lists = ["data/test/trials", "data/other/trials"]
    first, second = scored(["x=s.txt", "x=o.txt"], lists)
    assert len(first[0].scores_N) == 435
    assert len(second[0].scores_N) == 153
    with refuses("x", "1 score file for 2 trial lists"):
        scored(["x=s.txt"], lists)
    # In another order, trials have no score.
    with refuses("o.txt", "no score"):
        scored(["x=o.txt", "x=s.txt"], lists)


def test_a_list_may_have_its_name_in_the_results(world):
    ((result, other),) = scored(["exp/a", "exp/b_x=1"], [f"Vox 1={LIST}"])
    assert (result.trial_list.name, other.trial_list.key) == ("Vox 1", LIST)
    with refuses("--trials", "test/trial", LIST, error=FileNotFoundError):
        scored(["exp/a"], ["test/trial"])
    with refuses("--trials", "x names 2 lists"):
        scored(["exp/a"], ["x=data/test/trials", "x=data/other/trials"])


def test_an_experiment_without_the_list_has_no_result(world):
    ((result, missing),) = scored(["x=o.txt", "exp/a"], ["data/other/trials"])
    assert result.metric("eer") is not None
    assert missing is None


def test_without_its_list_an_experiment_has_only_its_results(world):
    (world / "data/test/trials").unlink()
    ((result,),) = scored(["exp/a"])
    assert result.metric("eer") > 0
    assert not result.has_scores
    assert result.find_metric("min_dcf_0.25") is None
    assert result.interval("eer") is not None
    assert "the list was not found" in result.no_scores
    with refuses(LIST, "not found"):
        scored(["exp/a", "s=s.txt"], [LIST])


@pytest.mark.parametrize(
    ("systems", "lists", "subject", "value"),
    [
        (["gone"], [], "gone", "no such experiment or score file"),
        (["s.txt"], [], "s.txt", "--trials"),
        (["data"], [], "data", "no results"),
        (["x=exp/a", "x=exp/b_x=1"], [], "x", "names 2 systems"),
        (["exp/a", "exp/a"], [], "exp/a", "names 2 systems"),
        (["x=exp/a", "x=s.txt"], ["data/test/trials"], "x", "names 2 systems"),
        (["s.txt"], ["gone"], "--trials", "gone"),
        (["s.txt"], ["data"], "--trials", "data"),
    ],
)
def test_wrong_names_are_refused(world, systems, lists, subject, value):
    error = (
        FileNotFoundError
        if "gone" in (systems + lists) or lists == ["data"]
        else ValueError
    )
    with refuses(subject, value, error=error):
        scored(systems, lists)


def test_other_trials_of_the_same_name_are_refused(world):
    path = world / "exp/b_x=1/results.json"
    (row,) = json.loads(path.read_text())
    path.write_text(json.dumps([row | {"num_target": 3}]))
    with refuses(LIST, "b_x=1 was scored on other trials"):
        scored(["exp/a", "exp/b_x=1"])
    # Also if the list is not found.
    (world / "data/test/trials").unlink()
    with refuses(LIST, "b_x=1 has 3 targets", "same trials"):
        scored(["exp/a", "exp/b_x=1"])


def test_other_trials_of_the_same_number_are_refused(world):
    path = world / "exp/b_x=1/scores/test_trials.txt"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(["x y 0.5 target\n", *lines[1:]]))
    with refuses(LIST, "b_x=1 was scored on other trials"):
        scored(["exp/a", "exp/b_x=1"])
