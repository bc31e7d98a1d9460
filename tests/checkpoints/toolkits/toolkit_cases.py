"""Checkpoints in the toolkits' own formats, and the toolkits' embeddings of real recordings.

    python tests/checkpoints/toolkits/toolkit_cases.py SHARED 3DSPEAKER_CHECKOUT WESPEAKER_CHECKOUT

stores the embeddings in figures.npz. A checkpoint holds the published names and shapes (those of
tests/parity) and weights drawn by the rule of tests/models/figures.py, so that it can be written
anywhere. WeSpeaker's have a projection and a config.yaml, as its trainer leaves them.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

from figures import fill, read_figures

HERE = Path(__file__).parent
SEED = 7
STORED = HERE / "figures.npz"
LIBRISPEECH = "data/librispeech-mini/test-other"
NUM_FILES = 4
SECONDS = (2.0, 12.0)


@dataclass(frozen=True)
class Case:
    toolkit: str
    figures: str  # of tests/parity: where names and shapes are from
    upstream: str
    args: dict[str, object]
    config: dict[str, object] = field(
        default_factory=dict
    )  # of WeSpeaker, but for the arguments


def wespeaker(
    figures: str, module: str, name: str, embed_dim: int, pooling: str
) -> Case:
    args = {"feat_dim": 80, "embed_dim": embed_dim, "pooling_func": pooling}
    dataset = {
        "resample_rate": 16000,
        "fbank_args": {"num_mel_bins": 80, "dither": 1.0},
    }
    projection = {"project_type": "arc_margin", "scale": 32.0, "easy_margin": False}
    config = {"model": name, "dataset_args": dataset, "projection_args": projection}
    return Case("wespeaker", figures, f"wespeaker.models.{module}:{name}", args, config)


CASES = {
    "campplus": Case(
        "3dspeaker",
        "campplus_192",
        "speakerlab.models.campplus.DTDNN:CAMPPlus",
        {"embedding_size": 192},
    ),
    "eres2net_base": Case(
        "3dspeaker",
        "eres2net_base",
        "speakerlab.models.eres2net.ERes2Net:ERes2Net",
        {"embedding_size": 192, "m_channels": 32},
    ),
    "campplus_wespeaker": wespeaker("campplus", "campplus", "CAMPPlus", 512, "TSTP"),
    "resnet34_wespeaker": wespeaker(
        "resnet34_wespeaker", "resnet", "ResNet34", 256, "TSTP"
    ),
    "ecapa512_wespeaker": wespeaker(
        "ecapa_tdnn_512_glob_wespeaker",
        "ecapa_tdnn",
        "ECAPA_TDNN_GLOB_c512",
        192,
        "ASTP",
    ),
}


def write_checkpoint(name: str, folder: Path) -> Path:
    """The checkpoint of a case in a separate folder."""
    case = CASES[name]
    place = folder / name
    place.mkdir(parents=True)
    shapes = dict(read_figures(case.figures).shapes)
    if case.toolkit == "wespeaker":
        shapes["projection.weight"] = (6, int(str(case.args["embed_dim"])))
        text = yaml.dump({**case.config, "model_args": case.args})
        (place / "config.yaml").write_text(text, encoding="utf-8")
    file = place / (
        "avg_model.pt" if case.toolkit == "wespeaker" else "embedding_model.ckpt"
    )
    torch.save(
        {tensor: fill(tensor, shape, SEED) for tensor, shape in shapes.items()}, file
    )
    return file


def real_files(shared: Path) -> list[Path]:
    """The first recordings by name that are of a usual length."""
    import soundfile

    paths: list[Path] = []
    for path in sorted((shared / LIBRISPEECH).rglob("*.flac")):
        if SECONDS[0] <= soundfile.info(path).duration <= SECONDS[1]:
            paths.append(path)
        if len(paths) == NUM_FILES:
            break
    return paths


def run_peer(
    toolkit: str,
    checkout: Path,
    checkpoints: dict[str, Path],
    files: list[Path],
    scratch: Path,
) -> dict[str, np.ndarray]:
    """Return name of the case -> (files, D), the embeddings by the toolkit's own code."""
    models = [
        {
            "name": name,
            "upstream": case.upstream,
            "args": case.args,
            "checkpoint": str(checkpoint),
        }
        for name, checkpoint, case in ((n, c, CASES[n]) for n, c in checkpoints.items())
    ]
    job = {"toolkit": toolkit, "checkout": str(checkout), "models": models}
    job |= {
        "files": [str(file) for file in files],
        "out": str(scratch / f"{toolkit}.npz"),
    }
    (scratch / f"{toolkit}.json").write_text(json.dumps(job), encoding="utf-8")
    # From its own folder: the toolkit's package may bear the name of ours.
    command = [sys.executable, str(HERE / "peer.py"), str(scratch / f"{toolkit}.json")]
    subprocess.run(command, cwd=scratch, check=True, timeout=250)
    return dict(np.load(scratch / f"{toolkit}.npz"))


def main(shared: Path, *checkouts: Path) -> None:
    files = real_files(shared)
    figures: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for toolkit, checkout in zip(
            ("3dspeaker", "wespeaker"), checkouts, strict=True
        ):
            names = [name for name, case in CASES.items() if case.toolkit == toolkit]
            checkpoints = {name: write_checkpoint(name, scratch) for name in names}
            figures |= run_peer(toolkit, checkout, checkpoints, files, scratch)
    np.savez_compressed(
        STORED, files=np.array([file.name for file in files]), **figures
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
