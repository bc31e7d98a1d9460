"""Drawing verification trials with a fixed seed, the same on every machine."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np

from speakerlab.data.tables import Trial

Pair = tuple[str, str]


def group_by_speaker(speakers: Mapping[str, str]) -> dict[str, list[str]]:
    """Turn utterance -> speaker into speaker -> utterances, sorted."""
    groups: dict[str, list[str]] = {}
    for utterance in sorted(speakers):
        groups.setdefault(speakers[utterance], []).append(utterance)
    return dict(sorted(groups.items()))


def draw_targets(
    groups: Mapping[str, Sequence[str]],
    *,
    seed: int,
    max_per_speaker: int,
    sessions: Mapping[str, str] | None = None,
) -> list[Trial]:
    """Return pairs of utterances of one speaker, at most `max_per_speaker` per speaker.

    With `sessions` (utterance -> session), speakers with several sessions get only pairs across
    sessions: within one session, the microphone and the room would help to recognise the speaker.
    """
    rng = np.random.default_rng([seed, 0])
    trials: list[Trial] = []
    for utterances in groups.values():
        pairs = list(combinations(utterances, 2))
        if sessions is not None:
            pairs = [(a, b) for a, b in pairs if sessions[a] != sessions[b]] or pairs
        keep = rng.permutation(len(pairs))[:max_per_speaker]
        trials += [(*pairs[i], True) for i in sorted(keep)]
    return sorted(trials)


def draw_nontargets(
    groups: Mapping[str, Sequence[str]],
    *,
    speaker_pairs: Iterable[Pair],
    seed: int,
    max_trials: int,
) -> list[Trial]:
    """Return pairs of utterances of different speakers: all, or a sample of `max_trials`.

    In a sample, the numbers of trials of two pairs of speakers differ by at most one.
    """
    rng = np.random.default_rng([seed, 1])
    pairs = sorted(speaker_pairs)
    order = rng.permutation(
        len(pairs)
    )  # which pairs get one more must not depend on the alphabet
    everything = sum(len(groups[a]) * len(groups[b]) for a, b in pairs)
    left = min(everything, max_trials)
    trials: list[Trial] = []
    for done, i in enumerate(order):
        ours, theirs = (groups[speaker] for speaker in pairs[i])
        num_pairs = len(ours) * len(theirs)
        share = (
            -(-left // (len(order) - done)) if everything > max_trials else num_pairs
        )
        picked = rng.permutation(num_pairs)[:share]
        for k in map(int, picked):
            trials.append((ours[k // len(theirs)], theirs[k % len(theirs)], False))
        left -= len(picked)
    return sorted(trials)
