"""Reference curves over several seeds."""

import json
from pathlib import Path

import pytest
from refusals import refuses

from egs.common.reference import summarize, write_reference
from speakerlab.experiments.curves import find_reference


def write_rows(path: Path, rows) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))


@pytest.fixture
def make_run(publish_to, tmp_path):
    """make_run(seed, loss, steps=60, valid=0.1) -> an experiment whose loss falls to `loss`."""

    def make(seed: int, loss: float, *, steps: int = 60, valid: float = 0.1) -> Path:
        exp = tmp_path / f"s{seed}_{steps}"
        publish_to(f"{exp.name}/model")
        card = exp / "model/card.json"
        facts = {"seed": seed, "steps": steps, "train_speakers": 5, "classes": 15}
        values = json.loads(card.read_text())
        card.write_text(json.dumps(values | facts))

        rows = []
        for step in range(1, steps + 1):
            row = {"kind": "train", "step": step, "lr": 0.1}
            row["loss"] = loss + steps - step
            rows.append(row)
        for step in (steps // 2, steps):
            rows.append({"kind": "valid", "step": step, "eer": valid})
        write_rows(exp / "metrics.jsonl", rows)
        return exp
        return exp

    return make


def test_a_reference_is_the_median_and_the_range_over_seeds(make_run):
    runs = [
        make_run(0, 1.0, valid=0.1),
        make_run(1, 4.0, valid=0.3),
        make_run(2, 2.0, valid=0.25),
    ]
    reference = summarize(runs)
    assert reference["seeds"] == [0, 1, 2]
    assert reference["settings"]["steps"] == 60
    assert reference["settings"]["classes"] == 15
    loss = reference["curves"]["loss"]
    # Bins of two steps: 1 and 2, ..., 59 and 60.
    assert len(loss["step"]) == 30
    keys = ("step", "low", "median", "high")
    first = [loss[key][0] for key in keys]
    last = [loss[key][-1] for key in keys]
    assert first == [1.5, 59.5, 60.5, 62.5]
    assert last == [59.5, 1.5, 2.5, 4.5]

    assert reference["curves"]["validation EER in %"] == {
        "step": [30, 60],
        "median": [25, 25],
        "low": [10, 10],
        "high": [30, 30],
    }
    rates = reference["curves"]["learning rate"]
    assert set(rates["high"]) == {0.1}


def test_a_recipe_has_one_reference_for_each_setting(make_run, tmp_path):
    file = tmp_path / "reference.json"
    long_run = make_run(0, 1.0, steps=90)
    assert find_reference(file, long_run) is None

    write_reference(file, [long_run])
    runs = [make_run(0, 1.0), make_run(1, 2.0)]
    write_reference(file, runs)
    # Of the same setting: it replaces the one before.
    runs = [make_run(3, 1.0), make_run(4, 2.0), make_run(5, 3.0)]
    write_reference(file, runs)
    references = json.loads(file.read_text())
    assert len(references) == 2

    short_run = make_run(7, 5.0)
    for run, seeds in ((long_run, [0]), (short_run, [3, 4, 5])):
        reference = find_reference(file, run)
        assert reference is not None
        assert reference["seeds"] == seeds
    other_setting = make_run(7, 5.0, steps=120)
    assert find_reference(file, other_setting) is None


def test_runs_that_differ_in_more_than_the_seed_make_no_reference(make_run):
    first = make_run(0, 1.0)
    other = make_run(1, 1.0, steps=90)
    with refuses(other, "'steps': 90"):
        summarize([first, other])
    with refuses(first, "seed 0"):
        summarize([first, first])
