"""Exported models in onnxruntime, without torch. In: waves in [-1, 1]. Out: embeddings.

The file that `export.py` writes holds the network with its front end and, as `Facts`, all other
data needed at inference. Letters: B rows, S samples, D embedding dimensions.
"""

import base64
import ctypes
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.checkpoints.model_files import parse_plda, refuse_substitute
from speakerlab.core.reading import parse_json
from speakerlab.core.tuning import Tuning
from speakerlab.frontend.vad import EnergyVad
from speakerlab.inference.passes import PASSES
from speakerlab.scoring.calibration import Calibration
from speakerlab.scoring.plda import Plda

INPUT = "wave"
OUTPUT = "embedding"
INSTALL = "pip install onnx onnxscript onnxruntime"
# The other facts are JSON.
PLAIN_TEXTS = {"sha256", "architecture", "precision", "plda"}


@dataclass(frozen=True)
class Facts:
    """Metadata of an exported file, stored as name -> text; fields that are None are left out."""

    sample_rate: int  # Hz
    embed_dim: int
    min_samples: int  # shortest input of the graph
    # Longest input of the graph; for other lengths see core/windows.py.
    max_samples: int
    sha256: str  # of the exported weights
    architecture: str
    frontend: Mapping[str, Any]
    calibration: Calibration | None = None
    diarization: Tuning | None = None
    vad: EnergyVad | None = None
    precision: str = "fp32"  # of weights and products; or int8
    # Of a student that shares its teacher's; see `model_files.space_of`.
    space: str | None = None
    plda: str | None = None  # of vbx: the bytes of its file, in base 64

    def to_texts(self) -> dict[str, str]:
        """Return name -> text, the format in the file."""
        texts: dict[str, str] = {}
        facts = asdict(self)
        for name, value in facts.items():
            if value is None:
                continue
            if name in PLAIN_TEXTS:
                texts[name] = value
            else:
                texts[name] = json.dumps(value, sort_keys=True)
        return texts

    @classmethod
    def from_texts(cls, texts: Mapping[str, str], *, where: str) -> "Facts":
        """Invert `to_texts`. Raises ValueError if a name is missing or its text is not JSON."""
        # Ignore other metadata of the file, such as its producer.
        names = [field.name for field in fields(cls) if field.name in texts]
        # Join the values, which are JSON themselves, to one JSON object.
        members: list[str] = []
        for name in names:
            value = texts[name]
            if name in PLAIN_TEXTS:
                value = json.dumps(value)
            members.append(f"{json.dumps(name)}: {value}")
        text = "{" + ", ".join(members) + "}"
        fix = (
            f"its metadata are {', '.join(names) or 'none'}; make it with `speakerlab"
            " export`"
        )
        return parse_json(text, cls, where=where, fix=fix)


class OnnxModel:
    """An exported model on the CPU; `calibration` and `vad` are None if the model has none."""

    classifier = None
    device = "cpu"

    def __init__(self, path: Path, *, num_threads: int | None = None) -> None:
        """Open a file. num_threads: None for the number of cores.

        Raises FileNotFoundError or ValueError for a file that is missing, damaged or not ours, and
        ModuleNotFoundError if onnxruntime is not installed.
        """
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: no such model; make one with `speakerlab export`"
            )
        refuse_substitute(path)
        # The program may change its folder before the file is opened again.
        self._file = path.absolute()
        self._num_threads = num_threads
        self._process = os.getpid()
        self._session = open_session(path, num_threads=num_threads)
        metadata = metadata_of(self._session, path)
        facts = Facts.from_texts(metadata, where=str(path))
        self.facts = facts
        self.sample_rate = facts.sample_rate
        self.embed_dim = facts.embed_dim
        self.min_samples = facts.min_samples
        self.max_samples = facts.max_samples
        self.sha256 = facts.sha256
        self.space = facts.space or facts.sha256
        self.precision = facts.precision
        self.family = facts.architecture
        self.source = path
        self.calibration = facts.calibration
        self.tuning = facts.diarization or Tuning()
        self.vad = None
        if facts.vad is not None:
            self.vad = replace(facts.vad, sample_rate=self.sample_rate)

    def read_plda(self) -> Plda:
        """Return the PLDA of vbx; ValueError with one line if the file has none."""
        if self.facts.plda is None:
            raise ValueError(
                f"{self.source}: has no PLDA, which vbx needs; give --development DIR, or"
                " export a model that has one"
            )
        data = base64.b64decode(self.facts.plda)
        return parse_plda(data, embed_dim=self.embed_dim, where=str(self.source))

    def embed_window(self, wave_BS: ArrayLike) -> NDArray[np.float32]:
        """Return emb_BD of waves of `min_samples` to `max_samples` samples."""
        if self._process != os.getpid():
            self._open_again()
        wave_BS = np.ascontiguousarray(wave_BS, dtype=np.float32)
        with PASSES.running():
            (emb_BD,) = self._session.run([OUTPUT], {INPUT: wave_BS})
        return emb_BD

    def frames_of_window(self, wave_1S: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Raise ValueError: an exported graph returns embeddings alone."""
        del wave_1S
        raise ValueError(
            f"{self.source}: an .onnx file returns embeddings, no frames; use the model"
            " folder that it was exported from"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle: the path of the file instead of the session."""
        state = dict(self.__dict__)
        del state["_session"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the file again; ValueError if another model has taken its place."""
        self.__dict__.update(state)
        self._session = open_session(self._file, num_threads=self._num_threads)
        self._process = os.getpid()
        metadata = metadata_of(self._session, self.source)
        facts = Facts.from_texts(metadata, where=str(self.source))
        if facts.sha256 != self.sha256:
            raise ValueError(
                f"{self.source}: has model {facts.sha256[:12]} now, not"
                f" {self.sha256[:12]} (sha256) that was pickled; load it again"
            )

    def _open_again(self) -> None:
        """Replace the session in a forked process, which lacks the threads of its parent's."""
        # Never deleted, because its destructor would wait for these threads for ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._session))
        self._session = open_session(self._file, num_threads=self._num_threads)
        self._process = os.getpid()


def open_session(path: Path, *, num_threads: int | None = None) -> Any:
    """Open a quiet onnxruntime session on the CPU; ValueError if the file is not ONNX."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{path}: onnxruntime is not installed; {INSTALL}"
        ) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads or 0
    options.log_severity_level = 3  # errors
    # Lengths differ between calls: do not reserve memory for the last one.
    options.enable_mem_pattern = False
    try:
        return onnxruntime.InferenceSession(
            str(path),
            options,
            providers=["CPUExecutionProvider"],
            enable_fallback=0,  # 1 prints errors
        )
    except Exception as error:  # the types differ between versions of onnxruntime
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path}: is not a complete ONNX file ({reason}); export or get it again"
        ) from None


def metadata_of(session: Any, path: Path) -> dict[str, str]:
    """Return the metadata of an open file; ValueError if they are not text."""
    try:
        return session.get_modelmeta().custom_metadata_map
    except UnicodeDecodeError:
        raise ValueError(
            f"{path}: its metadata are not UTF-8; export it again"
        ) from None
