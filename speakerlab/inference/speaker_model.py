"""The Python API: recordings, as files, bytes or arrays, to embeddings, scores and decisions.

    model = speakerlab.load("exp/mini")
    model.embed("a.wav")

torch is imported only for models that run with it; an ONNX file does without.
Letters: B rows, S samples, N recordings or speakers, D embedding dimensions, C classes.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from speakerlab.checkpoints.hub import local
from speakerlab.core.atomic import replacing
from speakerlab.core.reading import parse_json
from speakerlab.core.registry import use_plugins
from speakerlab.core.windows import embed_in_windows
from speakerlab.data.audio import name_of
from speakerlab.data.convert import read_wave
from speakerlab.scoring.pair_scores import unit_rows

if TYPE_CHECKING:  # each imports its runtime
    from speakerlab.inference.diarize import Diarization
    from speakerlab.inference.onnx_model import OnnxModel
    from speakerlab.inference.torch_model import TorchModel

PRECISIONS = ("fp32", "bf16", "auto")
Result = tuple[int, np.ndarray | Exception]  # row of `sources`, its embedding (or wave) or error
READ_AHEAD_SECONDS = 64  # of audio per group: one group is read while another is embedded


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
        """Return the best speaker, or None if the decision is that no enrolled speaker is heard."""
        return None if self.is_known is False else self.ranking[0][0]


def load_model(
    model: str | Path, *, device: str = "auto", precision: str = "fp32", plugins: Path | None = None
) -> "SpeakerModel":
    """Load a model; see `speakerlab.load`."""
    if plugins is not None:
        use_plugins(plugins)
    if not isinstance(model, str | Path):
        raise ValueError(f"model: must be a path or hub:NAME, got {model!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision: must be {', '.join(PRECISIONS)}, got {precision!r}")
    model = local(model)
    if model.suffix == ".onnx":
        from speakerlab.inference.onnx_model import OnnxModel

        if device == "cuda":
            raise ValueError("device: an .onnx file runs on the CPU, not on cuda; use cpu or auto")
        if precision == "bf16":
            raise ValueError(
                "precision: an .onnx file keeps the precision of its export, not bf16; use auto, "
                "or the model folder"
            )
        return SpeakerModel(OnnxModel(model))
    from speakerlab.inference.torch_model import TorchModel

    return SpeakerModel(TorchModel(model, device=device, precision=precision))


class SpeakerModel:
    """Embeds and compares recordings, and identifies enrolled speakers.

    A recording is a path, bytes, an open binary file, a numpy array or a torch tensor, at any
    sample rate, or a function that returns one of these; see `read_wave`. `sample_rate` is that of
    arrays, by default the model's. `speakers` holds a unit vector for each enrolled name.
    """

    def __init__(self, runtime: "TorchModel | OnnxModel") -> None:
        self.runtime = runtime
        self.sample_rate, self.embed_dim = runtime.sample_rate, runtime.embed_dim
        self.sha256, self.calibration = runtime.sha256, runtime.calibration
        self.tuning, self.precision = runtime.tuning, runtime.precision
        self.speakers: dict[str, np.ndarray] = {}

    def __repr__(self) -> str:
        runtime = self.runtime
        return (
            f"SpeakerModel({runtime.family}, {self.embed_dim} dimensions, {self.sample_rate} Hz, "
            f"{self.precision} on {runtime.device}, {runtime.source})"
        )

    def embed(self, audio: Any, sample_rate: int | None = None) -> np.ndarray:
        """Return emb_D, float32, of one recording of any length."""
        return self.embed_many([audio], sample_rate)[0]

    def embed_many(
        self, sources: Sequence[Any], sample_rate: int | None = None, **shown: Any
    ) -> np.ndarray:
        """Return emb_ND, float32, in the order of `sources`.

        Raises the error of the first recording that cannot be embedded, and ValueError if `sources`
        is a single recording. shown: progress and unit of `embed_each`.
        """
        embs: dict[int, np.ndarray] = {}
        for row, result in self.embed_each(sources, sample_rate, **shown):
            if isinstance(result, Exception):
                raise result
            embs[row] = result
        emb_ND = np.array([embs[row] for row in sorted(embs)], dtype=np.float32)
        return emb_ND.reshape(-1, self.embed_dim)

    def embed_each(
        self,
        sources: Sequence[Any],
        sample_rate: int | None = None,
        *,
        progress: bool = False,
        unit: str = "recordings",
    ) -> Iterator[Result]:
        """Yield (row of `sources`, its emb_D or the error), in any order.

        progress: show a bar on a terminal, in this unit.
        """
        if isinstance(sources, str | Path | bytes) or not hasattr(sources, "__len__"):
            raise ValueError(
                f"sources: must be a list of recordings, not one ({name_of(sources)}); put it in a "
                "list, or use embed"
            )
        from tqdm import tqdm

        bar = tqdm(total=len(sources), unit=f" {unit}", disable=None if progress else True)
        with bar, ThreadPoolExecutor(1) as reader:
            numbered = enumerate(sources)
            pending = reader.submit(self._read_group, numbered, sample_rate)
            while group := pending.result():
                pending = reader.submit(self._read_group, numbered, sample_rate)
                for row, result in self._embed_group(group):
                    if isinstance(result, np.ndarray) and not np.isfinite(result).all():
                        text = "the embedding has NaN; check the audio and the model"
                        result = ValueError(f"{name_of(sources[row])}: {text}")
                    yield row, result
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
        for where, emb_D in (("the first", emb_a_D), ("the second", emb_b_D)):
            if (shape := np.shape(emb_D)) != (self.embed_dim,):
                raise ValueError(
                    f"compare: {where} must be an embedding of shape ({self.embed_dim},), got "
                    f"{shape or repr(emb_D)}; use verify for recordings"
                )
        unit_a_D, unit_b_D = unit_rows(np.stack([emb_a_D, emb_b_D]), ["the first", "the second"])
        score, threshold = float(unit_a_D @ unit_b_D), self._threshold(far)
        llr = None if self.calibration is None else float(self.calibration.llr(score))
        is_same = None if threshold is None else score >= threshold
        return Verification(score, llr, is_same, threshold)

    def enroll(self, name: str, sources: Any, sample_rate: int | None = None) -> None:
        """Enrol a speaker by the mean embedding of its recordings, replacing one of that name.

        sources: a recording or a list of them; all have the same weight.
        """
        recordings = sources if isinstance(sources, list | tuple) else [sources]
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"enrol: a speaker needs a name, got {name!r}")
        if not recordings:
            raise ValueError(f"enrol: {name} needs at least one recording, got 0")
        ids = [f"recording {row + 1} of {name}" for row in range(len(recordings))]
        mean_D = unit_rows(self.embed_many(recordings, sample_rate), ids).mean(axis=0)
        self.speakers[name] = unit_rows(mean_D[None], [name], where="enrol")[0]

    def identify(
        self, audio: Any, sample_rate: int | None = None, *, far: float | None = None
    ) -> Identification:
        """Rank the enrolled speakers for a recording, and decide whether it is one of them.

        Speakers of equal score are in the order of enrolment.
        """
        return self.rank(self.embed(audio, sample_rate), far=far)

    def rank(self, emb_D: np.ndarray, *, far: float | None = None) -> Identification:
        """Rank the enrolled speakers for an embedding of this model, like `identify`."""
        if not self.speakers:
            raise ValueError("identify: no speaker is enrolled; enrol some first")
        unit_D = unit_rows(emb_D[None], ["the recording"])[0]
        score_N = np.stack(list(self.speakers.values())) @ unit_D
        ranking = sorted(zip(self.speakers, score_N.tolist()), key=lambda row: -row[1])
        threshold = self._threshold(far)
        is_known = None if threshold is None else ranking[0][1] >= threshold
        return Identification(ranking, is_known, threshold)

    def diarize(self, audio: Any, sample_rate: int | None = None, **options: Any) -> "Diarization":
        """Find who spoke when in a recording; options: see `inference.diarize.diarize`."""
        from speakerlab.inference.diarize import diarize

        return diarize(self, audio, sample_rate, **options)

    def classify(self, audio: Any, sample_rate: int | None = None) -> list[tuple[str, float]]:
        """Return (class, posterior) of a model trained for identification, best first.

        Raises ValueError for a model without classes, such as an `.onnx` file.
        """
        classifier = self.runtime.classifier
        if classifier is None:
            raise ValueError(
                "model: has no classes; use an experiment trained with task identification"
            )
        posterior_C = classifier.posteriors(self.embed(audio, sample_rate)[None])[0]
        return sorted(zip(classifier.classes, posterior_C.tolist()), key=lambda row: -row[1])

    def save_speakers(self, path: str | Path) -> None:
        """Write the enrolled speakers, with the model's sha256, atomically as safetensors."""
        if not self.speakers:
            raise ValueError(f"{path}: no speaker is enrolled; enrol some first")
        metadata = {"model_sha256": self.sha256, "names": json.dumps(list(self.speakers))}
        with replacing(Path(path)) as partial:
            save_file({"unit_ND": np.stack(list(self.speakers.values()))}, partial, metadata)

    def load_speakers(self, path: str | Path) -> None:
        """Replace the enrolled speakers by those of a file; ValueError if of another model."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such file; enrol speakers first")
        try:
            with safe_open(path, framework="numpy") as file:
                facts, unit_ND = file.metadata() or {}, file.get_tensor("unit_ND")
            digest, names = facts["model_sha256"], parse_json(facts["names"], list[str], where=path)
            rows_ND = np.asarray_chkfinite(unit_ND).astype("f8").reshape(len(names), -1)
            if not np.allclose(np.linalg.norm(rows_ND, axis=1), 1, atol=1e-3):
                raise ValueError("vectors are not of length 1")
        except (SafetensorError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: holds no speakers ({error}); enrol them again") from error
        if digest != self.sha256:
            raise ValueError(
                f"{path}: was made with model {digest[:12]}, not with {self.sha256[:12]} "
                "(sha256); enrol the speakers with this model"
            )
        self.speakers = dict(zip(names, unit_ND))

    def _threshold(self, far: float | None) -> float | None:
        if not (far is None or isinstance(far, Real)):
            raise ValueError(f"far: must be a false-alarm rate such as 0.01, got {far!r}")
        if self.calibration is not None:
            return self.calibration.threshold_at(far)
        if far is not None:
            raise ValueError(
                f"model: has no calibration to decide at far={far:g}; run `speakerlab calibrate`"
            )
        return None

    def _embed_group(self, group: Sequence[Result]) -> Iterator[Result]:
        """Embed waves in batches of one length, window by window; errors pass through."""
        by_length: dict[int, list[tuple[int, np.ndarray]]] = {}
        for row, wave_S in group:
            if isinstance(wave_S, Exception):
                yield row, wave_S
            else:
                by_length.setdefault(len(wave_S), []).append((row, wave_S))
        for batch in by_length.values():
            rows, waves = zip(*batch)
            wave_BS = waves[0][None] if len(waves) == 1 else np.stack(waves)  # an hour: no copy
            runtime = self.runtime
            lengths = {"min_samples": runtime.min_samples, "max_samples": runtime.max_samples}
            yield from zip(rows, embed_in_windows(wave_BS, runtime.embed_window, **lengths))

    def _read_group(
        self, numbered: Iterator[tuple[int, Any]], sample_rate: int | None
    ) -> list[Result]:
        """Read the next recordings at the model's rate, about a minute; empty if none is left."""
        group: list[Result] = []
        seconds = 0.0
        for row, source in numbered:
            try:
                source = source() if callable(source) else source
                wave_S = read_wave(source, sample_rate=self.sample_rate, source_rate=sample_rate)
                wave_S = wave_S if self.runtime.vad is None else self.runtime.vad(wave_S)
                seconds += len(wave_S) / self.sample_rate
                group.append((row, wave_S))
            except (ValueError, OSError) as error:
                group.append((row, error))
            if seconds >= READ_AHEAD_SECONDS:
                break
        return group
