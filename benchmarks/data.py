"""Crops a second that one core prepares for training, compared with 3D-Speaker's chain.

    python benchmarks/data.py --peer DIR --json FILE      # DIR: a checkout of 3D-Speaker

In: recordings, noises and rooms (corpus.py). Out: a row for each work and source of audio.

`data.to_device` is draw, read, collate: all that a worker does, since the front end runs on the
model's device. `data.full_cpu` adds speed, room, noise and fbank. Bare names read shards, `.wav`
and `.flac` loose files. 3D-Speaker has no such split: both rows compare with its whole chain, over
wav files of the same samples.

Each side is one process with one thread and no workers, the files in the system's cache. Both
change the speed of two crops in three and augment four in five. Of these 3D-Speaker gives a third
each noise, a room, or both; ours draws room and noise independently, each with probability `PROB`,
which leaves one crop in five clean. Before anything is timed, both must compute the same features.

3D-Speaker calls what current torchaudio lacks; it is replaced by something cheaper:
`torchaudio.load` by `soundfile.read` of the whole file, sox's `speed` and `rate` by
`torchaudio.transforms.Resample`, with its filter made once.
"""

import argparse
import csv
import random
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sides import (
    ROOT,
    add_seconds,
    close_sides,
    import_peer,
    report,
    require_equal,
    run_case,
    run_of,
    say,
    start_sides,
    take_turns,
    timed,
    wants,
)
from torch import Tensor
from torch.utils.data import DataLoader

PEERS = ("3dspeaker",)
QUICK = ("--seconds=3", "--source=shard")
SOURCES = ("flac", "wav", "shard")
WORKS = ("to_device", "full_cpu")
RATE = 16000
AUGMENTED = 0.8  # of the crops; as 3D-Speaker's aug_prob
PROB = 1 - (1 - AUGMENTED) ** 0.5  # of a room, and of noise
# Difference of mean-normalised log mel features: the peer's rounding in fp32.
ALLOWED = 1e-2
RATIOS = {"0.9": (9, 10), "1.1": (11, 10)}


def start_training(
    *,
    folder: str,
    source: str,
    micro_batch: int,
    crop_seconds: float,
    model: str = "campplus",
    device: str = "cpu",
    precision: str = "fp32",
    workers: int = 0,
    augment_prob: float = PROB,
    settings: Sequence[str] = (),
) -> Any:
    """Start the training that `speakerlab train` builds from conf/<model>.yaml.

    Only what both sides must have alike is changed. settings: KEY=VALUE.
    """
    from speakerlab.config.schema import load_config
    from speakerlab.core import process
    from speakerlab.experiments import train
    from speakerlab.experiments.hardware import start_rank
    from speakerlab.training.signals import Signals

    values = {
        "data.dir": folder,
        "data.train": f"[{source}]",
        "data.valid_speakers": 0,
        "data.crop_seconds": crop_seconds,
        "augment.speed_classes": "on",
        "augment.room_prob": augment_prob,
        "augment.noise_prob": augment_prob,
        "training.global_batch": micro_batch,
        "training.bn_batch": "null",
        "training.num_epochs": 10000,  # never done
        "runtime.device": torch.device(device).type,
        "runtime.micro_batch": micro_batch,
        "runtime.num_workers": workers,
        "runtime.precision": precision,
    }
    overrides = [f"{key}={value}" for key, value in values.items()]
    config = load_config([ROOT / "conf" / f"{model}.yaml"], [*overrides, *settings])
    exp = Path(tempfile.mkdtemp(prefix="exp", dir=folder))
    signals = Signals(process.leave)
    return train.start_training(exp, None, config, start_rank(config), signals)


class Ours:
    """Our chain, built from a configuration as training builds it."""

    def __init__(
        self, folder: str, source: str, micro_batch: int, crop_seconds: float
    ) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.crop_seconds = crop_seconds
        self.training = start_training(
            folder=folder,
            source=source,
            micro_batch=micro_batch,
            crop_seconds=crop_seconds,
        )
        self.augment = self.training.trainer.source.augment
        self.batches = self.training.trainer.source.read_from(0, 0)

    @torch.no_grad()
    def run(self, work: str, steps: int) -> float:
        """Return the seconds of so many batches."""

        def prepare_batch() -> None:
            batch = next(self.batches)
            if work == "full_cpu":
                self.training.embedder.frontend(self.augment(batch))

        return timed(prepare_batch, steps=steps)

    @torch.no_grad()
    def values(self, path: str) -> None:
        """Write feats_TF of each clip, without augmentation."""
        from speakerlab.data.loader import collate

        training = start_training(
            folder=self.folder,
            source="clips",
            micro_batch=2,  # the fewest that the model can be trained with
            crop_seconds=self.crop_seconds,
            augment_prob=0.0,
            settings=["augment.speeds=[1.0]"],
        )
        source = training.trainer.source
        crops, feats = source.crops_of(attempt=0), {}
        for row, name in enumerate(crops.manifest.ids):
            batch = collate([crops[(0, row, row)]])
            feats[name] = training.embedder.frontend(source.augment(batch))[0].numpy()
        np.savez(path, **feats)


