"""Fixtures of the tests of recipes."""

import sys
from importlib import import_module, reload
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for egs.common and egs.mini


@pytest.fixture
def recipe():
    """Return a function that loads the module egs/<name>/prepare.py again."""

    def load(name):
        return reload(import_module(f"egs.{name.replace('/', '.')}.prepare"))

    return load


@pytest.fixture
def prepare(recipe, capsys):
    """prepare("mini", corpus, data, *options, code=0) -> stdout of stage 1; stderr if it fails."""

    def run(name, corpus, data, *more, code=0) -> str:
        words = ["--corpus", corpus, "--data", data, *more]
        assert recipe(name).main(list(map(str, words))) == code
        written = capsys.readouterr()
        return written.err if code else written.out

    return run


@pytest.fixture(scope="session")
def espeak():
    """Install the synthesizer of mini if needed; skip without a network."""
    try:
        import_module("egs.mini.making").install_espeak()
    except ValueError as error:
        pytest.skip(str(error))
