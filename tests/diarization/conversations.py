"""Synthetic conversations: turns, and embeddings of windows drawn from a model of speakers.

Letters: N windows, K speakers, D dimensions.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from speakerlab.diarization.regions import Region, Turn, merge_regions
from speakerlab.diarization.windows import cut_windows

DIM = 64
# means over windows of one speaker and of two
SAME_COSINE = 0.5
BETWEEN_COSINE = 0.1


class Conversation(NamedTuple):
    turns: list[Turn]  # without overlap
    regions: list[Region]
    windows: list[Region]
    emb_ND: np.ndarray
    speaker_N: np.ndarray  # who speaks longest in a window


def converse(seed: int, num_speakers: int, *, num_turns: int = 80) -> Conversation:
    """Turns of 0.5 to 20 s, half of them after a pause; everyone has at least four."""
    rng = np.random.default_rng([seed, num_speakers])
    speakers = np.arange(num_speakers)
    four_each = np.resize(speakers, 4 * num_speakers)
    order = rng.permutation(four_each).tolist()
    num_others = max(num_turns - len(order), 0)
    others = rng.integers(num_speakers, size=num_others)
    order += others.tolist()
    turns = []
    now = 0.0
    for speaker in order:
        # half of the turns are longer than 3 s
        length = rng.lognormal(np.log(3.0), 0.7)
        length = float(np.clip(length, 0.5, 20.0))
        turns.append(Turn(now, now + length, str(speaker)))
        pause = 0.0
        if rng.random() < 0.5:
            pause = float(rng.exponential(0.6))
        now += length + pause

    regions = merge_regions(turn[:2] for turn in turns)
    windows = cut_windows(regions)
    shares = [_shares(window, turns, num_speakers) for window in windows]
    share_NK = np.array(shares)
    return Conversation(
        turns=turns,
        regions=regions,
        windows=windows,
        emb_ND=embed(rng, share_NK),
        speaker_N=share_NK.argmax(axis=1),
    )


def embed(rng: np.random.Generator, share_NK: np.ndarray) -> np.ndarray:
    """Return emb_ND: the voices of a window by their shares, and what differs between windows."""
    num_windows, num_speakers = share_NK.shape
    # all voices share a mean; the three variances add up to one
    mean_D = rng.normal(size=DIM) * np.sqrt(BETWEEN_COSINE / DIM)
    voice_variance = SAME_COSINE - BETWEEN_COSINE
    voice_KD = rng.normal(size=(num_speakers, DIM))
    voice_KD *= np.sqrt(voice_variance / DIM)
    noise_variance = 1.0 - SAME_COSINE
    noise_ND = rng.normal(size=(num_windows, DIM))
    noise_ND *= np.sqrt(noise_variance / DIM)
    emb_ND = mean_D + share_NK @ voice_KD + noise_ND
    return emb_ND.astype(np.float32)


def _shares(window: Region, turns: list[Turn], num_speakers: int) -> np.ndarray:
    share_K = np.zeros(num_speakers)
    for start, end, speaker in turns:
        low, high = window
        overlap = min(end, high) - max(start, low)
        share_K[int(speaker)] += max(overlap, 0.0)
    return share_K / share_K.sum()


def agreement(found_N: np.ndarray, true_N: np.ndarray) -> float:
    """Return the share of windows whose speaker is right, with the best match of the names."""
    num_found = found_N.max() + 1
    num_true = true_N.max() + 1
    count_KK = np.zeros((num_found, num_true))
    np.add.at(count_KK, (found_N, true_N), 1)
    rows, columns = linear_sum_assignment(-count_KK)
    num_right = count_KK[rows, columns].sum()
    return num_right / len(true_N)
