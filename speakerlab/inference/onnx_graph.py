"""A module as the bytes of an ONNX file. In: a module from `wave` (B, S) to tensors. Out: bytes.

Dates, paths and other traces of the export are removed, so that equal modules give equal bytes.
Letters: B rows, S samples.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from speakerlab import __version__
from speakerlab.inference.onnx_model import INPUT, INSTALL, OUTPUT

OPSET, IR_VERSION = 18, 8  # of 2022, so that older runtimes open the file too
NOISY_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir")


def to_onnx(
    module: nn.Module,
    wave_BS: Tensor,
    *,
    outputs: Sequence[str] = (OUTPUT,),
    texts: Mapping[str, str] | None = None,
) -> bytes:
    """Trace a module with these waves; the file takes any batch size and length.

    texts: metadata of the file. Raises ValueError with one line if the module cannot be traced.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"export: {name} is not installed; {INSTALL}")
    from onnxscript import optimizer

    free = torch.export.Dim.DYNAMIC
    with _quiet():
        try:
            program = torch.onnx.export(
                module.eval(),
                (wave_BS,),
                dynamo=True,
                dynamic_shapes=({0: free, 1: free},),
                input_names=[INPUT],
                output_names=list(outputs),
                opset_version=OPSET,
                verbose=False,
                optimize=False,  # it replaces an epsilon of 1e-8 by 0; runtimes optimise anyway
            )
        except Exception as error:  # the tracer raises many types
            reason = " ".join(str(error.__cause__ or error).split())[:200]
            raise ValueError(
                f"model: cannot be traced ({reason}); write it without branches on values"
            ) from error
        assert program is not None
        optimizer.fold_constants(program.model)
        optimizer.remove_unused_nodes(program.model)
    return finish(program.model_proto, texts=texts)


def finish(model: Any, *, texts: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a graph with `texts` as its metadata, without traces of the export."""
    _strip(model)
    model.graph.name = model.producer_name = "speakerlab"
    model.producer_version, model.ir_version = __version__, IR_VERSION
    for value in (*model.graph.input, *model.graph.output):
        dims = value.type.tensor_type.shape.dim
        for dim, name in zip(dims, ("batch", "samples" if value.name == INPUT else "")):
            if dim.HasField("dim_param"):
                dim.dim_param = name
    for name, text in {"producer": f"speakerlab {__version__}", **(texts or {})}.items():
        model.metadata_props.add(key=name, value=text)
    return model.SerializeToString(deterministic=True)


def _strip(message: Any) -> None:
    """Remove the exporter's notes: stack traces, names of our modules, shapes."""
    for field, value in message.ListFields():
        if field.name in ("doc_string", "metadata_props", "value_info"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for part in value if isinstance(value, Sequence) else [value]:
                _strip(part)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings about its own parts and about torchvision."""
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
