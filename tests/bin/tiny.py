"""The tiny experiment: its settings, what it leaves behind, and stage 3 of a recipe on it."""

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from voices import RATE, write_voices

from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.tables import write_data_dir

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "conf/campplus_tiny.yaml")
TINY = [
    "model.args.head_channels=4",
    "model.args.init_channels=16",
    "model.args.growth_rate=8",
    "model.args.blocks=[2,2,2]",
    "model.args.embed_dim=32",
    "data.crop_seconds=0.6",
    "data.valid_speakers=2",
    "training.global_batch=8",
    "training.num_epochs=4",
    "training.checkpoint_every_steps=2",
    "runtime.log_every_steps=1",
    "runtime.log_every_seconds=0.001",
    "runtime.num_workers=1",
    "runtime.precision=fp32",
]
# For data without noise and rooms.
BARE = ["augment.noise_prob=0", "augment.room_prob=0"]


def slow(*values: object):
    """Return parameters of a test that is only run with the slow tests."""
    # tests/oldest.py and tests/safety import this module, and do not need pytest.
    import pytest

    return pytest.param(*values, marks=pytest.mark.slow)


def write_corpus(root: Path) -> Path:
    """train: speakers 0-7, 3 utterances each; test: 8-11, 3 each; a noise; a room."""
    seconds = (1.5, 1.6, 1.7)
    write_voices(root / "train", speakers=range(8), seconds=seconds, check=False)
    write_voices(
        root / "test",
        speakers=range(8, 12),
        seconds=seconds,
        trials="all",
        check=False,
    )
    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(2 * RATE) * 3000).astype(np.int16)
    # A decaying noise is the response of a simple room.
    decay = np.exp(-np.arange(4000) / 800)
    room = (rng.standard_normal(4000) * decay * 8000).astype(np.int16)
    for name, wave in (("noise", noise), ("rirs", room)):
        path = root / f"wav/{name}.wav"
        audio.write(path, wave, RATE)
        write_data_dir(root / name, wavs={name: path})
    folders = [root / "train", root / "test", root / "noise", root / "rirs"]
    check_data_dirs(folders)
    return root


def weights(exp: Path) -> list[str]:
    """Digests of the published embedder and head."""
    digests = []
    for name in ("embedder", "head"):
        content = (exp / f"model/{name}.safetensors").read_bytes()
        digests.append(hashlib.sha256(content).hexdigest())
    return digests


def rows(exp: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, of one kind; without a last line that is cut or being written."""
    path = exp / "metrics.jsonl"
    if not path.exists():
        return []
    complete_rows = []
    lines = path.read_text().splitlines(keepends=True)
    for line in lines:
        if line.endswith("\n"):
            complete_rows.append(json.loads(line))
    if kind is None:
        return complete_rows
    return [row for row in complete_rows if row["kind"] == kind]


def losses(exp: Path) -> dict[int, float]:
    """Step -> loss; each step must have one row."""
    train_rows = rows(exp, "train")
    loss_of_step = {row["step"]: row["loss"] for row in train_rows}
    assert len(loss_of_step) == len(train_rows)
    return loss_of_step


def checkpoints(exp: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted((exp / "checkpoints").glob("step_*"))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def card(exp: Path) -> dict[str, Any]:
    return read_json(exp / "model/card.json")


def names_in(folder: Path) -> list[str]:
    """Return the names of the files and folders in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def cut(exp: Path, copy: Path) -> Path:
    """Copy an experiment as if it had been killed after its oldest checkpoint."""
    shutil.copytree(exp, copy)
    shutil.rmtree(copy / "model")
    for folder in checkpoints(copy)[1:]:
        shutil.rmtree(folder)
    return copy


def copy_data(data: Path, copy: Path) -> Path:
    """Copy the corpus with its recordings, so that a test may change it."""
    shutil.copytree(data, copy)
    for table in copy.glob("*/wav.scp"):
        text = table.read_text()
        # The paths of the recordings begin with the folder of the corpus.
        table.write_text(text.replace(f"{data}/", f"{copy}/"))
    return copy


def stage_3(data: Path, exp: Path, settings: list[str], *arguments: str) -> list[str]:
    """Return the command line of stage 3 of egs/mini.

    settings: of the fixture. arguments: options of run.sh, and more settings, which have a `=`.
    """
    # The fixture begins with --config, its value and --set.
    values = []
    for value in settings[3:]:
        if not value.startswith("data.dir="):
            values.append(value)
    options = []
    for argument in arguments:
        if "=" in argument:
            values.append(argument)
        else:
            options.append(argument)
    run_sh = ["bash", str(ROOT / "egs/mini/run.sh")]
    stages = ["--stage", "3", "--stop-stage", "3"]
    model = ["--model", "campplus_tiny"]
    places = ["--data", str(data), "--exp", str(exp)]
    return [*run_sh, *stages, *model, *places, *options, "--set", *values]


def training_of(arguments: list[str]) -> list[str]:
    """Return the training that stage 3 would start, without the seconds that run.sh needs."""
    command = [*arguments, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("speakerlab train ")]
    command = shlex.split(line)
    return [sys.executable, "-m", *command]
