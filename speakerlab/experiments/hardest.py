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

# Whether a trial is a target -> name of such trials in the report.
KINDS = {
    True: "target trials scored low",
    False: "non-target trials scored high",
}
CLIP_SECONDS = 10
SEARCHED_SECONDS = 60  # from the start, for the loudest segment
STEP_SECONDS = 0.25  # between the starts of compared segments
# The sample rates of MPEG audio 1 and 2 (ISO 11172-3, 13818-3). At other rates, such as 8 kHz, a
# clip is FLAC; browsers play both formats.
MP3_RATES = {16000, 22050, 24000, 32000, 44100, 48000}

# Id of an utterance -> data URI; None if it cannot be read.
Player = Callable[[str], str | None]


@dataclass(frozen=True)
class HardTrial:
    """Trial with one of the worst scores of a back end; clips are data URIs of audio."""

    enrol: str
    test: str
    score: float
    enrol_clip: str | None
    test_clip: str | None


def hardest_trials(
    scored: ListScores,
    *,
    player: Player | None = None,
    num: int = 5,
) -> dict[str, list[HardTrial]]:
    """Return the `num` lowest target trials and the `num` highest non-target trials, by kind.

    Ties keep the order of the list. player: makes the clips; an enrolment model is represented by
    its first utterance.
    """
    trials = scored.listed.trials
    models = scored.listed.models
    hard_trials: dict[str, list[HardTrial]] = {}
    for is_target, kind in KINDS.items():
        rows = np.flatnonzero(trials.is_target_N == is_target)
        # The higher a target scores, or the lower a non-target, the better.
        goodness = scored.scores_N[rows] if is_target else -scored.scores_N[rows]
        order = np.argsort(goodness, kind="stable")
        hard_trials[kind] = []
        for row in rows[order[:num]]:
            enrol = trials.enrol_ids[trials.enrol_N[row]]
            test = trials.test_ids[trials.test_N[row]]
            enrol_utterance = models.get(enrol, [enrol])[0]
            trial = HardTrial(
                enrol,
                test,
                score=float(scored.scores_N[row]),
                enrol_clip=player(enrol_utterance) if player else None,
                test_clip=player(test) if player else None,
            )
            hard_trials[kind].append(trial)
    return hard_trials


def player_of(data_dir: Path, *, sample_rate: int) -> Player:
    """Return a player of the utterances of a checked data directory, packed or not.

    An utterance whose audio is missing or broken has no clip; the first one is logged.
    """
    manifest = read_manifest([data_dir], sample_rate=sample_rate)
    row_of = {utterance: row for row, utterance in enumerate(manifest.ids)}
    broken: list[str] = []

    # Hard trials often share an utterance.
    @cache
    def play(utterance: str) -> str | None:
        if utterance not in row_of:
            return None
        row = row_of[utterance]
        # Search only the start of a long recording for the loudest segment.
        num_samples = int(manifest.num_samples_N[row])
        num_searched = min(num_samples, SEARCHED_SECONDS * sample_rate)
        try:
            wave_S = manifest.read(row, 0, num_searched)
            clip_S = loudest(
                wave_S,
                CLIP_SECONDS * sample_rate,
                round(STEP_SECONDS * sample_rate),
            )
            return data_uri(clip_S, sample_rate)
        except (OSError, ValueError) as error:
            # If the folder was moved, every file fails: log only the first.
            if not broken:
                log.warning("report.html: no player: %s", error)
            broken.append(utterance)
            return None

    return play


def data_uri(wave_S: np.ndarray, sample_rate: int) -> str:
    """Return int16 samples as the data URI of a compressed file that browsers play."""
    kind = "FLAC"
    media_type = "audio/flac"
    if sample_rate in MP3_RATES:
        kind = "MP3"
        media_type = "audio/mpeg"
    content = audio.encode(wave_S, sample_rate, kind)
    text = base64.b64encode(content).decode("ascii")
    return f"data:{media_type};base64,{text}"


def loudest(wave_S: np.ndarray, num_samples: int, step: int) -> np.ndarray:
    """Return the `num_samples` with the most energy, searched every `step`; all if fewer."""
    # sums[k] is the energy of the first k samples; a segment's energy is a difference of two sums.
    energy_S = wave_S.astype(np.float64) ** 2
    sums = np.append(0.0, np.cumsum(energy_S))
    last_start = max(len(wave_S) - num_samples, 0)
    starts = np.arange(0, last_start + 1, step)
    ends = np.minimum(starts + num_samples, len(wave_S))
    segment_energies = sums[ends] - sums[starts]
    start = starts[np.argmax(segment_energies)]
    return wave_S[start : start + num_samples]
