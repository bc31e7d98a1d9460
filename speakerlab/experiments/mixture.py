"""What differs between the corpora of a training: their shares, crops, odds and speeds.

In: the entries of `data.train`, and the manifest that was read from them, one part for each.

Letters: N utterances, C corpora, K speeds, P speakers.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from speakerlab.config.schema import Config
from speakerlab.core.batch import Draw
from speakerlab.data.loader import DrawFunctions
from speakerlab.data.manifest import Manifest

# Key of a corpus that lowers a probability of `augment` -> the augmentation.
ODDS = {"noise_prob": "noise", "room_prob": "room"}
ROUNDING = 1e-6  # of the sum of the shares


def check_mixture(config: Config) -> None:
    """Raise ValueError, one line, for settings of corpora that contradict the others."""
    corpora = config.data.corpora
    for index, corpus in enumerate(corpora):
        where = f"data.train[{index}]"
        for key in ODDS:
            prob = getattr(corpus, key)
            highest = getattr(config.augment, key)
            if prob is not None and prob > highest:
                raise ValueError(
                    f"{where}.{key}: {prob:g} is above augment.{key}, {highest:g}, which"
                    " is for all corpora; raise that one"
                )
        others = set(corpus.speeds or ()) - set(config.augment.speeds)
        if others:
            raise ValueError(
                f"{where}.speeds: {min(others):g} is not among augment.speeds"
                f" ({', '.join(f'{speed:g}' for speed in config.augment.speeds)}); add"
                " it there"
            )
    _check_shares([corpus.share for corpus in corpora])


def _check_shares(shares: Sequence[float | None]) -> None:
    given = [share for share in shares if share is not None]
    total = math.fsum(given)
    all_have_shares = len(given) == len(shares)
    if all_have_shares and abs(total - 1) > ROUNDING:
        raise ValueError(
            f"data.train: the shares sum up to {total:g}, not 1; change one, or leave"
            " one out, which then gets the rest"
        )
    if given and not all_have_shares and total >= 1:
        raise ValueError(
            f"data.train: the shares sum up to {total:g}, so nothing is left for the"
            " corpora without a share; lower one"
        )


def corpus_shares(config: Config, num_samples_C: Sequence[float]) -> np.ndarray | None:
    """Return the share of each corpus in an epoch, None if no corpus sets one.

    Corpora without a share divide what is left, in proportion to their samples.
    """
    corpora = config.data.corpora
    given = [corpus.share for corpus in corpora if corpus.share is not None]
    if not given:
        return None
    for corpus, num_samples in zip(corpora, num_samples_C):
        if not num_samples:
            raise ValueError(
                f"data.train: {corpus.dir} has no utterance to train on, but the shares"
                " count on it; lower data.valid_speakers, or leave the directory out"
            )
    left = 1 - math.fsum(given)
    samples_left = 0.0
    for corpus, num_samples in zip(corpora, num_samples_C):
        if corpus.share is None:
            samples_left += num_samples
    shares: list[float] = []
    for corpus, num_samples in zip(corpora, num_samples_C):
        share = corpus.share
        if share is None:
            share = left * num_samples / samples_left
        shares.append(share)
    return np.array(shares)


def seconds_per_crop(config: Config, manifest: Manifest) -> float | np.ndarray | None:
    """Return `training.one_crop_per` in seconds, or one value for each utterance.

    math.inf: one crop for each utterance; None or NaN: as many as fit.
    """
    intervals = [
        corpus.one_crop_per or config.training.one_crop_per
        for corpus in config.data.corpora
    ]
    seconds: list[float] = []
    for interval in intervals:
        if interval is None:
            seconds.append(math.nan)
        elif isinstance(interval, str):  # "utterance"
            seconds.append(math.inf)
        else:
            seconds.append(interval)
    first = seconds[0]
    if all(value == first for value in seconds):
        return first
    if np.isnan(seconds).all():
        return None
    return np.array(seconds)[manifest.part_N]


def draws_of_corpora(
    config: Config, draw_functions: DrawFunctions
) -> list[DrawFunctions]:
    """Return the draws of each corpus: those of all, less often or of fewer speeds."""
    draws: list[DrawFunctions] = []
    for corpus in config.data.corpora:
        functions = dict(draw_functions)
        for key, name in ODDS.items():
            prob = getattr(corpus, key)
            if prob is not None and name in functions:
                prob_of_all = getattr(config.augment, key)
                functions[name] = thinned(functions[name], prob / prob_of_all)
        if corpus.speeds is not None and "speed" in functions:
            speeds = config.augment.speeds
            allowed = {speeds.index(speed) for speed in corpus.speeds}
            functions["speed"] = among(functions["speed"], allowed)
        draws.append(functions)
    return draws


def thinned(
    draw: Callable[[np.random.Generator], Draw | None], prob: float
) -> Callable[[np.random.Generator], Draw | None]:
    """Return a function like `draw`, whose draws are left out but for a share `prob` of them."""

    def draw_less_often(rng: np.random.Generator) -> Draw | None:
        drawn = draw(rng)
        return drawn if rng.random() < prob else None

    return draw_less_often


def among(
    draw: Callable[[np.random.Generator], Draw | None], groups: set[int]
) -> Callable[[np.random.Generator], Draw | None]:
    """Return a function like `draw`, which draws again until the group is one of `groups`.

    `groups` has 0, the group of a crop that is not changed, so that this ends.
    """

    def draw_again(rng: np.random.Generator) -> Draw | None:
        while True:
            drawn = draw(rng)
            group = 0 if drawn is None else drawn.group
            if group in groups:
                return drawn

    return draw_again


def has_speed(config: Config, manifest: Manifest) -> np.ndarray:
    """Return used_KP: whether a speaker is ever heard at a speed of `augment.speeds`."""
    speeds = config.augment.speeds
    shape = (len(speeds), len(manifest.speakers))
    corpora = config.data.corpora
    if all(corpus.speeds is None for corpus in corpora):
        return np.ones(shape, dtype=bool)
    used_KP = np.zeros(shape, dtype=bool)
    for index, corpus in enumerate(corpora):
        speakers = np.unique(manifest.speaker_N[manifest.part_N == index])
        for number, speed in enumerate(speeds):
            if corpus.speeds is None or speed in corpus.speeds:
                used_KP[number, speakers] = True
    return used_KP
