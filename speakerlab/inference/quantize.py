"""A published model as an int8 ONNX file, for CPUs. In: a model, recordings. Out: a file.

Static quantisation: convolutions and linear layers hold and multiply 8-bit integers, with a scale
per weight channel and the activation ranges of calibration recordings. The front end, the pooling
and the layers after it stay fp32. The embeddings are compared with PyTorch's on other recordings,
and the file is not written if they differ too much.
Letters: S samples.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import nn

from speakerlab.checkpoints.published import load_published
from speakerlab.config.embedder import Embedder
from speakerlab.core.atomic import replacing
from speakerlab.data.audio import FULL_SCALE
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pieces import Stretch
from speakerlab.inference.export import Traced, compare_waves, facts_of, refuse_large, traced_wave
from speakerlab.inference.onnx_graph import finish, to_onnx
from speakerlab.inference.onnx_model import INPUT, Facts
from speakerlab.models.folding import LINEAR, find_last, find_wide

log = logging.getLogger(__name__)

MIN_COSINE = 0.95  # of the file's embedding with PyTorch's, for the worst recording
NUM_CALIBRATED, NUM_CHECKED = 64, 16  # recordings, at most
MAX_SECONDS = 6.0  # of each recording: the ranges of values do not change later in it
BACKBONE = "embedder.backbone."  # prefix of the backbone's weights in the file


def export_int8(source: Path, out: Path, *, data_dir: Path) -> Path:
    """Export the model of a folder or experiment to `out`; write nothing if too much is lost.

    data_dir: a checked data directory; some of its recordings calibrate and others check.
    Raises ValueError with one line, ModuleNotFoundError if the optional packages are missing.
    """
    published = load_published(source)
    facts = replace(facts_of(published), precision="int8")
    waves = read_waves(data_dir, published.embedder)
    cosines = write_int8(published.embedder, out, waves=waves, facts=facts)
    log.info(
        "%s: int8, calibrated on %d recordings; cosine with PyTorch on %d others: mean %.4f, "
        "least %.4f",
        *(out, len(waves) - len(cosines), len(cosines), np.mean(cosines), min(cosines)),
    )
    return out


def read_waves(data_dir: Path, embedder: Embedder) -> list[np.ndarray]:
    """Return wave_1S in [-1, 1] of the first recordings in the order of their hash.

    Raises ValueError if fewer than two are long enough for the graph.
    """
    manifest = read_manifest([data_dir], sample_rate=embedder.sample_rate)
    most = min(round(MAX_SECONDS * embedder.sample_rate), embedder.max_samples)
    fit = [r for r, size in enumerate(manifest.num_samples_N) if size >= embedder.min_samples]
    if len(fit) < 2:
        raise ValueError(
            f"{data_dir}: calibration needs two recordings of at least {embedder.min_samples} "
            f"samples, got {len(fit)}; give another directory with --calibrate"
        )
    pieces = [
        Stretch(manifest, row, 0, min(int(manifest.num_samples_N[row]), most))
        for row in fit[: NUM_CALIBRATED + NUM_CHECKED]
    ]
    return [piece.read()[None].astype(np.float32) / FULL_SCALE for piece in pieces]


def write_int8(
    embedder: Embedder, out: Path, *, waves: Sequence[np.ndarray], facts: Facts
) -> list[float]:
    """Export, quantise and compare; the file appears only if it is near enough.

    The last fifth of `waves` checks, the others calibrate. Returns the cosine of each that checks.
    """
    refuse_large(embedder, out)
    num_checked = min(max(len(waves) // 5, 1), NUM_CHECKED)
    folded = embedder.for_inference()
    with replacing(out) as partial:
        graph = to_onnx(Traced(folded), traced_wave(folded))
        partial.write_bytes(_quantise(graph, folded, waves[:-num_checked], facts))
        cosines = [row.cosine for row in compare_waves(embedder, partial, waves[-num_checked:])]
        if not min(cosines) >= MIN_COSINE:
            raise ValueError(
                f"{out}: the least cosine with PyTorch is {min(cosines):.4f}, below "
                f"{MIN_COSINE:g}; calibrate on recordings like those of training, or omit --int8"
            )
    return cosines


def _quantise(graph: bytes, folded: Embedder, waves: Sequence[np.ndarray], facts: Facts) -> bytes:
    """Return the bytes of an int8 file; onnxruntime.quantization works from file to file."""
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    reader: Any = _CalibrationReader(waves)
    with TemporaryDirectory() as folder:
        plain, ready, done = (Path(folder) / f"{name}.onnx" for name in ("plain", "ready", "done"))
        plain.write_bytes(graph)
        # Joins each BatchNorm with the convolution before it if possible.
        quant_pre_process(str(plain), str(ready), skip_symbolic_shape=True)
        quantize_static(
            str(ready),
            str(done),
            reader,
            quant_format=QuantFormat.QDQ,
            nodes_to_quantize=quantised_nodes(onnx.load(ready), folded.backbone),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return finish(onnx.load(done), texts=facts.to_texts())


def quantised_nodes(model: Any, backbone: nn.Module) -> list[str]:
    """Return the names of the convolutions and linear layers of a graph to make 8-bit."""
    wide = find_wide(backbone, find_last(backbone))
    narrow = [
        f"{BACKBONE}{name}.weight"
        for name, layer in backbone.named_modules()
        if isinstance(layer, LINEAR) and id(layer) not in wide
    ]
    return [
        node.name
        for node in model.graph.node
        if node.op_type in ("Conv", "Gemm")
        and any(name in weight for weight in node.input[1:2] for name in narrow)
    ]


class _CalibrationReader:
    """Recordings one by one, in the interface of onnxruntime's CalibrationDataReader."""

    def __init__(self, waves: Sequence[np.ndarray]) -> None:
        self._waves: Iterator[np.ndarray] = iter(waves)

    def get_next(self) -> dict[str, np.ndarray] | None:
        wave_1S = next(self._waves, None)
        return None if wave_1S is None else {INPUT: wave_1S}
