"""A module as the bytes of an ONNX file. In: a module from `wave` (B, S) to tensors. Out: bytes.

Dates, paths and what else tells of the making, not of the model, are left out: equal modules give
equal bytes. Letters: B rows, S samples.
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

OPSET, IR_VERSION = 18, 8  # of 2022: older runtimes open the file, too
NOISY = ("torch.onnx", "onnxscript", "onnx_ir")  # loggers that tell what concerns no user


def to_onnx(
    module: nn.Module,
    wave_BS: Tensor,
    *,
    outputs: Sequence[str] = (OUTPUT,),
    texts: Mapping[str, str] | None = None,
) -> bytes:
    """The file of a module, traced with these waves, that takes any batch and any length.

    `texts` go into its metadata. Raises ValueError with one line where the module cannot be traced.
    """
    _refuse_missing()
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
                optimize=False,  # it takes an epsilon of 1e-8 for 0; runtimes optimise anyway
            )
        except Exception as error:  # whatever the tracer meets
            reason = " ".join(str(error.__cause__ or error).split())[:200]
            raise ValueError(
                f"model: cannot be traced, got '{reason}'; write it without branches on values"
            ) from error
        assert program is not None
        optimizer.fold_constants(program.model)
        optimizer.remove_unused_nodes(program.model)
    return finish(program.model_proto, texts=texts)


def finish(model: Any, *, texts: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a graph with `texts` as its metadata, and nothing that tells of its making."""
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
    """Remove what the exporter notes on the side: stack traces, names of our modules, shapes."""
    for field, value in message.ListFields():
        if field.name in ("doc_string", "metadata_props", "value_info"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for part in value if isinstance(value, Sequence) else [value]:
                _strip(part)


def _refuse_missing() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"export: {name} is not installed; {INSTALL}")


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own parts and of torchvision; none of it concerns the model."""
    loggers = [logging.getLogger(name) for name in NOISY]
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
