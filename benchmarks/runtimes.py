"""Embeddings a second from waves, front end included, by each runtime that a model can ship on.

    pip install onnx onnxscript onnxruntime
    python benchmarks/runtimes.py [--models campplus eres2net] [--seconds 20] [--json FILE]

In: models with random weights, made-up waves. Out: a line and a row for each model and runtime;
`peer` is PyTorch in fp32; all take turns, one thread each. What int8 costs in EER: docs/onnx.md.
Letters: B rows, S samples.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import report, write_rows
from sides import ROOT, Measured

sys.path.insert(0, str(ROOT))
from speakerlab.config import build
from speakerlab.config.embedder import Embedder
from speakerlab.config.schema import Config, load_config
from speakerlab.core import process
from speakerlab.inference.export import speech_like, write_onnx
from speakerlab.inference.onnx_model import Facts, OnnxModel
from speakerlab.inference.quantize import write_int8
from speakerlab.training.precision import resolve_precision

Run = Callable[[np.ndarray], Any]
CALIBRATED = 20  # recordings
PRECISIONS = ("fp32", "bf16")


def torch_run(embedder: Embedder, precision: str) -> Run:
    """As the Python API and extraction have it: BatchNorm folded, weights cast."""
    folded = embedder.for_inference(resolve_precision(precision, torch.device("cpu")))

    def run(wave_BS: np.ndarray) -> Any:
        with torch.inference_mode():
            return folded.embed_window(torch.from_numpy(wave_BS)).float()

    return run


def runs(config: Config, folder: Path) -> Iterator[tuple[str, Run]]:
    """(name, what embeds) of each runtime, PyTorch in fp32 first."""
    embedder = build.build_embedder(config).eval()
    for precision in PRECISIONS:
        yield f"torch.{precision}", torch_run(embedder, precision)
    facts = Facts(
        sample_rate=embedder.sample_rate,
        embed_dim=embedder.embed_dim,
        min_samples=embedder.min_samples,
        max_samples=embedder.max_samples,
        sha256="",
        architecture=config.model.name,
        frontend=config.frontend,
        calibration=None,
        vad=None,
    )
    plain, small = folder / "fp32.onnx", folder / "int8.onnx"
    write_onnx(embedder, plain, facts=facts)
    yield "onnx.fp32", OnnxModel(plain, num_threads=1).embed_window
    waves = list(speech_like(CALIBRATED, 3 * embedder.sample_rate)[:, None])
    write_int8(embedder, small, waves=waves, facts=facts)
    yield "onnx.int8", OnnxModel(small, num_threads=1).embed_window


def compare(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a model: turns of all its runtimes."""
    config = load_config([ROOT / "conf" / f"{model}.yaml"], ["seed=1"])
    with tempfile.TemporaryDirectory() as folder:
        sides = dict(runs(config, Path(folder)))
        num_samples = round(options.crop_seconds * config.frontend["sample_rate"])
        wave_BS = speech_like(options.batch, num_samples)
        for run in sides.values():
            run(wave_BS)  # memory is taken and kernels are chosen
        rates: dict[str, list[float]] = {name: [] for name in sides}
        until = time.perf_counter() + options.seconds * len(sides)
        while time.perf_counter() < until or len(rates["torch.fp32"]) < 3:
            for name, run in sides.items():
                began = time.perf_counter()
                run(wave_BS)
                rates[name].append(options.batch / (time.perf_counter() - began))
    plain = rates["torch.fp32"]
    rows = []
    for name, rates_of in rates.items():
        own, peer = statistics.median(rates_of), statistics.median(plain)
        low, _, high = statistics.quantiles([a / b for a, b in zip(rates_of, plain)], n=4)
        measured = Measured(own, peer, own / peer, (low, high))
        rows.append(report(f"runtime.{model}.{name}", measured))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["campplus", "eres2net"])
    parser.add_argument("--batch", type=int, default=8, help="utterances at a time")
    parser.add_argument("--crop-seconds", type=float, default=3.0, help="of each")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each runtime, about")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    process.keep_freed_memory()
    rows = [row for model in options.models for row in compare(model, options)]
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
