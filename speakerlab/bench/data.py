"""Measure the data path of a training, hop by hop, and write crops to listen to.

Letters: S samples.
"""

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speakerlab.bench.stopwatch import Laps, Row
from speakerlab.bench.training import NEVER, WARM_UP
from speakerlab.core.atomic import write_text
from speakerlab.core.batch import Crop
from speakerlab.data import audio
from speakerlab.data.loader import Slot, TrainCrops, collate, micro_batches
from speakerlab.experiments.corpus import Corpus
from speakerlab.experiments.setup import TrainBatches
from speakerlab.experiments.train import Training
from speakerlab.frontend.augment.codec import LAWS


def data_rows(training: Training, *, seconds: float) -> Iterator[Row]:
    """Yield the crops a second of the loader, and of each hop in one process."""
    source: TrainBatches = training.trainer.source
    size, laps = source.plan.micro_batch, Laps(source.ranks.device)
    for _ in laps.repeat(source.read_from(0, 0), warm_up=WARM_UP, seconds=seconds):
        laps.end("waited")
    rate, note = laps.count * size / laps.total, f"{source.num_workers} workers, batches of {size}"
    yield Row(name="data.loader", ours=rate, unit="crops/s", note=note)
    hops = measure_hops(training, seconds=seconds)
    total = sum(hops.values())
    note = "one step after the other:"
    yield Row(name="data.one_process", ours=1 / total, unit="crops/s", note=note)
    for hop, took in hops.items():
        row, note = f"data.hop.{hop.replace(' ', '_')}", f"{took / total:.1%} of a crop"
        yield Row(name=row, ours=1e6 * took, unit="us", note=note)


def measure_hops(training: Training, *, seconds: float) -> dict[str, float]:
    """Return the seconds of each hop for a crop, one after the other in this process."""
    source: TrainBatches = training.trainer.source
    size, augment, crops = source.plan.micro_batch, source.augment, source.crops_of(attempt=0)
    laps = Laps(source.ranks.device)
    for slots in laps.repeat(slots_of(source, size), warm_up=WARM_UP, seconds=seconds):
        drawn = [crops.draw(slot) for slot in slots]
        laps.end("draw")
        read = [crops.read(crop) for crop in drawn]
        laps.end("read")
        batch = collate(read)
        laps.end("collate")
        batch = batch.to(laps.device)
        laps.end("to device")
        with torch.no_grad():
            wave_BS = augment.scale(batch)
            for name in augment.wave_names:
                wave_BS = augment.run(name, wave_BS, batch)
                laps.end(name)
            training.embedder.fbank(wave_BS)
        laps.end("fbank")
    return {hop: total / (laps.count * size) for hop, total in laps.seconds.items()}


def slots_of(source: TrainBatches, size: int) -> Iterator[list[Slot]]:
    """Return the slots of micro-batches of so many crops, without end."""
    return micro_batches(source.order, start_step=0, stop_step=NEVER, micro_batch=size)


def write_crops(training: Training, folder: Path, *, count: int) -> None:
    """Write the first crops of the first epoch as 16-bit wav, and their draws to `crops.tsv`."""
    source: TrainBatches = training.trainer.source
    augment, corpus, crops = source.augment, source.corpus, source.crops_of(attempt=0)
    rows: list[dict[str, str]] = []
    folder.mkdir(parents=True, exist_ok=True)
    for number, slot in enumerate(islice(chain.from_iterable(slots_of(source, 1)), count)):
        crop = crops[slot]
        augment.take_silent()
        wave_S = augment(collate([crop]).to(source.ranks.device))[0].cpu().numpy()
        name = f"crop-{number:02d}.wav"
        audio.write(folder / name, audio.to_int16(wave_S), corpus.train.sample_rate)
        about = describe(corpus, crops, crop)
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
