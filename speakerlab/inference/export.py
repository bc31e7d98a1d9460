"""Export of a published model to an ONNX file, compared with PyTorch before it is written.

One file or, where its weights exceed what ONNX allows in one, with a second beside it.
In: a model folder or experiment. Out: a file whose graph takes `wave`, float32 (B, S) in [-1, 1],
and returns `embedding` (B, D), front end included; its metadata are `onnx_model.Facts`. B and S are
free, S from `min_samples` on. Dates, paths and other traces of the export are removed, so that
equal models have equal bytes.
Letters: B rows, S samples, N recordings, D embedding dimensions.
"""

import base64
import glob
import hashlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speakerlab import __version__
from speakerlab.checkpoints.model_files import read_card, read_plda_bytes
from speakerlab.checkpoints.published import Published, load_published
from speakerlab.core.atomic import replacing
from speakerlab.core.bars import progress_bar
from speakerlab.embedder import Embedder
from speakerlab.frontend.pretrained import PretrainedFrontEnd
from speakerlab.inference.onnx_model import (
    INPUT,
    INSTALL,
    OUTPUT,
    Facts,
    open_session,
)
from speakerlab.scoring.pair_scores import unit_rows

log = logging.getLogger(__name__)

# Versions of 2022, so that older runtimes can open the file.
OPSET = 18
IR_VERSION = 8
MIN_COSINE = 0.99999  # between a row of the file's output and PyTorch's
MOST_BYTES = 2**31 - 2**20  # of weights in an ONNX file, with a little for the graph
TRACED_SECONDS = 2.5
# The file is compared with PyTorch on waves of so many lengths, up to the longest.
NUM_LENGTHS = 7
MAX_CHECKED_SECONDS = 30.0
SECONDS_PER_TICK = 1.0  # of the bar
# Input -> its second dimension.
AXES = {INPUT: "samples", "features": "frames", "feats": "frames"}


class Traced(nn.Module):
    """Module to export: the embedding of a wave."""

    input = INPUT
    output = OUTPUT

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder
        self.min_samples = embedder.min_samples  # of the shortest wave that is checked

    def forward(self, wave: Tensor) -> Tensor:
        return self.embedder.embed_window(wave)

    def input_of(self, wave: Tensor) -> Tensor:
        """Return the graph's input for a wave."""
        return wave


class OfFeatures(Traced):
    """Module to export: subtracts the mean of log mel energies, then computes the embedding."""

    input = "features"

    def input_of(self, wave: Tensor) -> Tensor:
        """Return our features; subtracting the mean again changes nothing."""
        return self.embedder.features(wave)

    def forward(self, wave: Tensor) -> Tensor:
        return super().forward(wave.clone())  # `forward` subtracts the mean in place


def export_onnx(source: Path, out: Path) -> Path:
    """Export the model of a folder or experiment to `out`; write nothing if outputs differ.

    Raises ValueError with the lengths at which PyTorch and the file differ, ModuleNotFoundError if
    the optional packages are missing.
    """
    published = load_published(source)
    facts = facts_of(published)
    cosines = write_onnx(published.embedder, out, facts=facts)
    log.info(
        "%s: equal to PyTorch at %d lengths, cosine >= %.7f",
        out,
        len(cosines),
        min(cosines),
    )
    return out


def facts_of(published: Published, *, precision: str = "fp32") -> Facts:
    """Return the metadata for the exported file of a published model."""
    embedder = published.embedder
    # Without a source, the tuning was not learned: the defaults need not be stored.
    is_tuned = bool(published.tuning.source)
    plda: str | None = None
    if published.tuning.plda_sha256 is not None:
        data = read_plda_bytes(published.folder, published.tuning)
        plda = base64.b64encode(data).decode()
    return Facts(
        sample_rate=embedder.sample_rate,
        embed_dim=embedder.embed_dim,
        min_samples=embedder.min_samples,
        max_samples=embedder.max_samples,
        sha256=published.sha256,
        architecture=published.config.model.name,
        frontend=published.config.frontend,
        calibration=published.calibration,
        diarization=published.tuning if is_tuned else None,
        plda=plda,
        vad=embedder.vad,
        precision=precision,
        space=read_card(published.folder).get("space"),
    )


def write_onnx(embedder: Embedder, out: Path, *, facts: Facts) -> list[float]:
    """Export and return the cosines with PyTorch; ValueError, and no file, if outputs differ."""
    texts = facts.to_texts()
    out = out.resolve()
    with replacing_model(out) as partial:
        return write_graph(Traced(embedder), partial, out, texts=texts)


