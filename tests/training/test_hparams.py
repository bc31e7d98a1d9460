"""TensorBoard's tab HPARAMS: settings and results of several experiments, each written once."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import (
    EventMultiplexer,
)
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams.api_pb2 import (
    ListSessionGroupsRequest,  # pyright: ignore[reportAttributeAccessIssue] # made when imported
    Status,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG

from speakerlab.training.monitor import Monitor, write_scores


def train(exp: Path, lr: float, eer: float, start_step: int = 0) -> None:
    """Write the rows of a training of 20 steps, whose last EER is `eer`."""
    settings = {"training.lr": lr, "seed": 0, "task": "verification"}
    monitor = Monitor(exp, total_steps=20, every_seconds=0.0, settings=settings)
    monitor.begin(start_step)
    for step in (10, 20):
        if step > start_step:
            eer_of_step = eer if step == 20 else eer + 0.1
            monitor.train_row(step, {"loss": 1.0, "accuracy": 0.5})
            monitor.valid_row(step, {"eer": eer_of_step, "eer/vox": 0.5})
    monitor.close()


def sessions_of(folder: Path):
    """Return the columns of settings, those of metrics, and the values of each run, as shown."""
    events = EventMultiplexer()
    events.AddRunsFromDirectory(str(folder))
    events.Reload()
    provider = MultiplexerDataProvider(events, str(folder))
    context = Context(TBContext(data_provider=provider, logdir=str(folder)))
    here = RequestContext()
    experiment = context.experiment_from_metadata(
        here,
        "",
        True,
        context.hparams_metadata(here, ""),
        context.hparams_from_data_provider(here, "", None),
    )
    request = ListSessionGroupsRequest(
        start_index=0,
        slice_size=9,
        allowed_statuses=Status.values(),
        include_metrics=True,
    )
    answer = Handler(here, context, "", request).run()
    values_of = {}
    for group in answer.session_groups:
        values = {key: value.number_value for key, value in group.hparams.items()}
        for metric in group.metric_values:
            values[metric.name.tag] = metric.value
        values_of[group.name] = values
    settings = [info.name for info in experiment.hparam_infos]
    metrics = [info.name.tag for info in experiment.metric_infos]
    return settings, metrics, values_of


def count_parameters(exp: Path) -> int:
    count = 0
    for path in (exp / "tensorboard").iterdir():
        for event in EventFileLoader(str(path)).Load():
            tags = [value.tag for value in event.summary.value]
            count += tags.count(SESSION_START_INFO_TAG)
    return count


def test_the_tab_shows_differing_settings_and_results_first(tmp_path):
    train(tmp_path / "a", lr=0.25, eer=0.125)
    train(tmp_path / "b", lr=0.5, eer=0.25)
    for test_eer in (0.75, 0.0625):  # scored twice
        write_scores(tmp_path / "a/tensorboard", 20, {"test/trials": test_eer}, {})
    settings, metrics, values_of = sessions_of(tmp_path)
    assert settings == ["training.lr", "seed", "task"]
    assert metrics[:2] == ["results/eer/test/trials", "results/valid_eer"]
    assert values_of.keys() == {"a", "b"}
    assert values_of["a"]["training.lr"] == 0.25
    assert values_of["b"]["training.lr"] == 0.5
    assert values_of["a"]["results/valid_eer"] == pytest.approx(0.125)
    assert values_of["b"]["results/valid_eer"] == pytest.approx(0.25)
    assert values_of["a"]["results/eer/test/trials"] == 0.0625
    assert "results/eer/test/trials" not in values_of["b"]


def test_a_resumed_training_does_not_write_its_settings_again(tmp_path):
    exp = tmp_path / "a"
    train(exp, lr=0.25, eer=0.125)
    train(exp, lr=0.25, eer=0.0625, start_step=10)
    assert count_parameters(exp) == 1
    _, _, values_of = sessions_of(tmp_path)
    assert values_of["a"]["results/valid_eer"] == pytest.approx(0.0625)


def test_a_training_that_begins_again_shows_its_new_settings(tmp_path):
    """As after a stop before the first checkpoint: TensorBoard keeps what it reads first."""
    exp = tmp_path / "a"
    train(exp, lr=0.25, eer=0.125)
    train(exp, lr=0.5, eer=0.25)
    assert count_parameters(exp) == 1
    _, _, values_of = sessions_of(tmp_path)
    assert values_of["a"]["training.lr"] == 0.5


def test_settings_are_written_again_where_the_events_were_removed(tmp_path):
    exp = tmp_path / "a"
    train(exp, lr=0.25, eer=0.125)
    for path in (exp / "tensorboard").iterdir():
        path.unlink()
    train(exp, lr=0.25, eer=0.125, start_step=10)
    assert count_parameters(exp) == 1
