"""Toy segmentation model in ONNX: nobody, one speaker or two, by the loudness."""

from pathlib import Path
from typing import Any

import pytest

SILENT, LOUD = 0.01, 0.103  # mean amplitude from which one speaks, and two (see voices.py)


def write_segmentation(
    path: Path, *, sample_rate: int | None = None, num_classes: int = 7, hop: int = 270
) -> Path:
    """Write a model with the layout of pyannote/segmentation-3.0."""
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    slopes = [0.0, 1.0, -9.0, -9.0, 2.0, -9.0, -9.0, -9.0][:num_classes]
    offsets = [0.0, -SILENT, -9.0, -9.0, -SILENT - LOUD, -9.0, -9.0, -9.0][:num_classes]
    constants = {"slopes": (slopes, [num_classes, 1, 1]), "offsets": (offsets, [num_classes])}
    nodes: list[Any] = [
        helper.make_node("Abs", ["x"], ["loud"]),
        helper.make_node("AveragePool", ["loud"], ["frames"], kernel_shape=[991], strides=[hop]),
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
            helper.make_tensor(name, floats, shape, [1e4 * value for value in values])
            for name, (values, shape) in constants.items()
        ],
    )
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    if sample_rate is not None:
        helper.set_model_props(model, {"sample_rate": str(sample_rate)})
    onnx.save_model(model, path)
    return path
