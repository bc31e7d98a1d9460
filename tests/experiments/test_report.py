"""From scores to the page: pictures, players, curves of the training, versions."""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from result_rows import row

from speakerlab.checkpoints.model_files import read_card
from speakerlab.experiments.curves import settings_of
from speakerlab.experiments.report import facts_of, write_report
from speakerlab.experiments.trial_list import ListScores, TrialList
from speakerlab.scoring.metrics import eer
from speakerlab.scoring.trials import Trials

IDS = [f"spk{speaker}-{take}" for speaker in range(4) for take in range(2)]


def all_pairs():
    """Every pair of two of four speakers' two utterances: 4 targets, 24 non-targets."""
    first, second = np.triu_indices(len(IDS), k=1)
    same_N = np.array([IDS[a][:4] == IDS[b][:4] for a, b in zip(first, second)])
    return Trials(IDS, IDS, first.astype(np.int32), second.astype(np.int32), same_N)


TRIALS = all_pairs()
SCORES = np.random.default_rng(0).normal(size=len(TRIALS)) + 2 * TRIALS.is_target_N


def scored(name, backend, scores_N, *more, data=Path("gone")):
    """All pairs as a back end scored them."""
    speakers = np.zeros((2, len(TRIALS)), dtype=np.int64)  # the report does not read them
    listed = TrialList(name, data / name, TRIALS, (speakers[0], speakers[1]), {}, {}, {})
    return ListScores(listed, backend, scores_N, *more)


@pytest.fixture
def experiment(publish_to, tmp_path):
    """A published model and a row a back end; `exp.rows` are those of results.json."""
    publish_to("exp/model")
    return tmp_path / "exp"


def rows_of(exp, lists, **changes):
    return [
        row(
            **{
                "trials": one.listed.name,
                "eer": eer(one.scores_N, TRIALS.is_target_N),
                "backend": one.backend,
                "model_sha256": read_card(exp)["sha256"],
                **changes,
            }
        )
        for one in lists
    ]


def test_a_report_holds_pictures_players_and_versions(experiment, make_data_dir):
    pytest.importorskip("matplotlib")
    data = make_data_dir("test", seconds=[1.0, 1.25]).parent
    lists = [
        scored("test/trials", "better", SCORES, 2 * SCORES, -SCORES, data=data),
        scored("test/trials", "cosine", SCORES - 1.5 * TRIALS.is_target_N, data=data),
    ]
    rows = [{"kind": "train", "step": s, "loss": 3.0 - s} for s in (1, 2)]
    (experiment / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write_report(experiment, lists, rows_of(experiment, lists))
    page = path.read_text(encoding="utf-8")
    assert path == experiment / "report.html"
    # the DET curves, two histograms, one calibration, the loss
    assert page.count('src="data:image/png') == 5
    assert sorted(p.name for p in (experiment / "scores").iterdir()) == [
        "test_trials_better_calibration.png",
        "test_trials_better_scores.png",
        "test_trials_cosine_scores.png",
        "test_trials_det.png",
        "training_loss.png",
    ]
    assert "Hardest trials: better" in page  # those of the primary back end
    assert page.count("<audio") == page.count('src="data:audio/mpeg') == 2 * (4 + 5)
    folded = page.partition("<summary>Other back ends</summary>")[2].partition("</details>")[0]
    assert "Scores of cosine" in folded and "Scores of better" not in folded
    for fact in (np.__version__, version("torch"), read_card(experiment)["sha256"]):
        assert f"<dd>{fact}</dd>" in page
    assert "max_seconds: 120.0" in page
    facts, card = facts_of(experiment), read_card(experiment)
    assert facts["Trained with"].keys() | facts["Model"].keys() == card.keys()
    assert "torch" not in facts["Model"] and facts["Scored with"]["torch"] == version("torch")
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)


def test_reference_curves_are_drawn_behind_those_of_the_same_training(experiment, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    lists = [scored("test/trials", "cosine", SCORES)]
    rows = [{"kind": "train", "step": s, "loss": 3.0 - s} for s in (1, 2)]
    (experiment / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = {"step": [1, 2], "median": [2.0, 1.0], "low": [1.5, 0.5], "high": [2.5, 1.5]}
    shown = {}
    for name, more in (("same", {}), ("other", {"steps": 8})):
        settings = settings_of(experiment) | more
        reference = {"settings": settings, "seeds": [1, 2, 3], "curves": {"loss": curve}}
        (tmp_path / name).write_text(json.dumps([reference]))
        page = write_report(experiment, lists, rows_of(experiment, lists), [], tmp_path / name)
        has_caption = "range of 3 reference runs" in page.read_text(encoding="utf-8")
        picture = image.imread(experiment / "scores/training_loss.png")[..., :3]
        grey = np.abs(picture - np.array([220, 223, 227]) / 255).max(axis=2) < 0.01
        shown[name] = has_caption, grey.mean() > 0.05
    assert shown == {"same": (True, True), "other": (False, False)}


def test_without_matplotlib_and_audio_the_page_says_so(experiment, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    lists = [scored("test/trials", "cosine", SCORES)]
    page = write_report(experiment, lists, rows_of(experiment, lists)).read_text(encoding="utf-8")
    (line,) = re.findall(r"The plots could not be drawn: [^<]*", page)
    assert "pip install matplotlib" in line
    assert "<img" not in page
    # nor is there a data directory with audio
    assert "The hardest trials of test/trials cannot be played: " in page
    assert "<audio" not in page and "Hardest trials: cosine" in page


def test_rows_of_another_model_are_left_out_and_counted(experiment, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    lists = [scored("test/trials", "cosine", SCORES)]
    old = rows_of(experiment, lists, trials="test/older", model_sha256="ab" * 32)
    rows = [*old, *rows_of(experiment, lists), *rows_of(experiment, lists, trials="test/before")]
    page = write_report(experiment, lists, rows).read_text(encoding="utf-8")
    assert "Rows of another model in results.json, left out: 1." in page
    assert "test/older" not in page and "test/before" in page


def test_many_lists_have_fewer_players_each(experiment, make_data_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    data = make_data_dir("test", seconds=[1.0, 1.0]).parent
    lists = [scored(f"test/{i}", "cosine", SCORES, data=data) for i in range(6)]
    page = write_report(experiment, lists, rows_of(experiment, lists)).read_text(encoding="utf-8")
    assert page.count("<audio") == 6 * 2 * 2  # one trial a kind instead of four
