"""Systems of known quality on a small trial list, as score files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from compared_runs import write_list

from speakerlab.experiments.systems import NamedList, NamedSystem, Scored
from speakerlab.experiments.trial_list import TrialList, read_trial_list
from speakerlab.scoring.score_files import write_scores


def make_list(folder: Path, num_speakers: int = 10, seconds: float = 3.0) -> TrialList:
    """All pairs of three utterances of each speaker; the first one is shorter than the others."""
    write_list(folder, num_speakers)
    durations: list[str] = []
    for number, line in enumerate((folder / "utt2spk").read_text().splitlines()):
        length = seconds + 2.0 * (number % 3 > 0)
        durations.append(f"{line.split()[0]} {length}\n")
    (folder / "utt2dur").write_text("".join(durations))
    return read_trial_list(folder / "trials")


def draw_scores(
    listed: TrialList, spread: float, seed: int, speaker_spread: float = 0.0
) -> np.ndarray:
    """Targets about 1, non-targets about 0; rounded as in a score file.

    speaker_spread: of what all trials of a speaker have in common.
    """
    rng = np.random.default_rng([seed, 7])
    is_target_N = listed.trials.is_target_N
    scores_N = is_target_N + spread * rng.standard_normal(len(is_target_N))
    effect_S = speaker_spread * rng.standard_normal(1 + np.max(listed.speakers))
    for speaker_N in listed.speakers:
        scores_N += effect_S[speaker_N]
    return scores_N.round(6)


def write_system(
    path: Path, listed: TrialList, spread: float = 0.3, seed: int = 0
) -> Path:
    write_scores(path, listed.trials, draw_scores(listed, spread, seed))
    return path


def score(
    listed: TrialList,
    spreads: Sequence[float],
    *,
    names: Sequence[str] = (),
    seeds: Sequence[int] = (),
    speaker_spread: float = 0.0,
) -> list[Scored]:
    """Systems in memory; equal seeds and spreads make equal systems."""
    if not seeds:
        seeds = range(len(spreads))
    trial_list = NamedList(listed.name, listed.name, listed)
    return [
        Scored(
            NamedSystem(names[place] if names else f"system {place}"),
            trial_list,
            known_scores=draw_scores(listed, spread, seeds[place], speaker_spread),
        )
        for place, spread in enumerate(spreads)
    ]
