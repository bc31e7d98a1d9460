"""Segmentation model in ONNX: which of up to three local speakers speak, in windows of 10 s.

The file is pyannote/segmentation-3.0 (MIT) in ONNX; `diarization/overlap.py` describes its output.
Letters: S samples, W windows, F frames of a window, C classes.
"""

from pathlib import Path

import numpy as np
from scipy.special import softmax

from speakerlab.data.convert import spool_wave
from speakerlab.diarization.overlap import HOP_SAMPLES, SAMPLE_RATE, SPEAKERS_CL, LocalSpeakers
from speakerlab.inference.onnx_model import metadata_of, open_session

WINDOW_SAMPLES, WINDOW_FRAMES = 10 * SAMPLE_RATE, 589
STEP_FRAMES = 148  # 2.5 s. 5 s has 0.1 to 0.9 points more DER in AMI; 1.25 s is no better


class Segmentation:
    """Segmentation model in an ONNX file, on one thread; open it once for many recordings."""

    def __init__(self, path: Path | str) -> None:
        """Open a file.

        Raises FileNotFoundError or ValueError for a file that is missing, damaged or another model,
        and ModuleNotFoundError if onnxruntime is not installed.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; give a segmentation model in ONNX")
        self._session = open_session(path, num_threads=1)
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        shapes = [value.shape for value in (*inputs, *outputs)]
        rate = metadata_of(self._session, path).get("sample_rate", str(SAMPLE_RATE))
        try:
            if [len(shape) for shape in shapes] != [3, 3] or rate != str(SAMPLE_RATE):
                raise ValueError(f"inputs and outputs {shapes}, {rate} Hz")
            self._input = inputs[0].name
            shape = self._log_prob(np.zeros(WINDOW_SAMPLES, dtype=np.float32)).shape
            if shape != (WINDOW_FRAMES, len(SPEAKERS_CL)):
                raise ValueError(f"{shape} for 10 s")
        except Exception as error:  # those of onnxruntime differ between versions
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{path}: is not pyannote/segmentation-3.0, got {reason}; export that model to ONNX"
            ) from None

    def run(self, wave_S: np.ndarray, *, sample_rate: int) -> LocalSpeakers:
        """Return the local speakers of a spooled wave, int16, of any rate and length."""
        if sample_rate != SAMPLE_RATE:
            wave_S = spool_wave(wave_S, sample_rate=SAMPLE_RATE, source_rate=sample_rate)
        last = max(-(-(len(wave_S) - WINDOW_SAMPLES) // HOP_SAMPLES), 0)
        start_W = np.array([*range(0, last, STEP_FRAMES), last])
        size = WINDOW_FRAMES, len(SPEAKERS_CL)
        prob_WFC = np.zeros((len(start_W), *size), dtype=np.float16)  # 12 MB for an hour
        for prob_FC, start in zip(prob_WFC, start_W * HOP_SAMPLES):
            window_S = wave_S[start : start + WINDOW_SAMPLES].astype(np.float32) / 32768
            window_S = np.pad(window_S, (0, WINDOW_SAMPLES - len(window_S)))
            prob_FC[:] = softmax(self._log_prob(window_S), axis=1)
        return LocalSpeakers(prob_WFC, start_W)

    def _log_prob(self, window_S: np.ndarray) -> np.ndarray:
        """Return the unnormalized log-probabilities of the classes, (F, C)."""
        return self._session.run(None, {self._input: window_S[None, None]})[0][0]
