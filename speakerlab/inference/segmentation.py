"""Segmentation model in ONNX: which of up to three local speakers speak, in windows of 10 s.

The file is pyannote/segmentation-3.0 (MIT) in ONNX; `diarization/overlap.py` describes its output.
Letters: S samples, W windows, F frames of a window, C classes.
"""

import math
from pathlib import Path

import numpy as np
from scipy.special import softmax

from speakerlab.data.audio import FULL_SCALE
from speakerlab.data.convert import spool_wave
from speakerlab.diarization.overlap import (
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


class Segmentation:
    """Segmentation model in an ONNX file, on one thread; open it once for many recordings."""

    def __init__(self, path: Path | str) -> None:
        """Open a file.

        Raises FileNotFoundError or ValueError for a file that is missing, damaged or another model,
        and ModuleNotFoundError if onnxruntime is not installed.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: is no file; give a segmentation model in ONNX"
            )
        self._session = open_session(path, num_threads=1)
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
            log_prob_FC = self._log_prob(silence_S)
            shape = log_prob_FC.shape
            if shape != (WINDOW_FRAMES, len(SPEAKERS_CL)):
                raise ValueError(f"{shape} for 10 s")
        except Exception as error:  # the types differ between versions of onnxruntime
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{path}: is not pyannote/segmentation-3.0, got {reason}; export that"
                " model to ONNX"
            ) from None

    def run(self, wave_S: np.ndarray, *, sample_rate: int) -> LocalSpeakers:
        """Return the local speakers of a spooled wave, int16, of any rate and length."""
        if sample_rate != SAMPLE_RATE:
            wave_S = spool_wave(
                wave_S,
                sample_rate=SAMPLE_RATE,
                source_rate=sample_rate,
            )
        # The last window contains the end of the recording; zeros may fill it up.
        samples_after_first = len(wave_S) - WINDOW_SAMPLES
        last_frame = math.ceil(samples_after_first / HOP_SAMPLES)
        last_frame = max(last_frame, 0)
        earlier_frames = range(0, last_frame, STEP_FRAMES)
        start_W = np.array([*earlier_frames, last_frame])

        # float16: 12 MB for an hour.
        shape = (len(start_W), WINDOW_FRAMES, len(SPEAKERS_CL))
        prob_WFC = np.zeros(shape, dtype=np.float16)
        for prob_FC, start in zip(prob_WFC, start_W * HOP_SAMPLES):
            int16_S = wave_S[start : start + WINDOW_SAMPLES]
            window_S = int16_S.astype(np.float32) / FULL_SCALE
            num_missing = WINDOW_SAMPLES - len(window_S)
            window_S = np.pad(window_S, (0, num_missing))
            log_prob_FC = self._log_prob(window_S)
            prob_FC[:] = softmax(log_prob_FC, axis=1)
        return LocalSpeakers(prob_WFC, start_W)

    def _log_prob(self, window_S: np.ndarray) -> np.ndarray:
        """Return the unnormalized log-probabilities of the classes, (F, C)."""
        wave_11S = window_S[None, None]
        (log_prob_1FC,) = self._session.run(None, {self._input: wave_11S})
        return log_prob_1FC[0]
