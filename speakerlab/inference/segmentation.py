"""Segmentation model: which of up to three local speakers speak, in windows of 10 s.

The model is a folder of the task `segmentation`, run by torch, or pyannote/segmentation-3.0 (MIT)
in ONNX; `diarization/local_speakers.py` describes the output of both.
Letters: S samples, W windows, F frames of a window, C classes.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Barrier, Lock
from typing import Any, Protocol

import numpy as np
from scipy.special import softmax

from speakerlab.checkpoints.hub import local
from speakerlab.checkpoints.model_files import SEGMENTER, find_model
from speakerlab.core.atomic import file_sha256
from speakerlab.core.system import available_cpus
from speakerlab.data.audio import FULL_SCALE
from speakerlab.data.convert import spool_wave
from speakerlab.diarization.local_speakers import (
    FIELD_SAMPLES,
    HOP_SAMPLES,
    SAMPLE_RATE,
    SPEAKERS_CL,
    LocalSpeakers,
)
from speakerlab.inference.onnx_model import metadata_of, open_session

WINDOW_SAMPLES = 10 * SAMPLE_RATE
WINDOW_FRAMES = 589  # output frames in a window
# 2.5 s. A step of 5 s has 0.1 to 0.9 points more DER in AMI; 1.25 s is no better.
STEP_FRAMES = 148
MAX_THREADS = 8  # more would wait for the GIL
STARTING_POOL = Lock()


class Runtime(Protocol):
    """Segmentation network of a file or a folder."""

    sha256: str  # of its weights

    def threads(self) -> AbstractContextManager[Executor]:
        """Return a context with a pool of threads, each of which may compute a window."""
        ...

    def log_prob(self, window_S: np.ndarray) -> np.ndarray:
        """Return the unnormalized log-probabilities (F, C) of a window, float32 in [-1, 1]."""
        ...


class Segmentation:
    """Segmentation model; open it once for many recordings."""

    def __init__(self, path: Path | str, *, device: Any = "auto") -> None:
        """Open a model folder, an experiment, hf:owner/name, or an ONNX file.

        device: of a folder, as in `load`. Raises FileNotFoundError or ValueError for what
        is missing, damaged or another model, and ModuleNotFoundError for an ONNX file if
        onnxruntime is not installed.
        """
        path = local(path)
        self._runtime: Runtime
        if path.suffix == ".onnx" or path.is_file():
            self._runtime = OnnxRuntime(path)
        else:
            self._runtime = TorchRuntime(path, device=device)

    @property
    def sha256(self) -> str:
        """Return the digest of the weights or, of an ONNX model, of the file."""
        return self._runtime.sha256

    def run(self, wave_S: np.ndarray, *, sample_rate: int) -> LocalSpeakers:
        """Return the local speakers of a spooled wave, int16, of any rate and length."""
        if sample_rate != SAMPLE_RATE:
            wave_S = spool_wave(
                wave_S,
                sample_rate=SAMPLE_RATE,
                source_rate=sample_rate,
            )
        # The last window contains the end of the recording; zeros may fill it up. If it begins at
        # frame 400, for example, the windows begin at the frames 0, 148, 296 and 400.
        samples_after_first = len(wave_S) - WINDOW_SAMPLES
        last_frame = math.ceil(samples_after_first / HOP_SAMPLES)
        last_frame = max(last_frame, 0)
        earlier_frames = range(0, last_frame, STEP_FRAMES)
        start_W = np.array([*earlier_frames, last_frame])

        # Views of a file: samples are read when the turn of their window comes.
        windows: list[np.ndarray] = []
        for start_frame in start_W:
            first = start_frame * HOP_SAMPLES
            windows.append(wave_S[first : first + WINDOW_SAMPLES])
        # float16: 12 MB for an hour.
        shape = (len(start_W), WINDOW_FRAMES, len(SPEAKERS_CL))
        prob_WFC = np.zeros(shape, dtype=np.float16)
        for window, prob_FC in enumerate(self.probabilities(windows)):
            prob_WFC[window] = prob_FC
        return LocalSpeakers(prob_WFC, start_W)

    def probabilities(self, windows: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the probability of each class in each frame (F, C) of windows, in their order.

        windows: int16; shorter ones are filled up with zeros. On a CPU, up to MAX_THREADS windows
        are computed at the same time, each with one thread; on a GPU, one. The network has
        thousands of small steps in sequence: threads that shared a step would wait for each other
        after each one, and 20 times as long if another program uses the cores.
        """
        with self._runtime.threads() as threads:
            yield from threads.map(self._probabilities_of, windows)

    def _probabilities_of(self, window_S: np.ndarray) -> np.ndarray:
        num_missing = WINDOW_SAMPLES - len(window_S)
        padded_S = np.pad(window_S, (0, num_missing))
        float_S = padded_S.astype(np.float32) / FULL_SCALE
        return softmax(self._runtime.log_prob(float_S), axis=1)


