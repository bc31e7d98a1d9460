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
import os
import random
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sides import (
    Process,
    add_seconds,
    import_peer,
    report,
    run_case,
    run_of,
    say,
    take_turns,
    timed,
    values_of,
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


class Ours:
    """Our chain, built from a configuration as training builds it."""

    def __init__(
        self, folder: str, source: str, micro_batch: int, crop_seconds: float
    ) -> None:
        torch.set_num_threads(1)
        # The CPU's work is measured, on any machine.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self.folder = folder
        self.micro_batch = micro_batch
        self.crop_seconds = crop_seconds
        self.training = self._training(source, PROB)
        self.augment = self.training.trainer.source.augment
        self.batches = self.training.trainer.source.read_from(0, 0)

    def _training(self, source: str, prob: float, **overrides: object) -> Any:
        from speakerlab.config.schema import load_config
        from speakerlab.core import process
        from speakerlab.experiments.train import start_training
        from speakerlab.training.distributed import start_ranks
        from speakerlab.training.signals import Signals

        values = {
            "model.name": "campplus",
            "data.dir": self.folder,
            "data.train": f"[{source}]",
            "data.valid_speakers": 0,
            "data.crop_seconds": self.crop_seconds,
            "augment.room_prob": prob,
            "augment.noise_prob": prob,
            "training.global_batch": self.micro_batch,
            "training.bn_batch": "null",
            "training.num_epochs": 10000,  # never done
            "runtime.micro_batch": self.micro_batch,
            "runtime.num_workers": 0,
            "runtime.precision": "fp32",
            **overrides,
        }
        config = load_config([], [f"{key}={value}" for key, value in values.items()])
        exp = Path(tempfile.mkdtemp(prefix="exp", dir=self.folder))
        ranks, signals = start_ranks(timeout_minutes=1.0), Signals(process.leave)
        return start_training(exp, None, config, ranks, signals)

    @torch.no_grad()
    def run(self, work: str, steps: int) -> float:
        """Return the seconds of so many batches."""

        def prepare_batch() -> None:
            batch = next(self.batches)
            if work == "full_cpu":
                self.training.embedder.fbank(self.augment(batch))

        return timed(prepare_batch, steps=steps)

    @torch.no_grad()
    def values(self, path: str) -> None:
        """Write feats_TF of each clip, without augmentation."""
        from speakerlab.data.loader import collate

        overrides = {
            "augment.speeds": "[1.0]",
            "training.global_batch": 1,
            "runtime.micro_batch": 1,
        }
        training = self._training("clips", 0.0, **overrides)
        source = training.trainer.source
        crops, feats = source.crops_of(attempt=0), {}
        for row, name in enumerate(crops.manifest.ids):
            batch = collate([crops[(0, row, row)]])
            feats[name] = training.embedder.fbank(source.augment(batch))[0].numpy()
        np.savez(path, **feats)


class Peer:
    """3D-Speaker's reader, speed, augmentation and features, over the wav copies."""

    def __init__(self, folder: str, micro_batch: int, crop_seconds: float) -> None:
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


def require_equal(ours: Process, peer: Process, folder: Path) -> None:
    """Print how far the features are apart; exit where they differ."""
    our_feats, peer_feats = values_of([ours, peer], folder)
    assert our_feats.keys() == peer_feats.keys()
    errors = [np.abs(our_feats[name] - peer_feats[name]).max() for name in peer_feats]
    error = float(max(errors))
    say(f"features of {len(our_feats)} crops, largest difference: {error:.1e}")
    if not error <= ALLOWED:
        raise SystemExit("data.py: the features are not equal; nothing was timed")


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the rows of every source."""
    import corpus

    packed = "shard" in options.source
    say(corpus.make(options, crop_seconds=options.crop_seconds, pack=packed))
    side_options = {
        "folder": options.folder,
        "micro_batch": options.micro_batch,
        "crop_seconds": options.crop_seconds,
    }
    peer = None
    if options.peers:
        root = options.peers["3dspeaker"]
        peer = Process("data", "3dspeaker", root, threads=1, **side_options)
    for source in options.source:
        ours = Process("data", "ours", threads=1, source=source, **side_options)
        if peer is not None and source == options.source[0]:
            require_equal(ours, peer, options.folder)
        sides = [ours] if peer is None else [ours, peer]
        for work in WORKS:
            name = f"data.{work}" + ("" if source == "shard" else f".{source}")
            if not wants(options, name):
                continue
            runs = [run_of(side, work=work) for side in sides]
            amount = options.micro_batch
            turns = take_turns(runs, amount=amount, seconds=options.seconds)
            yield report(name, turns, unit="crops/s")
        ours.close()
    if peer is not None:
        peer.close()


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
