"""The Python API: recordings, as files, bytes or arrays, to embeddings, scores and decisions.

    model = speakerlab.load("exp/mini")
    model.embed("a.wav")

torch is imported only for models that run with it; an ONNX file does without.
Letters: B rows, S samples, N recordings, D embedding dimensions, C classes.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from speakerlab.core.windows import embed_in_windows
from speakerlab.data.audio import name_of
from speakerlab.data.convert import read_wave
from speakerlab.frontend.vad import EnergyVad
from speakerlab.inference.enrolment import Speakers
from speakerlab.scoring.backend import unit_rows
from speakerlab.scoring.calibration import Calibration

if TYPE_CHECKING:  # it imports torch
    from speakerlab.inference.torch_model import Classifier

HUB = "hub:"
READ_AHEAD_SECONDS = 64  # of audio per group: one group is read while another is embedded


class Runtime(Protocol):
    """What runs a model: `TorchModel` or `OnnxModel`."""

    sample_rate: int
    embed_dim: int
    min_samples: int
    max_samples: int
    sha256: str  # of the weights
    precision: str  # of the backbone: fp32, bf16 or int8
    calibration: Calibration | None
    vad: EnergyVad | None

    def embed_window(self, wave_BS: np.ndarray) -> np.ndarray:
        """Return emb_BD of waves of `min_samples` to `max_samples`."""
        ...


@dataclass(frozen=True)
class Verification:
    """Comparison of two recordings; without a calibration all but the score is None."""

    score: float  # cosine of the two embeddings
    llr: float | None  # natural logarithm of the likelihood ratio
    is_same: bool | None  # score >= threshold
    threshold: float | None


@dataclass(frozen=True)
class Identification:
    """Speakers ranked for a recording; without a calibration `is_known` is None."""

    ranking: list[tuple[str, float]]  # every enrolled speaker and the score, best first
    is_known: bool | None  # the best score reaches the threshold
    threshold: float | None

    @property
    def name(self) -> str | None:
        """The best speaker, or None if the decision is that no enrolled speaker is heard."""
        return None if self.is_known is False else self.ranking[0][0]


def load_model(
    model: str | Path, *, device: str = "auto", precision: str = "fp32"
) -> "SpeakerModel":
    """Load an experiment, a model folder, an `.onnx` file or `hub:ID`.

    precision: of the backbone; auto is bf16 on a GPU with bf16 hardware, else fp32. An `.onnx` file
    has the precision of its export. Raises ValueError or FileNotFoundError with one line.
    """
    if str(model).startswith(HUB):
        from speakerlab.checkpoints.hub import fetch

        model = fetch(str(model).removeprefix(HUB))
    if Path(model).suffix == ".onnx":
        from speakerlab.inference.onnx_model import OnnxModel

        if device == "cuda":
            raise ValueError("device: an .onnx file runs on the CPU, not on cuda; use cpu or auto")
        if precision == "bf16":
            raise ValueError(
                "precision: an .onnx file keeps the precision of its export, not bf16; use auto, "
                "or the model folder"
            )
        return SpeakerModel(OnnxModel(Path(model)))
    from speakerlab.inference.torch_model import TorchModel

    runtime = TorchModel(Path(model), device=device, precision=precision)
    return SpeakerModel(runtime, runtime.classifier)


class SpeakerModel:
    """Embeds and compares recordings, and identifies enrolled speakers.

    A recording is a path, bytes, an open binary file, a numpy array or a torch tensor, at any
    sample rate; see `read_wave`. `sample_rate` is that of arrays, by default the model's.
    """

    def __init__(self, runtime: Runtime, classifier: "Classifier | None" = None) -> None:
        self.runtime, self.classifier = runtime, classifier
        self.sample_rate, self.embed_dim = runtime.sample_rate, runtime.embed_dim
        self.sha256, self.calibration = runtime.sha256, runtime.calibration
        self.precision = runtime.precision
        self.speakers = Speakers(runtime.sha256)

    def embed(self, audio: Any, sample_rate: int | None = None) -> np.ndarray:
        """Return emb_D, float32, of one recording of any length."""
        emb_D = self._embed_waves(self._read(audio, sample_rate)[None])[0]
        if not np.isfinite(emb_D).all():
            raise _not_finite(audio)
        return emb_D

    def embed_many(
        self, sources: Sequence[Any], sample_rate: int | None = None, *, progress: bool = False
    ) -> np.ndarray:
        """Return emb_ND, float32, in the order of `sources`.

        Raises the error of the first recording that cannot be embedded, and ValueError if `sources`
        is a single recording. progress: show a bar on a terminal.
        """
        emb_ND = np.empty((len(sources), self.embed_dim), dtype=np.float32)
        for row, result in self.embed_each(sources, sample_rate, progress=progress):
            if isinstance(result, Exception):
                raise result
            emb_ND[row] = result
        return emb_ND

    def embed_each(
        self, sources: Sequence[Any], sample_rate: int | None = None, *, progress: bool = False
    ) -> Iterator[tuple[int, np.ndarray | Exception]]:
        """Yield (row of `sources`, its emb_D or the error), in any order.

        One group of recordings is read while another is embedded; recordings of one length in a
        group share a batch.
        """
        if isinstance(sources, str | Path | bytes):
            raise ValueError(
                f"sources: must be a list of recordings, not one ({name_of(sources)}); put it in a "
                "list, or use embed"
            )
        from tqdm import tqdm

        bar = tqdm(total=len(sources), unit=" recordings", disable=None if progress else True)
        with bar, ThreadPoolExecutor(1) as reader:
            numbered = enumerate(sources)
            pending = reader.submit(self._read_group, numbered, sample_rate)
            while group := pending.result():
                pending = reader.submit(self._read_group, numbered, sample_rate)
                for row, result in self._embed_group(group):
                    is_broken = isinstance(result, np.ndarray) and not np.isfinite(result).all()
                    yield row, _not_finite(sources[row]) if is_broken else result
                    bar.update()

    def verify(
        self, a: Any, b: Any, sample_rate: int | None = None, *, far: float | None = None
    ) -> Verification:
        """Compare two recordings. far: decide at this false-alarm rate instead of at the EER."""
        return self.compare(self.embed(a, sample_rate), self.embed(b, sample_rate), far=far)

    def compare(
        self, emb_a_D: np.ndarray, emb_b_D: np.ndarray, *, far: float | None = None
    ) -> Verification:
        """Compare two embeddings of this model."""
        unit_a_D, unit_b_D = unit_rows(np.stack([emb_a_D, emb_b_D]), ["the first", "the second"])
        score, threshold = float(unit_a_D @ unit_b_D), self._threshold(far)
        llr = None if self.calibration is None else float(self.calibration.llr(score))
        is_same = None if threshold is None else score >= threshold
        return Verification(score, llr, is_same, threshold)

    def enroll(self, name: str, sources: Any, sample_rate: int | None = None) -> None:
        """Enrol a speaker from a recording or a list of them, replacing one of that name."""
        recordings = sources if isinstance(sources, list | tuple) else [sources]
        self.speakers.add(name, self.embed_many(recordings, sample_rate))

    def identify(
        self, audio: Any, sample_rate: int | None = None, *, far: float | None = None
    ) -> Identification:
        """Rank the enrolled speakers for a recording, and decide whether it is one of them."""
        ranking = self.speakers.rank(self.embed(audio, sample_rate))
        threshold = self._threshold(far)
        is_known = None if threshold is None else ranking[0][1] >= threshold
        return Identification(ranking, is_known, threshold)

    def classify(self, audio: Any, sample_rate: int | None = None) -> list[tuple[str, float]]:
        """Return (class, posterior) of a model trained for identification, best first.

        Raises ValueError for a model without classes, such as an `.onnx` file.
        """
        if self.classifier is None:
            raise ValueError(
                "model: has no classes; use an experiment trained with task identification"
            )
        posterior_C = self.classifier.posteriors(self.embed(audio, sample_rate)[None])[0]
        named = zip(self.classifier.classes, posterior_C.tolist())
        return sorted(named, key=lambda row: -row[1])

    def save_speakers(self, path: str | Path) -> None:
        """Write the enrolled speakers to a safetensors file."""
        self.speakers.save(Path(path))

    def load_speakers(self, path: str | Path) -> None:
        """Replace the enrolled speakers by those of a file."""
        self.speakers = Speakers.read(Path(path), model_sha256=self.sha256)

    def _threshold(self, far: float | None) -> float | None:
        if self.calibration is not None:
            return self.calibration.threshold_at(far)
        if far is not None:
            raise ValueError(
                f"model: has no calibration to decide at far={far:g}; run `speakerlab calibrate`"
            )
        return None

    def _read(self, audio: Any, sample_rate: int | None) -> np.ndarray:
        """Return wave_S at the model's rate, without silence if the model has a VAD."""
        wave_S = read_wave(audio, sample_rate=self.sample_rate, source_rate=sample_rate)
        return wave_S if self.runtime.vad is None else self.runtime.vad(wave_S)

    def _embed_waves(self, wave_BS: np.ndarray) -> np.ndarray:
        """Return emb_BD; window by window, so that an hour needs no more memory than a window."""
        runtime = self.runtime
        return embed_in_windows(
            wave_BS,
            runtime.embed_window,
            min_samples=runtime.min_samples,
            max_samples=runtime.max_samples,
        )

    def _embed_group(
        self, group: Sequence[tuple[int, np.ndarray | Exception]]
    ) -> Iterator[tuple[int, np.ndarray | Exception]]:
        """Embed waves in batches of one length; errors pass through."""
        by_length: dict[int, list[tuple[int, np.ndarray]]] = {}
        for row, wave_S in group:
            if isinstance(wave_S, Exception):
                yield row, wave_S
            else:
                by_length.setdefault(len(wave_S), []).append((row, wave_S))
        for batch in by_length.values():
            rows, waves = zip(*batch)
            wave_BS = waves[0][None] if len(waves) == 1 else np.stack(waves)  # an hour: no copy
            yield from zip(rows, self._embed_waves(wave_BS))

    def _read_group(
        self, numbered: Iterator[tuple[int, Any]], sample_rate: int | None
    ) -> list[tuple[int, np.ndarray | Exception]]:
        """Read the next recordings, about a minute of audio; empty if there are none."""
        group: list[tuple[int, np.ndarray | Exception]] = []
        seconds = 0.0
        for row, source in numbered:
            try:
                wave_S = self._read(source, sample_rate)
                seconds += len(wave_S) / self.sample_rate
                group.append((row, wave_S))
            except (ValueError, OSError) as error:
                group.append((row, error))
            if seconds >= READ_AHEAD_SECONDS:
                break
        return group


def _not_finite(source: Any) -> ValueError:
    return ValueError(f"{name_of(source)}: the embedding has NaN; check the audio and the model")
