"""Enrolment models of several utterances. In: embeddings, what a model is made of. Out: theirs.

Letters: M models, N utterances, D dimensions.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from speakerlab.core.faults import Faults
from speakerlab.scoring.embeddings import EmbeddingTable


def average_models(table: EmbeddingTable, models: Mapping[str, Sequence[str]]) -> EmbeddingTable:
    """A table of the models: the mean of the embeddings of a model's utterances, as they are.

    This is what WeSpeaker's CN-Celeb recipe calls the averaged protocol. Raises ValueError for a
    model without utterances and for utterances without an embedding.
    """
    wanted = list(dict.fromkeys(name for names in models.values() for name in names))
    found = table.select(wanted, where="enrolment")
    row_of = {name: row for row, name in enumerate(wanted)}
    rows = [[row_of[name] for name in names] for names in models.values()]
    faults = Faults()
    for model in (model for model, own in zip(models, rows) if not own):
        faults.add("models", f"enrolment: {model} has no utterances, got an empty line; add some")
    faults.raise_if_any("enrolment: refused, a model needs utterances")
    emb_MD = np.stack([found.emb_ND[own].mean(axis=0) for own in rows])
    return EmbeddingTable(list(models), emb_MD, table.model_sha256, table.facts)


def speaker_of_models(
    models: Mapping[str, Sequence[str]], speaker_of: Mapping[str, str], *, where: str = "enrolment"
) -> dict[str, str]:
    """model -> speaker. Raises ValueError for a model whose utterances are of several."""
    faults, found = Faults(), dict[str, str]()
    for model, names in models.items():
        speakers = sorted({speaker_of.get(name, "nobody") for name in names})
        if len(speakers) != 1:
            got = ", ".join(speakers)
            faults.add("models", f"{where}: {model} must be one speaker, got {got}; mend it")
        found[model] = speakers[0]
    faults.raise_if_any(f"{where}: refused, a model is one speaker")
    return found
