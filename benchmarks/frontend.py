"""Crops a second from waves to features, beside 3D-Speaker's, WeSpeaker's and SpeechBrain's own.

    python benchmarks/frontend.py --peer DIR [DIR ...] --json FILE

In: synthetic crops. Out: a row for each peer. `data.full_cpu` has speed, room and noise, too.

On a GPU ours and SpeechBrain's features are computed there, 3D-Speaker's and WeSpeaker's on the
CPU, where their workers compute them. On a CPU each side has one thread, as a worker has. Before
anything is timed, the features of 3D-Speaker and WeSpeaker must equal ours with their settings.
SpeechBrain's are others by definition: that row compares the time of the same task.

Letters: B crops, S samples, T frames, F mel bins.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from sides import (
    add_seconds,
    close_sides,
    import_peer,
    replace_module,
    report,
    require_equal,
    run_case,
    run_of,
    start_sides,
    suffix,
    take_turns,
    timed,
    wants,
)
from torch import Tensor

PEERS = ("3dspeaker", "wespeaker", "speechbrain")
QUICK = ("--seconds=3",)
RATE = 16000
# Of our front end beside a peer; else the defaults.
SETTINGS = {"wespeaker": {"window": "hamming", "scale": 32768.0}}
# Largest difference of mean-normalised log mel features: the peers compute in fp32.
ALLOWED = {"3dspeaker": 1e-2, "wespeaker": 1e-2}


class Side:
    """The features of one toolkit."""

    on_device = False  # else on the CPU, in workers

    def __init__(self, like: str, device: str, crops: int, crop_seconds: float) -> None:
        self.device = device if self.on_device else "cpu"
        self.features = self.build(like, torch.device(device))
        generator = torch.Generator().manual_seed(0)
        wave_BS = 0.1 * torch.randn(
            crops, round(crop_seconds * RATE), generator=generator
        )
        self.wave_BS = wave_BS.to(self.device)
        self.timed_on = device

    def build(self, like: str, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return wave_BS in [-1, 1] -> feats_BTF."""
        raise NotImplementedError

    @torch.no_grad()
    def values(self, path: str) -> None:
        feats_BTF = self.features(self.wave_BS[:4]).cpu().numpy()
        np.savez(path, feats_BTF=feats_BTF)

    @torch.no_grad()
    def run(self, steps: int) -> float:
        return timed(lambda: self.features(self.wave_BS), self.timed_on, steps=steps)


class Ours(Side):
    on_device = True

    def build(self, like: str, device: torch.device) -> Callable[[Tensor], Tensor]:
        from speakerlab.frontend.fbank import Fbank

        return Fbank(**SETTINGS.get(like, {})).eval().to(device)


class ThreeDSpeaker(Side):
    def build(self, like: str, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Compute one crop after the other, as its data set does in a worker, then stack them."""
        fbank = import_peer("speakerlab.process.processor").FBank(
            80, RATE, mean_nor=True
        )
        return lambda wave_BS: torch.stack([fbank(wave_S) for wave_S in wave_BS])


class WeSpeaker(Side):
    def build(self, like: str, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Compute crop after crop in a worker; subtract the mean by batch, on the device."""
        replace_module("kaldiio")  # which only reads ark files
        processor = import_peer("wespeaker.dataset.processor")
        apply_cmvn = import_peer("wespeaker.dataset.dataset_utils").apply_cmvn

        def features(wave_BS: Tensor) -> Tensor:
            samples: Iterator[dict[str, object]] = (
                {"key": "", "label": 0, "sample_rate": RATE, "wav": wave_S[None]}
                for wave_S in wave_BS
            )
            feats = [
                crop["feat"] for crop in processor.compute_fbank(samples, dither=0.0)
            ]
            return apply_cmvn(torch.stack(feats).to(device))

        return features


class SpeechBrain(Side):
    on_device = True

    def build(self, like: str, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Compute its own features (decibels of another spectrum) by batch, on the device."""
        fbank = import_peer("speechbrain.lobes.features").Fbank(n_mels=80).to(device)
        processing = import_peer("speechbrain.processing.features")
        norm = processing.InputNormalization(norm_type="sentence", std_norm=False).to(
            device
        )
        return lambda wave_BS: norm(
            fbank(wave_BS), torch.ones(len(wave_BS), device=device)
        )


SIDES = {
    "ours": Ours,
    "3dspeaker": ThreeDSpeaker,
    "wespeaker": WeSpeaker,
    "speechbrain": SpeechBrain,
}


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the row beside each peer, or ours alone."""
    for peer in list(options.peers) or [None]:
        name = f"frontend.fbank{suffix(peer)}"
        if not wants(options, name):
            continue
        threads = 1 if options.device == "cpu" else None
        peers = {} if peer is None else {peer: options.peers[peer]}
        sides = start_sides(
            "frontend",
            threads,
            peers,
            device=options.device,
            crops=options.micro_batch,
            crop_seconds=options.crop_seconds,
            like=peer or "3dspeaker",
        )
        if peer in ALLOWED:
            require_equal(
                f"{peer}: features", sides, options.folder, allowed=ALLOWED[peer]
            )
        runs = [run_of(side) for side in sides]
        turns = take_turns(runs, amount=options.micro_batch, seconds=options.seconds)
        close_sides(sides)
        yield report(name, turns, unit="crops/s")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--crop-seconds", type=float, default=3.0)
    parser.add_argument("--micro-batch", type=int, default=64)
    add_seconds(parser, 10.0)


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
