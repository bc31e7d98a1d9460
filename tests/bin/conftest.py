"""A corpus of eight speakers, a configuration that trains on it in seconds, and a way to
run commands as a user would: in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import ROOT, TINY
from voices import RATE, make_wave

from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.tables import write_data_dir


def write_set(folder: Path, speakers: range, num_utterances: int, trials: bool) -> None:
    """A checked data directory of speakers."""
    wavs, owners = {}, {}
    for speaker in speakers:
        for utterance in range(num_utterances):
            name = f"s{speaker}-u{utterance}"
            wavs[name] = folder.parent / "wav" / f"{name}.wav"
            wavs[name].parent.mkdir(parents=True, exist_ok=True)
            audio.write(wavs[name], make_wave(speaker, utterance, 1.5 + 0.1 * utterance), RATE)
            owners[name] = f"s{speaker}"
    names = sorted(wavs)
    pairs = [(a, b, owners[a] == owners[b]) for i, a in enumerate(names) for b in names[i + 1 :]]
    write_data_dir(folder, wavs=wavs, speakers=owners, trials={"trials": pairs} if trials else None)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """train: speakers 0-7, 3 utterances each; test: 8-11, 3 each; noise and rooms."""
    root = tmp_path_factory.mktemp("corpus with space")
    write_set(root / "train", range(8), 3, trials=False)
    write_set(root / "test", range(8, 12), 3, trials=True)
    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(2 * RATE) * 3000).astype(np.int16)
    decay = np.exp(-np.arange(4000) / 800)
    room = (rng.standard_normal(4000) * decay * 8000).astype(np.int16)
    for name, wave in (("noise", noise), ("rirs", room)):
        audio.write(root / "wav" / f"{name}.wav", wave, RATE)
        write_data_dir(root / name, wavs={name: root / "wav" / f"{name}.wav"})
    check_data_dirs([root / "train", root / "test", root / "noise", root / "rirs"])
    return root


@pytest.fixture(scope="session")
def settings(data) -> list[str]:
    """`--config` and `--set` of the tiny experiment."""
    conf = str(ROOT / "conf" / "campplus_tiny.yaml")
    return ["--config", conf, "--set", f"data.dir={data}", *TINY]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The package importable, one thread a process (so that ranks share the cores)."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


@pytest.fixture(scope="session")
def run(environment):
    """run(*words) -> the finished process of `python *words`, output as text."""

    def run_python(*words, **more) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, words)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=200, **more
        )

    return run_python


LAUNCH = ["-m", "speakerlab.bin.launch", "--standalone", "--max-restarts", "0"]


@pytest.fixture(scope="session")
def train_command(settings):
    """train_command(exp, ranks, *settings) -> the words after `python`."""

    def words(exp, ranks=1, *more) -> list[str]:
        options = ["--exp", str(exp), *settings, *more]
        if ranks == 1:
            return ["-m", "speakerlab", "train", *options]
        launch = [*LAUNCH, "--nproc-per-node", str(ranks)]
        return [*launch, "-m", "speakerlab.bin.train", *options]

    return words
