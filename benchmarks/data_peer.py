"""3D-Speaker's side of data.py: its own reader, speed, augmentation and features, unchanged.

In: lines of JSON, {"do": "chain" | "hops" | "values", ...}, and the data directories of
data_corpus.py. Out: a line of JSON for each. PYTHONPATH is its checkout.

What its recipes configure is built here as they do: `WavSVDataset` over a list with a row for every
3 s of a recording, batches from a DataLoader without workers. torchaudio has no sox effects any
more and needs FFmpeg to load; in their place stand, cheaper than what they replace,
 - `soundfile.read` of the whole file as float32 for `torchaudio.load`,
 - `torchaudio.transforms.Resample`, its filter made once, for sox's `speed` and `rate`.
"""

import argparse
import csv
import random
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import torchaudio
from sides import Answer, Order, import_from_root, serve
from stopwatch import Hop, Stopwatch, bytes_read
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

RATE = 16000
RATIOS = {"0.9": (9, 10), "1.1": (11, 10)}
SLOWER_OR_FASTER = {
    speed: torchaudio.transforms.Resample(*ratio) for speed, ratio in RATIOS.items()
}


def load(path: str, backend: str | None = None) -> tuple[Tensor, int]:
    wave_SC, rate = soundfile.read(path, dtype="float32", always_2d=True)
    return torch.from_numpy(wave_SC.T), rate


def apply_effects_tensor(
    wave_CS: Tensor, rate: int, effects: list[list[str]]
) -> tuple[Tensor, int]:
    assert [name for name, _ in effects] == ["speed", "rate"]
    return SLOWER_OR_FASTER[effects[0][1]](wave_CS), rate


torchaudio.load = load  # pyright: ignore[reportAttributeAccessIssue]
sox_effects = types.SimpleNamespace(apply_effects_tensor=apply_effects_tensor)
torchaudio.sox_effects = sox_effects  # pyright: ignore[reportAttributeAccessIssue]
processor = import_from_root("speakerlab.process.processor")
augmentation = import_from_root("speakerlab.process.augmentation")
peer_dataset = import_from_root("speakerlab.dataset.dataset")

HOPS: list[Hop] = [
    ("read", processor.WavReader, "__call__"),
    ("speed", sox_effects, "apply_effects_tensor"),
    ("read noise, room", processor.SpkVeriAug, "__call__"),
    ("room", augmentation, "addreverb"),
    ("noise", augmentation, "addnoise"),
    ("fbank", processor.FBank, "__call__"),
]


def write_list(data_dir: Path, crop_seconds: float) -> Path:
    """Its list of what to train on: a row for every crop that fits into a recording."""
    path = data_dir / "peer.csv"
    tables = [
        dict(line.split(maxsplit=1) for line in (data_dir / name).read_text().splitlines())
        for name in ("wav.scp", "utt2spk", "utt2dur")
    ]
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["ID", "dur", "path", "start", "stop", "spk"])
        for name, wav in tables[0].items():
            seconds = float(tables[2][name])
            for chunk in range(max(1, int(seconds / crop_seconds))):
                start = chunk * crop_seconds
                stop = min(start + crop_seconds, seconds)
                rows.writerow([f"{name}_{chunk}", seconds, wav, start, stop, tables[1][name]])
    return path


class Side:
    """Its chain over the wav copies."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        random.seed(0)
        self.options = options
        self.batches = self._batches()

    def _dataset(self, name: str, **how: Any) -> Dataset[Any]:
        folder = Path(self.options.folder)
        data_file = str(write_list(folder / name, self.options.crop_seconds))
        preprocessor = {
            "wav_reader": processor.WavReader(
                RATE, duration=self.options.crop_seconds, speed_pertub=how["speeds"]
            ),
            "label_encoder": processor.SpkLabelEncoder(data_file),
            "augmentations": processor.SpkVeriAug(
                how["prob"], str(folder / "noise/wav.scp"), str(folder / "rirs/wav.scp")
            ),
            "feature_extractor": processor.FBank(80, RATE, mean_nor=True),
        }
        return peer_dataset.WavSVDataset(data_file, preprocessor)

    def _batches(self, collate: Callable[..., Any] = default_collate) -> Iterator[Any]:
        dataset = self._dataset("wav", speeds=True, prob=self.options.prob)
        generator = torch.Generator().manual_seed(0)
        loader = DataLoader(
            dataset,
            batch_size=self.options.micro_batch,
            shuffle=True,
            drop_last=True,
            generator=generator,
            collate_fn=collate,
        )
        while True:
            yield from loader

    def run(self, steps: int) -> float:
        """Seconds that so many batches take."""
        start = time.perf_counter()
        for _ in range(steps):
            next(self.batches)
        return time.perf_counter() - start

    def hops(self, steps: int) -> Answer:
        """Where the time goes, how much is read, and how often what was drawn."""
        watch = Stopwatch()
        with watch.watching(HOPS):
            batches = self._batches(watch.timed("collate", default_collate))
            next(batches)
            watch.seconds.clear()
            watch.calls.clear()
            before, start = bytes_read(), time.perf_counter()
            for _ in range(steps):
                next(batches)
            total, after = time.perf_counter() - start, bytes_read()
        drawn = {name: watch.calls[name] for name in ("speed", "room", "noise")}
        read = None if before is None or after is None else after - before
        return {"total": total, "hops": dict(watch.seconds), "read": read, "drawn": drawn}

    def values(self, path: str) -> None:
        """Write feats_TF of each clip, nothing done to it."""
        dataset = self._dataset("clips", speeds=False, prob=0.0)
        names = [key.rsplit("_", 1)[0] for key in dataset.data_points]  # pyright: ignore[reportAttributeAccessIssue]
        feats = {name: dataset[i][0].numpy() for i, name in enumerate(names)}
        np.savez(path, **feats)  # pyright: ignore[reportArgumentType]


def start() -> Callable[[Order], Answer]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    for name, kind in (("prob", float), ("crop-seconds", float), ("micro-batch", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    side = Side(parser.parse_args())

    def answer(order: Order) -> Answer:
        if order["do"] == "values":
            side.values(order["path"])
            return {"written": True}
        if order["do"] == "hops":
            return side.hops(order["steps"])
        return {"seconds": side.run(order["steps"])}

    return answer


if __name__ == "__main__":
    serve(start)
