"""An int8 ONNX file of a published model, for CPUs. In: a model, recordings. Out: a file.

Convolutions and linear layers take and hold 8-bit integers (static quantisation, weights per
channel, activations by the least and largest values that calibration recordings gave); the front
end, the pooling and the layers after it stay fp32. What is lost is measured on recordings that
calibration has not seen, and the file is not written where it is too much.
Letters: B rows, S samples, D embedding.
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

MIN_COSINE = 0.95  # of an embedding of the file with PyTorch's, for the worst recording
CALIBRATED, CHECKED = 64, 16  # recordings
MAX_SECONDS = 6.0  # of each: values are not of another range later in a recording
BACKBONE = "embedder.backbone."  # names of weights in the file begin so


def export_int8(source: Path, out: Path, *, data_dir: Path) -> Path:
    """Write the model of a folder or experiment to `out`, or nothing where too much would be lost.

    data_dir: a checked data directory; of its recordings some calibrate and others check.
    Raises ValueError with one line, ModuleNotFoundError where the optional packages are missing.
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
    """wave_1S in [-1, 1] of up to CALIBRATED + CHECKED recordings, by the order of a hash.

    ValueError where there are not two that the graph takes.
    """
    manifest = read_manifest([data_dir], sample_rate=embedder.sample_rate)
    most = min(round(MAX_SECONDS * embedder.sample_rate), embedder.max_samples)
    fit = [r for r, size in enumerate(manifest.num_samples_N) if size >= embedder.min_samples]
    if len(fit) < 2:
        raise ValueError(
            f"{data_dir}: calibration needs two recordings of {embedder.min_samples} samples or "
            f"more, got {len(fit)}; give another with --calibrate"
        )
    sizes = [min(int(manifest.num_samples_N[row]), most) for row in fit[: CALIBRATED + CHECKED]]
    pieces = [Stretch(manifest, row, 0, size) for row, size in zip(fit, sizes)]
    return [piece.read()[None].astype(np.float32) / FULL_SCALE for piece in pieces]


def write_int8(
    embedder: Embedder, out: Path, *, waves: Sequence[np.ndarray], facts: Facts
) -> list[float]:
    """Export, quantise, compare, and only then let the file appear.

    The last fifth of `waves` checks, the others calibrate. Out: the cosine of each that checks.
    """
    refuse_large(embedder, out)
    num_checked = min(max(len(waves) // 5, 1), CHECKED)
    folded = embedder.folded()
    with replacing(out) as partial:
        graph = to_onnx(Traced(folded), traced_wave(folded))
        partial.write_bytes(_quantise(graph, folded, waves[:-num_checked], facts))
        cosines = [row.cosine for row in compare_waves(embedder, partial, waves[-num_checked:])]
        if not min(cosines) >= MIN_COSINE:
            raise ValueError(
                f"{out}: cosine with PyTorch must be {MIN_COSINE:g} for every recording, got "
                f"{min(cosines):.4f}; calibrate on recordings like those of training, or leave "
                "--int8 out"
            )
    return cosines


def _quantise(graph: bytes, folded: Embedder, waves: Sequence[np.ndarray], facts: Facts) -> bytes:
    """The bytes of an int8 file. onnxruntime.quantization works from file to file."""
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    reader: Any = _Waves(waves)
    with TemporaryDirectory() as folder:
        plain, ready, done = (Path(folder) / f"{name}.onnx" for name in ("plain", "ready", "done"))
        plain.write_bytes(graph)
        # Joins each BatchNorm with the convolution before it, where it can.
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
    """Names of the convolutions and linear layers of a graph that are to be 8-bit."""
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


class _Waves:
    """Recordings one by one, as onnxruntime asks for them (its CalibrationDataReader)."""

    def __init__(self, waves: Sequence[np.ndarray]) -> None:
        self._waves: Iterator[np.ndarray] = iter(waves)

    def get_next(self) -> dict[str, np.ndarray] | None:
        wave_1S = next(self._waves, None)
        return None if wave_1S is None else {INPUT: wave_1S}
