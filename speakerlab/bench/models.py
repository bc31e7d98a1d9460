"""Training steps and inference of a model, built as training and extraction build them.

Features are random and there already: no audio is read. Letters: B micro-batch, T frames, F mel
bins.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import count, product

import torch
from torch import Tensor

from speakerlab.bench.convolutions import measure_convolutions
from speakerlab.bench.machine import matmul_gflops
from speakerlab.bench.rows import Row
from speakerlab.bench.stopwatch import block_seconds, peak_memory
from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.experiments import setup
from speakerlab.experiments.planning import asked_micro_batch
from speakerlab.frontend.fbank import Fbank
from speakerlab.training.precision import Precision, resolve_precision
from speakerlab.training.update import Updater

WORKS = ("train", "infer")
MICRO_BATCH = {"cpu": 8, "cuda": 64}  # if the configuration has no number
NUM_CLASSES = 1000
LR = 1e-4  # small: random features with random labels must not diverge
TRIED_SECONDS = 0.3  # of each precision
MUCH_FASTER = 1.2  # times the rate of fp32, or bf16 is left out


def model_rows(
    config: Config, name: str, *, device: torch.device, works: Sequence[str], seconds: float
) -> Iterator[Row]:
    """Yield `train.NAME.PRECISION` and `infer...`, each beside its convolutions alone.

    seconds: of each of the two measurements. One rank, crops as long as the configuration has them.
    """
    feats_BTF = random_features(config, device)
    for work, precision in product(works, precisions_of(config, device)):
        used = resolve_precision(precision, device)
        with peak_memory(device) as peak:
            prepare = training_step if work == "train" else inference
            step = prepare(config, feats_BTF, used)
            took = statistics.median(block_seconds(step, device=device, seconds=seconds))
            del step
        embedder = build.build_embedder(config)
        if work == "infer":
            embedder = embedder.eval().for_inference()
        alone = measure_convolutions(
            embedder.get_submodule("backbone").to(device),
            feats_BTF,
            precision=precision,
            train=work == "train",
            seconds=seconds,
        )
        yield Row(
            name=f"{work}.{name}.{precision}",
            ours=len(feats_BTF) / took,
            unit="utt/s",
            gflops=alone.gflop / took,
            share=alone.seconds / took,
            peak_mib=peak[0] / 2**20 if peak else None,
            note=f"batch {len(feats_BTF)}",
        )


def precisions_of(config: Config, device: torch.device) -> Sequence[str]:
    """Return what the configuration asks for; for `auto`, bf16 too where its products are faster.

    A CPU without bf16 emulates it, which shows only in the rate.
    """
    if config.runtime.precision != "auto":
        return [config.runtime.precision]
    fp32, bf16 = (matmul_gflops(device, p, seconds=TRIED_SECONDS) for p in ("fp32", "bf16"))
    return ["fp32", "bf16"] if bf16 > MUCH_FASTER * fp32 else ["fp32"]


def micro_batch_of(config: Config, device: torch.device) -> int:
    """Return the number of the configuration, or a usual one."""
    return asked_micro_batch(config) or MICRO_BATCH[device.type]


def random_features(config: Config, device: torch.device) -> Tensor:
    """Return feats_BTF of noise, as long as a crop."""
    fbank = Fbank(**config.frontend)
    num_frames = fbank.num_frames(build.crop_samples(config))
    generator = torch.Generator().manual_seed(0)
    shape_BTF = (micro_batch_of(config, device), num_frames, fbank.num_mel_bins)
    return torch.randn(shape_BTF, generator=generator).to(device)


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
