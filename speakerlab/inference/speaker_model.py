"""Python API: embeddings, scores and decisions for recordings as files, bytes or arrays.

    model = speakerlab.load("exp/mini")
    model.embed("a.wav")

torch is imported only for models that run with it; an ONNX file does not need it.
Letters: S samples, N recordings or speakers, D embedding dimensions, C classes.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from speakerlab.checkpoints.hub import local
from speakerlab.core.counting import count_of
from speakerlab.core.distribution import refuse_other
from speakerlab.core.process import was_forked
from speakerlab.core.registry import use_plugins
from speakerlab.data.audio import name_of
from speakerlab.data.convert import Channels
from speakerlab.diarization.windows import STEP_SECONDS, WINDOW_SECONDS
from speakerlab.inference.decisions import (
    Identification,
    Verification,
    can_decide,
    check_point,
    rank_speakers,
)
from speakerlab.inference.enrolled import (
    add_speakers,
    check_name,
    read_speakers,
    write_speakers,
)
from speakerlab.inference.recording_embedder import RecordingEmbedder
from speakerlab.inference.speech import warn_of_little_speech
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
MIN_COPY_COSINE = 1 - 1e-5  # two recordings of a voice are less alike


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


class SpeakerModel(RecordingEmbedder):
    """Speaker model that embeds and compares recordings, and identifies enrolled speakers.

    `speakers` holds a unit vector for each enrolled name.
    """

    def __init__(self, runtime: "TorchModel | OnnxModel") -> None:
        super().__init__(runtime)
        # Attributes of both runtimes.
        self.sha256 = runtime.sha256
        self.space = runtime.space
        self.calibration = runtime.calibration
        self.tuning = runtime.tuning
        self.precision = runtime.precision
        self.speakers: dict[str, np.ndarray] = {}
        self.enrolled_by = self.sha256  # model of these speakers

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
        ranking = rank_speakers(self.speakers, cosine_N)
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
        return rank_speakers(classifier.classes, posterior_C)

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
