"""A published model as one ONNX file, compared with PyTorch before it is written.

In: a model folder or experiment. Out: a file whose graph takes `wave`, float32 (B, S) in [-1, 1],
and returns `embedding` (B, D), front end included; its metadata are `onnx_model.Facts`. B and S are
free, S from `min_samples` on. Dates, paths and other traces of the export are removed, so that
equal models give equal bytes. Letters: B rows, S samples, D embedding dimensions.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speakerlab import __version__
from speakerlab.checkpoints.published import Published, load_published
from speakerlab.config.embedder import Embedder
from speakerlab.core.atomic import replacing
from speakerlab.inference.onnx_model import INPUT, INSTALL, OUTPUT, Facts, open_session

log = logging.getLogger(__name__)

OPSET, IR_VERSION = 18, 8  # of 2022, so that older runtimes open the file too
MIN_COSINE = 0.99999  # of a row of the file's output with PyTorch's
TRACED_SECONDS = 2.5
NUM_LENGTHS, MAX_CHECKED_SECONDS = 7, 30.0
AXES = {INPUT: "samples", "features": "frames"}  # input -> its second dimension


class Traced(nn.Module):
    """The exported graph: the embedding of a wave."""

    input = INPUT

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, wave: Tensor) -> Tensor:
        return self.embedder.embed_window(wave)

    def input_of(self, wave: Tensor) -> Tensor:
        """Return the input of the graph for a wave."""
        return wave


def export_onnx(source: Path, out: Path) -> Path:
    """Export the model of a folder or experiment to `out`; write nothing if it is not equal.

    Raises ValueError with the lengths at which PyTorch and the file differ, ModuleNotFoundError if
    the optional packages are missing.
    """
    published = load_published(source)
    cosines = write_onnx(published.embedder, out, facts=facts_of(published))
    text = "%s: equal to PyTorch at %d lengths, cosine >= %.7f"
    log.info(text, out, len(cosines), min(cosines))
    return out


def facts_of(published: Published, *, precision: str = "fp32") -> Facts:
    """Return the metadata of a published model's file."""
    embedder, config = published.embedder, published.config
    return Facts(
        sample_rate=embedder.sample_rate,
        embed_dim=embedder.embed_dim,
        min_samples=embedder.min_samples,
        max_samples=embedder.max_samples,
        sha256=published.sha256,
        architecture=config.model.name,
        frontend=config.frontend,
        calibration=published.calibration,
        diarization=published.tuning if published.tuning.source else None,
        vad=embedder.vad,
        precision=precision,
    )


def write_onnx(embedder: Embedder, out: Path, *, facts: Facts) -> list[float]:
    """Export and return the cosines; the file appears only if it is equal, else ValueError."""
    with replacing(out) as partial:
        return write_graph(Traced(embedder), partial, out, texts=facts.to_texts())


def write_graph(module: Traced, path: Path, out: Path, *, texts: Mapping[str, str]) -> list[float]:
    """Write the file that becomes `out` and return the cosines; ValueError if it is not equal."""
    path.write_bytes(to_onnx(module, texts=texts))
    lengths = checked_lengths(module.embedder)
    cosines = compare_waves(module, path, [speech_like(2, length) for length in lengths])
    if any(not cosine >= MIN_COSINE for cosine in cosines):  # or NaN
        found = ", ".join(f"{n} ({cosine:.6f})" for n, cosine in zip(lengths, cosines))
        raise ValueError(
            f"{out}: differs from PyTorch, samples (cosine): {found}; "
            "change what the exporter traces differently, nothing was written"
        )
    return cosines


def to_onnx(module: Traced, *, texts: Mapping[str, str] | None = None) -> bytes:
    """Trace a module; the file takes any batch size and length, and has `texts` as metadata.

    Raises ValueError with one line if the module cannot be traced.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"export: {name} is not installed; {INSTALL}")
    if torch.__version__ < "2.9":  # a TorchVersion, which compares numbers
        fix = "pip install --upgrade torch torchaudio"
        raise ValueError(f"export: torch 2.9 or newer is needed, found {torch.__version__}; {fix}")
    from onnxscript import optimizer

    embedder, free = module.embedder, torch.export.Dim.DYNAMIC
    wanted = round(TRACED_SECONDS * embedder.sample_rate)
    num_samples = min(max(wanted, embedder.min_samples), embedder.max_samples)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the exporter's, about its own parts and torchvision
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module.eval(),
                (module.input_of(torch.from_numpy(speech_like(2, num_samples))),),
                dynamo=True,
                dynamic_shapes=({0: free, 1: free},),
                input_names=[module.input],
                output_names=[OUTPUT],
                opset_version=OPSET,
                verbose=False,
                optimize=False,  # it replaces an epsilon of 1e-8 by 0; runtimes optimise anyway
            )
            assert program is not None
            optimizer.fold_constants(program.model)
            optimizer.remove_unused_nodes(program.model)
    except Exception as error:  # the tracer raises many types
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise ValueError(
            f"model: cannot be traced ({reason}); write it without branches on values"
        ) from error
    finally:
        logging.disable(disabled)
    return finish(program.model_proto, texts=texts or {})


def finish(model: Any, *, texts: Mapping[str, str]) -> bytes:
    """Return the bytes of a graph with `texts` as its metadata, without traces of the export."""
    _strip(model)
    model.graph.name = model.producer_name = "speakerlab"
    model.producer_version, model.ir_version = __version__, IR_VERSION
    for value in (*model.graph.input, *model.graph.output):
        dims = value.type.tensor_type.shape.dim
        for dim, name in zip(dims, ("batch", AXES.get(value.name, ""))):
            if dim.HasField("dim_param"):
                dim.dim_param = name
    for name, text in {"producer": f"speakerlab {__version__}", **texts}.items():
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


def compare_waves(module: Traced, path: Path, waves: Sequence[np.ndarray]) -> list[float]:
    """Return the lowest cosine of a file's embeddings with PyTorch's for each wave_BS."""
    session = open_session(path, num_threads=torch.get_num_threads())
    cosines: list[float] = []
    for wave_BS in waves:
        with torch.inference_mode():
            wave = torch.from_numpy(wave_BS)
            wanted_BD = module.embedder.embed_window(wave).double()
            found_BD = session.run([OUTPUT], {module.input: module.input_of(wave).numpy()})[0]
            found_BD = torch.from_numpy(found_BD).double()
            cosines.append(nn.functional.cosine_similarity(found_BD, wanted_BD).min().item())
    return cosines


def checked_lengths(embedder: Embedder) -> list[int]:
    """Return lengths in samples, rising, from the shortest to MAX_CHECKED_SECONDS."""
    longest = min(embedder.max_samples, MAX_CHECKED_SECONDS * embedder.sample_rate)
    return [round(n) for n in np.geomspace(embedder.min_samples, longest, NUM_LENGTHS)]


def speech_like(rows: int, num_samples: int) -> np.ndarray:
    """Return wave_BS, float32, always the same: noise that swells and fades like syllables."""
    rng = np.random.default_rng([rows, num_samples])
    phase_BS = np.arange(num_samples) / 4000 + rng.uniform(0, 2 * np.pi, (rows, 1))
    loudness_BS = 10 ** (np.sin(phase_BS) + 0.5 * np.sin(2.7 * phase_BS) - 2.5)
    noise_BS = rng.standard_normal((rows, num_samples))
    noise_BS[:, 1:] += 0.9 * noise_BS[:, :-1]  # less of the high frequencies
    return (loudness_BS * noise_BS).astype(np.float32)
