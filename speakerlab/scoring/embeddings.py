"""Tables of embeddings: what extraction writes, process by process, and scoring reads.

Letters: N utterances, D dimensions of an embedding.
On disk a table is three files: `<stem>.npy` (float32, N x D), `<stem>.ids` (one id a line) and
`<stem>.json` (model hash, sizes, facts). The JSON is written last, so where it is, all is there.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.atomic import replacing
from speakerlab.core.faults import MAX_LINES_PER_KIND, Faults


@dataclass(frozen=True)
class EmbeddingTable:
    """Embeddings of distinct utterances, all by the model whose file has hash `model_sha256`.

    Raises ValueError, naming ids, where an id occurs twice or an embedding is not finite.
    """

    ids: list[str]
    emb_ND: NDArray[np.float32]
    model_sha256: str
    facts: Mapping[str, Any] = field(default_factory=dict)  # precision, checkpoint, what else helps

    def __post_init__(self) -> None:
        assert self.emb_ND.ndim == 2 and len(self.ids) == len(self.emb_ND), self.emb_ND.shape
        assert self.emb_ND.dtype == np.float32, self.emb_ND.dtype
        _refuse_duplicates(self.ids)
        faults = Faults()
        for row in np.flatnonzero(~np.isfinite(self.emb_ND).all(axis=1)):
            faults.add(
                "broken embeddings",
                f"embeddings: {self.ids[row]} is not finite, got "
                f"{_first_not_finite(self.emb_ND[row])}; look at its audio and at the model",
            )
        faults.raise_if_any("embeddings: refused, nothing was scored")

    def save(self, stem: str | Path) -> None:
        """Write the three files, each atomically; `stem` is their path without the endings."""
        for utterance in self.ids:
            if not utterance or utterance.split() != [utterance]:
                raise ValueError(
                    f"embeddings: an id must be one word, got {utterance!r}; rename the utterance"
                )
        described = {
            **self.facts,
            "model_sha256": self.model_sha256,
            "num": len(self.ids),
            "dim": self.emb_ND.shape[1],
        }
        _file(stem, ".json").unlink(missing_ok=True)  # an old one must not vouch for new files
        with replacing(_file(stem, ".npy")) as path, path.open("wb") as stream:
            np.save(stream, self.emb_ND, allow_pickle=False)
        with replacing(_file(stem, ".ids")) as path:
            path.write_text("".join(f"{utterance}\n" for utterance in self.ids), encoding="utf-8")
        with replacing(_file(stem, ".json")) as path:
            path.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, stem: str | Path) -> "EmbeddingTable":
        """Read what `save` wrote; a table that was not finished is refused."""
        described_path = _file(stem, ".json")
        if not described_path.is_file():
            raise FileNotFoundError(
                f"{described_path}: missing, so these embeddings were not finished; "
                "run the extraction (stage 5) again"
            )
        try:
            facts = json.loads(described_path.read_text(encoding="utf-8"))
            model_sha256, num, dim = (facts.pop(key) for key in ("model_sha256", "num", "dim"))
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{described_path}: does not describe embeddings, got {error!r}; "
                "run the extraction (stage 5) again"
            ) from error
        try:
            emb_ND = np.load(_file(stem, ".npy"), allow_pickle=False)
        except (ValueError, EOFError) as error:
            got = str(error).splitlines()[0]
            raise ValueError(
                f"{_file(stem, '.npy')}: is cut off or damaged, got '{got}'; run the extraction "
                "(stage 5) again"
            ) from error
        ids = _file(stem, ".ids").read_text(encoding="utf-8").splitlines()
        if emb_ND.shape != (num, dim) or len(ids) != num or emb_ND.dtype != np.float32:
            raise ValueError(
                f"{described_path}: {num} embeddings of {dim} dimensions are announced, got "
                f"{emb_ND.dtype} {emb_ND.shape} and {len(ids)} ids; run the extraction (stage 5) "
                "again"
            )
        return cls(ids, emb_ND, model_sha256, facts)

    @classmethod
    def merge(
        cls, tables: Sequence["EmbeddingTable"], wanted_ids: Sequence[str] | None = None
    ) -> "EmbeddingTable":
        """One table of the parts that several processes wrote.

        Rows are those of `wanted_ids` in their order (coverage is checked), or all in the order
        of the parts. Parts of different models are refused. Facts that all parts share stay.
        """
        tables = [table for table in tables if table.ids]  # a process may have had nothing to do
        if not tables:
            raise ValueError("embeddings: nothing to merge, got no part with rows; run stage 5")
        require_one_model(tables)
        dims = sorted({table.emb_ND.shape[1] for table in tables})
        if len(dims) > 1:
            raise ValueError(
                f"embeddings: the parts differ in dimension, got {dims}; run the extraction again"
            )
        first = tables[0].facts
        facts = {
            key: value
            for key, value in first.items()
            if all(key in table.facts and table.facts[key] == value for table in tables)
        }
        ids = [utterance for table in tables for utterance in table.ids]
        emb_ND = np.concatenate([table.emb_ND for table in tables])
        merged = cls(ids, emb_ND, tables[0].model_sha256, facts)
        return merged if wanted_ids is None else merged.select(wanted_ids)

    def check_coverage(self, wanted_ids: Iterable[str], *, where: str = "embeddings") -> int:
        """Raise ValueError naming ids that have no embedding; returns how many are not wanted."""
        wanted, present = dict.fromkeys(wanted_ids), set(self.ids)
        faults = Faults()
        missing = [utterance for utterance in wanted if utterance not in present]
        for utterance in missing:
            faults.add(
                "missing embeddings",
                f"{where}: no embedding of {utterance}; see rejected.tsv, or run stage 5 again",
            )
        faults.raise_if_any(f"{where}: {len(missing)} of {len(wanted)} utterances are missing")
        return len(present) - len(wanted)

    def select(self, wanted_ids: Sequence[str], *, where: str = "embeddings") -> "EmbeddingTable":
        """The rows of `wanted_ids`, in that order; coverage is checked."""
        self.check_coverage(wanted_ids, where=where)
        row_of = {utterance: row for row, utterance in enumerate(self.ids)}
        rows = np.fromiter((row_of[u] for u in wanted_ids), np.int64, len(wanted_ids))
        return EmbeddingTable(list(wanted_ids), self.emb_ND[rows], self.model_sha256, self.facts)


def require_one_model(tables: Iterable[EmbeddingTable]) -> None:
    """Raise ValueError unless all come from the same model file, in the same number format."""
    tables = list(tables)
    precisions = sorted({str(table.facts.get("precision", "fp32")) for table in tables})
    if len(precisions) > 1:
        raise ValueError(
            f"embeddings: made in {len(precisions)} precisions, got {' and '.join(precisions)}; "
            "run the extraction (stage 5) again with one --precision"
        )
    hashes = sorted({table.model_sha256 for table in tables})
    if len(hashes) > 1:
        raise ValueError(
            f"embeddings: made by {len(hashes)} different models, got sha256 "
            f"{', '.join(value[:12] for value in hashes[:MAX_LINES_PER_KIND])}; "
            "run the extraction (stage 5) again"
        )


def _file(stem: str | Path, ending: str) -> Path:
    """`<stem><ending>`; a dot inside the stem is part of the name."""
    return Path(f"{stem}{ending}")


def _refuse_duplicates(ids: Sequence[str]) -> None:
    if len(set(ids)) == len(ids):
        return
    faults = Faults()
    seen: set[str] = set()
    for utterance in ids:
        if utterance in seen:
            faults.add(
                "duplicate ids",
                f"embeddings: {utterance} occurs more than once; remove old parts and run the "
                "extraction (stage 5) again",
            )
        seen.add(utterance)
    faults.raise_if_any("embeddings: refused, ids must be unique")


def _first_not_finite(emb_D: np.ndarray) -> str:
    dimension = int((~np.isfinite(emb_D)).argmax())
    return f"{emb_D[dimension]} in dimension {dimension}"
