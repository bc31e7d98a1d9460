"""Training steps and inference of a model, as training and extraction build them.

In: `Config` and a size. Out: `Step`, on made-up features that are there already: no audio is read.

Letters: B micro-batch, T frames, F mel bins.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from speakerlab.bench.memory import PeakMemory
from speakerlab.bench.timing import block_seconds
from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.experiments import setup as setup_training
from speakerlab.training.precision import Precision, resolve_precision
from speakerlab.training.update import Updater

NUM_CLASSES = 1000
LR = 1e-4  # small: random features with random labels must not end in infinity


@dataclass(frozen=True)
class Step:
    """One training step, or one batch of inference."""

    utt_per_second: float
    seconds: float  # the median
    peak_bytes: int | None  # that the device, or the process, held more; None where not known


def measure_step(
    config: Config,
    *,
    device: torch.device,
    precision: str,
    micro_batch: int,
    train: bool,
    seconds: float,
) -> Step:
    """Measure for about so many seconds. precision: fp32, bf16 or fp16.

    A training step is what the trainer does with a micro-batch from its features on; the head has
    1,000 classes. Inference is the backbone as it extracts, BatchNorms folded. Crops are as long as
    the configuration has them.
    """
    used = resolve_precision(precision, device)
    feats_BTF = make_features(config, micro_batch=micro_batch, device=device)
    with PeakMemory(device) as peak:
        prepare = training_step if train else inference
        work = prepare(config, feats_BTF, used)
        took = statistics.median(block_seconds(work, device=device, seconds=seconds))
        del work
    return Step(micro_batch / took, took, peak.bytes)


def make_features(config: Config, *, micro_batch: int, device: torch.device) -> Tensor:
    """feats_BTF of noise, as long as a crop."""
    fbank = build.Fbank(**config.frontend)
    num_frames = fbank.num_frames(build.crop_samples(config))
    generator = torch.Generator().manual_seed(0)
    shape_BTF = (micro_batch, num_frames, fbank.num_mel_bins)
    return torch.randn(shape_BTF, generator=generator).to(device)


def training_step(config: Config, feats_BTF: Tensor, precision: Precision) -> Callable[[], None]:
    """What `Trainer.train_step` does once its batch is there, on one rank without accumulation."""
    device = feats_BTF.device
    task = build.build_task(config, num_classes=NUM_CLASSES, precision=precision)
    task.to(device).train()
    setup_training.choose_kernels(config, task)
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
        updater.guard.before_step()
        loss = task(feats_BTF, label_B, margin).loss
        updater.scale_loss(loss).backward()
        updater.check(next(steps), updater.step(LR))

    return step


def inference(config: Config, feats_BTF: Tensor, precision: Precision) -> Callable[[], object]:
    """The backbone of the embedder that extraction uses, without its front end."""
    embedder = build.build_embedder(config).eval().for_inference(precision).to(feats_BTF.device)
    backbone = embedder.get_submodule("backbone")

    def embed() -> None:
        with torch.inference_mode(), precision.autocast():
            backbone(feats_BTF)

    return embed
