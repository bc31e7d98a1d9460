"""Speakers of a recording among those who are enrolled: who is known.

In: the mean embedding of each speaker, and a model with enrolled speakers. Out: a match for each.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from speakerlab.data.tables import one_word

Model = Any  # a SpeakerModel, whose module imports this one


@dataclass(frozen=True)
class Match:
    """Best match of a speaker of a recording among the enrolled speakers."""

    name: str
    score: float
    threshold: float
    is_known: bool  # the score reaches the threshold: the speaker gets this name


def check_enrolled(model: Model) -> None:
    """Raise ValueError if a model cannot name speakers after enrolled ones."""
    if not model.speakers:
        raise ValueError("known: no speaker is enrolled; enrol some first")
    if model.enrolled_by != model.sha256:
        raise ValueError(
            "known: the speakers were enrolled by another model, for whose scores there"
            " is no threshold; enrol them with this model"
        )
    if model.calibration is None:
        raise ValueError(
            "known: the model has no calibration of verification to decide who is"
            " known; run `speakerlab calibrate --model MODEL --data DIR`"
        )
    # In RTTM, blanks in names become "_", and unknown speakers are called speaker1, speaker2, ...
    first_with_word: dict[str, str] = {}
    for name in model.speakers:
        first_name = first_with_word.setdefault(one_word(name), name)
        is_taken = first_name != name
        if is_taken or re.fullmatch(r"speaker\d+|channel\d+(-.*)?", name):
            owner = f"'{first_name}'" if is_taken else "unknown speakers"
            raise ValueError(
                f"known: '{name}' and {owner} have the same name in RTTM; enrol the"
                " speaker under another name"
            )


def match_enrolled(
    embeddings: Mapping[str, np.ndarray],
    model: Model,
    *,
    far: float | None = None,
    threshold: float | None = None,
) -> dict[str, Match]:
    """Return the match of each of several different speakers among the enrolled ones.

    embeddings: name -> (D,). threshold: a cosine, instead of the calibrated one. The pairs with the
    best scores are matched first; each enrolled speaker is known once. The match of an unknown
    speaker is the one with the best score.
    """
    # All pairs of a speaker and an enrolled speaker, best score first.
    pairs: list[tuple[str, Match]] = []
    for name, emb_D in embeddings.items():
        identification = model.rank(emb_D, far=far, threshold=threshold)
        decided_at = identification.threshold  # not None: see `check_enrolled`
        for enrolled_name, score in identification.ranking:
            match = Match(
                name=enrolled_name,
                score=score,
                threshold=decided_at,
                is_known=score >= decided_at,
            )
            pairs.append((name, match))
    # The sort is stable: equal scores stay in the order of appearance.
    pairs.sort(key=lambda pair: -pair[1].score)

    # Two speakers never get the same name: the better score wins.
    matches: dict[str, Match] = {}
    taken: set[str] = set()
    for name, match in pairs:
        if not match.is_known:
            continue
        if name not in matches and match.name not in taken:
            matches[name] = match
            taken.add(match.name)
    # The match of the others is the best score, which comes first.
    for name, match in pairs:
        unknown = replace(match, is_known=False)
        matches.setdefault(name, unknown)
    return matches
