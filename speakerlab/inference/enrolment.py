"""Enrolled speakers: a name and a unit vector each, kept in one file with the model's hash.

Letters: N speakers, M recordings of a speaker, D embedding dimensions.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from speakerlab.core.atomic import replacing
from speakerlab.scoring.backend import unit_rows


class Speakers:
    """name -> unit vector, all from the model whose weights have `model_sha256`."""

    def __init__(self, model_sha256: str) -> None:
        self.model_sha256 = model_sha256
        self.unit_of: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.unit_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self.unit_of)

    def add(self, name: str, emb_MD: np.ndarray) -> None:
        """Enrol a speaker by the mean of its embeddings, each scaled to length 1.

        Every recording has the same weight. Replaces a speaker of that name.
        """
        if not name.strip():
            raise ValueError("enrol: a speaker needs a name, got ''")
        if not len(emb_MD):
            raise ValueError(f"enrol: {name} needs at least one recording, got 0")
        ids = [f"recording {row + 1} of {name}" for row in range(len(emb_MD))]
        mean_D = unit_rows(emb_MD, ids).mean(axis=0)
        self.unit_of[name] = unit_rows(mean_D[None], [name], where="enrol")[0]

    def rank(self, emb_D: np.ndarray) -> list[tuple[str, float]]:
        """Return (name, cosine) of every speaker, best first; ties in the order of enrolment."""
        if not self.unit_of:
            raise ValueError("identify: no speaker is enrolled; enrol some first")
        unit_D = unit_rows(emb_D[None], ["the recording"])[0]
        score_N = np.stack(list(self.unit_of.values())) @ unit_D
        return sorted(zip(self.unit_of, map(float, score_N)), key=lambda row: -row[1])

    def save(self, path: Path) -> None:
        """Write all speakers atomically as safetensors."""
        if not self.unit_of:
            raise ValueError(f"{path}: no speaker is enrolled; enrol some first")
        metadata = {"model_sha256": self.model_sha256, "names": json.dumps(list(self.unit_of))}
        with replacing(path) as partial:
            save_file({"unit_ND": np.stack(list(self.unit_of.values()))}, partial, metadata)

    @classmethod
    def read(cls, path: Path, *, model_sha256: str) -> "Speakers":
        """Read a file of `save`; ValueError if it was made with another model."""
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; enrol speakers first")
        try:
            with safe_open(path, framework="numpy") as file:
                metadata, unit_ND = file.metadata() or {}, file.get_tensor("unit_ND")
            names, digest = json.loads(metadata["names"]), metadata["model_sha256"]
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path}: is not a file of enrolled speakers ({error}); enrol them again"
            ) from error
        if digest != model_sha256:
            raise ValueError(
                f"{path}: was made with model {digest[:12]}, not with {model_sha256[:12]} "
                "(sha256); enrol the speakers with this model"
            )
        speakers = cls(digest)
        speakers.unit_of = dict(zip(names, unit_ND))
        return speakers
