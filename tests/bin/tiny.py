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
BARE = ["augment.noise_prob=0", "augment.room_prob=0"]  # for data without noise and rooms


def write_corpus(root: Path) -> Path:
    """train: speakers 0-7, 3 utterances each; test: 8-11, 3 each; a noise; a room."""
    seconds = (1.5, 1.6, 1.7)
    write_voices(root / "train", speakers=range(8), seconds=seconds, check=False)
    write_voices(root / "test", speakers=range(8, 12), seconds=seconds, trials="all", check=False)
    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(2 * RATE) * 3000).astype(np.int16)
    decay = np.exp(-np.arange(4000) / 800)
    room = (rng.standard_normal(4000) * decay * 8000).astype(np.int16)
    for name, wave in (("noise", noise), ("rirs", room)):
        audio.write(root / "wav" / f"{name}.wav", wave, RATE)
        write_data_dir(root / name, wavs={name: root / "wav" / f"{name}.wav"})
    check_data_dirs([root / "train", root / "test", root / "noise", root / "rirs"])
    return root


def weights(exp: Path) -> list[str]:
    """Digests of the published embedder and head."""
    files = [exp / "model" / f"{name}.safetensors" for name in ("embedder", "head")]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


def rows(exp: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, of one kind; without a last line that is cut or being written."""
    path = exp / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in found if kind in (None, row["kind"])]


def losses(exp: Path) -> dict[int, float]:
    """Step -> loss; each step must have one row."""
    found = rows(exp, "train")
    assert len({row["step"] for row in found}) == len(found)
    return {row["step"]: row["loss"] for row in found}


def checkpoints(exp: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted((exp / "checkpoints").glob("step_*"))


def card(exp: Path) -> dict[str, Any]:
    return json.loads((exp / "model/card.json").read_text())


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
        table.write_text(table.read_text().replace(f"{data}/", f"{copy}/"))
    for name in (".stage1", ".stage2"):  # as if these stages had been run
        (copy / name).touch()
    return copy


def stage_3(data: Path, exp: Path, settings: list[str], *more: str) -> list[str]:
    """Return the command line of stage 3 of egs/mini; `more`: settings and options."""
    values = [value for value in settings[3:] if not value.startswith("data.dir=")]
    options = [word for word in more if "=" not in word]
    return [
        *("bash", str(ROOT / "egs/mini/run.sh"), "--stage", "3", "--stop-stage", "3"),
        *("--model", "campplus_tiny", "--data", str(data), "--exp", str(exp), *options),
        *("--set", *values, *(word for word in more if "=" in word)),
    ]


def training_of(words: list[str]) -> list[str]:
    """Return the training that stage 3 would start, without the seconds that run.sh needs."""
    done = subprocess.run([*words, "--dry-run"], capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("python -m "))
    return [sys.executable, *shlex.split(line)[1:]]
