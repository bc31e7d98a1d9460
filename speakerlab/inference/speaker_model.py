"""The Python API: `model = speakerlab.load("exp/mini")`, then `model.embed("a.wav")` and the like.

In: recordings, as files, bytes or arrays. Out: embeddings, scores, decisions.
Letters: B rows, S samples, N recordings, D embedding.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from speakerlab.core.windows import cut_windows
from speakerlab.data.audio import name_of
from speakerlab.data.convert import read_wave
from speakerlab.frontend.vad import EnergyVad
from speakerlab.inference.enrolment import Speakers
from speakerlab.inference.progress import Progress
from speakerlab.scoring.backend import unit_rows
from speakerlab.scoring.calibration import Calibration

if TYPE_CHECKING:
    from speakerlab.inference.classifier import Classifier

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16"]
HUB = "hub:"
AHEAD_SECONDS = 64  # of audio in a group: one is read while the one before is embedded


class Runtime(Protocol):
    """What runs a model: `TorchModel` or `OnnxModel`."""

    sample_rate: int
    embed_dim: int
    min_samples: int
    max_samples: int
    sha256: str  # of the weights
    precision: str  # of the backbone: fp32, bf16, int8
    calibration: Calibration | None
    vad: EnergyVad | None

    def embed_window(self, wave_BS: np.ndarray) -> np.ndarray:
        """emb_BD of waves of `min_samples` to `max_samples`."""
        ...


@dataclass(frozen=True)
class Verification:
    """Whether two recordings are of one speaker; None is what a model without calibration gives."""

    score: float  # cosine of the two embeddings
    llr: float | None  # natural logarithm of the likelihood ratio
    is_same: bool | None  # score >= threshold
    threshold: float | None


@dataclass(frozen=True)
class Identification:
    """Who speaks. `is_known` is None where the model has no calibration to decide by."""

    ranking: list[tuple[str, float]]  # every enrolled speaker and the score, best first
    is_known: bool | None  # the best score reaches the threshold
    threshold: float | None

    @property
    def name(self) -> str | None:
        """The best speaker; None where the decision is that nobody enrolled speaks."""
        return None if self.is_known is False else self.ranking[0][0]


def load(
    model: str | Path, *, device: Device = "auto", precision: Precision = "fp32"
) -> "SpeakerModel":
    """Open an experiment, a model folder, an `.onnx` file, or `hub:ID`.

    precision: of the backbone; auto is bf16 on a GPU that has it, else fp32. An `.onnx` file has
    the one that it was exported with.
    Raises ValueError and FileNotFoundError with one line.
    """
    if str(model).startswith(HUB):
        from speakerlab.checkpoints import hub

        model = hub.fetch(str(model).removeprefix(HUB))
    if Path(model).suffix == ".onnx":
        from speakerlab.inference.onnx_model import OnnxModel

        if device == "cuda":
            raise ValueError("device: an .onnx file runs on the CPU, got 'cuda'; take cpu or auto")
        if precision == "bf16":
            raise ValueError(
                "precision: an .onnx file keeps the one it was exported with, got 'bf16'; "
                "take auto, or the model's folder"
            )
        return SpeakerModel(OnnxModel(Path(model)))
    from speakerlab.checkpoints.published import load_published
    from speakerlab.inference.classifier import load_classifier
    from speakerlab.inference.torch_model import TorchModel

    published = load_published(Path(model))
    named = published.config.task == "identification"
    classifier = load_classifier(published.folder) if named else None
    return SpeakerModel(TorchModel(published, device=device, precision=precision), classifier)


class SpeakerModel:
    """Recordings to embeddings, comparisons of two, and speakers known by name.

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
        """emb_D, float32, of one recording of any length."""
        emb_D = self._embed_waves(self._read(audio, sample_rate)[None])[0]
        if not np.isfinite(emb_D).all():
            raise _not_finite(audio)
        return emb_D

    def embed_many(
        self, sources: Sequence[Any], sample_rate: int | None = None, *, progress: bool = False
    ) -> np.ndarray:
        """emb_ND, float32, in the order of `sources`. The first that is broken ends it.

        Raises ValueError where `sources` is a single recording.
        """
        emb_ND = np.empty((len(sources), self.embed_dim), dtype=np.float32)
        tell = Progress(len(sources)).tell if progress else lambda done: None
        for done, (row, result) in enumerate(self.embed_each(sources, sample_rate), 1):
            if isinstance(result, Exception):
                raise result
            emb_ND[row] = result
            tell(done)
        return emb_ND

    def embed_each(
        self, sources: Sequence[Any], sample_rate: int | None = None
    ) -> Iterator[tuple[int, np.ndarray | Exception]]:
        """(row of `sources`, its emb_D or what is wrong with it), in no certain order.

        One group of recordings is read while the one before is embedded; in a group those of one
        length share a batch.
        """
        if isinstance(sources, str | Path | bytes):
            raise ValueError(
                f"sources: is a list of recordings, got one ({name_of(sources)}); "
                "put it in a list, or use embed"
            )
        for group in self._groups(sources, sample_rate):
            by_length: dict[int, list[tuple[int, np.ndarray]]] = {}
            for row, got in group:
                if isinstance(got, Exception):
                    yield row, got
                else:
                    by_length.setdefault(len(got), []).append((row, got))
            for batch in by_length.values():
                rows, waves = zip(*batch)
                wave_BS = waves[0][None] if len(waves) == 1 else np.stack(waves)  # an hour: no copy
                for row, emb_D in zip(rows, self._embed_waves(wave_BS)):
                    is_sound = np.isfinite(emb_D).all()
                    yield row, emb_D if is_sound else _not_finite(sources[row])

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
        return Verification(
            score, llr, None if threshold is None else score >= threshold, threshold
        )

    def enroll(self, name: str, sources: Any, sample_rate: int | None = None) -> None:
        """Remember a speaker by one recording or a list of them; replaces one of that name."""
        recordings = sources if isinstance(sources, list | tuple) else [sources]
        self.speakers.add(name, self.embed_many(recordings, sample_rate))

    def identify(
        self, audio: Any, sample_rate: int | None = None, *, far: float | None = None
    ) -> Identification:
        """Who of the enrolled speaks, if any of them does."""
        ranking, threshold = (
            self.speakers.rank(self.embed(audio, sample_rate)),
            self._threshold(far),
        )
        is_known = None if threshold is None else ranking[0][1] >= threshold
        return Identification(ranking, is_known, threshold)

    def classify(self, audio: Any, sample_rate: int | None = None) -> list[tuple[str, float]]:
        """Every class of a model of task identification, and its posterior, best first.

        Raises ValueError for a model that has no classes, an `.onnx` file among them.
        """
        if self.classifier is None:
            raise ValueError(
                "model: has no classes to name, got one that only embeds; take an experiment that "
                "was trained with task identification"
            )
        posterior_C = self.classifier.posteriors(self.embed(audio, sample_rate)[None])[0]
        named = zip(self.classifier.classes, posterior_C.tolist())
        return sorted(named, key=lambda one: -one[1])

    def save_speakers(self, path: str | Path) -> None:
        """Write the enrolled speakers to a file (safetensors)."""
        self.speakers.save(Path(path))

    def load_speakers(self, path: str | Path) -> None:
        """Take the enrolled speakers of a file in place of those known so far."""
        self.speakers = Speakers.load(Path(path), model_sha256=self.sha256)

    def _threshold(self, far: float | None) -> float | None:
        if self.calibration is not None:
            return self.calibration.threshold_at(far)
        if far is not None:
            raise ValueError(
                f"model: has no calibration, got far={far:g}; run `speakerlab calibrate` first"
            )
        return None

    def _read(self, audio: Any, sample_rate: int | None) -> np.ndarray:
        """wave_S at the model's rate, without the silence that the model leaves out."""
        wave_S = read_wave(audio, sample_rate=self.sample_rate, source_rate=sample_rate)
        return wave_S if self.runtime.vad is None else self.runtime.vad(wave_S)

    def _embed_waves(self, wave_BS: np.ndarray) -> np.ndarray:
        """emb_BD; window by window, so that an hour takes no more memory than two minutes."""
        runtime = self.runtime
        windows = cut_windows(
            wave_BS, min_samples=runtime.min_samples, max_samples=runtime.max_samples
        )
        return np.mean([runtime.embed_window(window) for window in windows], axis=0)

    def _groups(
        self, sources: Sequence[Any], sample_rate: int | None
    ) -> Iterator[list[tuple[int, np.ndarray | Exception]]]:
        """Recordings with their rows, about a minute of audio at a time; the next is being read."""
        numbered = enumerate(sources)
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(self._read_group, numbered, sample_rate)
            while group := pending.result():
                pending = pool.submit(self._read_group, numbered, sample_rate)
                yield group

    def _read_group(
        self, numbered: Iterator[tuple[int, Any]], sample_rate: int | None
    ) -> list[tuple[int, np.ndarray | Exception]]:
        group: list[tuple[int, np.ndarray | Exception]] = []
        seconds = 0.0
        for row, source in numbered:
            try:
                wave_S = self._read(source, sample_rate)
                seconds += len(wave_S) / self.sample_rate
                group.append((row, wave_S))
            except (ValueError, OSError) as error:
                group.append((row, error))
            if seconds >= AHEAD_SECONDS:
                break
        return group


def _not_finite(source: Any) -> ValueError:
    return ValueError(f"{name_of(source)}: gives no embedding, got NaN; look at it and the model")
