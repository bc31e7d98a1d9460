"""Fixtures of the tests of recipes."""

import sys
from importlib import import_module, reload
from pathlib import Path

import pytest
from corpora import MUSAN, RIR_LIST, ROOMS, write_short

ROOT = Path(__file__).resolve().parents[2]
PREPARED = ".prepared"  # the record of what is prepared already
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

    def run(name, corpus, data, *options, code=0) -> str:
        Path(data, PREPARED).unlink(missing_ok=True)  # the corpus may have changed
        arguments = ["--corpus", corpus, "--data", data, *options]
        arguments = [str(argument) for argument in arguments]
        assert recipe(name).main(arguments) == code
        written = capsys.readouterr()
        return written.err if code else written.out

    return run


@pytest.fixture
def musan(tmp_path) -> Path:
    return write_short(tmp_path / "musan", (*MUSAN, "speech/librivox/s-0.wav"))


@pytest.fixture
def rirs(tmp_path) -> Path:
    folder = write_short(tmp_path / "RIRS_NOISES", ROOMS)
    (folder / "real_rirs_isotropic_noises/rir_list").write_text(RIR_LIST)
    return folder


@pytest.fixture(scope="session")
def espeak():
    """Install the synthesizer of mini if needed; skip without a network."""
    try:
        import_module("egs.mini.making").install_espeak()
    except ValueError as error:
        pytest.skip(str(error))
