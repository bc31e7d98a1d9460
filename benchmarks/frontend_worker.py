"""One side of frontend.py: waits on stdin, and makes features of the waves it is told to.

In: lines of JSON, {"do": "values" | "fbank", ...}. Out: a line of JSON for each. PYTHONPATH is our
tree or a peer's checkout. Letters: B crops, S samples, T frames, F mel bins.
"""

import argparse
import sys
import time
import types
from collections.abc import Callable, Iterator

import torch
from frontend_sides import RATE, SETTINGS
from models_sides import BARE
from sides import Answer, Order, import_from_root, serve
from torch import Tensor

Features = Callable[[Tensor], Tensor]  # wave_BS in [-1, 1] -> feats_BTF


def ours(like: str, device: torch.device) -> Features:
    """Our front end with the settings of a peer."""
    from speakerlab.frontend.fbank import Fbank

    return Fbank(**SETTINGS[like]).eval().to(device)


def of_3dspeaker(_: torch.device) -> Features:
    """A crop after the other, as its data set does in a worker, then stacked."""
    fbank = import_from_root("speakerlab.process.processor").FBank(80, RATE, mean_nor=True)
    return lambda wave_BS: torch.stack([fbank(wave_S) for wave_S in wave_BS])


def of_wespeaker(device: torch.device) -> Features:
    """A crop after the other in a worker; the mean is taken off on the device, batch by batch."""
    sys.modules.setdefault("kaldiio", types.ModuleType("kaldiio"))  # only reads ark files
    names = ("processor", "dataset_utils")
    processor, after = (
        import_from_root(f"wespeaker.dataset.{name}", BARE["wespeaker"]) for name in names
    )

    def features(wave_BS: Tensor) -> Tensor:
        samples: Iterator[dict[str, object]] = (
            {"key": "", "label": 0, "sample_rate": RATE, "wav": wave_S[None]} for wave_S in wave_BS
        )
        feats = [found["feat"] for found in processor.compute_fbank(samples, dither=0.0)]
        return after.apply_cmvn(torch.stack(feats).to(device))

    return features


def of_speechbrain(device: torch.device) -> Features:
    """Its own features (decibels of another spectrum), batch by batch on the device."""
    lobes = import_from_root("speechbrain.lobes.features", BARE["speechbrain"])
    processing = import_from_root("speechbrain.processing.features", BARE["speechbrain"])
    fbank = lobes.Fbank(n_mels=80).to(device)
    norm = processing.InputNormalization(norm_type="sentence", std_norm=False).to(device)

    def features(wave_BS: Tensor) -> Tensor:
        return norm(fbank(wave_BS), torch.ones(len(wave_BS), device=device))

    return features


PEERS = {"3dspeaker": of_3dspeaker, "wespeaker": of_wespeaker, "speechbrain": of_speechbrain}
ON_DEVICE = ("ours", "speechbrain")  # the others' run in workers, on the CPU


def start() -> Callable[[Order], Answer]:
    parser = argparse.ArgumentParser()
    for name in ("side", "like", "device"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("crops", "samples"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    is_ours = options.side == "ours"
    features = ours(options.like, device) if is_ours else PEERS[options.side](device)
    generator = torch.Generator().manual_seed(0)
    wave_BS = 0.1 * torch.randn(options.crops, options.samples, generator=generator)
    if options.side in ON_DEVICE:
        wave_BS = wave_BS.to(device)

    def answer(order: Order) -> Answer:
        with torch.no_grad():
            if order["do"] == "values":
                torch.save(features(wave_BS[:4]).cpu(), order["path"])
                return {"written": True}
            wait(device)
            began = time.perf_counter()
            for _ in range(order["steps"]):
                features(wave_BS)
            wait(device)
            return {"seconds": time.perf_counter() - began}

    return answer


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    serve(start)
