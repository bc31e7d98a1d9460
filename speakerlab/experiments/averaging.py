"""Average the models of a training's last checkpoints.

Only scheduled checkpoints count: the steps of others depend on time, signals and validation.
Izmailov et al., Averaging Weights Leads to Wider Optima, UAI 2018, arXiv 1803.05407, without its
learning rate schedule; BatchNorm's statistics are averaged like weights, as in WeSpeaker.
"""

import logging
from pathlib import Path

import torch
from torch import nn

from speakerlab.checkpoints.published import publish
from speakerlab.config.build import build_embedder, build_head
from speakerlab.config.embedder import Embedder
from speakerlab.config.schema import load_config
from speakerlab.core.reading import read_json, read_text
from speakerlab.losses.head import Head
from speakerlab.training.checkpoint import list_checkpoints, load_state, read_checked, read_note

log = logging.getLogger(__name__)


def average_newest(
    exp_dir: Path, num: int, embedder: Embedder, head: Head | None = None
) -> list[int]:
    """Load the mean of up to `num` newest scheduled checkpoints, or the last; return their steps.

    head: must not be split over ranks. Raises ValueError if there is none, or one is damaged.
    """
    found = list_checkpoints(exp_dir / "checkpoints")
    if not found:
        raise ValueError(f"{exp_dir}/checkpoints: no checkpoint to average")
    scheduled = [folder for folder in found if read_note(folder).scheduled]
    if not scheduled:
        text = "%s/checkpoints: none is scheduled, using only the last; to average some, lower "
        log.warning(text + "training.checkpoint_every_steps", exp_dir)
    folders = scheduled[-num:] or found[-1:]
    parts = {"embedder": embedder} if head is None else {"embedder": embedder, "head": head}
    own = nn.ModuleDict(parts).state_dict()
    sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in own.items()}
    for folder in folders:
        task = load_state(read_checked(folder), where=folder)["task"]
        for name, total in sums.items():
            total += task[name].to(total) / len(folders)
    for name, tensor in own.items():
        tensor.copy_(sums[name])
    return [read_note(folder).step for folder in folders]


def publish_average(exp_dir: Path, num: int, out: Path) -> tuple[list[int], str]:
    """Publish the mean of up to `num` checkpoints; return their steps and the model's sha256.

    It has no calibration, and a head only for identification.
    """
    if out.exists():
        raise ValueError(f"{out}: already exists; choose another --out")
    recorded = exp_dir / "config.yaml"
    if not recorded.exists():
        raise FileNotFoundError(f"{recorded}: no such file; give the folder of a training")
    config = load_config([recorded])
    embedder, head, classes = build_embedder(config), None, list[str]()
    if config.task == "identification":
        classes = read_text(exp_dir / "speakers.txt").splitlines()
        head = build_head(config, embed_dim=embedder.embed_dim, num_classes=len(classes))
    steps = average_newest(exp_dir, num, embedder, head)
    run = exp_dir / "run.json"
    facts = read_json(run) if run.exists() else {}
    return steps, publish(
        out,
        embedder=embedder,
        config=config,
        facts={**facts, "averaged": steps},
        head=head.state_dict() if head else None,
        speakers=classes,
    )