class TorchRuntime:
    """Segmentation network of a model folder or an experiment."""

    def __init__(self, path: Path, *, device: Any = "auto") -> None:
        folder = find_model(path, SEGMENTER)
        # An ONNX file needs no torch.
        from speakerlab.checkpoints.published import load_segmenter
        from speakerlab.inference.torch_model import choose_device

        published = load_segmenter(folder)
        segmenter = published.segmenter
        grid = (segmenter.sample_rate, segmenter.hop_samples, segmenter.field_samples)
        known_grid = (SAMPLE_RATE, HOP_SAMPLES, FIELD_SAMPLES)
        if grid != known_grid or segmenter.num_sets != len(SPEAKERS_CL):
            raise ValueError(
                f"{folder}: has frames of other samples {grid} than {known_grid}, which"
                " diarization expects; train pyannet at 16 kHz"
            )
        self.sha256 = published.sha256
        self.device = choose_device(device)
        # The network was never run on other devices.
        if self.device.type == "mps":
            self.device = choose_device("cpu")
        self._segmenter = segmenter.to(self.device)

    @contextmanager
    def threads(self) -> Iterator[Executor]:
        import torch

        # torch has a number of threads for each Python thread. One that starts takes the number
        # that was set last by any, so that number is restored as soon as the pool has started.
        with STARTING_POOL:
            num_threads = torch.get_num_threads()
            num_windows = min(num_threads, available_cpus(), MAX_THREADS)
            if self.device.type != "cpu":
                num_windows = 1
            have_started = Barrier(num_windows)

            def start() -> None:
                torch.get_num_threads()  # takes the number; else the first step would
                torch.set_num_threads(1)
                have_started.wait()

            pool = ThreadPoolExecutor(num_windows)
            # Each task waits for all others, so each is on a thread of its own.
            starts = [pool.submit(start) for _ in range(num_windows)]
            wait(starts)
            torch.set_num_threads(num_threads)
        with pool:
            yield pool

    def log_prob(self, window_S: np.ndarray) -> np.ndarray:
        import torch

        with torch.inference_mode():
            wave_1S = torch.from_numpy(window_S)[None].to(self.device)
            log_prob_1FC = self._segmenter(wave_1S)
        return log_prob_1FC[0].float().cpu().numpy()


class OnnxRuntime:
    """Segmentation model in an ONNX file."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: is no file; give a segmentation model in ONNX, or the folder of"
                " one"
            )
        # Windows are computed at the same time, so each has one thread.
        self._session = open_session(path, num_threads=1)
        self.sha256 = file_sha256(path)
        inputs = self._session.get_inputs()
        outputs = self._session.get_outputs()
        shapes = [value.shape for value in (*inputs, *outputs)]
        metadata = metadata_of(self._session, path)
        rate = metadata.get("sample_rate", str(SAMPLE_RATE))
        try:
            # One input (batch, channel, sample) and one output (batch, frame, class).
            num_dims = [len(shape) for shape in shapes]
            if num_dims != [3, 3] or rate != str(SAMPLE_RATE):
                raise ValueError(f"inputs and outputs {shapes}, {rate} Hz")
            self._input = inputs[0].name
            # Shapes in the file may have names instead of sizes, so run the model once.
            silence_S = np.zeros(WINDOW_SAMPLES, dtype=np.float32)
            shape = self.log_prob(silence_S).shape
            if shape != (WINDOW_FRAMES, len(SPEAKERS_CL)):
                raise ValueError(f"{shape} for 10 s")
        except Exception as error:  # the types differ between versions of onnxruntime
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{path}: is not pyannote/segmentation-3.0, got {reason}; export that"
                " model to ONNX"
            ) from None

    def threads(self) -> AbstractContextManager[Executor]:
        num_windows = min(available_cpus(), MAX_THREADS)
        return ThreadPoolExecutor(num_windows)

    def log_prob(self, window_S: np.ndarray) -> np.ndarray:
        wave_11S = window_S[None, None]
        (log_prob_1FC,) = self._session.run(None, {self._input: wave_11S})
        return log_prob_1FC[0]
