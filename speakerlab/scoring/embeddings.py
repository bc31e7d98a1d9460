"""Tables of embeddings: written by extraction, read by scoring.

Letters: N utterances, D dimensions of an embedding.
On disk a table is three files: `<stem>.npy` (float32, N x D), `<stem>.ids` (one id per line) and
`<stem>.json` (model hash, sizes, facts). The JSON is written last: if it exists, all files exist.
"""

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.atomic import replacing, write_json, write_text
from speakerlab.core.counting import count_of
from speakerlab.core.faults import Faults
from speakerlab.core.reading import keys, read_json, read_text

AGAIN = "run `speakerlab extract` again"
REQUIRED_FACTS = keys(model_sha256=str, num=int, dim=int)  # of the JSON


@dataclass(frozen=True)
class EmbeddingTable:
    """Embeddings of distinct utterances, all from the model file with the hash `model_sha256`.

    Raises ValueError, naming ids, if an id occurs twice or an embedding is not finite.
    """

    ids: list[str]
    emb_ND: NDArray[np.float32]
    model_sha256: str
    # For example the precision and the hash of the data.
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def space(self) -> str:
        """Return the sha256 that names the space; tables of one space can be compared.

        A student may share the space of its teacher (`model_files.space_of`).
        """
        return str(self.facts.get("space") or self.model_sha256)

    def __post_init__(self) -> None:
        shape = self.emb_ND.shape
        assert len(shape) == 2, shape
        assert len(self.ids) == shape[0], shape
        assert self.emb_ND.dtype == np.float32, self.emb_ND.dtype
        faults = Faults()
        for name in self.ids:
            # Blanks end an id in trial lists and score files.
            if name.split() != [name]:
                problem = f"an id must be one word, got {name!r}; rename the utterance"
                faults.add("bad ids", f"embeddings: {problem}")
        for name, num in Counter(self.ids).items():
            if num > 1:
                problem = (
                    f"embeddings: {name} occurs {num} times; remove old parts and"
                    f" {AGAIN}"
                )
                faults.add("duplicate ids", problem)
        is_finite_ND = np.isfinite(self.emb_ND)
        is_broken_N = ~is_finite_ND.all(axis=1)
        for row in np.flatnonzero(is_broken_N):
            column = is_finite_ND[row].argmin()  # the first that is not finite
            value = self.emb_ND[row, column]
            faults.add(
                "broken embeddings",
                f"embeddings: {self.ids[row]} is not finite, got {value}; check its"
                " audio and the model",
            )
        faults.raise_if_any("embeddings: refused, nothing was scored")

    def save(self, stem: str | Path) -> None:
        """Write the three files, each atomically; `stem` is their path without the endings."""
        facts_file = Path(f"{stem}.json")
        # If writing is interrupted, the old facts must not describe new files.
        facts_file.unlink(missing_ok=True)
        # In memory first: on a full disk, the error of `np.save` has no errno.
        buffer = io.BytesIO()
        np.save(buffer, self.emb_ND, allow_pickle=False)
        with replacing(Path(f"{stem}.npy")) as path:
            path.write_bytes(buffer.getbuffer())
        lines = [f"{utterance}\n" for utterance in self.ids]
        write_text(Path(f"{stem}.ids"), "".join(lines))
        num, dim = self.emb_ND.shape
        facts = {
            **self.facts,
            "model_sha256": self.model_sha256,
            "num": num,
            "dim": dim,
        }
        write_json(facts_file, facts)

    @classmethod
    def load(cls, stem: str | Path) -> "EmbeddingTable":
        """Read a table; FileNotFoundError if it is incomplete, ValueError if it is damaged."""
        facts_file = Path(f"{stem}.json")
        if not facts_file.is_file():
            raise FileNotFoundError(
                f"{facts_file}: missing, so this table is incomplete; {AGAIN}"
            )
        facts = read_json(facts_file, like=REQUIRED_FACTS, fix=AGAIN)
        # The other keys remain in `facts`.
        model_sha256 = facts.pop("model_sha256")
        num = facts.pop("num")
        dim = facts.pop("dim")
        ids = read_text(Path(f"{stem}.ids")).splitlines()
        try:
            emb_ND = np.asarray(np.load(f"{stem}.npy", allow_pickle=False))
        except OSError:
            raise
        # NumPy may raise any error while parsing the header of a damaged file.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{stem}.npy: is damaged ({reason}); {AGAIN}") from error
        is_as_described = (
            emb_ND.shape == (num, dim)
            and len(ids) == num
            and emb_ND.dtype == np.float32
        )
        if not is_as_described:
            raise ValueError(
                f"{facts_file}: describes {count_of(num, 'embedding')} of"
                f" {count_of(dim, 'dimension')}, but there"
                f" are {emb_ND.dtype} {emb_ND.shape} and {len(ids)} ids; {AGAIN}"
            )
        try:
            return cls(ids, emb_ND, model_sha256, facts)
        except ValueError as error:
            raise ValueError(f"{stem}.npy, .ids: {error}") from None

    def select(
        self,
        wanted_ids: Sequence[str],
        *,
        where: str = "embeddings",
    ) -> "EmbeddingTable":
        """Return the rows of `wanted_ids` in that order; ValueError names ids without embedding."""
        row_of = {utterance: row for row, utterance in enumerate(self.ids)}
        missing = [utterance for utterance in wanted_ids if utterance not in row_of]
        # The message counts all faults and names the first ones.
        faults = Faults()
        for utterance in missing:
            faults.add(
                "missing embeddings",
                f"{where}: no embedding of {utterance}; see rejected.tsv, or {AGAIN}",
            )
        faults.raise_if_any(
            f"{where}: {len(missing)} of {len(wanted_ids)} utterances are missing"
        )
        rows = np.array([row_of[utterance] for utterance in wanted_ids], dtype=np.int64)
        return EmbeddingTable(
            ids=list(wanted_ids),
            emb_ND=self.emb_ND[rows],
            model_sha256=self.model_sha256,
            facts=self.facts,
        )


def require_one_model(tables: Iterable[EmbeddingTable]) -> None:
    """Raise ValueError unless all tables are of one space, so of one model, in one precision."""
    spaces: set[str] = set()
    precisions: set[str] = set()
    for table in tables:
        spaces.add(table.space)
        # A table without this fact is in fp32.
        precision = table.facts.get("precision", "fp32")
        precisions.add(str(precision))
    for kind, values in (("models", spaces), ("precisions", precisions)):
        if len(values) > 1:
            # The first characters of a hash are enough to distinguish models.
            shown = ", ".join(f"{value:.12}" for value in sorted(values))
            raise ValueError(
                f"embeddings: of different {kind}, {shown}; {AGAIN} with one"
            )
