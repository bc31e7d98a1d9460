"""Measure the data path of a training, hop by hop, and write crops to listen to.

Everything is built as training builds it. Letters: S samples.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from speakerlab.bench.models import micro_batch_of
from speakerlab.bench.stopwatch import Laps, Row
from speakerlab.bench.synthetic import with_synthetic_corpus
from speakerlab.config.schema import Config
from speakerlab.core.atomic import write_text
from speakerlab.core.batch import Crop
from speakerlab.data import audio
from speakerlab.data.loader import Slot, TrainCrops, collate, micro_batches
from speakerlab.experiments import setup
from speakerlab.experiments.corpus import Corpus, read_corpus, row_names
from speakerlab.experiments.planning import plan_batch
from speakerlab.frontend.augment import Augment
from speakerlab.frontend.augment.codec import LAWS
from speakerlab.training.distributed import Ranks
from speakerlab.training.task import Task

ENDLESS = 1 << 40  # steps
WARM_UP = 2  # batches before anything is measured


class DataBench(NamedTuple):
    """The data path and the model of a training, on one rank."""

    source: setup.TrainBatches
    crops: TrainCrops
    task: Task

    def slots(self, micro_batch: int) -> Iterator[list[Slot]]:
        """Return the slots of micro-batches without end."""
        order = self.source.order
        return micro_batches(order, start_step=0, stop_step=ENDLESS, micro_batch=micro_batch)


@contextmanager
def open_bench(config: Config, ranks: Ranks, *, has_data: bool) -> Iterator[DataBench]:
    """Yield the data path of a configuration, over a synthetic corpus if it has no data."""
    with tempfile.TemporaryDirectory() as folder:
        if not has_data:
            size = micro_batch_of(config, ranks.device)
            config = with_synthetic_corpus(config, Path(folder), micro_batch=size)
        yield build_bench(config, ranks)


def build_bench(config: Config, ranks: Ranks) -> DataBench:
    """Build the data path and the model, for one rank."""
    training = config.training.model_copy(update={"num_epochs": 1 << 20})  # never at an end
    config = config.model_copy(update={"training": training})
    corpus = read_corpus(config)
    classes = row_names(config, corpus)
    precision = setup.precision(config, ranks)
    task = setup.build_task(config, corpus, precision, ranks, num_classes=len(classes))
    augment, plan = task.augment, plan_batch(config, ranks, task)
    assert isinstance(augment, Augment)
    source = setup.TrainBatches(config, corpus, classes, augment, ranks, plan)
    crops = source.crops_of(attempt=0)
    return DataBench(source=source, crops=crops, task=task.to(ranks.device))


def data_rows(bench: DataBench, name: str, *, seconds: float) -> Iterator[Row]:
    """Yield the crops a second of the loader, of a training, and of each hop in one process."""
    source = bench.source
    note = f"{source.num_workers} workers, batches of {source.plan.micro_batch}"
    rate, _ = measure_batches(bench, seconds=seconds, train=False)
    yield Row(name="data.loader", ours=rate, unit="crops/s", note=note)
    rate, waited = measure_batches(bench, seconds=seconds, train=True)
    note = f"{waited:.1%} of the time waiting for data"
    yield Row(name=f"data.training.{name}", ours=rate, unit="crops/s", note=note)
    hops = measure_hops(bench, seconds=seconds)
    total = sum(hops.values())
    note = "one step after the other:"
    yield Row(name="data.one_process", ours=1 / total, unit="crops/s", note=note)
    for hop, took in hops.items():
        row, note = f"data.hop.{hop.replace(' ', '_')}", f"{took / total:.1%} of a crop"
        yield Row(name=row, ours=1e6 * took, unit="us", note=note)


def measure_batches(bench: DataBench, *, seconds: float, train: bool) -> tuple[float, float]:
    """Return (crops a second of the loader's workers, share of the time spent waiting for them).

    train: with forward and backward of each batch; else nothing else is done.
    """
    source = bench.source
    laps = Laps(source.ranks.device)
    for batch in laps.repeat(source.read_from(0, 0), warm_up=WARM_UP, seconds=seconds):
        laps.end("waited")
        if train:
            batch = batch.to(laps.device)
            wave_BS = batch.feats_BTF if len(batch.feats_BTF) else source.augment(batch)
            bench.task(wave_BS, batch.label_B, 0.0, batch=batch).loss.backward()
            bench.task.zero_grad()
            laps.end("worked")
    rate = laps.count * source.plan.micro_batch / laps.total
    return rate, laps.seconds["waited"] / laps.total


def measure_hops(bench: DataBench, *, seconds: float) -> dict[str, float]:
    """Return the seconds of each hop for a crop, one after the other in this process."""
    size, augment = bench.source.plan.micro_batch, bench.source.augment
    laps = Laps(bench.source.ranks.device)
    for slots in laps.repeat(bench.slots(size), warm_up=WARM_UP, seconds=seconds):
        drawn = [bench.crops.draw(slot) for slot in slots]
        laps.end("draw")
        crops = [bench.crops.read(crop) for crop in drawn]
        laps.end("read")
        batch = collate(crops)
        laps.end("collate")
        batch = batch.to(laps.device)
        laps.end("to device")
        with torch.no_grad():
            wave_BS = augment.scale(batch)
            for name in augment.wave_names:
                wave_BS = augment.run(name, wave_BS, batch)
                laps.end(name)
            bench.task.embedder.get_submodule("fbank")(wave_BS)
        laps.end("fbank")
    return {hop: total / (laps.count * size) for hop, total in laps.seconds.items()}


def write_crops(bench: DataBench, folder: Path, *, count: int) -> None:
    """Write the first crops of the first epoch as 16-bit wav, and their draws to `crops.tsv`."""
    source, rows = bench.source, list[dict[str, str]]()
    augment, corpus = source.augment, source.corpus
    folder.mkdir(parents=True, exist_ok=True)
    for number, slot in enumerate(islice(chain.from_iterable(bench.slots(1)), count)):
        crop = bench.crops[slot]
        augment.take_silent()
        wave_S = augment(collate([crop]).to(source.ranks.device))[0].cpu().numpy()
        name = f"crop-{number:02d}.wav"
        audio.write(folder / name, audio.to_int16(wave_S), corpus.train.sample_rate)
        about = describe(corpus, bench.crops, crop)
        if augment.take_silent():
            about["snr_db"] = "none: silent"
        clipped = f"{100 * (abs(wave_S) > 1).mean():.2f}"
        rows.append({"file": name, **about, "clipped_percent": clipped})
    lines = ["\t".join(rows[0]), *("\t".join(row.values()) for row in rows)]
    write_text(folder / "crops.tsv", "\n".join(lines) + "\n")


def describe(corpus: Corpus, crops: TrainCrops, crop: Crop) -> dict[str, str]:
    """Return where a crop is from and how it is augmented; "-" for what is not applied."""
    train, noise, rate = corpus.train, corpus.noise, corpus.train.sample_rate
    drawn: dict[str, dict[str, Any]] = {name: {**d.values} for name, d in crop.draws.items()}
    added = drawn.get("noise", {})
    places = zip(added.get("noise", ()), added.get("start", ()))
    parts = [f"{noise[i].id} from {start / rate:.2f} s" for i, start in places]
    speed = crop.draws["speed"].group if "speed" in drawn else 0
    known = {
        "utterance": train.ids[crop.row],
        "speaker": train.speakers[train.speaker_N[crop.row]],
        "from_second": f"{crop.first / rate:.2f}",
        "reencoded_by": crops.codecs[drawn["reencode"]["codec"]] if "reencode" in drawn else "-",
        "speed": f"{crops.speeds[speed]:g}",
        "room": corpus.rooms[int(drawn["room"]["room"])].id if "room" in drawn else "-",
        "noise_kind": noise[added["noise"][0]].kind if parts else "-",
        "noises": "; ".join(parts) or "-",
        "snr_db": f"{added['snr_db']:.2f}" if parts else "-",
        "telephone_band": "yes" if "telephone" in drawn else "-",
        "codec": LAWS[int(drawn["codec"]["law"])] if "codec" in drawn else "-",
    }
    shown = {"reencode", "speed", "room", "noise", "telephone", "codec", "spec"}  # spec: inaudible
    for name in sorted(crops.draws.keys() - shown):
        values = (f"{key} {np.round(v, 3)}" for key, v in drawn.get(name, {}).items())
        known[name] = ", ".join(values) or "yes" if name in drawn else "-"
    return known
