"""Enrolled speakers: a name and the direction of a voice, kept in one file with the model's hash.

Letters: N speakers, M recordings of one, D embedding.
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
    """name -> unit vector. All by the model whose weights have `model_sha256`."""

    def __init__(self, model_sha256: str) -> None:
        self.model_sha256 = model_sha256
        self.unit_of: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.unit_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self.unit_of)

    def add(self, name: str, emb_MD: np.ndarray) -> None:
        """Enrol a speaker, in place of one of that name: the mean of embeddings of length 1.

        So every recording weighs the same, however long its embedding is.
        """
        if not name.strip():
            raise ValueError("enrol: a speaker needs a name, got ''; give one")
        if not len(emb_MD):
            raise ValueError(f"enrol: {name} needs a recording, got 0; give one or more")
        unit_MD = unit_rows(
            emb_MD, [f"recording {row + 1} of {name}" for row in range(len(emb_MD))]
        )
        self.unit_of[name] = unit_rows(unit_MD.mean(axis=0)[None], [name], where="enrol")[0]

    def rank(self, emb_D: np.ndarray) -> list[tuple[str, float]]:
        """(name, cosine) of every speaker, best first; of equals the one enrolled earlier."""
        if not self.unit_of:
            raise ValueError("identify: nobody is enrolled, got 0 speakers; enrol some first")
        unit_D = unit_rows(emb_D[None], ["the recording"])[0]
        score_N = np.stack(list(self.unit_of.values())) @ unit_D
        ranking = zip(self.unit_of, map(float, score_N))
        return sorted(ranking, key=lambda row: -row[1])

    def save(self, path: Path) -> None:
        """Write all as safetensors, whole or not at all."""
        if not self.unit_of:
            raise ValueError(f"{path}: nobody is enrolled, got 0 speakers; enrol some first")
        metadata = {"model_sha256": self.model_sha256, "names": json.dumps(list(self.unit_of))}
        with replacing(path) as partial:
            save_file({"unit_ND": np.stack(list(self.unit_of.values()))}, partial, metadata)

    @classmethod
    def load(cls, path: Path, *, model_sha256: str) -> "Speakers":
        """What `save` wrote; ValueError where it was made with another model."""
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; enrol speakers first")
        try:
            with safe_open(path, framework="numpy") as file:
                metadata, unit_ND = file.metadata() or {}, file.get_tensor("unit_ND")
            names, digest = json.loads(metadata["names"]), metadata["model_sha256"]
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path}: holds no speakers, got '{error}'; enrol them anew"
            ) from error
        if digest != model_sha256:
            raise ValueError(
                f"{path}: was made with another model (sha256 {digest[:12]}), got "
                f"{model_sha256[:12]}; enrol the speakers with this one"
            )
        speakers = cls(digest)
        speakers.unit_of = dict(zip(names, unit_ND))
        return speakers
