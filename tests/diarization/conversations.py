"""Synthetic conversations: turns, and embeddings of windows drawn from a model of speakers.

Letters: N windows, K speakers, D dimensions.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from speakerlab.diarization.regions import Region, Turn, merge_regions
from speakerlab.diarization.windows import cut_windows

DIM = 64
SAME_COSINE, BETWEEN_COSINE = 0.5, 0.1  # means over windows of one speaker and of two


class Conversation(NamedTuple):
    turns: list[Turn]  # without overlap
    regions: list[Region]
    windows: list[Region]
    emb_ND: np.ndarray
    speaker_N: np.ndarray  # who speaks longest in a window


def converse(seed: int, num_speakers: int, *, num_turns: int = 80) -> Conversation:
    """Turns of 0.5 to 20 s, half of them after a pause; everyone has at least four."""
    rng = np.random.default_rng([seed, num_speakers])
    order = rng.permutation(np.resize(np.arange(num_speakers), 4 * num_speakers)).tolist()
    order += rng.integers(num_speakers, size=max(num_turns - len(order), 0)).tolist()
    turns, now = [], 0.0
    for speaker in order:
        length = float(np.clip(rng.lognormal(np.log(3.0), 0.7), 0.5, 20.0))
        turns.append(Turn(now, now + length, str(speaker)))
        now += length + (float(rng.exponential(0.6)) if rng.random() < 0.5 else 0.0)
    regions = merge_regions(turn[:2] for turn in turns)
    windows = cut_windows(regions)
    share_NK = np.array([_shares(window, turns, num_speakers) for window in windows])
    return Conversation(turns, regions, windows, embed(rng, share_NK), share_NK.argmax(axis=1))


def embed(rng: np.random.Generator, share_NK: np.ndarray) -> np.ndarray:
    """Return emb_ND: the voices of a window by their shares, and what differs between windows."""
    mean_D = rng.normal(size=DIM) * np.sqrt(BETWEEN_COSINE / DIM)
    voice_KD = rng.normal(size=(share_NK.shape[1], DIM))
    voice_KD *= np.sqrt((SAME_COSINE - BETWEEN_COSINE) / DIM)
    noise_ND = rng.normal(size=(len(share_NK), DIM)) * np.sqrt((1.0 - SAME_COSINE) / DIM)
    return (mean_D + share_NK @ voice_KD + noise_ND).astype(np.float32)


def _shares(window: Region, turns: list[Turn], num_speakers: int) -> np.ndarray:
    share_K = np.zeros(num_speakers)
    for start, end, speaker in turns:
        share_K[int(speaker)] += max(min(end, window[1]) - max(start, window[0]), 0.0)
    return share_K / share_K.sum()


def agreement(found_N: np.ndarray, true_N: np.ndarray) -> float:
    """Return the share of windows whose speaker is right, with the best match of the names."""
    count_KK = np.zeros((found_N.max() + 1, true_N.max() + 1))
    np.add.at(count_KK, (found_N, true_N), 1)
    rows, columns = linear_sum_assignment(-count_KK)
    return count_KK[rows, columns].sum() / len(true_N)
