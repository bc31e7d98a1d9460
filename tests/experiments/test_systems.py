"""Systems and lists by name: what a text names, and what is refused."""

import json
import logging
from typing import Any

import numpy as np
import pytest
from compared_runs import LIST, make_run
from named_pipes import piped
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


def test_equal_names_get_the_folders_that_tell_them_apart(world):
    paths = ["ours/x/scores.txt", "base/x/scores.txt", "other/s.txt"]
    for path in paths:
        (world / path).parent.mkdir(parents=True)
        (world / path).write_text((world / "s.txt").read_text())
    systems = read_systems([*paths, "s.txt"], num_lists=1)
    names = [system.name for system in systems]
    assert names == ["ours/x/scores", "base/x/scores", "other/s", f"{world.name}/s"]
    # A name that is given needs none.
    systems = read_systems([paths[0], f"base={paths[1]}"], num_lists=1)
    assert [system.name for system in systems] == ["ours/x/scores", "base"]


def test_a_misspelt_path_has_a_suggestion(world):
    for text, hint in [
        ("exp/aa", "; did you mean exp/a?"),
        ("x=exp/b_x1", "; did you mean exp/b_x=1?"),
        ("exq/a", "; there is no folder exq"),
        ("exp/nothing like it", "; correct the path"),
        ("t.txt", "; did you mean s.txt?"),
    ]:
        with pytest.raises(FileNotFoundError) as caught:
            read_systems([text], num_lists=1)
        assert str(caught.value).endswith(hint), caught.value


def test_two_names_of_a_system_are_reported(world, caplog):
    names = [s.name for s in read_systems(["a=exp/a", "b=exp/a"], num_lists=0)]
    assert names == ["a", "b"]
    assert "exp/a: is given twice, as a and as b" in caplog.text


# Trial lists


@pytest.mark.parametrize("recorded", ["relative", "lost"])
def test_a_list_is_found_from_another_folder(world, monkeypatch, recorded):
    record = world / "exp/a/scores/.scored"
    if recorded == "relative":
        record.write_text(f"trials={json.dumps({'data/test/trials': 'digest'})}\n")
    else:
        # Then by the data.dir of the configuration.
        record.unlink()
    (world / "elsewhere").mkdir()
    monkeypatch.chdir(world / "elsewhere")
    for path in ("../exp/a", str(world / "exp/a")):
        ((result,),) = scored([path])
        assert result.has_scores


def test_a_lost_list_has_the_path_that_was_tried(world):
    (world / "data/test/trials").unlink()
    ((result,),) = scored(["exp/a"])
    assert result.no_scores == (
        f"the list was not found as {world}/data/test/trials; give its path with"
        " --trials FILE"
    )


def test_a_bare_name_has_its_folder(world, monkeypatch):
    monkeypatch.chdir(world / "data/test")
    for path in ("trials", "./trials", "../test/trials"):
        ((result,),) = scored(["../../s.txt"], [path])
        assert result.trial_list.name == "test/trials"


def add_lists(exp, *names):
    path = exp / "results.json"
    (row,) = json.loads(path.read_text())
    rows = [row, *(row | {"trials": name} for name in names)]
    path.write_text(json.dumps(rows))


def test_lists_that_another_model_enrols_must_be_asked_for(world, caplog):
    caplog.set_level(logging.INFO)
    enrolled = f"{LIST}, enrolled by teacher"
    add_lists(world / "exp/a", enrolled)
    systems = read_systems(["exp/a"], num_lists=0)
    assert [trial_list.key for trial_list in read_lists([], systems)] == [LIST]
    assert f"left out '{enrolled}'" in caplog.text
    (trial_list,) = read_lists([enrolled], systems)
    assert trial_list.key == enrolled
    # The only ones are shown.
    rows = json.loads((world / "exp/a/results.json").read_text())
    (world / "exp/a/results.json").write_text(json.dumps(rows[1:]))
    systems = read_systems(["exp/a"], num_lists=0)
    assert [trial_list.key for trial_list in read_lists([], systems)] == [enrolled]


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["test/trials_o", "test/trials_h"], ["o", "h"]),
        (["test/trials", "test/trials_h"], ["trials", "trials_h"]),
        (["dev/trials_o", "test/trials_o"], ["dev/trials_o", "test/trials_o"]),
        (["test/trials_o"], ["test/trials_o"]),
    ],
)
def test_names_of_several_lists_leave_out_what_is_common(world, keys, names):
    path = world / "exp/a/results.json"
    (row,) = json.loads(path.read_text())
    path.write_text(json.dumps([row | {"trials": key} for key in keys]))
    systems = read_systems(["exp/a"], num_lists=0)
    assert [trial_list.name for trial_list in read_lists([], systems)] == names
    full = read_lists([], systems, short_names=False)
    assert [trial_list.name for trial_list in full] == keys
    # A name that is given stays.
    texts = [f"x={keys[0]}", *keys[1:]]
    assert read_lists(texts, systems)[0].name == "x"


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


def test_a_score_file_may_be_a_pipe(world):
    lists = ["data/test/trials"]
    (((expected),),) = scored(["s.txt"], lists)
    with piped(world, world / "s.txt") as (pipe,):
        (((result),),) = scored([f"s={pipe}"], lists)
    assert np.array_equal(result.scores_N, expected.scores_N)


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
        (["exp/a", "exp/a"], [], "exp/a", "given twice"),
        (["exp/a", "./exp/../exp/a"], [], "exp/../exp/a", "given twice"),
        (["x=exp/a", "x=exp/a"], [], "exp/a", "given twice"),
        (["base", "=", "exp/a"], [], "=", "without blanks about the ="),
        (["base=", "exp/a"], [], "base=", "without blanks about the ="),
        (["base", "=exp/a"], [], "=exp/a", "without blanks about the ="),
        (["exp/a"], ["data/test/trials"] * 2, "--trials", "test/trials is given twice"),
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
