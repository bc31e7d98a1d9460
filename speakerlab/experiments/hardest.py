"""The trials that a system gets most wrong, with clips to listen to.

In: trials, scores, a data directory. Out: `HardTrial`s whose clips are data URIs, for the page.
Letters: N trials, S samples.
"""

import base64
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from speakerlab.data import audio
from speakerlab.data.manifest import read_manifest
from speakerlab.experiments.page import HardTrial
from speakerlab.scoring.trials import Trials

log = logging.getLogger(__name__)

KINDS = {True: "target trials scored low", False: "non-target trials scored high"}
CLIP_SECONDS = 10
SEARCHED_SECONDS = 60  # from the beginning, for the loudest stretch
STEP_SECONDS = 0.25  # between two stretches that are compared
# The rates of MPEG audio 1 and 2 (ISO 11172-3, 13818-3). At another, such as telephone's, a clip is
# FLAC; browsers play both.
MP3_RATES = {16000, 22050, 24000, 32000, 44100, 48000}

Player = Callable[[str], str | None]  # id of an utterance -> data URI, None where it cannot be read


def hardest_trials(
    trials: Trials,
    scores_N: np.ndarray,
    *,
    name: str,
    backend: str,
    player: Player | None = None,
    utterances_of: Mapping[str, Sequence[str]] | None = None,
    num: int = 5,
) -> list[HardTrial]:
    """The `num` target trials scored lowest, then the `num` non-target trials scored highest.

    Equal scores stand in the order of the list. name: of the trial list. player: gives the clips;
    an enrolment model of `utterances_of` (model -> its utterances) is heard in its first one.
    """
    found = []
    for is_target, kind in KINDS.items():
        own = np.flatnonzero(trials.is_target_N == is_target)
        badness = -scores_N[own] if is_target else scores_N[own]
        for i in own[_largest(badness, num)]:
            enrol = trials.enrol_ids[trials.enrol_N[i]]
            test = trials.test_ids[trials.test_N[i]]
            first = (utterances_of or {}).get(enrol, [enrol])[0]
            found.append(
                HardTrial(
                    trials=name,
                    backend=backend,
                    enrol=enrol,
                    test=test,
                    score=float(scores_N[i]),
                    kind=kind,
                    enrol_clip=player(first) if player else None,
                    test_clip=player(test) if player else None,
                )
            )
    return found


def player_of(data_dir: Path, *, sample_rate: int) -> Player:
    """What plays the utterances of a checked data directory, packed or not.

    An utterance whose audio is gone or broken has no clip; the first such is logged.
    """
    manifest = read_manifest([data_dir], sample_rate=sample_rate)
    row_of = {utterance: row for row, utterance in enumerate(manifest.ids)}
    broken: list[str] = []

    @cache
    def play(utterance: str) -> str | None:
        if utterance not in row_of:
            return None
        row = row_of[utterance]
        num_samples = min(int(manifest.num_samples_N[row]), SEARCHED_SECONDS * sample_rate)
        try:
            wave_S = manifest.read(row, 0, num_samples)
        except (OSError, ValueError) as error:
            if not broken:
                log.warning("report.html lacks a player: %s", error)
            broken.append(utterance)
            return None
        return clip(wave_S, sample_rate)

    return play


def clip(wave_S: np.ndarray, sample_rate: int) -> str:
    """The loudest ten seconds of int16 samples, or all where there are fewer, as a data URI."""
    start = loudest_start(wave_S, CLIP_SECONDS * sample_rate, round(STEP_SECONDS * sample_rate))
    cut_S = wave_S[start : start + CLIP_SECONDS * sample_rate]
    kind, mime = ("MP3", "mpeg") if sample_rate in MP3_RATES else ("FLAC", "flac")
    data = base64.b64encode(audio.encode(cut_S, sample_rate, kind)).decode("ascii")
    return f"data:audio/{mime};base64,{data}"


def loudest_start(wave_S: np.ndarray, num_samples: int, step: int) -> int:
    """Where the stretch of `num_samples` with the most energy begins, every `step` samples."""
    sums = np.append(0.0, np.cumsum(wave_S.astype(np.float64) ** 2))
    starts = np.arange(0, max(len(wave_S) - num_samples, 0) + 1, step)
    ends = np.minimum(starts + num_samples, len(wave_S))
    return int(starts[np.argmax(sums[ends] - sums[starts])])


def _largest(values: np.ndarray, num: int) -> np.ndarray:
    """Where the `num` largest stand, largest first, equal ones in their order."""
    num = min(num, len(values))
    if not num:
        return np.zeros(0, dtype=np.intp)
    least = np.partition(values, len(values) - num)[len(values) - num]
    chosen = np.flatnonzero(values >= least)
    return chosen[np.argsort(-values[chosen], kind="stable")][:num]