def write_graph(
    module: Traced, path: Path, out: Path, *, texts: Mapping[str, str]
) -> list[float]:
    """Write the future `out` to `path`; return the cosines, ValueError if outputs differ."""
    model = to_onnx(module, texts=texts)
    write_model(model, path, out)
    lengths = checked_lengths(module)
    waves = [speech_like(rows=2, num_samples=length) for length in lengths]
    cosines = compare_waves(module, path, waves)
    # Not `min(cosines) < MIN_COSINE`: NaN would pass.
    is_equal = all(cosine >= MIN_COSINE for cosine in cosines)
    if not is_equal:
        differences: list[str] = []
        for length, cosine in zip(lengths, cosines):
            differences.append(f"{length} ({cosine:.6f})")
        shown = ", ".join(differences)
        raise ValueError(
            f"{out}: differs from PyTorch, samples (cosine): {shown}; "
            "change what the exporter traces differently, nothing was written"
        )
    return cosines


def to_onnx(module: Traced, *, texts: Mapping[str, str] | None = None) -> Any:
    """Trace a module, return a ModelProto whose graph takes any batch size and length.

    texts: metadata of the file. Raises ValueError with one line if the module cannot be traced.
    """
    _check_packages()
    from onnxscript import optimizer

    embedder = module.embedder
    if isinstance(embedder.frontend, PretrainedFrontEnd):
        embedder.frontend.prepare_for_export()
    wave_BS = _example_wave(embedder)
    free = torch.export.Dim.DYNAMIC
    free_rows_and_samples = {0: free, 1: free}

    # The exporter warns about its own parts and torchvision.
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    # Tracing takes most of the time of an export, up to a minute for large networks.
    bar = progress_bar(total=2, unit="steps", text="tracing the network")
    try:
        with bar, _ticking(bar), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            example = module.input_of(wave_BS)
            # In eval mode, in which BatchNorm does not use the statistics of the example.
            program = torch.onnx.export(
                module.eval(),
                (example,),
                dynamo=True,
                dynamic_shapes=(free_rows_and_samples,),
                input_names=[module.input],
                output_names=[module.output],
                opset_version=OPSET,
                verbose=False,
                # The optimizer would replace an epsilon of 1e-8 by 0; runtimes optimise anyway.
                optimize=False,
            )
            # `program` is None with dynamo=False only.
            assert program is not None
            bar.update()
            bar.set_description("simplifying the graph")
            # These two do not change the outputs of the graph.
            optimizer.fold_constants(program.model)
            optimizer.remove_unused_nodes(program.model)
            bar.update()
    except Exception as error:  # the tracer raises many types
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:200]
        raise ValueError(
            f"model: cannot be traced ({reason}); write it without branches on values"
        ) from error
    finally:
        # The level holds for the whole process, so it is restored.
        logging.disable(disabled_level)
    return finish(program.model_proto, texts=texts or {})


def _check_packages() -> None:
    """Raise ModuleNotFoundError without an optional package, ValueError if torch is too old."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"export: {name} is not installed; {INSTALL}")
    if torch.__version__ < "2.10":  # a TorchVersion, which compares numbers
        fix = "pip install --upgrade torch"
        raise ValueError(
            f"export: torch 2.10 or newer is needed, found {torch.__version__}; {fix}"
        )


def _example_wave(embedder: Embedder) -> Tensor:
    """Return wave_BS to trace the network with."""
    num_samples = round(TRACED_SECONDS * embedder.sample_rate)
    num_samples = max(num_samples, embedder.min_samples)
    num_samples = min(num_samples, embedder.max_samples)
    # Two rows, because torch.export takes a dimension of size 1 for a constant.
    example_BS = speech_like(rows=2, num_samples=num_samples)
    return torch.from_numpy(example_BS)


@contextmanager
def _ticking(bar: Any) -> Iterator[None]:
    """Show the seconds of a bar whose steps are long, so that nobody thinks that it hangs."""
    ended = Event()

    # torch does not say how far it is, so only the time passes.
    def tick() -> None:
        while not ended.wait(SECONDS_PER_TICK):
            bar.refresh()

    thread = Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def finish(model: Any, *, texts: Mapping[str, str]) -> Any:
    """Give a graph `texts` as its metadata and remove the traces of the export; return it."""
    _strip(model)
    model.graph.name = "speakerlab"
    model.producer_name = "speakerlab"
    model.producer_version = __version__
    model.ir_version = IR_VERSION

    # Name the free dimensions; the exporter numbers them.
    graph = model.graph
    for value in (*graph.input, *graph.output):
        dims = value.type.tensor_type.shape.dim
        second_name = AXES.get(value.name, "")
        for dim, name in zip(dims, ["batch", second_name]):
            if dim.HasField("dim_param"):
                dim.dim_param = name

    metadata = {"producer": f"speakerlab {__version__}", **texts}
    for name, text in metadata.items():
        model.metadata_props.add(key=name, value=text)
    return model


def write_model(model: Any, path: Path, out: Path) -> None:
    """Write a ModelProto to `path`, the future `out`, and large weights beside it.

    If `out` is a link, `path` lies beside the file that it points to, and so must the weights.
    """
    if is_large(model):
        _write_weights(model, out)
    # Deterministic, so that equal models have equal bytes: protobuf may write maps in any order.
    path.write_bytes(model.SerializeToString(deterministic=True))


def is_large(model: Any) -> bool:
    """Return whether the weights of a ModelProto need a file of their own."""
    num_bytes = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    return num_bytes > MOST_BYTES


def _write_weights(model: Any, out: Path) -> None:
    """Write the weights beside `out`, and leave references to them in the graph.

    The file is named after its content, so that an older `out` keeps its own until it is replaced.
    """
    from onnx.external_data_helper import (
        convert_model_to_external_data,
        write_external_data_tensors,
    )

    digest = hashlib.sha256()
    for tensor in model.graph.initializer:
        digest.update(tensor.raw_data)
    name = f"{out.name}.{digest.hexdigest()[:12]}.data"
    with replacing(out.with_name(name)) as partial:
        convert_model_to_external_data(model, location=partial.name)
        write_external_data_tensors(model, str(partial.parent))
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name


@contextmanager
def replacing_model(out: Path) -> Iterator[Path]:
    """`replacing`; afterwards, `out` has no weights beside it but those that it refers to."""
    try:
        with replacing(out) as partial:
            yield partial
    finally:
        name = glob.escape(out.name)
        weight_files = list(out.parent.glob(f"{name}.????????????.data"))
        referred_names: set[str] = set()
        if weight_files and out.exists():
            referred_names = _referred(out)
        for file in weight_files:
            if file.name not in referred_names:
                file.unlink()


def _referred(path: Path) -> set[str]:
    """Return the names of the files that an ONNX file refers to."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    names: set[str] = set()
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                names.add(entry.value)
    return names


