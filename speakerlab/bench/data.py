"""Measure the data path of a training, hop by hop, and write crops to listen to.

Letters: S samples.
"""

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from speakerlab.bench.stopwatch import Laps, Row
from speakerlab.bench.training import NEVER, WARM_UP
from speakerlab.core.atomic import write_text
from speakerlab.core.batch import Crop
from speakerlab.data import audio
from speakerlab.data.loader import Slot, TrainCrops, collate, micro_batches
from speakerlab.experiments.corpus import Corpus
from speakerlab.experiments.train import Training
from speakerlab.experiments.train_batches import TrainBatches
from speakerlab.frontend.augment.codec import LAWS


def data_rows(training: Training, *, seconds: float) -> Iterator[Row]:
    """Yield the crops per second of the loader and of one process, and the time of each hop."""
    source = cast(TrainBatches, training.trainer.source)
    size = source.plan.micro_batch

    # The rate at which a training receives crops from its workers.
    laps = Laps(source.ranks.device)
    batches = source.read_from(0, 0)
    for _ in laps.repeat(batches, warm_up=WARM_UP, seconds=seconds):
        laps.end("waited")
    yield Row(
        name="data.loader",
        ours=laps.count * size / laps.total,
        unit="crops/s",
        note=f"{source.num_workers} workers, batches of {size}",
    )

    # The time of a worker, by hop.
    seconds_of_hop = measure_hops(training, seconds=seconds)
    total_seconds = sum(seconds_of_hop.values())
    yield Row(
        name="data.one_process",
        ours=1 / total_seconds,
        unit="crops/s",
        note="one step after the other:",
    )
    for hop, hop_seconds in seconds_of_hop.items():
        yield Row(
            name=f"data.hop.{hop.replace(' ', '_')}",
            ours=1e6 * hop_seconds,
            unit="us",
            note=f"{hop_seconds / total_seconds:.1%} of a crop",
        )


def measure_hops(training: Training, *, seconds: float) -> dict[str, float]:
    """Return the seconds of each hop for one crop, measured sequentially in this process."""
    source = cast(TrainBatches, training.trainer.source)
    size = source.plan.micro_batch
    augment = source.augment
    crops = source.crops_of(attempt=0)
    laps = Laps(source.ranks.device)
    slots_of_batches = slots_of(source, size)
    for slots in laps.repeat(slots_of_batches, warm_up=WARM_UP, seconds=seconds):
        # In training, a worker does this on the host.
        drawn = [crops.draw(slot) for slot in slots]
        laps.end("draw")
        read = [crops.read(crop) for crop in drawn]
        laps.end("read")
        batch = collate(read)
        laps.end("collate")
        # In training, the rank does this on the device.
        batch = batch.to(laps.device)
        laps.end("to device")
        with torch.no_grad():
            wave_BS = augment.scale(batch)
            for name in augment.wave_names:
                wave_BS = augment.run(name, wave_BS, batch)
                laps.end(name)
            training.embedder.frontend(wave_BS)
        laps.end("fbank")
    num_crops = laps.count * size
    return {hop: total / num_crops for hop, total in laps.seconds.items()}


def slots_of(source: TrainBatches, size: int) -> Iterator[list[Slot]]:
    """Yield the slots of micro-batches of `size` crops, without end."""
    return micro_batches(
        source.order,
        start_step=0,
        stop_step=NEVER,
        micro_batch=size,
    )


