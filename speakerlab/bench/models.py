"""Training steps and inference of a model, built as training and extraction build them.

Features are random and there already: no audio is read. Letters: B micro-batch, T frames, F mel
bins.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from speakerlab.bench.stopwatch import Row, block_seconds
from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.experiments import setup
from speakerlab.experiments.planning import asked_micro_batch
from speakerlab.frontend.fbank import Fbank
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import Precision
from speakerlab.training.update import Updater

WORKS = ("train", "infer")
MICRO_BATCH = {"cpu": 8, "cuda": 64}  # if the configuration has no number
NUM_CLASSES = 1000
LR = 1e-4  # small: random features with random labels must not diverge


def model_rows(
    config: Config, name: str, ranks: Ranks, *, works: Sequence[str], seconds: float
) -> Iterator[Row]:
    """Yield `train.NAME.PRECISION` and `infer...`, in the precision that training would take.

    seconds: of each measurement. One rank, crops as long as the configuration has them.
    """
    feats_BTF = random_features(config, ranks.device)
    precision = setup.precision(config, ranks)
    for work in works:
        prepare = training_step if work == "train" else inference
        step = prepare(config, feats_BTF, precision)
        took = statistics.median(block_seconds(step, device=ranks.device, seconds=seconds))
        yield Row(
            name=f"{work}.{name}.{precision.name}",
            ours=len(feats_BTF) / took,
            unit="utt/s",
            note=f"batch {len(feats_BTF)}",
        )


def micro_batch_of(config: Config, device: torch.device) -> int:
    """Return the number of the configuration, or a usual one."""
    return asked_micro_batch(config) or MICRO_BATCH[device.type]


def random_features(config: Config, device: torch.device) -> Tensor:
    """Return feats_BTF of noise, as long as a crop."""
    fbank = Fbank(**config.frontend)
    num_frames = fbank.num_frames(build.crop_samples(config))
    shape_BTF = (micro_batch_of(config, device), num_frames, fbank.num_mel_bins)
    return torch.randn(shape_BTF, device=device)


def training_step(config: Config, feats_BTF: Tensor, precision: Precision) -> Callable[[], None]:
    """Return a training step on one rank without accumulation, from its features on."""
    if config.task == "ssl":
        raise ValueError("task: ssl cannot be timed; leave out its layer of conf/ssl")
    device = feats_BTF.device
    task = build.build_task(config, num_classes=NUM_CLASSES, precision=precision)
    task.to(device).train()
    setup.choose_kernels(config, task)
    updater = Updater(
        task,
        build.build_optimizer(config, task.parameters(), lr=LR),
        device=device,
        clip_norm=config.training.clip_norm,
        scale_loss=precision.scales_loss,
    )
    label_B = torch.arange(len(feats_BTF), device=device) % NUM_CLASSES
    steps, margin = count(), config.training.margin.final

    def step() -> None:
        updater.before_step()
        loss = task(feats_BTF, label_B, margin).loss
        updater.scale_loss(loss).backward()
        updater.check(next(steps), updater.step(LR))

    return step


def inference(config: Config, feats_BTF: Tensor, precision: Precision) -> Callable[[], object]:
    """Return a pass of the backbone of the embedder that extraction uses."""
    embedder = build.build_embedder(config).eval().for_inference(precision).to(feats_BTF.device)
    backbone = embedder.get_submodule("backbone")

    def embed() -> None:
        with torch.inference_mode(), precision.autocast():
            backbone(feats_BTF)

    return embed
