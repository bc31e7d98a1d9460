"""A published model as one ONNX file, checked against PyTorch before it is written.

In: a model folder or experiment. Out: a file whose graph takes `wave`, float32 (B, S) in [-1, 1],
and gives `embedding` (B, D), front end inside; what else is to be known is in its metadata
(`onnx_model.Facts`). B and S are free, S from `min_samples` on. Equal models give equal bytes.
Letters: B rows, S samples, D embedding.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speakerlab.checkpoints.published import Published, load_published
from speakerlab.config.embedder import Embedder
from speakerlab.core.atomic import replacing
from speakerlab.core.faults import Faults
from speakerlab.inference.onnx_graph import to_onnx
from speakerlab.inference.onnx_model import INPUT, Facts, OnnxModel, open_session

log = logging.getLogger(__name__)

MIN_COSINE = 0.99999  # of a row of the file's output with PyTorch's
PARTED = 1e-3  # relative error from which a part of the network is taken to differ
MAX_BYTES = 2_000_000_000  # a protobuf message ends at 2 GiB; the graph itself needs a little
TRACED_SECONDS = 2.5
CHECKED_FRAMES = (137, 298)
CHECKED_SECONDS = (1.0, 3.01, 10.37, 29.99)


@dataclass(frozen=True)
class Comparison:
    """How near the file is to PyTorch at one length."""

    num_samples: int
    cosine: float  # of the worst row
    error: float  # largest difference over the largest value

    @property
    def is_equal(self) -> bool:
        """False for NaN, too."""
        return self.cosine >= MIN_COSINE


class Traced(nn.Module):
    """What is exported: the embedding of a wave of a length that the model takes."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, wave: Tensor) -> Tensor:
        return self.embedder.embed_window(wave)