def write_crops(
    training: Training,
    folder: Path,
    *,
    count: int,
) -> None:
    """Write the first crops of the first epoch as 16-bit wav, and their draws to `crops.tsv`."""
    source = cast(TrainBatches, training.trainer.source)
    augment = source.augment
    corpus = source.corpus
    sample_rate = corpus.train.sample_rate
    crops = source.crops_of(attempt=0)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, str]] = []
    slots = chain.from_iterable(slots_of(source, 1))
    for number, slot in enumerate(islice(slots, count)):
        crop = crops[slot]
        # Reset the count of silent noises, so that the count below belongs to this crop.
        augment.take_silent()
        batch = collate([crop]).to(source.ranks.device)
        wave_1S = augment(batch)
        wave_S = wave_1S[0].cpu().numpy()
        name = f"crop-{number:02d}.wav"
        audio.write(folder / name, audio.to_int16(wave_S), sample_rate)

        description = describe(corpus, crops, crop)
        # An SNR was drawn, but silence cannot be scaled.
        if augment.take_silent():
            description["snr_db"] = "none: silent"
        # The file has integer samples and clips; training does not clip.
        is_clipped_S = abs(wave_S) > 1
        row = {
            "file": name,
            **description,
            "clipped_percent": f"{100 * is_clipped_S.mean():.2f}",
        }
        rows.append(row)

    lines = ["\t".join(rows[0])]
    for row in rows:
        lines.append("\t".join(row.values()))
    text = "\n".join(lines)
    write_text(folder / "crops.tsv", f"{text}\n")


def describe(corpus: Corpus, crops: TrainCrops, crop: Crop) -> dict[str, str]:
    """Return the source of a crop and its augmentations; "-" if one is not applied."""
    train = corpus.train
    rate = train.sample_rate
    # Augmentation -> its drawn values, only for the augmentations of this crop.
    drawn: dict[str, dict[str, Any]] = {}
    for name, draw in crop.draws.items():
        drawn[name] = {**draw.values}

    # Every crop has the same columns, because it is a line of one table.
    speaker = train.speaker_N[crop.row]
    columns = {
        "utterance": train.ids[crop.row],
        "speaker": train.speakers[speaker],
        "from_second": f"{crop.first / rate:.2f}",
        "reencoded_by": "-",
        "speed": f"{crops.speeds[0]:g}",
        "room": "-",
        "noise_kind": "-",
        "noises": "-",
        "snr_db": "-",
        "telephone_band": "-",
        "codec": "-",
    }
    if "reencode" in drawn:
        codec = drawn["reencode"]["codec"]
        columns["reencoded_by"] = crops.codecs[codec]
    if "speed" in drawn:
        # The draws are grouped by speed, because each speed has a separate resampling.
        speed_number = crop.draws["speed"].group
        columns["speed"] = f"{crops.speeds[speed_number]:g}"
    if "room" in drawn:
        room = int(drawn["room"]["room"])
        columns["room"] = corpus.rooms[room].id
    if "telephone" in drawn:
        columns["telephone_band"] = "yes"
    if "codec" in drawn:
        law = int(drawn["codec"]["law"])
        columns["codec"] = LAWS[law]
    noise = drawn.get("noise", {})
    columns |= describe_noises(corpus, noise)

    # Each augmentation of a plugin has a column. `spec` masks features, which are not audible.
    described = {
        "reencode",
        "speed",
        "room",
        "noise",
        "telephone",
        "codec",
        "spec",
    }
    further = crops.draw_functions.keys() - described
    for name in sorted(further):
        if name not in drawn:
            columns[name] = "-"
            continue
        values: list[str] = []
        for key, value in drawn[name].items():
            values.append(f"{key} {np.round(value, 3)}")
        columns[name] = ", ".join(values) or "yes"
    return columns


def describe_noises(corpus: Corpus, drawn: dict[str, Any]) -> dict[str, str]:
    """Return the columns of the noises drawn for a crop; {} without noises."""
    rows = drawn.get("noise", ())
    starts = drawn.get("start", ())
    noises: list[str] = []
    for row, start in zip(rows, starts):
        seconds = start / corpus.train.sample_rate
        noises.append(f"{corpus.noise[row].id} from {seconds:.2f} s")
    if not noises:
        return {}
    # All noises of a crop are of one kind; only babble has several noises.
    first = corpus.noise[rows[0]]
    return {
        "noise_kind": first.kind,
        "noises": "; ".join(noises),
        "snr_db": f"{drawn['snr_db']:.2f}",
    }
