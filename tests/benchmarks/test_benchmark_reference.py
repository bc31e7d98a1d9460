"""Reference curves over several seeds."""

import json
import sys
from pathlib import Path

import pytest
from refusals import refuses

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from reference import summarize, write_reference

from speakerlab.experiments.curves import find_reference


def write_rows(path: Path, rows) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def make_run(publish_to, tmp_path):
    """make_run(seed, loss, steps=60, valid=0.1) -> an experiment whose loss falls to `loss`."""

    def make(seed: int, loss: float, *, steps: int = 60, valid: float = 0.1) -> Path:
        exp = tmp_path / f"s{seed}_{steps}"
        publish_to(f"{exp.name}/model")
        card = exp / "model/card.json"
        facts = {"seed": seed, "steps": steps, "train_speakers": 5, "classes": 15}
        card.write_text(json.dumps(json.loads(card.read_text()) | facts))
        train = [
            {"kind": "train", "step": step, "loss": loss + steps - step, "lr": 0.1}
            for step in range(1, steps + 1)
        ]
        eers = [{"kind": "valid", "step": step, "eer": valid} for step in (steps // 2, steps)]
        write_rows(exp / "metrics.jsonl", [*train, *eers])
        return exp

    return make


def test_a_reference_is_the_median_and_the_range_over_seeds(make_run):
    runs = [make_run(0, 1.0, valid=0.1), make_run(1, 4.0, valid=0.3), make_run(2, 2.0, valid=0.25)]
    reference = summarize(runs)
    assert reference["seeds"] == [0, 1, 2]
    assert reference["settings"]["steps"] == 60 and reference["settings"]["classes"] == 15
    loss = reference["curves"]["loss"]
    assert len(loss["step"]) == 30  # bins of two steps: 1 and 2, ..., 59 and 60
    assert [loss[key][0] for key in ("step", "low", "median", "high")] == [1.5, 59.5, 60.5, 62.5]
    assert [loss[key][-1] for key in ("step", "low", "median", "high")] == [59.5, 1.5, 2.5, 4.5]
    assert reference["curves"]["validation EER in %"] == {
        "step": [30, 60], "median": [25, 25], "low": [10, 10], "high": [30, 30]
    }  # fmt: skip
    assert set(reference["curves"]["learning rate"]["high"]) == {0.1}


def test_a_recipe_has_one_reference_for_each_setting(make_run, tmp_path):
    file, long = tmp_path / "reference.json", make_run(0, 1.0, steps=90)
    assert find_reference(file, long) is None
    write_reference(file, [long])
    write_reference(file, [make_run(0, 1.0), make_run(1, 2.0)])
    write_reference(file, [make_run(3, 1.0), make_run(4, 2.0), make_run(5, 3.0)])  # in its place
    assert len(json.loads(file.read_text())) == 2
    for run, seeds in ((long, [0]), (make_run(7, 5.0), [3, 4, 5])):
        found = find_reference(file, run)
        assert found is not None and found["seeds"] == seeds
    assert find_reference(file, make_run(7, 5.0, steps=120)) is None


def test_runs_that_differ_in_more_than_the_seed_make_no_reference(make_run):
    first, other = make_run(0, 1.0), make_run(1, 1.0, steps=90)
    with refuses(other, "'steps': 90"):
        summarize([first, other])
    with refuses(first, "seed 0"):
        summarize([first, first])
