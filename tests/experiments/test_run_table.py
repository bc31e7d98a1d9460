"""Tables of experiments: which settings differ, what is the reference, which EERs are compared."""

import json

import numpy as np
import pytest
from compared_runs import LIST, add_valid, make_run, write_list
from refusals import refuses

from speakerlab.bin.score import scores_file
from speakerlab.experiments import run_table
from speakerlab.experiments.run_table import (
    choose_reference,
    differing_settings,
    find_differences,
    find_experiments,
    format_differences,
    format_runs,
    holm,
    json_rows,
    notes_of,
    other_differences,
    read_runs,
)
from speakerlab.experiments.stored_scores import scores_path


@pytest.fixture
def world(tmp_path):
    """A trial list, and three experiments: a good one, the same again, a bad one."""
    write_list(tmp_path / "data/test")
    exp = tmp_path / "exp"
    make_run(exp / "a", seed=0, lr=0.1, spread=0.2)
    make_run(exp / "b", seed=1, lr=0.1, spread=0.2)
    make_run(exp / "c", seed=0, lr=0.5, spread=4.0)
    return exp


def runs_in(folder):
    return read_runs(find_experiments([folder]))


def compared(world, **options):
    runs = runs_in(world)
    return runs, find_differences(runs, runs[0], **options)


def edit(path, **changes):
    values = json.loads(path.read_text())
    if isinstance(values, list):
        (values[0],) = [values[0] | changes]
    else:
        values |= changes
    path.write_text(json.dumps(values))


# Finding and reading


def test_experiments_are_found_once_in_order(world, tmp_path):
    folders = find_experiments([world / "c", world])
    assert [folder.name for folder in folders] == ["c", "a", "b"]
    (world / "no_experiment").mkdir()
    assert find_experiments([world]) == [world / name for name in "abc"]
    with refuses(str(tmp_path / "data"), "no experiment"):
        find_experiments([tmp_path / "data", world])
    with refuses(str(tmp_path / "gone"), "missing"):
        find_experiments([world / "a", tmp_path / "gone"])
    with refuses(str(world / "a"), "two or more"):
        find_experiments([world / "a", world / "../exp/a"])


def test_runs_of_one_name_are_told_apart(world, tmp_path):
    make_run(tmp_path / "other/a", seed=0, lr=0.1, spread=0.2)
    runs = read_runs([world / "a", world / "b", tmp_path / "other/a"])
    assert [run.name for run in runs] == [
        str(world / "a"),
        "b",
        str(tmp_path / "other/a"),
    ]


def test_only_settings_that_differ_are_columns(world):
    runs = runs_in(world)
    assert differing_settings(runs) == {"seed": [0, 1, 0], "lr": [0.1, 0.1, 0.5]}
    assert other_differences(runs) == []
    assert differing_settings(runs[::2]) == {"lr": [0.1, 0.5]}


def test_other_data_and_arguments_of_other_models_are_seen(world):
    config = world / "c/config.yaml"
    text = config.read_text() + "runtime: {precision: bf16}\nvad: {threshold: 1}\n"
    config.write_text(text.replace("campplus", "xvector").replace("growth", "width"))
    for name in "ab":
        path = world / name / "config.yaml"
        path.write_text(path.read_text() + "runtime: {precision: fp32}\nvad: null\n")
    edit(world / "b/run.json", train_sha256="1" * 64)
    runs = runs_in(world)
    assert differing_settings(runs) == {
        "seed": [0, 1, 0],
        "model": ["campplus", "campplus", "xvector"],
        "lr": [0.1, 0.1, 0.5],
        "vad": [None, None, "set"],
        "train data": ["0" * 12, "1" * 12, "0" * 12],
    }
    assert other_differences(runs) == ["runtime.precision"]
    assert "runtime.precision" in notes_of(runs, [])[0]


def test_steps_hours_and_the_last_validation_are_read(world):
    exp = world / "a"
    with (exp / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "valid", "step": 30, "eer": 0.03, "eer/vox": 0.5}\n')
        file.write('{"kind": "train", "step": 40, "loss"')
    lines = ["10:00:00 exp/a: trains on the CPU", "10:30:00 step 10", "in two lines"]
    # The night between was no training.
    lines += ["22:00:00 exp/a: trains on the CPU", "23:00:00 published"]
    log = "".join(f"2026-01-31 {line}\n" for line in lines)
    (exp / "train.log").write_text(log.replace("2026-01-31 in", "in"))
    run, *_ = runs_in(world)
    assert (run.steps, run.hours, run.valid) == (30, 1.5, {"eer": 0.03})


def test_an_unfinished_experiment_has_no_results(world):
    (world / "b/model").rename(world / "model_of_b")
    runs = runs_in(world)
    assert runs[1].rows == {}
    assert "not finished: b" in notes_of(runs, [])


def test_the_primary_row_of_the_present_model_counts(world):
    path = world / "a/results.json"
    (row,) = json.loads(path.read_text())
    other = {"backend": "asnorm", "eer": 0.125}
    rows = [row | {"primary": False}, row | other | {"primary": True}]
    rows.append(row | {"trials": "old", "model_sha256": "f" * 64})
    path.write_text(json.dumps(rows))
    run, *_ = runs_in(world)
    assert run.rows.keys() == {LIST}
    assert run.rows[LIST]["eer"] == 0.125


# The reference


