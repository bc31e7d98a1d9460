"""Export of a published model to int8 ONNX, for CPUs. In: a model, recordings. Out: a file.

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
from speakerlab.core.counting import count_of
from speakerlab.data.audio import FULL_SCALE
from speakerlab.data.manifest import Piece, read_manifest
from speakerlab.embedder import Embedder
from speakerlab.inference.export import (
    Traced,
    compare_waves,
    facts_of,
    finish,
    is_large,
    replacing_model,
    to_onnx,
    write_model,
)
from speakerlab.inference.onnx_model import INPUT
from speakerlab.models.folding import LINEAR, find_last, find_wide

log = logging.getLogger(__name__)

MIN_COSINE = 0.95  # between the file's and PyTorch's embedding of the worst recording
NUM_CALIBRATED = 64  # recordings, at most
NUM_CHECKED = 16  # recordings, at most
MAX_SECONDS = 6.0  # of each recording: more does not change the activation ranges
BACKBONE = "embedder.backbone."  # prefix of the backbone's weights in the file


def export_int8(source: Path, out: Path, *, data_dir: Path) -> Path:
    """Export a model as int8; write nothing if the embeddings differ too much.

    source: folder or experiment. data_dir: a checked data directory; a fifth of the recordings are
    for the check, the others for calibration.
    Raises ValueError with one line, ModuleNotFoundError if the optional packages are missing.
    """
    published = load_published(source)
    embedder = published.embedder
    waves = read_waves(data_dir, embedder)
    num_checked = max(len(waves) // 5, 1)
    num_checked = min(num_checked, NUM_CHECKED)
    # Check with recordings that were not used to find the activation ranges.
    calibration_waves = waves[:-num_checked]
    checked_waves = waves[-num_checked:]

    facts = facts_of(published, precision="int8")
    with replacing_model(out.resolve()) as partial:
        folded = embedder.for_inference()
        model = _quantise(folded, calibration_waves, facts.to_texts())
        write_model(model, partial, out.resolve())
        cosines = compare_waves(Traced(embedder), partial, checked_waves)
        # Written so that NaN is refused too.
        if not min(cosines) >= MIN_COSINE:
            raise ValueError(
                f"{out}: the lowest cosine with PyTorch is {min(cosines):.4f}, below"
                f" {MIN_COSINE:g}; calibrate on recordings like those of training, or"
                " omit --int8"
            )
    log.info(
        "%s: int8, calibrated on %s; cosine on %s: mean %.4f, lowest %.4f",
        out,
        count_of(len(calibration_waves), "recording"),
        count_of(num_checked, "other"),
        np.mean(cosines),
        min(cosines),
    )
    return out


def read_waves(data_dir: Path, embedder: Embedder) -> list[np.ndarray]:
    """Return wave_1S in [-1, 1] of the first recordings in the order of their hash.

    Raises ValueError if fewer than two are long enough for the graph.
    """
    sample_rate = embedder.sample_rate
    manifest = read_manifest([data_dir], sample_rate=sample_rate)
    max_samples = round(MAX_SECONDS * sample_rate)
    max_samples = min(max_samples, embedder.max_samples)
    # The graph has a range of input lengths: shorter recordings are left out, longer ones are cut.
    pieces: list[Piece] = []
    for piece in manifest.pieces():
        if piece.num_samples >= embedder.min_samples:
            num_samples = min(piece.num_samples, max_samples)
            pieces.append(replace(piece, num_samples=num_samples))
    if len(pieces) < 2:
        raise ValueError(
            f"{data_dir}: calibration needs two recordings of at least"
            f" {embedder.min_samples} samples, got {len(pieces)}; give another directory"
            " with --calibrate"
        )
    waves: list[np.ndarray] = []
    for piece in pieces[: NUM_CALIBRATED + NUM_CHECKED]:
        int16_1S = piece.read()[None]
        waves.append(int16_1S.astype(np.float32) / FULL_SCALE)
    return waves


def _quantise(
    folded: Embedder, waves: Sequence[np.ndarray], texts: Mapping[str, str]
) -> Any:
    """Return an int8 ModelProto; onnxruntime.quantization works from file to file."""
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    feeds = iter([{INPUT: wave_1S} for wave_1S in waves])

    def next_feed() -> dict[str, np.ndarray] | None:
        return next(feeds, None)

    # The only method of a CalibrationDataReader that is called.
    reader: Any = SimpleNamespace(get_next=next_feed)
    with TemporaryDirectory() as folder:
        exported = Path(folder) / "plain.onnx"
        prepared = Path(folder) / "ready.onnx"
        quantised = Path(folder) / "done.onnx"
        model = to_onnx(Traced(folded))
        has_second_file = is_large(model)
        write_model(model, exported, exported)
        # Joins each BatchNorm with the convolution before it if possible.
        quant_pre_process(
            str(exported),
            str(prepared),
            skip_symbolic_shape=True,
            save_as_external_data=has_second_file,
            all_tensors_to_one_file=has_second_file,
        )
        node_names = quantised_nodes(onnx.load(prepared), folded.backbone)
        quantize_static(
            str(prepared),
            str(quantised),
            reader,
            quant_format=QuantFormat.QDQ,
            nodes_to_quantize=node_names,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            use_external_data_format=has_second_file,
        )
        return finish(onnx.load(quantised), texts=texts)


def quantised_nodes(model: Any, backbone: nn.Module) -> list[str]:
    """Return the names of the convolutions and linear layers of a graph to quantise to 8 bits."""
    # The pooling and all layers after it stay wide, that is, fp32.
    last_layers = find_last(backbone)
    wide_ids = find_wide(backbone, last_layers)
    weights: list[str] = []
    for name, layer in backbone.named_modules():
        is_wide = id(layer) in wide_ids
        if isinstance(layer, LINEAR) and not is_wide:
            weights.append(f"{BACKBONE}{name}.weight")

    # Map onnxruntime's nodes of the graph to PyTorch's layers by the names of their weights.
    names: list[str] = []
    for node in model.graph.node:
        if node.op_type in ("Conv", "Gemm"):
            # The exporter may add to the name of a weight, the second input of a node.
            weight_of_node = node.input[1]
            if any(weight in weight_of_node for weight in weights):
                names.append(node.name)
    return names
