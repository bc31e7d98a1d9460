"""From scores to the page: pictures, players, curves of the training, versions."""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from result_rows import row
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from speakerlab.checkpoints.model_files import read_card
from speakerlab.experiments import plots
from speakerlab.experiments.curves import settings_of
from speakerlab.experiments.report import facts_of, write_report
from speakerlab.experiments.trial_list import ListScores, TrialList
from speakerlab.scoring.metrics import eer
from speakerlab.scoring.trials import Trials
from speakerlab.training.monitor import Monitor

IDS = [f"spk{speaker}-{take}" for speaker in range(4) for take in range(2)]


def all_pairs():
    """Every pair of two of four speakers' two utterances: 4 targets, 24 non-targets."""
    first_N, second_N = np.triu_indices(len(IDS), k=1)
    speakers = np.array([name[:4] for name in IDS])
    is_target_N = speakers[first_N] == speakers[second_N]
    return Trials(
        IDS,
        IDS,
        first_N.astype(np.int32),
        second_N.astype(np.int32),
        is_target_N,
    )


TRIALS = all_pairs()
SCORES = np.random.default_rng(0).normal(size=len(TRIALS))
SCORES += 2 * TRIALS.is_target_N


def scored(name, backend, scores_N, *options, data=Path("gone")):
    """All pairs as a back end scored them."""
    # the report does not read them
    speakers_N = np.zeros(len(TRIALS), dtype=np.int64)
    listed = TrialList(
        name,
        data / name,
        TRIALS,
        (speakers_N, speakers_N),
        {},
        {},
        {},
    )
    return ListScores(listed, backend, scores_N, *options)


@pytest.fixture
def experiment(publish_to, tmp_path):
    """A published model and a row a back end; `exp.rows` are those of results.json."""
    publish_to("exp/model")
    return tmp_path / "exp"


def rows_of(exp, lists, **changes):
    rows = []
    for scored_list in lists:
        values = {
            "trials": scored_list.listed.name,
            "eer": eer(scored_list.scores_N, TRIALS.is_target_N),
            "backend": scored_list.backend,
            "model_sha256": read_card(exp)["sha256"],
        }
        rows.append(row(**values | changes))
    return rows


def page_of(exp, lists):
    path = write_report(exp, lists, rows_of(exp, lists))
    return path.read_text(encoding="utf-8")


def write_losses(exp):
    """Two steps of a training, with losses of 2 and 1."""
    lines = []
    for step in (1, 2):
        metrics = {"kind": "train", "step": step, "loss": 3.0 - step}
        lines.append(json.dumps(metrics) + "\n")
    (exp / "metrics.jsonl").write_text("".join(lines))


def test_a_report_holds_pictures_players_and_versions(experiment, make_data_dir):
    pytest.importorskip("matplotlib")
    data = make_data_dir("test", seconds=[1.0, 1.25]).parent
    worse_N = SCORES - 1.5 * TRIALS.is_target_N
    lists = [
        scored("test/trials", "better", SCORES, 2 * SCORES, -SCORES, data=data),
        scored("test/trials", "cosine", worse_N, data=data),
    ]
    write_losses(experiment)
    path = write_report(experiment, lists, rows_of(experiment, lists))
    page = path.read_text(encoding="utf-8")
    assert path == experiment / "report.html"
    # the DET curves, two histograms, one calibration, the loss
    assert page.count('src="data:image/png') == 5
    pictures = sorted(p.name for p in (experiment / "scores").iterdir())
    assert pictures == [
        "test_trials_better_calibration.png",
        "test_trials_better_scores.png",
        "test_trials_cosine_scores.png",
        "test_trials_det.png",
        "training_loss.png",
    ]
    # players of the primary back end: two for each of 4 targets and of 5 non-targets
    assert "Hardest trials: better" in page
    assert page.count("<audio") == 2 * (4 + 5)
    assert page.count('src="data:audio/mpeg') == 2 * (4 + 5)
    _, _, folded = page.partition("<summary>Other back ends</summary>")
    folded = folded.partition("</details>")[0]
    assert "Scores of cosine" in folded
    assert "Scores of better" not in folded

    card = read_card(experiment)
    for fact in (np.__version__, version("torch"), card["sha256"]):
        assert f"<dd>{fact}</dd>" in page
    assert "max_seconds: 120.0" in page
    facts = facts_of(experiment)
    names = facts["Trained with"].keys() | facts["Model"].keys()
    assert names == card.keys()
    assert "torch" not in facts["Model"]
    assert facts["Scored with"]["torch"] == version("torch")
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)


