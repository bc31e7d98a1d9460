"""Python API: embeddings, scores and decisions for recordings as files, bytes or arrays.

    model = speakerlab.load("exp/mini")
    model.embed("a.wav")

torch is imported only for models that run with it; an ONNX file does not need it.
Letters: B rows, S samples, N recordings or speakers, D embedding dimensions, C classes or channels,
W windows, T frames, F values of a frame.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from speakerlab.checkpoints.hub import local
from speakerlab.core.bars import progress_bar
from speakerlab.core.counting import count_of
from speakerlab.core.distribution import refuse_other
from speakerlab.core.faults import Faults
from speakerlab.core.process import return_freed_memory, was_forked
from speakerlab.core.registry import use_plugins
from speakerlab.core.windows import embed_in_windows, group_rows, window_bounds
from speakerlab.data.audio import name_of
from speakerlab.data.convert import (
    Channels,
    read_channels,
    read_wave,
    spool_channels,
    spool_wave,
    warn_of_levels,
)
from speakerlab.diarization.windows import STEP_SECONDS, WINDOW_SECONDS, cut_windows
from speakerlab.inference.enrolled import (
    add_speakers,
    check_name,
    read_speakers,
    write_speakers,
)
from speakerlab.inference.speech import MIN_DECISION_SECONDS, warn_of_little_speech
from speakerlab.scoring.pair_scores import unit_rows

if TYPE_CHECKING:  # each imports its runtime
    import torch

    from speakerlab.diarization.clustering import Method
    from speakerlab.diarization.regions import Region
    from speakerlab.inference.diarize import Diarization
    from speakerlab.inference.onnx_model import OnnxModel
    from speakerlab.inference.segmentation import Segmentation
    from speakerlab.inference.stream import Stream
    from speakerlab.inference.torch_model import TorchModel
    from speakerlab.scoring.plda import Plda

log = logging.getLogger(__name__)
PRECISIONS = ("fp32", "bf16", "auto")
# Row of `sources`, and its embedding (or wave) or the error.
Result = tuple[int, np.ndarray | Exception]
Windows = tuple[np.ndarray, np.ndarray]  # times_W2 and emb_WD
MIN_COPY_COSINE = 1 - 1e-5  # two recordings of a voice are less alike
# Audio in a group of recordings: one group is read while another is embedded.
READ_AHEAD_SECONDS = 64
# Audio between two returns of freed memory, which take about 0.1 s.
RETURN_MEMORY_SECONDS = 120


class Loaded(NamedTuple):
    """A source whose turn has come, and its wave or the error."""

    row: int
    source: Any
    wave: np.ndarray | Exception


@dataclass(frozen=True)
class Verification:
    """Comparison of two recordings; without a calibration all but the score is None.

    Without speech in both recordings, `is_same` is None.
    """

    score: float  # cosine of the two embeddings
    llr: float | None  # natural logarithm of the likelihood ratio
    is_same: bool | None  # score >= threshold
    threshold: float | None
    # Seconds of speech in each recording; None for two embeddings.
    speech_seconds: tuple[float, float] | None = None

    @property
    def has_speech(self) -> bool:
        """Return whether both recordings have enough speech for a decision."""
        return self.speech_seconds is None or can_decide(*self.speech_seconds)

    def with_speech(self, speech_seconds: tuple[float, float]) -> "Verification":
        """Return the comparison with its seconds of speech, undecided if they are too few."""
        is_same = self.is_same if can_decide(*speech_seconds) else None
        return replace(self, is_same=is_same, speech_seconds=speech_seconds)


@dataclass(frozen=True)
class Identification:
    """Speakers ranked for a recording; without a calibration or speech `is_known` is None."""

    ranking: list[tuple[str, float]]  # every enrolled speaker and the score, best first
    is_known: bool | None  # the best score reaches the threshold
    threshold: float | None
    speech_seconds: float | None = None  # in the recording; None for an embedding

    @property
    def has_speech(self) -> bool:
        """Return whether the recording has enough speech for a decision."""
        return self.speech_seconds is None or can_decide(self.speech_seconds)

    @property
    def name(self) -> str | None:
        """Return the best speaker; None if the decision is "not enrolled", or without speech."""
        # Without a calibration (None), the best speaker is returned.
        if self.is_known is False or not self.has_speech:
            return None
        best, _ = self.ranking[0]
        return best


def load_model(
    model: str | Path,
    *,
    device: "str | torch.device" = "auto",
    precision: str = "fp32",
    plugins: Path | None = None,
) -> "SpeakerModel":
    """Load a model; see `speakerlab.load`."""
    refuse_other()
    # First, because the class of the model may be in that folder.
    if plugins is not None:
        use_plugins(plugins)
    if not isinstance(model, str | Path):
        raise ValueError(
            f"model: must be a path, hub:NAME or hf:owner/name, got {model!r}"
        )
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision: must be {', '.join(PRECISIONS)}, got {precision!r}"
        )
    # A published model is downloaded; a path stays unchanged.
    model = local(model)

    # The runtimes are imported here, so that an ONNX model needs no torch.
    if model.suffix == ".onnx":
        from speakerlab.inference.onnx_model import OnnxModel

        if str(device) not in ("auto", "cpu"):
            raise ValueError(
                f"device: an .onnx file runs on the CPU, not on {device}; use cpu or"
                " auto"
            )
        if precision == "bf16":
            raise ValueError(
                "precision: an .onnx file keeps the precision of its export, not bf16;"
                " use auto, or the model folder"
            )
        return SpeakerModel(OnnxModel(model))

    # The program may have computed with torch before it forked this process, which then lacks the
    # threads of its parent. For later forks, `torch_model` takes care.
    torch = sys.modules.get("torch")
    is_first = "speakerlab.inference.torch_model" not in sys.modules
    if torch is not None and is_first and was_forked():
        torch.set_num_threads(1)
    from speakerlab.inference.torch_model import TorchModel

    runtime = TorchModel(model, device=device, precision=precision)
    return SpeakerModel(runtime)


class SpeakerModel:
    """Speaker model that embeds and compares recordings, and identifies enrolled speakers.

    A recording is a path, bytes, an open binary file, a numpy array or a torch tensor, at any
    sample rate, or a function that returns one of these; see `read_wave`. `sample_rate` is the
    rate of arrays, by default the model's. `channels` is the number of the channel to use, from 1,
    or "mix", their mean; None: the first one, with a warning if another one has other sound.
    `speakers` holds a unit vector for each enrolled name.
    """

    def __init__(self, runtime: "TorchModel | OnnxModel") -> None:
        self.runtime = runtime
        # Attributes of both runtimes.
        self.sample_rate = runtime.sample_rate
        self.embed_dim = runtime.embed_dim
        self.sha256 = runtime.sha256
        self.space = runtime.space
        self.calibration = runtime.calibration
        self.tuning = runtime.tuning
        self.precision = runtime.precision
        self.speakers: dict[str, np.ndarray] = {}
        self.enrolled_by = self.sha256  # model of these speakers
        self.seconds_embedded = 0.0  # since freed memory was returned

    def __repr__(self) -> str:
        runtime = self.runtime
        return (
            f"SpeakerModel({runtime.family}, {self.embed_dim} dimensions,"
            f" {self.sample_rate} Hz, {self.precision} on {runtime.device},"
            f" {runtime.source})"
        )

    def read_plda(self) -> "Plda":
        """Return the PLDA of the clustering vbx; ValueError if the model has none."""
        return self.runtime.read_plda()

    def embed(
        self,
        audio: Any,
        sample_rate: int | None = None,
        *,
        channels: Channels | Literal["each"] = None,
    ) -> np.ndarray:
        """Return emb_D, float32, of one recording of any length; channels="each": emb_CD."""
        if channels == "each":
            source = audio() if callable(audio) else audio
            wave_CS = read_channels(
                source,
                sample_rate=self.sample_rate,
                source_rate=sample_rate,
            )
            return self.embed_many(list(wave_CS), check_levels=False)
        emb_1D = self.embed_many([audio], sample_rate, channels=channels)
        return emb_1D[0]

    def embed_many(
        self,
        sources: Sequence[Any],
        sample_rate: int | None = None,
        *,
        channels: Channels = None,
        check_levels: bool = True,
        progress: bool = False,
        unit: str = "recordings",
    ) -> np.ndarray:
        """Return emb_ND, float32, in the order of `sources`.

        progress: show a bar on a terminal or in a notebook, in this unit. Raises the error of the
        first recording that cannot be embedded, and ValueError if `sources` is a single recording.
        check_levels: False for parts of recordings, which may be silent; see `read_wave`.
        """
        # `embed_each` yields in any order, because it batches recordings of equal length.
        embedded: dict[int, np.ndarray] = {}
        results = self.embed_each(
            sources,
            sample_rate,
            channels=channels,
            check_levels=check_levels,
            progress=progress,
            unit=unit,
        )
        for row, result in results:
            if isinstance(result, Exception):
                raise result
            embedded[row] = result
        if not embedded:
            return np.zeros((0, self.embed_dim), dtype=np.float32)
        in_order = [embedded[row] for row in sorted(embedded)]
        return np.array(in_order, dtype=np.float32)

    def embed_each(
        self,
        sources: Sequence[Any],
        sample_rate: int | None = None,
        *,
        channels: Channels = None,
        check_levels: bool = True,
        progress: bool = False,
        unit: str = "recordings",
    ) -> Iterator[Result]:
        """Yield (row of `sources`, its emb_D or the error), in any order.

        Every row is yielded, whatever its source is: an error of a library is a ValueError of one
        line. progress: show a bar on a terminal or in a notebook, in this unit. check_levels: as in
        `embed_many`.
        """
        # An open file is an iterator too, but a single recording.
        is_iterator = isinstance(sources, Iterator) and not hasattr(sources, "read")
        if is_iterator:
            raise ValueError(
                f"sources: must be a list of recordings, got {type(sources).__name__};"
                " make a list of it with list(...)"
            )
        # Text and bytes have a length too, but are a single recording.
        has_length = hasattr(sources, "__len__")
        if not has_length or isinstance(sources, str | Path | bytes):
            raise ValueError(
                f"sources: must be a list of recordings, not one ({name_of(sources)});"
                " put it in a list, or use embed"
            )
        bar = progress_bar(total=len(sources), unit=unit, shown=progress)
        # A single thread reads, because the groups are consecutive parts of `numbered`.
        numbered = enumerate(_each(sources))
        read = partial(
            self._read,
            sample_rate=sample_rate,
            channels=channels,
            check_levels=check_levels,
        )
        read_group = partial(self._read_group, numbered, read)
        reader = ThreadPoolExecutor(1)
        try:
            with bar:
                pending = reader.submit(read_group)
                while True:
                    group = pending.result()
                    if not group:
                        return
                    # The thread reads the next group while this one is embedded.
                    pending = reader.submit(read_group)
                    for row, result in self._embed_group(group):
                        yield row, result
                        bar.update()
        finally:
            # Without waiting: the garbage collector may close this generator in any thread, even
            # in the one that reads.
            reader.shutdown(wait=False, cancel_futures=True)

    @overload
    def embed_windows(
        self,
        audio: Any,
        sample_rate: int | None = ...,
        *,
        window: float = ...,
        step: float = ...,
        channels: Channels = ...,
        progress: bool = ...,
    ) -> Windows: ...

    @overload
    def embed_windows(
        self,
        audio: Any,
        sample_rate: int | None = ...,
        *,
        window: float = ...,
        step: float = ...,
        channels: Literal["each"],
        progress: bool = ...,
    ) -> list[Windows]: ...

    def embed_windows(
        self,
        audio: Any,
        sample_rate: int | None = None,
        *,
        window: float = WINDOW_SECONDS,
        step: float = STEP_SECONDS,
        channels: Channels | Literal["each"] = None,
        progress: bool = False,
    ) -> Windows | list[Windows]:
        """Return (times_W2, emb_WD) of the windows of one recording; channels="each": of each.

        times_W2, float64: start and end of each window in seconds; emb_WD, float32: row w is the
        embedding of these samples alone. window, step: in seconds, rounded to whole samples. The
        last window ends with the recording; a shorter recording is one shorter window. Windows of
        digital silence are left out. A model with a VAD removes silence within each window. A file
        of any length needs little memory besides the result.
        Raises ValueError for windows that leave gaps, and if every window is silent (with "each",
        such a channel has no windows).
        """
        source = audio() if callable(audio) else audio
        where = name_of(source)
        if channels == "each":
            waves = spool_channels(
                source,
                sample_rate=self.sample_rate,
                source_rate=sample_rate,
            )
            windows_of_channels: list[Windows] = []
            for number, wave_S in enumerate(waves, start=1):
                windows = self._embed_windows_of(
                    wave_S,
                    window,
                    step,
                    where=f"{where}, channel {number}",
                    progress=progress,
                )
                windows_of_channels.append(windows)
            return windows_of_channels
        wave_S = self._read_long(source, sample_rate, channels)
        times_W2, emb_WD = self._embed_windows_of(
            wave_S,
            window,
            step,
            where=where,
            progress=progress,
        )
        if not len(times_W2):
            raise ValueError(
                f"{where}: is silent in every window; give a recording of a voice"
            )
        return times_W2, emb_WD

    def frames(
        self,
        audio: Any,
        sample_rate: int | None = None,
        *,
        channels: Channels = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (times_T, frames_TF) of one recording: what the model pools into its embedding.

        times_T, float64: the middle of each frame in seconds; frames are 10 to 80 ms apart, which
        depends on the network. frames_TF, float32: the input of its pooling; F is the number of
        channels (of maps: channels x bins), and the values have no unit. A model with a VAD has no
        frames of the silence that it removes. Longer than `max_seconds`, a recording is cut into
        equal windows as for its embedding, and a frame sees its window only.
        Raises ValueError for an `.onnx` file, for a network without a `Pooling` (SimAM-ResNet), and
        for a recording that is too short for a frame.
        """
        wave_S = self._read(audio, sample_rate=sample_rate, channels=channels)
        seconds_S = np.arange(len(wave_S)) / self.sample_rate
        if self.runtime.vad is not None:
            # The samples that are kept have other places in the recording.
            is_kept_S = self.runtime.vad.speech_mask(wave_S)
            wave_S = wave_S[is_kept_S]
            seconds_S = seconds_S[is_kept_S]
        min_samples = self.runtime.min_samples
        if len(wave_S) < min_samples:
            raise ValueError(
                f"{name_of(audio)}: has {len(wave_S) / self.sample_rate:.3f} s, a frame"
                f" needs {min_samples / self.sample_rate:.3f} s; give a longer recording"
            )
        times: list[np.ndarray] = []
        frames: list[np.ndarray] = []
        bounds = window_bounds(len(wave_S), max_samples=self.runtime.max_samples)
        for first, end in bounds:
            wave_1S = wave_S[None, first:end]
            middle_T, frames_TF = self.runtime.frames_of_window(wave_1S)
            window_seconds_S = seconds_S[first:end]
            times.append(window_seconds_S[middle_T])
            frames.append(frames_TF)
        return np.concatenate(times), np.concatenate(frames)

    def verify(
        self,
        a: Any,
        b: Any,
        sample_rate: int | None = None,
        *,
        far: float | None = None,
        threshold: float | None = None,
        channels: Channels | tuple[Channels, Channels] = None,
    ) -> Verification:
        """Compare two recordings. far: decide at this false-alarm rate instead of at the EER.

        threshold: decide at this cosine instead of at the calibrated one.
        channels: of both recordings, or a pair: of the first and of the second.
        A recording with less than half a second of speech is warned of; without speech in both,
        nothing is decided.
        """
        if isinstance(channels, tuple):
            if len(channels) != 2:
                raise ValueError(
                    f"channels: must be a channel, or a pair of two, got {channels!r};"
                    " correct it"
                )
            channels_a, channels_b = channels
        else:
            channels_a = channels_b = channels
        # One by one, so that their lengths do not matter.
        emb_a_D, seconds_a = self._embed_speech(a, sample_rate, channels_a)
        emb_b_D, seconds_b = self._embed_speech(b, sample_rate, channels_b)
        result = self.compare(emb_a_D, emb_b_D, far=far, threshold=threshold)
        return result.with_speech((seconds_a, seconds_b))

    def compare(
        self,
        emb_a_D: np.ndarray,
        emb_b_D: np.ndarray,
        *,
        far: float | None = None,
        threshold: float | None = None,
    ) -> Verification:
        """Compare two embeddings of this model, like `verify`."""
        # A recording passed by mistake is an array too, but of another shape.
        names = ["the first", "the second"]
        embeddings = [emb_a_D, emb_b_D]
        for name, emb_D in zip(names, embeddings):
            shape = np.shape(emb_D)
            if shape != (self.embed_dim,):
                raise ValueError(
                    f"compare: {name} must be an embedding of shape"
                    f" ({self.embed_dim},), got {shape or repr(emb_D)}; use verify for"
                    " recordings"
                )
        # The dot product of vectors of length 1 is the cosine.
        unit_a_D, unit_b_D = unit_rows(np.stack(embeddings), names)
        score = float(unit_a_D @ unit_b_D)
        llr = None
        if self.calibration is not None:
            llr = float(self.calibration.llr(score))
        check_point(far, threshold)
        if threshold is None:
            threshold = self._threshold(far)
        is_same = None
        if threshold is not None:
            # A threshold of numpy would give a bool of numpy, which `is True` rejects.
            is_same = bool(score >= threshold)
        return Verification(
            score=score,
            llr=llr,
            is_same=is_same,
            threshold=threshold,
        )

    def enroll(
        self,
        name: str,
        sources: Any,
        sample_rate: int | None = None,
        *,
        channels: Channels = None,
    ) -> np.ndarray:
        """Enrol a speaker as the mean embedding of recordings; replace a speaker of the same name.

        Return unit_ND, the embeddings of the recordings, of length 1, for example to compare them.
        sources: a recording or a list of them; all have the same weight. Raises ValueError if none
        has speech, or the other speakers were enrolled by another model; the error of a recording
        that cannot be read, or a ValueError that lists all of them.
        """
        # Only list and tuple: an array is a sequence too, but a single recording.
        is_list = isinstance(sources, list | tuple)
        recordings = sources if is_list else [sources]
        check_name(name, self.speakers)
        if not recordings:
            raise ValueError(f"enrol: {name} needs at least one recording, got 0")
        # The first speaker decides whose speakers these are. Scores of a speaker depend on the
        # model that enrolled it, so those of two models cannot be ranked together.
        if not self.speakers:
            self.enrolled_by = self.sha256
        if self.enrolled_by != self.sha256:
            raise ValueError(
                f"enrol: the speakers are of model {self.enrolled_by[:12]}, not of"
                f" {self.sha256[:12]} (sha256); enrol {name} with that model, or in"
                " another file"
            )
        titles: list[str] = []  # for errors
        for number in range(1, len(recordings) + 1):
            titles.append(f"recording {number} of {name}")
        all_seconds: list[float] = []

        def read(recording: Any) -> np.ndarray:
            wave_S, seconds = self._read_speech(recording, sample_rate, channels)
            all_seconds.append(seconds)
            return wave_S

        # Read when their turn comes, so that many recordings need little memory.
        reads = [partial(read, recording) for recording in recordings]
        emb_ND = self._embed_all(reads)
        # From noise or silence, the model would make a speaker who resembles all noise.
        if not can_decide(max(all_seconds)):
            raise ValueError(
                f"enrol: {name} has no speech in any recording; give others"
            )
        # Unit vectors, so that loud or long recordings weigh no more than others.
        unit_ND = unit_rows(emb_ND, titles)
        distinct_ND = _without_copies(unit_ND, name)
        mean_1D = distinct_ND.mean(axis=0, keepdims=True)
        # The mean of different vectors is shorter than 1; `rank` needs unit vectors.
        unit_1D = unit_rows(mean_1D, [name], where="enrol")
        self.speakers[name] = unit_1D[0]
        return unit_ND

    def identify(
        self,
        audio: Any,
        sample_rate: int | None = None,
        *,
        far: float | None = None,
        threshold: float | None = None,
        channels: Channels = None,
    ) -> Identification:
        """Rank the enrolled speakers for a recording, and decide whether the best one is speaking.

        Speakers with equal scores are in the order of enrolment. A recording with less than half a
        second of speech is warned of; without speech, nothing is decided. threshold: a cosine,
        instead of the calibrated one.
        """
        emb_D, seconds = self._embed_speech(audio, sample_rate, channels)
        result = self.rank(emb_D, far=far, threshold=threshold)
        is_known = result.is_known if can_decide(seconds) else None
        return replace(result, is_known=is_known, speech_seconds=seconds)

    def rank(
        self,
        emb_D: np.ndarray,
        *,
        far: float | None = None,
        threshold: float | None = None,
    ) -> Identification:
        """Rank the enrolled speakers for an embedding of this model, like `identify`."""
        if not self.speakers:
            raise ValueError("identify: no speaker is enrolled; enrol some first")
        (unit_D,) = unit_rows(emb_D[None], ["the recording"])
        cosine_N = self._stack_speakers() @ unit_D
        ranking = _rank(self.speakers, cosine_N)
        _, best_score = ranking[0]
        check_point(far, threshold)
        if threshold is None:
            threshold = self._threshold_of_enrolled(far)
        is_known = None
        if threshold is not None:
            is_known = bool(best_score >= threshold)
        return Identification(ranking, is_known, threshold)

    def diarize(
        self,
        audio: Any,
        sample_rate: int | None = None,
        *,
        num_speakers: int | None = None,
        min_speakers: int = 1,
        max_speakers: int | None = None,
        method: "str | Method | None" = None,
        known: bool = False,
        far: float | None = None,
        recording: str | None = None,
        segmentation: "Segmentation | Path | str | None" = None,
        vad: Literal["energy", "silero"] | None = None,
        regions: "Sequence[Region] | None" = None,
        window_seconds: float = WINDOW_SECONDS,
        step_seconds: float = STEP_SECONDS,
        channels: Channels | Literal["each"] = None,
        progress: bool = False,
        overlap: "Segmentation | Path | str | None" = None,
    ) -> "Diarization":
        """Find who spoke when in a recording.

        num_speakers: where it is known; else they are counted, from min_speakers to max_speakers.
        vad, segmentation, regions: what finds the speech, a model that also finds two speakers at
        once, and regions of speech from elsewhere. overlap: the earlier name of `segmentation`.
        `inference.diarize.diarize` has all options.
        """
        from speakerlab.inference.diarize import diarize

        return diarize(
            self,
            audio,
            sample_rate,
            num_speakers=num_speakers,
            min_speakers=min_speakers,
            max_speakers=max_speakers,
            method=method,
            known=known,
            far=far,
            recording=recording,
            segmentation=segmentation,
            overlap=overlap,
            vad=vad,
            regions=regions,
            window_seconds=window_seconds,
            step_seconds=step_seconds,
            channels=channels,
            progress=progress,
        )

    def stream(
        self,
        sample_rate: int | None = None,
        *,
        latency: float | None = 2.0,
        max_speakers: int | None = None,
        threshold: float | None = None,
        known: bool = False,
        far: float | None = None,
        recording: str = "stream",
        channels: Channels = None,
        segmentation: "Segmentation | Path | str | None" = None,
        **offline: Any,
    ) -> "Stream":
        """Find who spoke when in audio that comes bit by bit.

            stream = model.stream(sample_rate=16000, latency=2.0)
            for chunk in chunks:
                for turn in stream.push(chunk): ...
            for turn in stream.finish(): ...
            stream.diarization.to_rttm()

        latency: seconds, at least 1, after which a turn that ended is returned; turns are never
        changed. math.inf or None: all turns are returned by `finish`, and equal those of `diarize`,
        whose other options may then be given, too. threshold: cosine from which a window belongs to
        a speaker (None: that of `ahc` in `model.tuning`). max_speakers: further ones are taken for
        the nearest of these. known, far: as in `diarize`; a speaker gets the enrolled name as soon
        as the mean embedding reaches the threshold, and earlier turns keep theirs. segmentation:
        as in `diarize`; turns of two speakers may then overlap.
        Raises ValueError with one line, also `push` and `finish`.
        """
        from speakerlab.inference.stream import Stream

        return Stream(
            self,
            sample_rate,
            latency=latency,
            max_speakers=max_speakers,
            threshold=threshold,
            known=known,
            far=far,
            recording=recording,
            channels=channels,
            segmentation=segmentation,
            **offline,
        )

    def classify(
        self,
        audio: Any,
        sample_rate: int | None = None,
        *,
        channels: Channels = None,
    ) -> list[tuple[str, float]]:
        """Return (class, posterior) of a model trained for identification, best first.

        Raises ValueError for a model without classes, such as an `.onnx` file.
        """
        classifier = self.runtime.classifier
        if classifier is None:
            raise ValueError(
                "model: has no classes; use an experiment trained with task"
                " identification"
            )
        emb_1D = self.embed_many([audio], sample_rate, channels=channels)
        (posterior_C,) = classifier.posteriors(emb_1D)
        return _rank(classifier.classes, posterior_C)

    def save_speakers(
        self, path: str | Path, *, add: str | Sequence[str] | None = None
    ) -> None:
        """Write the enrolled speakers, with the model's sha256, atomically as safetensors.

        add: names of enrolled speakers to add to those of an existing file, or to replace in it;
        several processes may do so at the same time. None: the file has all enrolled speakers, and
        no others.
        """
        file = Path(path)
        if add is None:
            if not self.speakers:
                raise ValueError(f"{path}: no speaker is enrolled; enrol some first")
            write_speakers(
                file,
                self.speakers,
                model_sha256=self.enrolled_by,
                space=self.space,
            )
            return
        names = [add] if isinstance(add, str) else add
        # Check all names before the file is touched.
        added: dict[str, np.ndarray] = {}
        for name in names:
            if name not in self.speakers:
                raise ValueError(
                    f"{path}: add: {name!r} is not enrolled; enrol it first"
                )
            added[name] = self.speakers[name]
        if not added:
            raise ValueError(f"{path}: add: no names given; give the enrolled ones")
        add_speakers(
            file,
            added,
            model_sha256=self.enrolled_by,
            space=self.space,
        )

    def load_speakers(self, path: str | Path) -> None:
        """Replace the enrolled speakers by a file's; ValueError if the file is of another model.

        A student whose projection was kept also reads the file of its teacher. It has no threshold
        for these speakers, because the scores of two models are others than those of one.
        """
        enrolled = read_speakers(Path(path), space=self.space)
        self.speakers = enrolled.speakers
        self.enrolled_by = enrolled.model_sha256

    def _stack_speakers(self) -> np.ndarray:
        """Return the unit vectors of the enrolled speakers, (N, D), in the order of enrolment."""
        vectors = list(self.speakers.values())
        return np.stack(vectors)

    def _threshold_of_enrolled(self, far: float | None) -> float | None:
        """Return the threshold for the enrolled speakers; None where another model enrolled them.

        Raises ValueError if a `far` is given for such speakers.
        """
        # The calibration was learned from pairs of this model alone, whose scores are higher.
        if self.enrolled_by == self.sha256:
            return self._threshold(far)
        if far is not None:
            raise ValueError(
                f"far: the speakers were enrolled by model {self.enrolled_by[:12]}, for"
                " whose scores there is no calibration; give a threshold"
            )
        return None

    def _threshold(self, far: float | None) -> float | None:
        """Return the threshold of a decision; None if the model has no calibration."""
        is_rate = isinstance(far, Real)
        if far is not None and not is_rate:
            raise ValueError(
                f"far: must be a false-alarm rate such as 0.01, got {far!r}"
            )
        if self.calibration is not None:
            return self.calibration.threshold_at(far)
        # Without calibration there is no decision, but an explicit `far` must not be ignored.
        if far is not None:
            raise ValueError(
                f"model: has no calibration to decide at far={far:g}; run `speakerlab"
                " calibrate`"
            )
        return None

    def _embed_group(self, group: Sequence[Loaded]) -> Iterator[Result]:
        """Embed waves in batches of equal length, window by window; yield errors unchanged."""
        loaded: list[Loaded] = []
        waves: list[np.ndarray] = []
        for recording in group:
            if isinstance(recording.wave, Exception):
                yield recording.row, recording.wave
            else:
                loaded.append(recording)
                waves.append(recording.wave)

        # Only waves of equal length share a batch: padding would change their embeddings.
        num_samples = [len(wave_S) for wave_S in waves]
        for batch in group_rows(num_samples):
            batch_waves = [waves[index] for index in batch]
            results = self._embed_batch(batch_waves)
            for index, result in zip(batch, results):
                row, source, _ = loaded[index]
                if isinstance(result, Exception):
                    result = _error_of(source, result)
                elif not np.isfinite(result).all():
                    text = "the embedding has NaN; check the audio and the model"
                    result = ValueError(f"{_safe_name(source)}: {text}")
                yield row, result

    def _embed_batch(
        self, waves: Sequence[np.ndarray]
    ) -> Sequence[np.ndarray | Exception]:
        """Return emb_D or the error of each of several waves of equal length."""
        # A single recording is not copied, because it may be an hour long.
        wave_BS = waves[0][None] if len(waves) == 1 else np.stack(waves)
        try:
            emb_BD = embed_in_windows(
                wave_BS,
                self.runtime.embed_window,
                min_samples=self.runtime.min_samples,
                max_samples=self.runtime.max_samples,
            )
        except Exception as error:
            if len(waves) == 1:
                return [error]
            # For example, too many for the memory of a GPU.
            results: list[np.ndarray | Exception] = []
            for wave_S in waves:
                results += self._embed_batch([wave_S])
            return results
        self._return_memory(wave_BS.size / self.sample_rate)
        return list(emb_BD)

    def _return_memory(self, seconds: float) -> None:
        """Return freed memory to the system from time to time; seconds: of audio just embedded.

        Each length needs blocks of other sizes, between which ever more free memory would remain.
        """
        self.seconds_embedded += seconds
        if self.seconds_embedded >= RETURN_MEMORY_SECONDS:
            self.seconds_embedded = 0.0
            return_freed_memory()

    def _embed_all(self, sources: Sequence[Any]) -> np.ndarray:
        """Return emb_ND of all sources; if some cannot be embedded, one error lists them."""
        # By row, because recordings of similar length are embedded together.
        results = sorted(
            self.embed_each(sources, check_levels=False),
            key=lambda result: result[0],
        )
        errors: list[Exception] = []
        embeddings: list[np.ndarray] = []
        for _, result in results:
            if isinstance(result, Exception):
                errors.append(result)
            else:
                embeddings.append(result)
        # A single error keeps its type, such as FileNotFoundError.
        if len(errors) == 1:
            raise errors[0]
        faults = Faults()
        for error in errors:
            faults.add("recordings that cannot be used", str(error))
        faults.raise_if_any()
        return np.stack(embeddings)

    def _embed_speech(
        self, source: Any, sample_rate: int | None, channels: Channels
    ) -> tuple[np.ndarray, float]:
        """Return emb_D of a recording and its seconds of speech; warn if they are few."""
        wave_S, seconds = self._read_speech(source, sample_rate, channels)
        (emb_D,) = self.embed_many([wave_S], check_levels=False)
        return emb_D, seconds

    def _read_speech(
        self, source: Any, sample_rate: int | None, channels: Channels
    ) -> tuple[np.ndarray, float]:
        """Return wave_S at the model's rate and its seconds of speech; warn if they are few."""
        wave_S = self._read(source, sample_rate=sample_rate, channels=channels)
        seconds = warn_of_little_speech(
            wave_S,
            sample_rate=self.sample_rate,
            where=name_of(source),
        )
        return wave_S, seconds

    def _embed_windows_of(
        self,
        wave_S: np.ndarray,
        window: float,
        step: float,
        *,
        where: str,
        progress: bool,
    ) -> Windows:
        """Return (times_W2, emb_WD) of a wave; no windows if it is digital silence."""
        rate = self.sample_rate
        warn_of_levels(wave_S, sample_rate=rate, where=where)
        times: list[tuple[float, float]] = []
        reads: list[Callable[[], np.ndarray]] = []
        bounds = _window_samples(len(wave_S), window, step, sample_rate=rate)
        for first, end in bounds:
            samples = slice(first, end)
            window_S = wave_S[samples]
            # Digital silence has no embedding.
            if window_S.min() != window_S.max():
                times.append((first / rate, end / rate))
                # Reads from the temporary file when its turn comes.
                reads.append(partial(wave_S.__getitem__, samples))
        emb_WD = self.embed_many(
            reads,
            check_levels=False,
            progress=progress,
            unit="windows",
        )
        times_W2 = np.array(times, dtype=np.float64).reshape(-1, 2)
        return times_W2, emb_WD

    def _read_long(
        self, source: Any, sample_rate: int | None, channels: Channels
    ) -> np.ndarray:
        """Return wave_S at the model's rate: of a file int16, without holding it in memory."""
        # An array is in memory already, and may have more digits than 16 bits.
        is_array = hasattr(source, "dtype")
        if is_array:
            return read_wave(
                source,
                sample_rate=self.sample_rate,
                source_rate=sample_rate,
                channels=channels,
                check_levels=False,
            )
        return spool_wave(
            source,
            sample_rate=self.sample_rate,
            source_rate=sample_rate,
            channels=channels,
        )

    def _read(
        self,
        source: Any,
        *,
        sample_rate: int | None,
        channels: Channels,
        check_levels: bool = True,
    ) -> np.ndarray:
        """Read a recording at the model's rate."""
        # A function reads a recording when its turn comes.
        if callable(source):
            source = source()
        return read_wave(
            source,
            sample_rate=self.sample_rate,
            source_rate=sample_rate,
            channels=channels,
            check_levels=check_levels,
        )

    def _read_group(
        self,
        numbered: Iterator[tuple[int, Any]],
        read: Callable[[Any], np.ndarray],
    ) -> list[Loaded]:
        """Read about a minute of recordings at the model's rate; empty if none is left."""
        group: list[Loaded] = []
        seconds = 0.0
        vad = self.runtime.vad
        for row, source in numbered:
            # A recording that cannot be read must not stop the others, whatever is wrong with it.
            try:
                if isinstance(source, Exception):
                    raise source
                wave_S = read(source)
                # The VAD takes the whole recording, because its thresholds depend on all levels.
                if vad is not None:
                    wave_S = vad(wave_S)
                seconds += len(wave_S) / self.sample_rate
                group.append(Loaded(row, source, wave_S))
            except Exception as error:
                group.append(Loaded(row, source, _error_of(source, error)))
            # The whole group is in memory, so its size is limited.
            if seconds >= READ_AHEAD_SECONDS:
                break
        return group


