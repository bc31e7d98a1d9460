"""Names of identities: of enrolled speakers, of an earlier result, or with new numbers.

Letters: N speakers of recordings, G identities, D embedding dimensions.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from speakerlab.data.tables import one_word
from speakerlab.inference.diarized_speakers import Key, LocalSpeaker
from speakerlab.inference.known_speakers import Model, match_enrolled

IDENTITY = "identity"  # name of a person, with a number
UNKNOWN = "unknown"  # name of a speaker with too little speech, with a number


def name_enrolled(
    speakers: Sequence[LocalSpeaker],
    group_N: NDArray[np.int64],
    mean_GD: np.ndarray,
    model: Model,
    threshold: float | None,
) -> dict[int, str]:
    """Return the names of groups after enrolled speakers: given already, or found by the model."""
    enrolled: dict[int, str] = {}
    for speaker, group in zip(speakers, group_N.tolist()):
        if speaker.known_as:
            enrolled[group] = speaker.known_as
    if model is None:
        return enrolled
    embeddings: dict[str, np.ndarray] = {}
    for group, mean_D in enumerate(mean_GD):
        if group not in enrolled:
            embeddings[str(group)] = mean_D
    # A name belongs to one group, and those of the diarizations come first.
    taken = set(enrolled.values())
    matches = match_enrolled(embeddings, model, threshold=threshold)
    for group, match in matches.items():
        name = one_word(match.name)
        if match.is_known and name not in taken:
            enrolled[int(group)] = name
    return enrolled


def name_groups(
    speakers: Sequence[LocalSpeaker],
    group_N: NDArray[np.int64],
    *,
    unknown: set[int],
    enrolled: Mapping[int, str],
    earlier: Mapping[Key, str],
    last_numbers: Mapping[str, int],
) -> tuple[list[str], dict[str, int]]:
    """Return the name of each group, and the last numbers in use: earlier names are kept."""
    num_groups = int(group_N.max()) + 1
    kind_of: list[str] = []  # of each group
    for group in range(num_groups):
        kind_of.append(UNKNOWN if group in unknown else IDENTITY)

    # A group keeps the earlier name that most of its speech had.
    common_seconds = _common_seconds(speakers, group_N, kind_of, earlier)
    names = dict(enrolled)
    taken = set(enrolled.values())
    # The sort is stable: of equal seconds, the first in order of appearance.
    longest_first = sorted(common_seconds, key=lambda pair: -common_seconds[pair])
    for group, name in longest_first:
        if group not in names and name not in taken:
            names[group] = name
            taken.add(name)

    # Groups without an earlier name get the next numbers, which no earlier result has used.
    numbers = {IDENTITY: 0, UNKNOWN: 0, **last_numbers}
    for name in earlier.values():
        match = re.fullmatch(rf"({IDENTITY}|{UNKNOWN})(\d+)", name)
        if match:
            numbers[match[1]] = max(numbers[match[1]], int(match[2]))
    for group in range(num_groups):
        kind = kind_of[group]
        while group not in names:
            numbers[kind] += 1
            name = f"{kind}{numbers[kind]}"
            # An enrolled speaker may have such a name.
            if name not in taken:
                names[group] = name
    return [names[group] for group in range(num_groups)], numbers


def _common_seconds(
    speakers: Sequence[LocalSpeaker],
    group_N: NDArray[np.int64],
    kind_of: Sequence[str],
    earlier: Mapping[Key, str],
) -> dict[tuple[int, str], float]:
    """Return (group, earlier name) -> the seconds of the group that had this name.

    kind_of: of each group; names of the other kind are not kept.
    """
    common_seconds: dict[tuple[int, str], float] = {}
    for speaker, group in zip(speakers, group_N.tolist()):
        name = earlier.get(speaker.key, "")
        if re.fullmatch(rf"{kind_of[group]}\d+", name):
            pair = (group, name)
            seconds_before = common_seconds.get(pair, 0.0)
            common_seconds[pair] = seconds_before + speaker.seconds
    return common_seconds