def _strip(message: Any) -> None:
    """Remove the exporter's notes: stack traces, names of our modules, shapes."""
    for field, value in message.ListFields():
        if field.name in ("doc_string", "metadata_props", "value_info"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            messages = value if isinstance(value, Sequence) else [value]
            for inner_message in messages:
                _strip(inner_message)


def compare_waves(
    module: Traced, path: Path, waves: Sequence[np.ndarray]
) -> list[float]:
    """Return the lowest cosine between a file's and PyTorch's embeddings for each wave_BS."""
    num_threads = torch.get_num_threads()
    session = open_session(path, num_threads=num_threads)
    cosines: list[float] = []
    bar = progress_bar(waves, unit="waves", text="comparing with PyTorch")
    for wave_BS in bar:
        with torch.inference_mode():
            wave = torch.from_numpy(wave_BS)
            torch_BD = module.embedder.embed_window(wave)
            graph_input = module.input_of(wave).numpy()
            (output_BD,) = session.run([module.output], {module.input: graph_input})
            onnx_BD = torch.from_numpy(output_BD)
            # In float64, so that the cosine itself adds no error.
            cosine_B = nn.functional.cosine_similarity(
                onnx_BD.double(), torch_BD.double()
            )
            lowest_cosine = cosine_B.min()
            cosines.append(lowest_cosine.item())
    return cosines


def lowest_cosine(
    ours_ND: np.ndarray, theirs_ND: np.ndarray, names: Sequence[str]
) -> tuple[float, str]:
    """Return the lowest cosine of two embeddings of one recording, and this recording's name."""
    our_unit_ND = unit_rows(ours_ND, names)
    their_unit_ND = unit_rows(theirs_ND, names)
    product_ND = our_unit_ND * their_unit_ND
    cosine_N = product_ND.sum(axis=1)
    return min(zip(cosine_N.tolist(), names))


def checked_lengths(module: Traced) -> list[int]:
    """Return ascending lengths in samples, from the shortest input to MAX_CHECKED_SECONDS."""
    embedder = module.embedder
    longest = MAX_CHECKED_SECONDS * embedder.sample_rate
    longest = min(embedder.max_samples, longest)
    lengths = np.geomspace(module.min_samples, longest, NUM_LENGTHS)
    return [round(length) for length in lengths]


def speech_like(rows: int, num_samples: int) -> np.ndarray:
    """Return a deterministic wave_BS, float32: noise with the rhythm of syllables."""
    rng = np.random.default_rng([rows, num_samples])
    start_B1 = rng.uniform(0, 2 * np.pi, (rows, 1))
    angle_S = np.arange(num_samples) / 4000  # 4 rad a second at 16 kHz
    phase_BS = angle_S + start_B1
    # Two sines of unrelated frequencies; powers of ten, as loudness is perceived.
    slow_BS = np.sin(phase_BS)
    fast_BS = 0.5 * np.sin(2.7 * phase_BS)
    loudness_BS = 10 ** (slow_BS + fast_BS - 2.5)
    noise_BS = rng.standard_normal((rows, num_samples))
    # Adding the sample before attenuates the high frequencies.
    before_BS = noise_BS[:, :-1]
    noise_BS[:, 1:] += 0.9 * before_BS
    return (loudness_BS * noise_BS).astype(np.float32)
