"""A published model as one ONNX file, compared with PyTorch before it is written.

In: a model folder or experiment. Out: a file whose graph takes `wave`, float32 (B, S) in [-1, 1],
and gives `embedding` (B, D), front end included; its metadata are `onnx_model.Facts`. B and S are
free, S from `min_samples` on. Equal models give equal bytes.
Letters: B rows, S samples, D embedding dimensions.
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
MAX_PART_ERROR = 1e-3  # relative error above which a part of the network counts as different
MAX_BYTES = 2_000_000_000  # a protobuf message ends at 2 GiB; the graph itself needs a little
TRACED_SECONDS = 2.5
CHECKED_FRAMES = (137, 298)
CHECKED_SECONDS = (1.0, 3.01, 10.37, 29.99)


@dataclass(frozen=True)
class Comparison:
    """Agreement of the file with PyTorch at one length."""

    num_samples: int
    cosine: float  # of the worst row
    error: float  # largest difference over the largest value

    @property
    def is_equal(self) -> bool:
        """Whether they agree; False for NaN."""
        return self.cosine >= MIN_COSINE


class Traced(nn.Module):
    """The exported graph: the embedding of a wave of a length that the model takes."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, wave: Tensor) -> Tensor:
        return self.embedder.embed_window(wave)


class TracedParts(Traced):
    """The same graph with the output of every part of the network, in the order of execution."""

    def forward(self, wave: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        return tuple(self.outputs(wave).values())

    def outputs(self, wave: Tensor) -> dict[str, Tensor]:
        """Return part -> its first output, down to the second level of the backbone."""
        found: dict[str, Tensor] = {}

        def note(name: str, output: Any) -> None:
            if isinstance(output, Tensor) and name not in found:
                found[name] = output.clone()  # later layers may work in place

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
    """Export the model of a folder or experiment to `out`; write nothing if it is not equal.

    Raises ValueError with one line for each length at which PyTorch and the file differ, and the
    first part that differs; ModuleNotFoundError if the optional packages are missing.
    """
    published = load_published(source)
    rows = write_onnx(published.embedder, out, facts=facts_of(published))
    text = "%s: equal to PyTorch at %d lengths, cosine >= %.7f, relative error <= %.1e"
    log.info(text, out, len(rows), min(r.cosine for r in rows), max(r.error for r in rows))
    return out


def facts_of(published: Published) -> Facts:
    """Return the metadata of a published model's file."""
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
    """Export and compare; the file appears only if it is equal. See `export_onnx`."""
    refuse_large(embedder, out)
    traced = Traced(embedder.eval())
    with replacing(out) as partial:
        partial.write_bytes(to_onnx(traced, traced_wave(embedder), texts=facts.to_texts()))
        waves = [speech_like(2, num_samples) for num_samples in checked_lengths(embedder)]
        compared = compare_waves(embedder, partial, waves)
        if different := [row for row in compared if not row.is_equal]:
            raise ValueError(_report(out, embedder, different, scratch=partial))
    return compared


def refuse_large(embedder: Embedder, out: Path) -> None:
    """Raise ValueError for a model that does not fit in one file."""
    num_bytes = sum(4 * tensor.numel() for tensor in embedder.state_dict().values())
    if num_bytes > MAX_BYTES:
        raise ValueError(
            f"{out}: one ONNX file holds {MAX_BYTES} bytes of weights, got {num_bytes}; "
            "export a smaller model"
        )


def compare_waves(embedder: Embedder, path: Path, waves: Sequence[np.ndarray]) -> list[Comparison]:
    """Compare a file with PyTorch for each wave_BS."""
    model = OnnxModel(path, num_threads=torch.get_num_threads())
    rows: list[Comparison] = []
    for wave_BS in waves:
        with torch.inference_mode():
            wanted_BD = embedder.embed_window(torch.from_numpy(wave_BS)).numpy()
        cosine, error = _distance(model.embed_window(wave_BS), wanted_BD)
        rows.append(Comparison(wave_BS.shape[1], cosine, error))
    return rows


def checked_lengths(embedder: Embedder) -> list[int]:
    """Return at least six lengths in samples, rising: the shortest, whole frames and others."""
    low, high, fbank = embedder.min_samples, embedder.max_samples, embedder.fbank
    by_frames = [fbank.min_samples + (n - 1) * fbank.frame_shift for n in CHECKED_FRAMES]
    by_time = [round(seconds * embedder.sample_rate) for seconds in CHECKED_SECONDS]
    chosen = {low, *(n for n in (*by_frames, *by_time) if low <= n <= high)}
    if len(chosen) < 6:
        chosen |= {int(n) for n in np.linspace(low, high, 7)}
    return sorted(chosen)


def speech_like(rows: int, num_samples: int) -> np.ndarray:
    """Return wave_BS, float32, always the same: noise that swells and fades like syllables."""
    rng = np.random.default_rng([rows, num_samples])
    phase_BS = np.arange(num_samples) / 4000 + rng.uniform(0, 2 * np.pi, (rows, 1))
    loudness_BS = 10 ** (np.sin(phase_BS) + 0.5 * np.sin(2.7 * phase_BS) - 2.5)
    noise_BS = rng.standard_normal((rows, num_samples))
    noise_BS[:, 1:] += 0.9 * noise_BS[:, :-1]  # less of the high frequencies
    return (loudness_BS * noise_BS).astype(np.float32)


def traced_wave(embedder: Embedder) -> Tensor:
    """Return wave_BS to trace a model with."""
    wanted = round(TRACED_SECONDS * embedder.sample_rate)
    num_samples = min(max(wanted, embedder.min_samples), embedder.max_samples)
    return torch.from_numpy(speech_like(2, num_samples))


def _report(out: Path, embedder: Embedder, rows: Sequence[Comparison], *, scratch: Path) -> str:
    """Return one line for each length, and one with the first part that differs in the worst."""
    faults, worst = Faults(), min(rows, key=lambda row: (row.cosine == row.cosine, row.cosine))
    for row in rows:
        faults.add(
            "lengths",
            f"{out}: differs from PyTorch at {row.num_samples} samples "
            f"({embedder.fbank.num_frames(row.num_samples)} frames), cosine {row.cosine:.6f}, "
            f"relative error {row.error:.1e}; nothing was written",
        )
    return faults.report(_first_difference(scratch, embedder, worst.num_samples))


def _first_difference(scratch: Path, embedder: Embedder, num_samples: int) -> str:
    """Name the first part whose output differs. scratch: a file that may be overwritten."""
    module, wave_BS = TracedParts(embedder), speech_like(2, num_samples)
    with torch.inference_mode():
        ours = {name: t.numpy() for name, t in module.outputs(torch.from_numpy(wave_BS)).items()}
    scratch.write_bytes(to_onnx(module, traced_wave(embedder), outputs=list(ours)))
    theirs = open_session(scratch).run(list(ours), {INPUT: wave_BS})
    before = "the wave"
    for output, (name, wanted) in zip(theirs, ours.items()):
        error = _distance(output, wanted)[1]
        if not error < MAX_PART_ERROR:
            return (
                f"{name}: is the first part that differs, with a relative error of {error:.1e}, "
                f"and less than {MAX_PART_ERROR:g} up to {before}; change that module"
            )
        before = name
    return "export: no part differs on its own, so the exporter is at fault; try another torch"


def _distance(found: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """Return the least cosine of any row, and the largest difference over the largest value."""
    if found.shape != wanted.shape:
        return float("nan"), float("inf")
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    rows_a, rows_b = found.reshape(len(found), -1), wanted.reshape(len(wanted), -1)
    norms = np.linalg.norm(rows_a, axis=1) * np.linalg.norm(rows_b, axis=1)
    tiny = np.finfo(np.float64).tiny
    cosine = (rows_a * rows_b).sum(axis=1) / np.maximum(norms, tiny)
    error = np.abs(found - wanted).max() / max(np.abs(wanted).max(), tiny)
    return float(cosine.min()), float(error)
