"""The hardest trials of a system, with clips to listen to.

Letters: N trials, S samples.
"""

import base64
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from speakerlab.data import audio
from speakerlab.data.manifest import read_manifest
from speakerlab.experiments.trial_list import ListScores

log = logging.getLogger(__name__)

KINDS = {True: "target trials scored low", False: "non-target trials scored high"}
CLIP_SECONDS = 10
SEARCHED_SECONDS = 60  # from the start, for the loudest segment
STEP_SECONDS = 0.25  # between two segments that are compared
# The rates of MPEG audio 1 and 2 (ISO 11172-3, 13818-3). At others, such as 8 kHz, a clip is FLAC;
# browsers play both.
MP3_RATES = {16000, 22050, 24000, 32000, 44100, 48000}

Player = Callable[[str], str | None]  # id of an utterance -> data URI; None if it cannot be read


@dataclass(frozen=True)
class HardTrial:
    """A trial that a back end got wrong, or nearly; clips are data URIs of audio."""

    enrol: str
    test: str
    score: float
    enrol_clip: str | None
    test_clip: str | None


def hardest_trials(
    scored: ListScores, *, player: Player | None = None, num: int = 5
) -> dict[str, list[HardTrial]]:
    """Return the `num` lowest target trials and the `num` highest non-target trials, by kind.

    Ties keep the order of the list. player: makes the clips; an enrolment model is represented by
    its first utterance.
    """
    trials, found = scored.listed.trials, dict[str, list[HardTrial]]()
    for is_target, kind in KINDS.items():
        own = np.flatnonzero(trials.is_target_N == is_target)
        goodness = scored.scores_N[own] * (1 if is_target else -1)
        found[kind] = []
        for i in own[np.argsort(goodness, kind="stable")[:num]]:
            enrol = trials.enrol_ids[trials.enrol_N[i]]
            test = trials.test_ids[trials.test_N[i]]
            first = scored.listed.models.get(enrol, [enrol])[0]
            clips = (player(first), player(test)) if player else (None, None)
            found[kind].append(HardTrial(enrol, test, float(scored.scores_N[i]), *clips))
    return found


def player_of(data_dir: Path, *, sample_rate: int) -> Player:
    """Return a player of the utterances of a checked data directory, packed or not.

    An utterance whose audio is missing or broken has no clip; the first one is logged.
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
            cut = (CLIP_SECONDS * sample_rate, round(STEP_SECONDS * sample_rate))
            return data_uri(loudest(manifest.read(row, 0, num_samples), *cut), sample_rate)
        except (OSError, ValueError) as error:
            if not broken:
                log.warning("report.html: no player: %s", error)
            broken.append(utterance)
            return None

    return play


def data_uri(wave_S: np.ndarray, sample_rate: int) -> str:
    """Return int16 samples as the data URI of a compressed file that browsers play."""
    kind, mime = ("MP3", "mpeg") if sample_rate in MP3_RATES else ("FLAC", "flac")
    data = base64.b64encode(audio.encode(wave_S, sample_rate, kind)).decode("ascii")
    return f"data:audio/{mime};base64,{data}"


def loudest(wave_S: np.ndarray, num_samples: int, step: int) -> np.ndarray:
    """Return the `num_samples` with the most energy, searched every `step`; all if fewer."""
    sums = np.append(0.0, np.cumsum(wave_S.astype(np.float64) ** 2))
    starts = np.arange(0, max(len(wave_S) - num_samples, 0) + 1, step)
    ends = np.minimum(starts + num_samples, len(wave_S))
    start = starts[np.argmax(sums[ends] - sums[starts])]
    return wave_S[start : start + num_samples]
