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
from sides import Process, import_peer, report, run_case, say, take_turns, timed, wants
from torch import Tensor
from torch.utils.data import DataLoader

PEERS = ("3dspeaker",)
QUICK = ("--seconds=3", "--source=shard")
SOURCES = ("flac", "wav", "shard")
WORKS = ("to_device", "full_cpu")
RATE = 16000
AUGMENTED = 0.8  # of the crops; as 3D-Speaker's aug_prob
PROB = 1 - (1 - AUGMENTED) ** 0.5  # of a room, and of noise
ALLOWED = 1e-2  # difference of mean-normalised log mel features: the peer's rounding in fp32
RATIOS = {"0.9": (9, 10), "1.1": (11, 10)}


class Ours:
    """Our chain, built from a configuration as training builds it."""

    def __init__(self, folder: str, source: str, micro_batch: int, crop_seconds: float) -> None:
        torch.set_num_threads(1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU's work is measured, on any machine
        self.folder, self.micro_batch, self.crop_seconds = folder, micro_batch, crop_seconds
        self.training = self._training(source, PROB)
        self.augment = self.training.trainer.source.augment
        self.batches = self.training.trainer.source.read_from(0, 0)

    def _training(self, source: str, prob: float, **more: object) -> Any:
        from speakerlab.config.schema import load_config
        from speakerlab.core import process
        from speakerlab.experiments.train import build_training
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
            **more,
        }
        config = load_config([], [f"{key}={value}" for key, value in values.items()])
        exp = Path(tempfile.mkdtemp(prefix="exp", dir=self.folder))
        ranks, signals = start_ranks(timeout_minutes=1.0), Signals(process.leave)
        return build_training(exp, None, config, ranks, signals)

    @torch.no_grad()
    def run(self, work: str, steps: int) -> float:
        """Return the seconds of so many batches."""

        def one() -> None:
            batch = next(self.batches)
            if work == "full_cpu":
                self.training.embedder.fbank(self.augment(batch))

        return timed(one, steps=steps)

    @torch.no_grad()
    def values(self, path: str) -> None:
        """Write feats_TF of each clip, without augmentation."""
        from speakerlab.data.loader import collate

        more = {"augment.speeds": "[1.0]", "training.global_batch": 1, "runtime.micro_batch": 1}
        training = self._training("clips", 0.0, **more)
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
            dataset, batch_size=micro_batch, shuffle=True, drop_last=True, generator=generator
        )
        self.batches = without_end(loader)

    def _dataset(self, name: str, *, speeds: bool, prob: float) -> Any:
        """Build its data set as its recipes do."""
        processor = import_peer("speakerlab.process.processor")
        data_file = str(write_list(self.folder / name, self.crop_seconds))
        noise, rooms = (str(self.folder / f"{kind}/wav.scp") for kind in ("noise", "rirs"))
        reader = processor.WavReader(RATE, duration=self.crop_seconds, speed_pertub=speeds)
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

    filters = {speed: torchaudio.transforms.Resample(*ratio) for speed, ratio in RATIOS.items()}

    def load(path: str, backend: str | None = None) -> tuple[Tensor, int]:
        wave_SC, rate = soundfile.read(path, dtype="float32", always_2d=True)
        return torch.from_numpy(wave_SC.T), rate

    def apply_effects_tensor(
        wave_CS: Tensor, rate: int, effects: list[list[str]]
    ) -> tuple[Tensor, int]:
        assert [name for name, _ in effects] == ["speed", "rate"]
        return filters[effects[0][1]](wave_CS), rate

    torchaudio.load = load
    torchaudio.sox_effects = types.SimpleNamespace(apply_effects_tensor=apply_effects_tensor)


def write_list(data_dir: Path, crop_seconds: float) -> Path:
    """Write 3D-Speaker's list of a data directory: a row for every crop that fits."""
    path = data_dir / "peer.csv"
    wavs, speakers, seconds = (
        dict(line.split(maxsplit=1) for line in (data_dir / name).read_text().splitlines())
        for name in ("wav.scp", "utt2spk", "utt2dur")
    )
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["ID", "dur", "path", "start", "stop", "spk"])
        for name, wav in wavs.items():
            whole = float(seconds[name])
            for chunk in range(max(1, int(whole / crop_seconds))):
                start = chunk * crop_seconds
                stop = min(start + crop_seconds, whole)
                rows.writerow([f"{name}_{chunk}", whole, wav, start, stop, speakers[name]])
    return path


def require_equal(ours: Process, peer: Process, folder: Path) -> None:
    """Print how far the features are apart; exit where they differ."""
    paths = [folder / "ours.npz", folder / "peer.npz"]
    for side, path in zip((ours, peer), paths):
        side.ask("values", path=path)
    found, expected = (dict(np.load(path)) for path in paths)
    assert found.keys() == expected.keys()
    error = max(float(np.abs(found[name] - expected[name]).max()) for name in expected)
    say(f"features of {len(found)} crops, largest difference: {error:.1e}")
    if not error <= ALLOWED:
        raise SystemExit("data.py: the features are not equal; nothing was timed")


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the rows of every source."""
    import corpus

    say(corpus.make(options, crop_seconds=options.crop_seconds, pack="shard" in options.source))
    words = {key: getattr(options, key) for key in ("folder", "micro_batch", "crop_seconds")}
    peer = None
    if options.peers:
        peer = Process("data", "3dspeaker", options.peers["3dspeaker"], threads=1, **words)
    for source in options.source:
        ours = Process("data", "ours", threads=1, source=source, **words)
        if peer is not None and source == options.source[0]:
            require_equal(ours, peer, options.folder)
        sides = [ours, *([peer] if peer else [])]
        for work in WORKS:
            name = f"data.{work}" + ("" if source == "shard" else f".{source}")
            if not wants(options, name):
                continue
            runs = [lambda n, s=side, w=work: s.ask("run", work=w, steps=n) for side in sides]
            turns = take_turns(runs, amount=options.micro_batch, seconds=options.seconds)
            yield report(name, turns, unit="crops/s")
        ours.close()
    if peer is not None:
        peer.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", nargs="+", default=list(SOURCES), choices=SOURCES)
    add_audio_options(parser)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each side of each row")


def add_audio_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that corpus.py reads."""
    parser.add_argument("--audio", type=Path, help="flac files in a folder for each speaker")
    parser.add_argument("--noise", type=Path, help="a folder of noises")
    parser.add_argument("--rirs", type=Path, help="a folder of room impulse responses")
    parser.add_argument("--utterance-seconds", type=float, help="cut recordings to this length")
    parser.add_argument("--crop-seconds", type=float, default=3.0)


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