class TracedParts(nn.Module):
    """The same, giving what each part of the network gave, in the order of their work."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, wave: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.outputs(wave).values())

    def outputs(self, wave: Tensor) -> dict[str, Tensor]:
        """Name of a part, down to the second level of the backbone -> its first output."""
        found: dict[str, Tensor] = {}

        def note(name: str, output: Any) -> None:
            if isinstance(output, Tensor) and name not in found:
                found[name] = output.clone()  # what follows may work in place

        hooks = [
            module.register_forward_hook(lambda _m, _i, output, name=name: note(name, output))
            for name, module in self.embedder.named_modules()
            if name and name.count(".") <= 2
        ]
        try:
            self.embedder.embed_window(wave)
        finally:
            for hook in hooks:
                hook.remove()
        return found


def export_onnx(source: Path, out: Path) -> Path:
    """Write the model of a folder or experiment to `out`, or nothing where it would not be equal.

    Raises ValueError with one line for each length at which PyTorch and the file part, and where
    they part; ModuleNotFoundError where the optional packages are missing.
    """
    published = load_published(source)
    compared = write_onnx(published.embedder, out, facts=facts_of(published))
    log.info(
        "%s: equal to PyTorch at %d lengths of %d to %d samples, cosine >= %.7f, relative error "
        "<= %.1e",
        out,
        len(compared),
        compared[0].num_samples,
        compared[-1].num_samples,
        min(row.cosine for row in compared),
        max(row.error for row in compared),
    )
    return out


def facts_of(published: Published) -> Facts:
    """What the file is to say of its model."""
    embedder, config = published.embedder, published.config
    calibration = published.calibration
    return Facts(
        sample_rate=embedder.sample_rate,
        embed_dim=embedder.embed_dim,
        min_samples=embedder.min_samples,
        max_samples=embedder.max_samples,
        sha256=published.sha256,
        architecture=config.model.name,
        frontend=config.frontend,
        calibration=None if calibration is None else calibration.to_dict(),
        vad=config.vad,
    )


def write_onnx(embedder: Embedder, out: Path, *, facts: Facts) -> list[Comparison]:
    """Export, compare, and only then let the file appear; see `export_onnx`."""
    refuse_large(embedder, out)
    embedder.eval()
    with replacing(out) as partial:
        partial.write_bytes(
            to_onnx(Traced(embedder), traced_wave(embedder), texts=facts.to_texts())
        )
        compared = compare(embedder, partial)
        parted = [row for row in compared if not row.is_equal]
        if parted:
            raise ValueError(_report(out, embedder, parted, room=partial))
    return compared


def refuse_large(embedder: Embedder, out: Path) -> None:
    """ValueError for a model that does not fit in one file."""
    num_bytes = sum(4 * tensor.numel() for tensor in embedder.state_dict().values())
    if num_bytes > MAX_BYTES:
        raise ValueError(
            f"{out}: one ONNX file holds {MAX_BYTES} bytes of weights, got {num_bytes}; "
            "export a smaller model"
        )


def compare(embedder: Embedder, path: Path) -> list[Comparison]:
    """A file against PyTorch at six lengths or more, two rows each, shortest first."""
    waves = [speech_like(2, num_samples) for num_samples in checked_lengths(embedder)]
    return compare_waves(embedder, path, waves)


def compare_waves(embedder: Embedder, path: Path, waves: Sequence[np.ndarray]) -> list[Comparison]:
    """A file against PyTorch for each wave_BS."""
    model = OnnxModel(path, num_threads=torch.get_num_threads())
    return [
        Comparison(
            wave_BS.shape[1],
            *_distance(model.embed_window(wave_BS), _embed(embedder, wave_BS)),
        )
        for wave_BS in waves
    ]


def checked_lengths(embedder: Embedder) -> list[int]:
    """Numbers of samples, rising: the least, some of whole frames and some not; six at least."""
    low, high, fbank = embedder.min_samples, embedder.max_samples, embedder.fbank
    by_frames = [fbank.min_samples + (n - 1) * fbank.frame_shift for n in CHECKED_FRAMES]
    by_time = [round(seconds * embedder.sample_rate) for seconds in CHECKED_SECONDS]
    chosen = {low, *(n for n in (*by_frames, *by_time) if low <= n <= high)}
    if len(chosen) < 6:
        chosen |= {int(n) for n in np.linspace(low, high, 7)}
    return sorted(chosen)


def speech_like(rows: int, num_samples: int) -> np.ndarray:
    """wave_BS, float32, the same at each call: noise that swells and fades as syllables do."""
    rng = np.random.default_rng([rows, num_samples])
    phase_BS = np.arange(num_samples) / 4000 + rng.uniform(0, 2 * np.pi, (rows, 1))
    loudness_BS = 10 ** (np.sin(phase_BS) + 0.5 * np.sin(2.7 * phase_BS) - 2.5)
    noise_BS = rng.standard_normal((rows, num_samples))
    noise_BS[:, 1:] += 0.9 * noise_BS[:, :-1]  # less of the high frequencies
    return (loudness_BS * noise_BS).astype(np.float32)


def _report(out: Path, embedder: Embedder, parted: Sequence[Comparison], *, room: Path) -> str:
    """A line for each length, and one for where, in the worst of them, the first difference is.

    `room` is a file that may be written to find out.
    """
    faults, worst = Faults(), min(parted, key=lambda row: (row.cosine == row.cosine, row.cosine))
    for row in parted:
        faults.add(
            "lengths",
            f"{out}: must equal PyTorch at {row.num_samples} samples "
            f"({embedder.fbank.num_frames(row.num_samples)} frames), got cosine {row.cosine:.6f} "
            f"and relative error {row.error:.1e}; nothing is written",
        )
    return faults.report(_first_difference(room, embedder, worst.num_samples))


def _first_difference(room: Path, embedder: Embedder, num_samples: int) -> str:
    module, wave_BS = TracedParts(embedder), speech_like(2, num_samples)
    with torch.inference_mode():
        ours = {name: t.numpy() for name, t in module.outputs(torch.from_numpy(wave_BS)).items()}
    room.write_bytes(to_onnx(module, traced_wave(embedder), outputs=list(ours)))
    theirs = open_session(room).run(list(ours), {INPUT: wave_BS})
    errors = {name: _distance(t, ours[name])[1] for name, t in zip(ours, theirs)}
    before = "the wave"
    for name, error in errors.items():
        if not error < PARTED:
            return (
                f"they part in {name}, got relative error {error:.1e} there and less than "
                f"{PARTED:g} up to {before}; change that module"
            )
        before = name
    return "no part differs when each is looked at, got an exporter's fault; try another torch"


def _distance(found: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """Least cosine of any row, and the largest difference over the largest value."""
    if found.shape != wanted.shape:
        return float("nan"), float("inf")
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    rows_a, rows_b = found.reshape(len(found), -1), wanted.reshape(len(wanted), -1)
    norms = np.linalg.norm(rows_a, axis=1) * np.linalg.norm(rows_b, axis=1)
    tiny = np.finfo(np.float64).tiny
    cosine = (rows_a * rows_b).sum(axis=1) / np.maximum(norms, tiny)
    return float(cosine.min()), float(
        np.abs(found - wanted).max() / max(np.abs(wanted).max(), tiny)
    )


def _embed(embedder: Embedder, wave_BS: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return embedder.embed_window(torch.from_numpy(wave_BS)).numpy()


def traced_wave(embedder: Embedder) -> Tensor:
    """wave_BS to trace a model with."""
    wanted = round(TRACED_SECONDS * embedder.sample_rate)
    num_samples = min(max(wanted, embedder.min_samples), embedder.max_samples)
    return torch.from_numpy(speech_like(2, num_samples))