@pytest.mark.parametrize(
    ("fine_tuned", "name"), [(False, "untrained"), (True, "before fine-tuning")]
)
def test_the_det_plot_names_the_initial_weights(
    experiment, monkeypatch, fine_tuned, name
):
    pytest.importorskip("matplotlib")
    names = []

    def plot_det(path, curves):
        names.extend(curves)
        plots.plot_curve(path, [1, 2], [1.0, 2.0], name="det")

    monkeypatch.setattr(plots, "plot_det", plot_det)
    options = (None, -SCORES, fine_tuned)
    page_of(experiment, [scored("test/trials", "cosine", SCORES, *options)])
    assert names == ["cosine", name]


def test_tensorboard_shows_the_plots_of_the_last_scoring(experiment):
    image = pytest.importorskip("matplotlib.image")
    folder = experiment / "tensorboard"
    lists = [scored("test/trials", "cosine", SCORES)]
    # Without curves of a training, there is nothing to stand beside.
    page_of(experiment, lists)
    assert not folder.exists()

    monitor = Monitor(experiment, total_steps=7, every_seconds=9.0)
    monitor.begin(0)
    monitor.train_row(7, {"loss": 1.0})
    monitor.close()
    page_of(experiment, lists)
    page_of(experiment, lists)
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    tags = ["scores/test_trials_det", "scores/test_trials_cosine_scores"]
    assert events.Tags()["images"] == tags
    for tag in tags:
        (drawn,) = events.Images(tag)
        assert drawn.step == 7  # of the card
        picture = image.imread(f"{experiment / tag}.png")
        assert (drawn.height, drawn.width) == picture.shape[:2]
    assert [event.step for event in events.Scalars("train/loss")] == [7]
    # Of the last scoring only.
    (scored_eer,) = events.Scalars("results/eer/test/trials")
    assert scored_eer.value == pytest.approx(eer(SCORES, TRIALS.is_target_N))

    # A run that is extended from there keeps them.
    longer = Monitor(experiment, total_steps=8, every_seconds=9.0)
    longer.begin(7)
    longer.train_row(8, {"loss": 0.5})
    longer.close()
    events.Reload()
    assert len(events.Images(tags[0])) == 1
    assert [event.step for event in events.Scalars("train/loss")] == [7, 8]


def test_reference_curves_are_drawn_behind_those_of_the_same_training(
    experiment, tmp_path
):
    image = pytest.importorskip("matplotlib.image")
    lists = [scored("test/trials", "cosine", SCORES)]
    rows = rows_of(experiment, lists)
    write_losses(experiment)
    curve = {
        "step": [1, 2],
        "median": [2.0, 1.0],
        "low": [1.5, 0.5],
        "high": [2.5, 1.5],
    }
    background = np.array([220, 223, 227]) / 255
    for name, changes, is_drawn in [
        ("same", {}, True),
        ("other", {"steps": 8}, False),
    ]:
        settings = settings_of(experiment) | changes
        reference = {
            "settings": settings,
            "seeds": [1, 2, 3],
            "curves": {"loss": curve},
        }
        reference_path = tmp_path / name
        reference_path.write_text(json.dumps([reference]))
        path = write_report(experiment, lists, rows, [], reference_path)
        page = path.read_text(encoding="utf-8")
        assert ("range of 3 reference runs" in page) == is_drawn

        # the range is an area of this grey
        picture = image.imread(experiment / "scores/training_loss.png")
        distance = np.abs(picture[..., :3] - background).max(axis=2)
        grey_share = np.mean(distance < 0.01)
        assert (grey_share > 0.05) == is_drawn


def test_without_matplotlib_and_audio_the_page_says_so(experiment, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    lists = [scored("test/trials", "cosine", SCORES)]
    page = page_of(experiment, lists)
    (line,) = re.findall(r"The plots could not be drawn: [^<]*", page)
    assert "pip install matplotlib" in line
    assert "<img" not in page
    # nor is there a data directory with audio
    assert "The hardest trials of test/trials cannot be played: " in page
    assert "<audio" not in page
    assert "Hardest trials: cosine" in page


def test_rows_of_another_model_are_left_out_and_counted(experiment, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    lists = [scored("test/trials", "cosine", SCORES)]
    old = rows_of(
        experiment,
        lists,
        trials="test/older",
        model_sha256="ab" * 32,
    )
    rows = [
        *old,
        *rows_of(experiment, lists),
        *rows_of(experiment, lists, trials="test/before"),
    ]
    path = write_report(experiment, lists, rows)
    page = path.read_text(encoding="utf-8")
    assert "Rows of another model in results.json, left out: 1." in page
    assert "test/older" not in page
    assert "test/before" in page


def test_many_lists_have_fewer_players_each(experiment, make_data_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    data = make_data_dir("test", seconds=[1.0, 1.0]).parent
    lists = []
    for number in range(6):
        name = f"test/{number}"
        lists.append(scored(name, "cosine", SCORES, data=data))
    page = page_of(experiment, lists)
    # one trial a kind instead of four
    assert page.count("<audio") == 6 * 2 * 2