def can_decide(*seconds: float) -> bool:
    """Return whether each recording has enough seconds of speech for a decision."""
    return all(speech >= MIN_DECISION_SECONDS for speech in seconds)


def check_point(far: float | None, threshold: float | None) -> None:
    """Raise ValueError for a threshold that is no cosine, or beside a false-alarm rate."""
    if threshold is None:
        return
    if far is not None:
        raise ValueError(
            f"threshold: {threshold!r} is given, and far={far!r}; give one of them"
        )
    # The comparison is also false for nan.
    if not isinstance(threshold, Real) or not -1 <= threshold <= 1:
        raise ValueError(
            f"threshold: must be a cosine from -1 to 1, got {threshold!r}; correct it"
        )


def _window_samples(
    num_samples: int, window: float, step: float, *, sample_rate: int
) -> list[tuple[int, int]]:
    """Return (first sample, end) of each window of a recording."""
    lengths: dict[str, int] = {}
    for name, seconds in (("window", window), ("step", step)):
        is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
        # The comparison is also false for nan.
        if not is_number or not 1 <= seconds * sample_rate < np.inf:
            raise ValueError(
                f"{name}: must be seconds, at least one sample, got {seconds!r}; correct"
                " it"
            )
        lengths[name] = round(seconds * sample_rate)
    if step > window:
        raise ValueError(
            f"step: windows of {window:g} s every {step:g} s leave gaps; give a step of"
            " at most the window"
        )
    # In samples instead of seconds, so that the times of windows are exact.
    windows = cut_windows(
        [(0, num_samples)],
        window_seconds=lengths["window"],
        step_seconds=lengths["step"],
    )
    return [(round(first), round(end)) for first, end in windows]