class Peer:
    """3D-Speaker's reader, speed, augmentation and features, over the wav copies."""

    def __init__(
        self, folder: str, source: str, micro_batch: int, crop_seconds: float
    ) -> None:
        """Take the options of our side; the peer only reads `wav`."""
        torch.set_num_threads(1)
        random.seed(0)
        replace_torchaudio()
        self.folder, self.crop_seconds = Path(folder), crop_seconds
        generator = torch.Generator().manual_seed(0)
        dataset = self._dataset("wav", speeds=True, prob=AUGMENTED)
        loader = DataLoader(
            dataset,
            batch_size=micro_batch,
            shuffle=True,
            drop_last=True,
            generator=generator,
        )
        self.batches = without_end(loader)

    def _dataset(self, name: str, *, speeds: bool, prob: float) -> Any:
        """Build its data set as its recipes do."""
        processor = import_peer("speakerlab.process.processor")
        data_file = str(write_list(self.folder / name, self.crop_seconds))
        noise = str(self.folder / "noise/wav.scp")
        rooms = str(self.folder / "rirs/wav.scp")
        reader = processor.WavReader(
            RATE, duration=self.crop_seconds, speed_pertub=speeds
        )
        preprocessor = {
            "wav_reader": reader,
            "label_encoder": processor.SpkLabelEncoder(data_file),
            "augmentations": processor.SpkVeriAug(prob, noise, rooms),
            "feature_extractor": processor.FBank(80, RATE, mean_nor=True),
        }
        module = import_peer("speakerlab.dataset.dataset")
        return module.WavSVDataset(data_file, preprocessor)

    def run(self, work: str, steps: int) -> float:
        """Return the seconds of so many batches; its chain is the same for both works."""
        return timed(lambda: next(self.batches), steps=steps)

    def values(self, path: str) -> None:
        """Write feats_TF of each clip, without augmentation."""
        dataset = self._dataset("clips", speeds=False, prob=0.0)
        names = [key.rsplit("_", 1)[0] for key in dataset.data_points]
        np.savez(path, **{name: dataset[i][0].numpy() for i, name in enumerate(names)})


SIDES = {"ours": Ours, "3dspeaker": Peer}


def without_end(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def replace_torchaudio() -> None:
    """Put `load` and the sox effects, which current torchaudio lacks, in place."""
    import soundfile
    import torchaudio

    filters = {
        speed: torchaudio.transforms.Resample(*ratio) for speed, ratio in RATIOS.items()
    }

    def load(path: str, backend: str | None = None) -> tuple[Tensor, int]:
        wave_SC, rate = soundfile.read(path, dtype="float32", always_2d=True)
        return torch.from_numpy(wave_SC.T), rate

    def apply_effects_tensor(
        wave_CS: Tensor, rate: int, effects: list[list[str]]
    ) -> tuple[Tensor, int]:
        assert [name for name, _ in effects] == ["speed", "rate"]
        return filters[effects[0][1]](wave_CS), rate

    torchaudio.load = load
    torchaudio.sox_effects = types.SimpleNamespace(
        apply_effects_tensor=apply_effects_tensor
    )


def replace_cuda() -> None:
    """Have `cuda` leave tensors and modules where they are, where there is no GPU."""
    for kind in (Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_args, **_options: self


def write_list(data_dir: Path, crop_seconds: float) -> Path:
    """Write 3D-Speaker's list of a data directory: a row for every crop that fits."""
    path = data_dir / "peer.csv"
    wavs = read_pairs(data_dir / "wav.scp")
    speakers = read_pairs(data_dir / "utt2spk")
    seconds = read_pairs(data_dir / "utt2dur")
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["ID", "dur", "path", "start", "stop", "spk"])
        for name, wav in wavs.items():
            whole = float(seconds[name])
            for chunk in range(max(1, int(whole / crop_seconds))):
                start = chunk * crop_seconds
                stop = min(start + crop_seconds, whole)
                rows.writerow(
                    [f"{name}_{chunk}", whole, wav, start, stop, speakers[name]]
                )
    return path


def read_pairs(path: Path) -> dict[str, str]:
    """Read a Kaldi table, also in a peer's process."""
    lines = path.read_text().splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the rows of every source."""
    import corpus

    packed = "shard" in options.source
    say(corpus.make(options, crop_seconds=options.crop_seconds, pack=packed))
    for source in options.source:
        sides = start_sides(
            "data",
            1,  # thread
            options.peers,
            folder=options.folder,
            source=source,
            micro_batch=options.micro_batch,
            crop_seconds=options.crop_seconds,
        )
        if options.peers:
            require_equal("features", sides, options.folder, allowed=ALLOWED)
        for work in WORKS:
            name = f"data.{work}" + ("" if source == "shard" else f".{source}")
            if not wants(options, name):
                continue
            runs = [run_of(side, work=work) for side in sides]
            amount = options.micro_batch
            turns = take_turns(runs, amount=amount, seconds=options.seconds)
            yield report(name, turns, unit="crops/s")
        close_sides(sides)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", nargs="+", default=list(SOURCES), choices=SOURCES)
    add_audio_options(parser)
    parser.add_argument("--micro-batch", type=int, default=64)
    add_seconds(parser, 8.0)


def add_audio_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that corpus.py reads."""
    add = parser.add_argument
    add("--audio", type=Path, help="flac files in a folder for each speaker")
    add("--noise", type=Path, help="a folder of noises")
    add("--rirs", type=Path, help="a folder of room impulse responses")
    add("--utterance-seconds", type=float, help="cut recordings to this length")
    add("--crop-seconds", type=float, default=3.0)


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