def test_the_reference_is_the_best_of_validation(world):
    runs = runs_in(world)
    assert choose_reference(runs)[0] is runs[0]
    for name, eer in (("a", 0.2), ("b", 0.1)):
        add_valid(world / name, eer=eer)
    runs = runs_in(world)
    # One run has no validation.
    assert choose_reference(runs)[0] is runs[0]
    add_valid(world / "c", eer=0.3)
    runs = runs_in(world)
    reference, reason = choose_reference(runs)
    assert reference is runs[1]
    assert "validation EER" in reason


# Comparisons


def test_holm_by_hand():
    # Sorted: 0.005 x 4, 0.01 x 3, 0.03 x 2, 0.04 x 1, which is raised to the one before.
    p_values = [0.01, 0.04, 0.03, 0.005]
    assert holm(p_values) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_bad_run_is_significantly_worse_and_a_like_one_is_not(world):
    runs, differences = compared(world)
    like, bad = differences
    assert [d.run for d in differences] == runs[1:]
    assert not like.is_significant
    assert bad.is_significant
    assert bad.eer_difference == runs[2].rows[LIST]["eer"] - runs[0].rows[LIST]["eer"]
    # The smaller of two p-values is doubled.
    assert bad.p_value is not None
    assert bad.corrected_p == pytest.approx(2 * bad.p_value)
    assert notes_of(runs, differences) == []


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda b: (b / "results.json").unlink(), "not scored"),
        (lambda b: (b / "scores/test_trials.txt").unlink(), "no stored scores"),
        (lambda b: edit(b / "results.json", num_target=3), "other trials"),
        (lambda b: edit(b / "results.json", eer=0.9), "not those of its EER"),
        (
            lambda b: (b / "scores/test_trials.txt").write_text("x y 0.5 target\n"),
            "other trials",
        ),
    ],
)
def test_what_cannot_be_compared_has_a_reason(world, harm, reason):
    harm(world / "b")
    runs, differences = compared(world)
    like, bad = differences
    assert reason in like.not_tested
    assert like.eer_difference is None
    # Of one comparison.
    assert bad.corrected_p == bad.p_value
    (note,) = notes_of(runs, differences)
    assert note.startswith(f"not tested: b on {LIST}: ")
    assert "b" not in format_differences(differences).split()


def test_a_list_that_has_moved_is_given(world, tmp_path):
    (tmp_path / "data").rename(tmp_path / "moved")
    _, differences = compared(world)
    assert all("--trials" in d.not_tested for d in differences)
    other = tmp_path / "moved/test/other"
    other.write_text("")
    lists = [other, tmp_path / "moved/test/trials"]
    _, differences = compared(world, lists=lists)
    assert differences[1].is_significant


def test_too_many_comparisons_for_the_replicates_are_noted(world, monkeypatch):
    monkeypatch.setattr(run_table, "LEVEL", 1e-9)
    runs, differences = compared(world)
    (note,) = notes_of(runs, differences)
    least_p = differences[1].least_p
    corrected_p = differences[1].corrected_p
    assert least_p is not None and corrected_p is not None
    assert note.startswith(f"{LIST}: no difference can be significant")
    assert f"{least_p:.2g}" in note
    assert least_p <= corrected_p


def test_too_few_speakers_have_no_test(tmp_path):
    write_list(tmp_path / "data/test", num_speakers=4)
    for name, spread in (("a", 0.2), ("b", 4.0)):
        make_run(tmp_path / "exp" / name, seed=0, lr=0.1, spread=spread)
    _, (difference,) = compared(tmp_path / "exp")
    assert difference.corrected_p is None
    line = format_differences([difference]).splitlines()[-1]
    assert line.split()[3:] == ["n/a", "(4", "speakers)", "n/a"]


# Names and output


@pytest.mark.parametrize("enrol", [None, "teacher"])
@pytest.mark.parametrize("back_end", ["cosine", "mean+cosine+asnorm,top-n=20"])
def test_stored_scores_are_those_that_score_writes(tmp_path, back_end, enrol):
    row = {"trials": "test/trials", "backend": back_end}
    if enrol:
        row["trials"] += f", enrolled by {enrol}"
    teacher = tmp_path / enrol if enrol else None
    name = scores_file(tmp_path / "test/trials", back_end, teacher)
    assert scores_path(tmp_path, row) == tmp_path / "scores" / name


def test_tables_and_json_hold_the_same(world):
    add_valid(world / "a", eer=0.125)
    runs, differences = compared(world)
    header, _, *lines = format_runs(runs).splitlines()
    assert header.split()[:3] == ["experiment", "seed", "lr"]
    assert f"{LIST} EER %" in header
    assert [line.split()[:3] for line in lines] == [
        ["a", "0", "0.1"],
        ["b", "1", "0.1"],
        ["c", "0", "0.5"],
    ]
    assert "12.50 %" in lines[0]
    table = format_differences(differences).splitlines()
    assert [line.split()[-1] for line in table[2:]] == ["no", "yes"]

    rows = json_rows(runs, runs[0], differences)
    assert json.loads(json.dumps(rows)) == rows
    assert rows[2]["settings"] == {"seed": 0, "lr": 0.5}
    assert rows[0]["is_reference"]
    result = rows[2]["results"][LIST]
    eer = 100 * result["eer"]
    assert f" {eer:.2f} (" in lines[2]
    assert result["compared"]["is_significant"]
    assert result["compared"]["with"] == str(world / "a")
    assert "compared" not in rows[0]["results"][LIST]
    assert np.isfinite(result["compared"]["p_holm"])
