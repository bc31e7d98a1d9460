"""How fast training gets its data on this machine, hop by hop, and what its crops sound like.

In: the `Config` of a training. Out: rates, and crops as wav files with a table of what was done to
each. Everything is built as training builds it. Letters: S samples.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speakerlab.bench.timing import synchronise
from speakerlab.config.schema import Config
from speakerlab.core.atomic import write_text
from speakerlab.core.batch import Batch, Crop, Draw
from speakerlab.data import audio
from speakerlab.data.dataset import TrainCrops
from speakerlab.data.loader import collate, train_loader
from speakerlab.data.sampler import EpochOrder, MicroBatches
from speakerlab.experiments import setup as setup_training
from speakerlab.experiments.corpus import Corpus, read_corpus, row_names
from speakerlab.experiments.planning import plan_batch
from speakerlab.frontend.augment import Augment
from speakerlab.frontend.augment.codec import LAWS
from speakerlab.training.distributed import Ranks
from speakerlab.training.task import SpeakerTask

ENDLESS = 1 << 40  # steps
WARM_UP = 2  # batches before anything is measured


class Laps:
    """Seconds by name, each from the end of the lap before; a GPU's work is done at the end."""

    def __init__(self, device: torch.device) -> None:
        self.seconds, self.device = defaultdict[str, float](float), device
        self.last = time.perf_counter()

    def end(self, name: str) -> None:
        synchronise(self.device)
        now = time.perf_counter()
        self.seconds[name] += now - self.last
        self.last = now

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class DataBench:
    """What a training of this configuration reads with, and what it would do with it."""

    corpus: Corpus
    crops: TrainCrops
    order: EpochOrder
    augment: Augment
    task: SpeakerTask
    device: torch.device
    micro_batch: int
    num_workers: int

    def batches(self) -> Iterator[Batch]:
        """Micro-batches as a rank gets them, without an end."""
        order = MicroBatches(
            self.order, start_step=0, stop_step=ENDLESS, micro_batch=self.micro_batch
        )
        return train_loader(
            self.crops,
            order,
            num_workers=self.num_workers,
            pin_memory=self.device.type == "cuda",
        )


def build_bench(config: Config, ranks: Ranks) -> DataBench:
    """Build the data's path and the model, for one rank."""
    corpus = read_corpus(config)
    classes = row_names(config, corpus)
    precision = setup_training.precision(config, ranks)
    task = setup_training.build_task(config, corpus, precision, ranks, num_classes=len(classes))
    assert isinstance(task.augment, Augment)
    plan = plan_batch(config, ranks, task)
    crops = setup_training.train_crops(config, corpus, classes, task.augment)
    return DataBench(
        corpus=corpus,
        crops=crops,
        order=setup_training.epoch_order(config, corpus),
        augment=task.augment,
        task=task.to(ranks.device),
        device=ranks.device,
        micro_batch=plan.micro_batch,
        num_workers=setup_training.num_workers(config, ranks, crops, plan),
    )


def measure_loader(bench: DataBench, *, seconds: float) -> float:
    """Crops a second that the loader's workers hand over while nothing else is done."""
    with closing(bench.batches()) as batches:  # pyright: ignore[reportArgumentType]
        next(islice(batches, WARM_UP - 1, None))
        start, num_crops = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            num_crops += len(next(batches).label_B)
        return num_crops / (time.perf_counter() - start)


def measure_training(bench: DataBench, *, seconds: float) -> tuple[float, float]:
    """(crops a second, share of the time waited for data) of forward and backward passes."""
    laps, num_crops = Laps(bench.device), 0
    with closing(bench.batches()) as batches:  # pyright: ignore[reportArgumentType]
        for number, batch in enumerate(batches):
            if number == WARM_UP:
                laps, num_crops = Laps(bench.device), 0
            laps.end("waited")
            batch = batch.to(bench.device)
            wave_BS = batch.feats_BTF if len(batch.feats_BTF) else bench.augment(batch)
            bench.task(wave_BS, batch.label_B, 0.0, batch=batch).loss.backward()
            bench.task.zero_grad()
            num_crops += len(batch.label_B)
            laps.end("worked")
            if number > WARM_UP and laps.total > seconds:
                break
    return num_crops / laps.total, laps.seconds["waited"] / laps.total


