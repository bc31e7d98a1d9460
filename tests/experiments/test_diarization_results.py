"""Intervals of DER and JER against simulated recordings with known error rates."""

import numpy as np
import pytest

from speakerlab.diarization.scoring import Errors
from speakerlab.experiments.diarization import results_of

TRUE_DER, TRUE_JER, NUM_SPEAKERS = 1 / 6, 1 / 4, 4


def simulated(num_recordings: int, seed: int) -> dict[str, Errors]:
    """Recordings of 2 to 13 minutes (in 90 %), some of them much more difficult than others."""
    rng, found = np.random.default_rng([num_recordings, seed]), {}
    for number in range(num_recordings):
        seconds, rate = 300 * rng.lognormal(0.0, 0.55), rng.beta(2, 10)
        jaccard = rng.beta(2, 6) * rng.uniform(0, 2, NUM_SPEAKERS)
        counts = {"num_speakers": NUM_SPEAKERS, "num_found": NUM_SPEAKERS}
        times = {"scored": seconds, "confusion": rate * seconds, "speech": seconds}
        none = dict.fromkeys(("missed", "false_alarm", "overlapped"), 0.0)
        found[str(number)] = Errors(jaccard=tuple(jaccard.tolist()), **counts, **times, **none)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_recordings", [10, 40])
def test_intervals_have_their_nominal_coverage(num_recordings):
    num, hits = 400, np.zeros(2)
    for seed in range(num):
        total = results_of(simulated(num_recordings, seed), {})["total"]
        for row, (name, true) in enumerate({"der": TRUE_DER, "jer": TRUE_JER}.items()):
            low, high = total[f"{name}_ci95"]
            hits[row] += low <= true <= high
    assert np.all(np.abs(hits / num - 0.95) < 2.6 * np.sqrt(0.95 * 0.05 / num)), hits / num
