"""Memory of a process that embeds one recording after another, as a service does for weeks.

    python tests/many_calls.py --calls 3000 --seconds 0.5 30
    python tests/many_calls.py --calls 97000 --seconds 0.5 1 --every 5000

Draws a length for each call, evenly from the range, and embeds noise of that length with CAM++ of
the published size and random weights. Prints the memory of the process (RSS, and its highest value
so far) at intervals. Almost every call has a length that no call before had: what a library stores
for each shape shows as growth. The last line is after a return of freed memory, which a model does
after every two minutes of audio: it has the memory in use, without what the last calls left.
`--threads` makes the calls from several threads; `--onnx` exports the model and embeds with
onnxruntime.
"""

import argparse
import logging
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import speakerlab
from speakerlab.checkpoints.published import publish
from speakerlab.config.build import build_embedder
from speakerlab.config.schema import load_config
from speakerlab.core.system import return_freed_memory
from speakerlab.inference.export import export_onnx

CAMPPLUS = Path(__file__).parents[1] / "conf" / "campplus.yaml"
RATE = 16000
MB = 1e6


def publish_campplus(folder: Path) -> Path:
    """Publish CAM++ of the published size, whose BatchNorm has seen noise."""
    torch.manual_seed(0)
    config = load_config([CAMPPLUS])
    embedder = build_embedder(config)
    with torch.no_grad():
        embedder.train()(0.1 * torch.randn(4, 2 * RATE))
    publish(folder, embedder=embedder.eval(), config=config, facts={"commit": None})
    return folder


def memory_of_process() -> tuple[float, float]:
    """Return (RSS, highest RSS so far) of this process in MB."""
    kilobytes: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            kilobytes[name] = int(value.split()[0])
    return kilobytes["VmRSS"] * 1024 / MB, kilobytes["VmHWM"] * 1024 / MB


def embed_noise(model: Any, seconds: float, seed: int) -> None:
    """Embed noise of a length; the weights are random, so only the shape matters."""
    rng = np.random.default_rng(seed)
    wave_S = rng.standard_normal(round(seconds * RATE), dtype=np.float32)
    emb_D = model.embed(0.1 * wave_S)
    assert np.isfinite(emb_D).all()


def make_calls(
    model: Any, seconds_N: np.ndarray, *, every: int, num_threads: int
) -> None:
    """Make the calls, and print the memory at intervals."""
    began = time.perf_counter()
    num_calls = len(seconds_N)
    with ThreadPoolExecutor(num_threads) as pool:
        for first in range(0, num_calls, every):
            numbers = range(first, min(first + every, num_calls))
            # `list` raises the error of a thread.
            list(
                pool.map(lambda n: embed_noise(model, float(seconds_N[n]), n), numbers)
            )
            rss, peak = memory_of_process()
            elapsed = time.perf_counter() - began
            sys.stdout.write(
                f"{numbers.stop:7} calls  {elapsed:7.0f} s  RSS {rss:6.0f} MB"
                f"  highest {peak:6.0f} MB\n"
            )
            sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seconds", type=float, nargs=2, default=[0.5, 30.0])
    parser.add_argument("--every", type=int, default=250, help="calls between lines")
    parser.add_argument("--threads", type=int, default=1, help="that call the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--onnx", action="store_true")
    args = parser.parse_args()
    # Every call would warn that noise is no speech.
    logging.disable(logging.WARNING)

    shortest, longest = args.seconds
    rng = np.random.default_rng(args.seed)
    seconds_N = rng.uniform(shortest, longest, args.calls)
    with tempfile.TemporaryDirectory() as folder:
        path = publish_campplus(Path(folder) / "model")
        if args.onnx:
            export_onnx(path, Path(folder) / "model.onnx")
            path = Path(folder) / "model.onnx"
        model = speakerlab.load(path, device="cpu")
        rss, _ = memory_of_process()
        sys.stdout.write(f"{model!r}: RSS {rss:.0f} MB\n")
        make_calls(model, seconds_N, every=args.every, num_threads=args.threads)
        return_freed_memory()
        rss, _ = memory_of_process()
        sys.stdout.write(f"after a return of freed memory: RSS {rss:.0f} MB\n")


if __name__ == "__main__":
    main()