def measure_hops(bench: DataBench, *, seconds: float) -> dict[str, float]:
    """Seconds that each hop takes for a crop, one after the other in this process."""
    laps, num_crops = Laps(bench.device), 0
    order = MicroBatches(
        bench.order, start_step=0, stop_step=ENDLESS, micro_batch=bench.micro_batch
    )
    for number, slots in enumerate(order):
        if number == WARM_UP:
            laps, num_crops = Laps(bench.device), 0
        drawn = [bench.crops.draw(slot) for slot in slots]
        laps.end("draw")
        crops = [bench.crops.read(crop) for crop in drawn]
        laps.end("read")
        batch = collate(crops)
        laps.end("collate")
        batch = batch.to(bench.device)
        laps.end("to device")
        with torch.no_grad():
            wave_BS = bench.augment.scale(batch)
            for name in bench.augment.wave_names:
                wave_BS = bench.augment.run(name, wave_BS, batch)
                laps.end(name)
            bench.task.embedder.get_submodule("fbank")(wave_BS)
        laps.end("fbank")
        num_crops += len(slots)
        if number > WARM_UP and laps.total > seconds:
            break
    return {hop: total / num_crops for hop, total in laps.seconds.items()}


def write_crops(bench: DataBench, folder: Path, *, count: int) -> None:
    """The first crops of the first epoch as 16-bit wav, and `crops.tsv`: what was done to each."""
    folder.mkdir(parents=True, exist_ok=True)
    order = MicroBatches(bench.order, start_step=0, stop_step=ENDLESS, micro_batch=1)
    rows: list[dict[str, str]] = []
    for number, slot in enumerate(islice(chain.from_iterable(order), count)):
        crop = bench.crops[slot]
        bench.augment.take_silent()
        wave_S = bench.augment(collate([crop]).to(bench.device))[0].cpu().numpy()
        name = f"crop-{number:02d}.wav"
        audio.write(folder / name, audio.to_int16(wave_S), bench.corpus.train.sample_rate)
        about = describe(bench.corpus, bench.crops, crop)
        if bench.augment.take_silent():
            about["snr_db"] = "none: silent"
        clipped = f"{100 * (abs(wave_S) > 1).mean():.2f}"
        rows.append({"file": name, **about, "clipped_percent": clipped})
    lines = ["\t".join(rows[0]), *("\t".join(row.values()) for row in rows)]
    write_text(folder / "crops.tsv", "\n".join(lines) + "\n")


def describe(corpus: Corpus, crops: TrainCrops, crop: Crop) -> dict[str, str]:
    """What a crop is and what is done to it; "-" for what is not."""
    train, noise, rate = corpus.train, corpus.noise, corpus.train.sample_rate
    nothing = Draw({})
    room = crop.draws.get("room", nothing).values
    added: dict[str, Any] = {**crop.draws.get("noise", nothing).values}
    noises, starts = added.get("noise", ()), added.get("start", ())
    parts = [f"{noise.ids[i]} from {start / rate:.2f} s" for i, start in zip(noises, starts)]
    law = crop.draws.get("codec", nothing).values.get("law")
    known = {
        "utterance": train.ids[crop.row],
        "speaker": train.speakers[train.speaker_N[crop.row]],
        "from_second": f"{crop.first / rate:.2f}",
        "speed": f"{crops.speeds[crop.draws.get('speed', nothing).group]:g}",
        "room": corpus.rooms.ids[int(room["room"])] if room else "-",
        "noise_kind": noise.kinds[noises[0]] if parts else "-",
        "noises": "; ".join(parts) or "-",
        "snr_db": f"{added['snr_db']:.2f}" if parts else "-",
        "telephone_band": "yes" if "telephone" in crop.draws else "-",
        "codec": LAWS[int(law)] if law is not None else "-",
    }
    shown = {"speed", "room", "noise", "telephone", "codec", "spec"}  # spec: not to be heard
    for name in sorted(crops.draws.keys() - shown):
        draw = crop.draws.get(name, nothing)
        values = {key: np.round(value, 3).tolist() for key, value in draw.values.items()}
        known[name] = str(values or "yes") if name in crop.draws else "-"
    return known
