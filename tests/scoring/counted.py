"""Rates counted one threshold at a time, and trials with speakers."""

import numpy as np


def brute_points(scores, is_target, weights):
    """Rates at each threshold, counted one threshold at a time."""
    points = []
    for threshold in [*sorted(set(scores.tolist())), np.inf]:
        accepted = scores >= threshold
        miss = weights[is_target & ~accepted].sum() / weights[is_target].sum()
        fa = weights[~is_target & accepted].sum() / weights[~is_target].sum()
        points.append((miss, fa))
    return points


def brute_eer(scores, is_target, weights=None):
    points = brute_points(scores, is_target, np.ones(len(scores)) if weights is None else weights)
    for (miss_0, fa_0), (miss_1, fa_1) in zip(points, points[1:]):
        if miss_0 < fa_0 and miss_1 >= fa_1:
            share = (fa_0 - miss_0) / ((fa_0 - miss_0) + (miss_1 - fa_1))
            return miss_0 + share * (miss_1 - miss_0)
    raise AssertionError("no crossing")


def simulated(*, num_speakers, per_speaker, seed, spread=1.3, dim=8):
    """All pairs of noisy copies of random directions: scores, truth, and the two speakers."""
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=(num_speakers, 1, dim))
    # speakers differ in how far their utterances scatter, so trials of one speaker go together
    scatter = spread * np.exp(0.3 * rng.normal(size=(num_speakers, 1, 1)))
    emb = centre + scatter * rng.normal(size=(num_speakers, per_speaker, dim))
    emb = emb.reshape(-1, dim) / np.linalg.norm(emb.reshape(-1, dim), axis=1, keepdims=True)
    i, j = np.triu_indices(len(emb), 1)
    speaker = np.arange(num_speakers).repeat(per_speaker)
    return (emb @ emb.T)[i, j], speaker[i] == speaker[j], speaker[i], speaker[j]
