"""Average the models of a training: its last checkpoints, and the model that it began from.

Only scheduled checkpoints are averaged: the steps of other checkpoints depend on time, signals and
validation.
Izmailov et al., Averaging Weights Leads to Wider Optima, UAI 2018, arXiv 1803.05407, without its
learning rate schedule; BatchNorm's statistics are averaged like weights, as in WeSpeaker.
"""

import logging
from pathlib import Path

import torch
from torch import nn

from speakerlab.checkpoints.published import load_initial_network, publish
from speakerlab.config.build import build_head, build_trained_network
from speakerlab.config.schema import Config, load_config
from speakerlab.core.reading import read_text
from speakerlab.embedder import Embedder
from speakerlab.experiments.run_log import recorded_facts
from speakerlab.losses.head import Head
from speakerlab.models.segmenter import Segmenter
from speakerlab.training.checkpoint import (
    list_checkpoints,
    load_state,
    read_checked,
    read_note,
)

log = logging.getLogger(__name__)


def average_newest(
    exp_dir: Path,
    num: int,
    embedder: Embedder | Segmenter,
    head: Head | None = None,
) -> list[int]:
    """Load the mean of up to `num` newest scheduled checkpoints, or the last; return their steps.

    head: must not be split over ranks. Raises ValueError if a checkpoint is damaged or none exists.
    """
    saved = list_checkpoints(exp_dir / "checkpoints")
    if not saved:
        raise ValueError(f"{exp_dir}/checkpoints: no checkpoint to average")
    # Equal configurations have the same scheduled steps, also after interruptions.
    scheduled = [folder for folder in saved if read_note(folder).scheduled]
    if not scheduled:
        log.warning(
            "%s/checkpoints: none is scheduled, using only the last; to average some,"
            " lower training.checkpoint_every_steps",
            exp_dir,
        )
    folders = scheduled[-num:] or saved[-1:]

    # The tensors of a checkpoint have the prefixes `embedder.` and `head.`, as in this ModuleDict.
    modules: dict[str, nn.Module] = {"embedder": embedder}
    if head is not None:
        modules["head"] = head
    current_state = nn.ModuleDict(modules).state_dict()

    # Sums in fp64, so that rounding errors of many checkpoints do not add up.
    sums: dict[str, torch.Tensor] = {}
    for name, tensor in current_state.items():
        sums[name] = torch.zeros_like(tensor, dtype=torch.float64)
    for folder in folders:
        checkpoint = load_state(read_checked(folder), where=folder)
        task_state = checkpoint["task"]
        for name, total in sums.items():
            weights = task_state[name].to(total)
            total += weights / len(folders)

    # `current_state` shares its tensors with the modules.
    for name, tensor in current_state.items():
        tensor.copy_(sums[name])
    return [read_note(folder).step for folder in folders]


def mix_with_initial(
    exp_dir: Path, embedder: Embedder | Segmenter, config: Config
) -> None:
    """Set the weights to a mean with those of --init, by `training.initial_share`.

    A model that was fine-tuned on one kind of recordings gets worse on others. Half of the way back
    it has most of what it learned, and most of what it knew: Wortsman et al., "Robust fine-tuning
    of zero-shot models", CVPR 2022, arXiv 2109.01903.
    """
    share = config.training.initial_share
    if not share:
        return
    initial_state = load_initial_network(exp_dir, config).state_dict()
    for name, tensor in embedder.state_dict().items():
        initial = initial_state[name].to(tensor.device, torch.float64)
        tensor.copy_(torch.lerp(tensor.double(), initial, share))


def publish_average(exp_dir: Path, num: int, out: Path) -> tuple[list[int], str]:
    """Publish the mean of up to `num` checkpoints; return their steps and the model's sha256.

    It has no calibration, and a head only for identification.
    """
    # An existing model may be in use.
    if out.exists():
        raise ValueError(f"{out}: already exists; choose another --out")
    recorded = exp_dir / "config.yaml"
    if not recorded.exists():
        raise FileNotFoundError(
            f"{recorded}: no such file; give the folder of a training"
        )
    config = load_config([recorded])
    embedder = build_trained_network(config)

    # A verification model has its head only for further training.
    head: Head | None = None
    classes: list[str] = []
    if config.task == "identification":
        assert isinstance(embedder, Embedder)
        classes = read_text(exp_dir / "speakers.txt").splitlines()
        head = build_head(
            config,
            embed_dim=embedder.embed_dim,
            num_classes=len(classes),
        )
    steps = average_newest(exp_dir, num, embedder, head)
    mix_with_initial(exp_dir, embedder, config)

    digest = publish(
        out,
        embedder=embedder,
        config=config,
        facts={**recorded_facts(exp_dir), "averaged": steps},
        head=None if head is None else head.state_dict(),
        speakers=classes,
    )
    return steps, digest
