"""Tables of embeddings: written by extraction, read by scoring.

Letters: N utterances, D dimensions of an embedding.
On disk a table is three files: `<stem>.npy` (float32, N x D), `<stem>.ids` (one id per line) and
`<stem>.json` (model hash, sizes, facts). The JSON is written last: where it exists, all exists.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.atomic import replacing, write_json, write_text
from speakerlab.core.faults import Faults
from speakerlab.core.reading import keys, read_json, read_text

AGAIN = "run the extraction (stage 5) again"
KNOWN = keys(model_sha256=str, num=int, dim=int)  # in the JSON


@dataclass(frozen=True)
class EmbeddingTable:
    """Embeddings of distinct utterances, all by the model whose file has hash `model_sha256`.

    Raises ValueError, naming ids, if an id occurs twice or an embedding is not finite.
    """

    ids: list[str]
    emb_ND: NDArray[np.float32]
    model_sha256: str
    facts: Mapping[str, Any] = field(default_factory=dict)  # such as precision and data hash

    def __post_init__(self) -> None:
        assert self.emb_ND.ndim == 2 and len(self.ids) == len(self.emb_ND), self.emb_ND.shape
        assert self.emb_ND.dtype == np.float32, self.emb_ND.dtype
        faults = Faults()
        for name in self.ids:
            if name.split() != [name]:
                problem = f"an id must be one word, got {name!r}; rename the utterance"
                faults.add("bad ids", f"embeddings: {problem}")
        for name, num in Counter(self.ids).items():
            if num > 1:
                problem = f"embeddings: {name} occurs {num} times; remove old parts and {AGAIN}"
                faults.add("duplicate ids", problem)
        for row in np.flatnonzero(~np.isfinite(self.emb_ND).all(axis=1)):
            value = self.emb_ND[row][~np.isfinite(self.emb_ND[row])][0]
            faults.add(
                "broken embeddings",
                f"embeddings: {self.ids[row]} is not finite, got {value}; check its audio and the "
                "model",
            )
        faults.raise_if_any("embeddings: refused, nothing was scored")

    def save(self, stem: str | Path) -> None:
        """Write the three files, each atomically; `stem` is their path without the endings."""
        about = Path(f"{stem}.json")
        about.unlink(missing_ok=True)  # it must not describe new files
        with replacing(Path(f"{stem}.npy")) as path, path.open("wb") as stream:
            np.save(stream, self.emb_ND, allow_pickle=False)
        write_text(Path(f"{stem}.ids"), "".join(f"{utterance}\n" for utterance in self.ids))
        num, dim = self.emb_ND.shape
        write_json(about, {**self.facts, "model_sha256": self.model_sha256, "num": num, "dim": dim})

    @classmethod
    def load(cls, stem: str | Path) -> "EmbeddingTable":
        """Read a table; FileNotFoundError if it is incomplete, ValueError if it is damaged."""
        about = Path(f"{stem}.json")
        if not about.is_file():
            raise FileNotFoundError(f"{about}: missing, so this table is incomplete; {AGAIN}")
        facts = read_json(about, like=KNOWN, fix=AGAIN)
        model_sha256, num, dim = (facts.pop(key) for key in ("model_sha256", "num", "dim"))
        ids = read_text(Path(f"{stem}.ids")).splitlines()
        try:
            emb_ND = np.asarray(np.load(f"{stem}.npy", allow_pickle=False))
        except OSError:
            raise
        except Exception as error:  # parsing its header may raise anything
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{stem}.npy: is damaged ({reason}); {AGAIN}") from error
        if emb_ND.shape != (num, dim) or len(ids) != num or emb_ND.dtype != np.float32:
            raise ValueError(
                f"{about}: describes {num} embeddings of {dim} dimensions, but there are "
                f"{emb_ND.dtype} {emb_ND.shape} and {len(ids)} ids; {AGAIN}"
            )
        try:
            return cls(ids, emb_ND, model_sha256, facts)
        except ValueError as error:
            raise ValueError(f"{stem}.npy, .ids: {error}") from None

    def select(self, wanted_ids: Sequence[str], *, where: str = "embeddings") -> "EmbeddingTable":
        """Return the rows of `wanted_ids` in that order; ValueError names ids without embedding."""
        row_of = {utterance: row for row, utterance in enumerate(self.ids)}
        missing = [utterance for utterance in wanted_ids if utterance not in row_of]
        faults = Faults()
        for utterance in missing:
            faults.add(
                "missing embeddings",
                f"{where}: no embedding of {utterance}; see rejected.tsv, or run stage 5 again",
            )
        faults.raise_if_any(f"{where}: {len(missing)} of {len(wanted_ids)} utterances are missing")
        rows = np.fromiter((row_of[u] for u in wanted_ids), np.int64, len(wanted_ids))
        return EmbeddingTable(list(wanted_ids), self.emb_ND[rows], self.model_sha256, self.facts)


def require_one_model(tables: Iterable[EmbeddingTable]) -> None:
    """Raise ValueError unless all tables are by one model, in one precision."""
    tables = list(tables)
    for what, found in (
        ("models", {table.model_sha256 for table in tables}),
        ("precisions", {str(table.facts.get("precision", "fp32")) for table in tables}),
    ):
        if len(found) > 1:
            shown = ", ".join(f"{value:.12}" for value in sorted(found))
            raise ValueError(f"embeddings: of different {what}, {shown}; {AGAIN} with one")
