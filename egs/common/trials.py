"""Trials from utterances grouped by speaker: pairs drawn with a seed, the same on every machine.

In: speaker -> utterance ids. Out: (enrolment, test, same speaker) triples, sorted.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np

from speakerlab.data.tables import Trial

Pair = tuple[str, str]


def group_by_speaker(speakers: Mapping[str, str]) -> dict[str, list[str]]:
    """utterance -> speaker turned into speaker -> utterances, all sorted."""
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
    """Pairs of two utterances of one speaker, at most `max_per_speaker` each.

    With `sessions` (utterance -> session) a speaker of several sessions gets pairs across sessions
    only: within one, the microphone and the room would help to recognise the speaker.
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
    """Pairs of utterances of two speakers: all where they are at most `max_trials`, else a sample.

    Of a sample every pair of speakers gets the same number, up to one.
    """
    rng = np.random.default_rng([seed, 1])
    pairs = sorted(speaker_pairs)
    order = rng.permutation(len(pairs))  # who gets one more must not follow the alphabet
    everything = sum(len(groups[a]) * len(groups[b]) for a, b in pairs)
    left = min(everything, max_trials)
    trials: list[Trial] = []
    for done, i in enumerate(order):
        ours, theirs = (groups[speaker] for speaker in pairs[i])
        num_pairs = len(ours) * len(theirs)
        share = -(-left // (len(order) - done)) if everything > max_trials else num_pairs
        picked = rng.permutation(num_pairs)[:share]
        for k in map(int, picked):
            trials.append((ours[k // len(theirs)], theirs[k % len(theirs)], False))
        left -= len(picked)
    return sorted(trials)
