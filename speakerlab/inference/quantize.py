"""A published model as an int8 ONNX file, for CPUs. In: a model, recordings. Out: a file.

Static quantisation: convolutions and linear layers hold and multiply 8-bit integers, with a scale
per weight channel and the activation ranges of calibration recordings. The front end, the pooling
and the layers after it stay fp32. The embeddings are compared with PyTorch's on other recordings,
and the file is not written if they differ too much.
Letters: S samples.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn

from speakerlab.checkpoints.published import load_published
from speakerlab.config.embedder import Embedder
from speakerlab.core.atomic import replacing
from speakerlab.data.audio import FULL_SCALE
from speakerlab.data.manifest import read_manifest
from speakerlab.inference.batches import utterance_pieces
from speakerlab.inference.export import Traced, compare_waves, facts_of, finish, to_onnx
from speakerlab.inference.onnx_model import INPUT
from speakerlab.models.folding import LINEAR, find_last, find_wide

log = logging.getLogger(__name__)

MIN_COSINE = 0.95  # of the file's embedding with PyTorch's, for the worst recording
NUM_CALIBRATED, NUM_CHECKED = 64, 16  # recordings, at most
MAX_SECONDS = 6.0  # of each recording: the ranges of values do not change later in it
BACKBONE = "embedder.backbone."  # prefix of the backbone's weights in the file


def export_int8(source: Path, out: Path, *, data_dir: Path) -> Path:
    """Export the model of a folder or experiment to `out`; write nothing if too much is lost.

    data_dir: a checked data directory; a fifth of the recordings check, the others calibrate.
    Raises ValueError with one line, ModuleNotFoundError if the optional packages are missing.
    """
    published = load_published(source)
    embedder = published.embedder
    waves = read_waves(data_dir, embedder)
    num_checked = min(max(len(waves) // 5, 1), NUM_CHECKED)
    with replacing(out) as partial:
        texts = facts_of(published, precision="int8").to_texts()
        partial.write_bytes(_quantise(embedder.for_inference(), waves[:-num_checked], texts))
        cosines = compare_waves(Traced(embedder), partial, waves[-num_checked:])
        if not min(cosines) >= MIN_COSINE:
            raise ValueError(
                f"{out}: the lowest cosine with PyTorch is {min(cosines):.4f}, below "
                f"{MIN_COSINE:g}; calibrate on recordings like those of training, or omit --int8"
            )
    text = "%s: int8, calibrated on %d recordings; cosine on %d others: mean %.4f, lowest %.4f"
    log.info(text, out, len(waves) - num_checked, num_checked, np.mean(cosines), min(cosines))
    return out


def read_waves(data_dir: Path, embedder: Embedder) -> list[np.ndarray]:
    """Return wave_1S in [-1, 1] of the first recordings in the order of their hash.

    Raises ValueError if fewer than two are long enough for the graph.
    """
    manifest = read_manifest([data_dir], sample_rate=embedder.sample_rate)
    most = min(round(MAX_SECONDS * embedder.sample_rate), embedder.max_samples)
    fit = [p for p in utterance_pieces(manifest) if p.num_samples >= embedder.min_samples]
    if len(fit) < 2:
        raise ValueError(
            f"{data_dir}: calibration needs two recordings of at least {embedder.min_samples} "
            f"samples, got {len(fit)}; give another directory with --calibrate"
        )
    pieces = [replace(p, num_samples=min(p.num_samples, most)) for p in fit]
    chosen = pieces[: NUM_CALIBRATED + NUM_CHECKED]
    return [piece.read()[None].astype(np.float32) / FULL_SCALE for piece in chosen]


def _quantise(folded: Embedder, waves: Sequence[np.ndarray], texts: Mapping[str, str]) -> bytes:
    """Return the bytes of an int8 file; onnxruntime.quantization works from file to file."""
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    feeds = iter([{INPUT: wave_1S} for wave_1S in waves])
    reader: Any = SimpleNamespace(get_next=lambda: next(feeds, None))  # a CalibrationDataReader
    with TemporaryDirectory() as folder:
        plain, ready, done = (Path(folder) / f"{name}.onnx" for name in ("plain", "ready", "done"))
        plain.write_bytes(to_onnx(Traced(folded)))
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
        return finish(onnx.load(done), texts=texts)


def quantised_nodes(model: Any, backbone: nn.Module) -> list[str]:
    """Return the names of the convolutions and linear layers of a graph to make 8-bit."""
    wide = find_wide(backbone, find_last(backbone))
    layers = backbone.named_modules()
    narrow = [n for n, layer in layers if isinstance(layer, LINEAR) and id(layer) not in wide]
    nodes = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    return [n.name for n in nodes if any(f"{BACKBONE}{w}.weight" in n.input[1] for w in narrow)]
