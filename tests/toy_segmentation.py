"""Toy segmentation model in ONNX: nobody, one speaker or two, by the loudness."""

from pathlib import Path
from typing import Any

import pytest

# Mean amplitudes from which one speaker speaks, and two (see voices.py).
SILENT = 0.01
LOUD = 0.103


def write_segmentation(
    path: Path,
    *,
    sample_rate: int | None = None,
    num_classes: int = 7,
    hop: int = 270,
) -> Path:
    """Write a model with the layout of pyannote/segmentation-3.0."""
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    floats = onnx.TensorProto.FLOAT
    # slope and offset of the score of each class, by the amplitude;
    # of the single speakers only the first, of the pairs only the first is ever the highest
    lines = [
        (0.0, 0.0),
        (1.0, -SILENT),
        (-9.0, -9.0),
        (-9.0, -9.0),
        (2.0, -SILENT - LOUD),
        (-9.0, -9.0),
        (-9.0, -9.0),
        (-9.0, -9.0),
    ]
    slopes = [1e4 * slope for slope, _ in lines[:num_classes]]
    offsets = [1e4 * offset for _, offset in lines[:num_classes]]
    nodes: list[Any] = [
        helper.make_node("Abs", ["x"], ["loud"]),
        helper.make_node(
            "AveragePool",
            ["loud"],
            ["frames"],
            kernel_shape=[991],
            strides=[hop],
        ),
        helper.make_node("Conv", ["frames", "slopes", "offsets"], ["score"]),
        helper.make_node("Transpose", ["score"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("LogSoftmax", ["turned"], ["y"], axis=2),
    ]
    graph = helper.make_graph(
        nodes,
        "segmentation",
        [helper.make_tensor_value_info("x", floats, ["N", 1, "T"])],
        [helper.make_tensor_value_info("y", floats, ["N", "F", num_classes])],
        [
            helper.make_tensor("slopes", floats, [num_classes, 1, 1], slopes),
            helper.make_tensor("offsets", floats, [num_classes], offsets),
        ],
    )
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    if sample_rate is not None:
        helper.set_model_props(model, {"sample_rate": str(sample_rate)})
    onnx.save_model(model, path)
    return path