def _without_copies(unit_ND: np.ndarray, name: str) -> np.ndarray:
    """Return the rows that are no copies of an earlier one, which would weigh it double."""
    cosine_NN = unit_ND @ unit_ND.T
    # Column n above the diagonal: row n beside the earlier ones.
    with_earlier_NN = np.triu(cosine_NN, k=1)
    is_copy_N = (with_earlier_NN > MIN_COPY_COSINE).any(axis=0)
    if is_copy_N.any():
        num_copies = int(is_copy_N.sum())
        log.warning(
            "enrol: %s has %s of other recordings, used once",
            name,
            count_of(num_copies, "copy"),
        )
    return unit_ND[~is_copy_N]


def _each(sources: Iterable[Any] | Sized) -> Iterator[Any]:
    """Yield as many sources as there are, or the error of getting one."""
    num_sources = len(sources)  # pyright: ignore[reportArgumentType]
    # A sequence by its indices: its iterator ends at the first error of its `__getitem__`.
    is_indexed = isinstance(sources, Sequence) or not hasattr(sources, "__iter__")
    iterator: Iterator[Any] | None = None
    if not is_indexed:
        iterator = iter(sources)  # pyright: ignore
    for row in range(num_sources):
        try:
            if iterator is None:
                yield sources[row]  # pyright: ignore
            else:
                yield next(iterator)
        except StopIteration:
            yield ValueError(
                f"sources: end after {row} of {num_sources} recordings; give a list"
            )
        except Exception as error:
            yield _error_of(f"sources[{row}]", error)


def _error_of(source: Any, error: Exception) -> Exception:
    """Return the error of a source as one for users: that of a library in one line."""
    if isinstance(error, ValueError | OSError | ImportError):
        return error
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    line = f"{_safe_name(source)}: cannot be used ({reason}); check the recording"
    in_one_line = ValueError(line)
    in_one_line.__cause__ = error
    return in_one_line


def _safe_name(source: Any) -> str:
    """Return the name of a source for messages, also of one whose attributes raise errors."""
    try:
        return name_of(source)
    except Exception:
        return f"audio ({type(source).__name__})"


def _rank(names: Iterable[str], score_N: np.ndarray) -> list[tuple[str, float]]:
    """Return (name, score), best first; equal scores keep the order of the names."""
    pairs = list(zip(names, score_N.tolist()))
    pairs.sort(key=lambda pair: -pair[1])
    return pairs
