"""A corpus of twelve speakers, a configuration that trains on it in seconds, and commands."""

import os
import sys
from pathlib import Path

import pytest
from forked import run_forked
from models_on_disk import publish_small
from tiny import CONFIG, ROOT, TINY, write_corpus


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus with space"))


@pytest.fixture
def make_exp(tmp_path, make_config, make_embedder):
    """make_exp("a", "seed=1", ..., calibration=None) -> an experiment with a model."""

    def make(name: str, *overrides: str, calibration=None) -> Path:
        config = make_config(*overrides)
        embedder = make_embedder(*overrides)
        return publish_small(tmp_path / name, config, embedder, calibration)

    return make


@pytest.fixture(scope="session")
def settings(data) -> list[str]:
    """`--config` and `--set` of the tiny experiment, whose speeds make new speakers."""
    values = [f"data.dir={data}", *TINY, "augment.speed_classes=on"]
    return ["--config", CONFIG, "--set", *values]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The package importable, one thread a process (so that ranks share the cores)."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def run(environment, tmp_path_factory):
    """run(*words, ranks=1, code=0) -> what `python *words` wrote; it ended with that exit code."""

    def run_command(*arguments, code=0, **options):
        folder = tmp_path_factory.mktemp("output")
        done = run_forked(arguments, environment, folder=folder, **options)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run_command


@pytest.fixture(scope="session")
def train(run, settings):
    """train(exp, *settings, ranks=1, code=0) -> what `speakerlab train` wrote."""

    def train_to(exp, *overrides, **options):
        command = ("-m", "speakerlab", "train", "--exp", exp)
        return run(*command, *settings, *overrides, **options)

    return train_to


@pytest.fixture(scope="session")
def trained(tmp_path_factory, train) -> Path:
    """An experiment trained for 24 steps; a test that changes it takes a copy."""
    exp = tmp_path_factory.mktemp("trained") / "exp"
    train(exp)
    return exp


@pytest.fixture(scope="session")
def train_command(settings):
    """train_command(exp, ranks, *settings) -> the command line of a training as users start it."""

    def command_of(exp, ranks=1, *overrides) -> list[str]:
        options = ["--nproc", str(ranks), "--exp", str(exp), *settings, *overrides]
        return [sys.executable, "-m", "speakerlab", "train", *options]

    return command_of
