"""Speech detection in a recording, by its energy or by Silero VAD.

Silero VAD is a network in a file of the package `silero-vad` (MIT), run by onnxruntime. The package
is not imported: it would limit torch to one thread.
Letters: S samples, T frames, L samples of a frame and its context.
"""

import logging
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from speakerlab.data import levels
from speakerlab.data.audio import FULL_SCALE
from speakerlab.data.convert import spool_wave
from speakerlab.diarization.regions import Region
from speakerlab.diarization.windows import speech_regions
from speakerlab.frontend.vad import EnergyVad
from speakerlab.inference.onnx_model import open_session

log = logging.getLogger(__name__)
# Two words. A decision from less says little about the speaker.
MIN_SPEECH_SECONDS = 0.5
# From less, nothing is decided.
MIN_DECISION_SECONDS = levels.MIN_VOICE_SECONDS
SAMPLE_RATE = 16000  # of Silero VAD
CONTEXT_SAMPLES = 64  # before each of its frames, which it also hears
BLOCK_SAMPLES = 16 * SAMPLE_RATE  # in one call; a multiple of the frame
# Speech starts at the first probability, from WeSpeaker's recipe, and ends below the second.
# Silero's own 0.5 and 0.35 miss 25.9 instead of 17.9 % of the speech of five excerpts of AMI, with
# 0.1 instead of 1.3 % of false alarms; mini's development set has 4.5 instead of 5.9 %.
START = 0.18
STOP = 0.1


def find_speech(
    wave_S: np.ndarray, *, sample_rate: int, vad: str = "energy"
) -> list[Region]:
    """Return the regions of speech; vad: "energy" or "silero", which needs a spooled wave."""
    if vad == "silero":
        detector = SileroVad()
        if sample_rate != SAMPLE_RATE:
            wave_S = spool_wave(
                wave_S,
                sample_rate=SAMPLE_RATE,
                source_rate=sample_rate,
            )
            sample_rate = SAMPLE_RATE
    elif vad == "energy":
        detector = energy_detector(sample_rate)
    else:
        raise ValueError(f"vad: must be energy or silero, got '{vad}'")
    voiced_T = detector.voiced_frames(wave_S)
    frame_seconds = detector.frame_samples / sample_rate
    return speech_regions(voiced_T, frame_seconds=frame_seconds)


def energy_detector(sample_rate: int) -> EnergyVad:
    """Return the detector of `vad="energy"`."""
    # `above_noise` removes pauses with noise at 12 to 30 dB SNR: without it, mini's development
    # set has 9.1 instead of 4.4 % of false alarms, but 0.2 % fewer misses. On five excerpts of AMI
    # with quiet voices, a floor of -55 dBFS misses 12.9 %, of -70 dBFS 7.0 %.
    return EnergyVad(sample_rate=sample_rate, above_noise=0.25, floor_dbfs=-70.0)


def is_other_sound(wave_S: np.ndarray, *, sample_rate: int) -> bool:
    """Return whether a whole recording is noise or a tone, which would count as speech."""
    # A constant, such as digital silence, has no spectrum.
    if not np.ptp(wave_S):
        return False
    measured = levels.measure(wave_S, sample_rate=sample_rate)
    sound = levels.find_other_sound(wave_S, measured, sample_rate=sample_rate)
    return sound is not None


def warn_of_little_speech(wave_S: np.ndarray, *, sample_rate: int, where: str) -> float:
    """Return the seconds of speech in a recording; warn if they are below MIN_SPEECH_SECONDS.

    Return 0 for noise and tones without a warning, because `read_wave` warns of them.
    """
    if is_other_sound(wave_S, sample_rate=sample_rate):
        return 0.0
    # By energy: Silero VAD may not be installed, and would take longer than the embedding.
    seconds = 0.0
    for start, end in find_speech(wave_S, sample_rate=sample_rate):
        seconds += end - start
    seconds = round(seconds, 3)
    if seconds < MIN_SPEECH_SECONDS:
        amount = f"only {seconds:.2f} s of speech were" if seconds else "no speech was"
        log.warning(
            "%s: %s found, a reliable decision needs %g s; give a longer recording of"
            " the voice",
            where,
            amount,
            MIN_SPEECH_SECONDS,
        )
    return seconds


class SileroVad:
    """Silero VAD in onnxruntime, on one thread, for wave_S, int16 at SAMPLE_RATE."""

    frame_samples = 512

    def __init__(self) -> None:
        folder = Path()
        package = find_spec("silero_vad")
        if package is not None and package.origin:
            folder = Path(package.origin).parent
        path = folder / "data/silero_vad_16k_sequence.onnx"
        has_runtime = find_spec("onnxruntime") is not None
        if not has_runtime or not path.is_file():
            raise ModuleNotFoundError(
                "vad: silero is not installed; pip install 'silero-vad>=6.2.2'"
                " onnxruntime"
            )
        self._session = open_session(path, num_threads=1)

    def voiced_frames(self, wave_S: np.ndarray) -> np.ndarray:
        """Return whether each frame is speech, (T,); frames are consecutive, without overlap."""
        speech_T = self.probabilities(wave_S)
        # Between the thresholds, a frame takes the decision of the last frame outside them. For
        # example, the probabilities 0.3 0.15 0.05 0.15 are decided by the frames 0 0 2 2.
        is_decided_T = (speech_T >= START) | (speech_T < STOP)
        frame_T = np.arange(len(speech_T))
        decided_T = np.where(is_decided_T, frame_T, 0)
        last_decided_T = np.maximum.accumulate(decided_T)
        return speech_T[last_decided_T] >= START

    def probabilities(self, wave_S: np.ndarray) -> np.ndarray:
        """Return the probability of speech in each frame; the last frame is padded with zeros."""
        frame_samples = self.frame_samples
        # numpy cannot join zero arrays: a wave may have no frame.
        probabilities = [np.zeros(0, dtype=np.float32)]
        before_S = np.zeros(CONTEXT_SAMPLES, dtype=np.float32)
        # The state of the recurrent network, carried over from block to block.
        hidden = np.zeros((1, 1, 128), dtype=np.float32)
        cell = np.zeros((1, 1, 128), dtype=np.float32)
        for start in range(0, len(wave_S), BLOCK_SAMPLES):
            int16_S = wave_S[start : start + BLOCK_SAMPLES]
            block_S = int16_S.astype(np.float32) / FULL_SCALE
            num_missing = -len(block_S) % frame_samples  # to whole frames
            padded_S = np.pad(block_S, (0, num_missing))
            with_context_S = np.concatenate([before_S, padded_S])
            before_S = with_context_S[-CONTEXT_SAMPLES:]

            # Each frame is preceded by its context. Of the windows at all samples, those of frames.
            num_heard = CONTEXT_SAMPLES + frame_samples
            windows = sliding_window_view(with_context_S, num_heard)
            frames_TL = windows[::frame_samples].copy()
            inputs = {"input": frames_TL, "h": hidden, "c": cell}
            speech_T, hidden, cell = self._session.run(None, inputs)
            probabilities.append(speech_T)
        return np.concatenate(probabilities)
