"""An exported model at work, without torch. In: waves in [-1, 1]. Out: embeddings.

The file that `export.py` writes holds the network with its front end and, as `Facts`, all that its
use requires.
Letters: B rows, S samples, D embedding.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.core.windows import cut_windows
from speakerlab.frontend.vad import EnergyVad
from speakerlab.scoring.calibration import Calibration

INPUT, OUTPUT = "wave", "embedding"
INSTALL = "pip install onnx onnxscript onnxruntime"


@dataclass(frozen=True)
class Facts:
    """What a file says of its model, in the metadata of the ONNX format: name -> text.

    Text stands as it is, everything else as JSON; what is None is left out.
    """

    sample_rate: int  # Hz
    embed_dim: int
    min_samples: int  # the graph takes from so many samples
    max_samples: int  # to so many; see windows.py for other lengths
    sha256: str  # of the weights that were exported
    architecture: str
    frontend: Mapping[str, Any]
    calibration: Mapping[str, Any] | None = None
    vad: Mapping[str, Any] | None = None  # arguments of EnergyVad
    precision: str = "fp32"  # of the weights and what they are multiplied with; or int8

    def to_texts(self) -> dict[str, str]:
        """Name -> text, as a file holds it."""
        return {
            name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            for name, value in asdict(self).items()
            if value is not None
        }

    @classmethod
    def from_texts(cls, texts: Mapping[str, str], *, where: str) -> "Facts":
        """What `to_texts` gave. Raises ValueError where a name is missing or no JSON."""
        texts = {field.name: texts[field.name] for field in fields(cls) if field.name in texts}
        plain = {"sha256", "architecture", "precision"}
        try:
            values: dict[str, Any] = {
                name: text if name in plain else json.loads(text) for name, text in texts.items()
            }
            return cls(**values)
        except (TypeError, json.JSONDecodeError):
            known = ", ".join(texts) or "none"
            raise ValueError(
                f"{where}: is no model of ours, got the metadata {known}; make it with "
                "`speakerlab export`"
            ) from None


class OnnxModel:
    """A model file opened by onnxruntime, on the CPU.

    `calibration` says how scores are read, `vad` leaves out what is not speech, before a recording
    is embedded; None where the model has none.
    """

    def __init__(self, path: Path, *, num_threads: int | None = None) -> None:
        """`num_threads`: as many as there are cores if None.

        Raises FileNotFoundError or ValueError for a file that is missing, damaged or not ours, and
        ModuleNotFoundError where onnxruntime is not installed.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such model, got no file; run `speakerlab export`")
        self._session = open_session(path, num_threads=num_threads)
        texts = self._session.get_modelmeta().custom_metadata_map
        self.facts = Facts.from_texts(texts, where=str(path))
        self.sample_rate, self.embed_dim = self.facts.sample_rate, self.facts.embed_dim
        self.min_samples, self.max_samples = self.facts.min_samples, self.facts.max_samples
        self.sha256, self.precision = self.facts.sha256, self.facts.precision
        self.calibration: Calibration | None = None
        if self.facts.calibration is not None:
            self.calibration = Calibration.from_dict(self.facts.calibration, where=str(path))
        self.vad: EnergyVad | None = None
        if self.facts.vad is not None:
            self.vad = EnergyVad(sample_rate=self.sample_rate, **self.facts.vad)

    def embed_window(self, wave_BS: ArrayLike) -> NDArray[np.float32]:
        """emb_BD of waves of `min_samples` to `max_samples` samples."""
        wave_BS = np.ascontiguousarray(wave_BS, dtype=np.float32)
        shape = wave_BS.shape
        if len(shape) != 2 or not self.min_samples <= shape[1] <= self.max_samples:
            raise ValueError(
                f"wave: must be rows of {self.min_samples} to {self.max_samples} samples, got "
                f"{shape}; use embed for other lengths"
            )
        return self._session.run([OUTPUT], {INPUT: wave_BS})[0]

    def embed(self, wave_S: ArrayLike) -> NDArray[np.float32]:
        """emb_D of one recording of any length above 0, at the model's sample rate.

        All of it: `vad`, where there is one, is for the caller to apply first.
        """
        wave_S = np.asarray(wave_S, dtype=np.float32)
        if wave_S.ndim != 1:
            raise ValueError(
                f"wave: must be samples of one channel, got {wave_S.shape}; choose a channel"
            )
        windows = cut_windows(wave_S, min_samples=self.min_samples, max_samples=self.max_samples)
        return np.mean([self.embed_window(window[None])[0] for window in windows], axis=0)


def open_session(path: Path, *, num_threads: int | None = None) -> Any:
    """An onnxruntime session on the CPU that says nothing. ValueError where the file is not ONNX.

    Memory that is taken by the length at hand is given back: lengths differ from call to call.
    """
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"{path}: onnxruntime is not installed; {INSTALL}") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads or 0
    options.log_severity_level = 3  # errors
    options.enable_mem_pattern = False
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own types, which differ between versions
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path}: is not a whole ONNX file, got '{reason}'; export again"
        ) from None
