"""Run a toolkit's own inference on recordings, in a separate process.

    python tests/checkpoints/toolkits/peer.py JOB.json

A job names the `toolkit`, the `checkout`, `files`, and `models`: the class or function that builds
each, its arguments, and its checkpoint. The toolkit's own code turns each file into features and an
embedding. Out: `out`, an npz with one (files, D) array a model.

What is not the checkout's own: reading the file, as torchaudio.load is gone; soundfile gives the
same samples.
"""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import soundfile
import torch
from torch import Tensor

PACKAGES = {"3dspeaker": "speakerlab", "wespeaker": "wespeaker"}


def add_package(toolkit: str, checkout: Path) -> None:
    """Make the toolkit's package importable from the checkout, and from nowhere else."""
    package = ModuleType(PACKAGES[toolkit])
    package.__path__ = [str(checkout / PACKAGES[toolkit])]
    sys.modules[PACKAGES[toolkit]] = package


def features_3dspeaker() -> Callable[[Path], Tensor]:
    fbank = import_module("speakerlab.process.processor").FBank(
        80, sample_rate=16000, mean_nor=True
    )
    return lambda path: fbank(read(path))


def features_wespeaker() -> Callable[[Path], Tensor]:
    processor = import_module("wespeaker.dataset.processor")

    def features(path: Path) -> Tensor:
        row = {"key": path.stem, "label": 0, "sample_rate": 16000, "wav": read(path)}
        rows = processor.compute_fbank(iter([row]), dither=0.0)
        return next(processor.apply_cmvn(rows))["feat"]

    return features


def read(path: Path) -> Tensor:
    """(1, S) samples in [-1, 1], as torchaudio.load gave them."""
    wave_S, rate = soundfile.read(path, dtype="float32")
    assert rate == 16000, rate
    return torch.from_numpy(wave_S)[None]


def build(upstream: str, args: dict[str, object], checkpoint: str) -> torch.nn.Module:
    module, _, name = upstream.partition(":")
    network = getattr(import_module(module), name)(**args).eval()
    state = torch.load(checkpoint, weights_only=True)
    network.load_state_dict(
        {
            name: value
            for name, value in state.items()
            if not name.startswith("projection.")
        }
    )
    return network


@torch.no_grad()
def embed(network: torch.nn.Module, feats_TF: Tensor) -> np.ndarray:
    output = network(feats_TF[None])
    return (output[-1] if isinstance(output, tuple) else output)[0].numpy()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    add_package(job["toolkit"], Path(job["checkout"]))
    features = {"3dspeaker": features_3dspeaker, "wespeaker": features_wespeaker}[
        job["toolkit"]
    ]()
    feats = [features(Path(file)) for file in job["files"]]
    results: dict[str, np.ndarray] = {}
    for model in job["models"]:
        network = build(model["upstream"], model["args"], model["checkpoint"])
        results[model["name"]] = np.stack(
            [embed(network, feats_TF) for feats_TF in feats]
        )
    np.savez(job["out"], **results)


if __name__ == "__main__":
    main()
