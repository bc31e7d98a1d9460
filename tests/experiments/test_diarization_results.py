"""Intervals of DER and JER against simulated recordings with known error rates."""

import numpy as np
import pytest

from speakerlab.diarization.scoring import Errors
from speakerlab.experiments.diarization import results_of

TRUE_DER = 1 / 6
TRUE_JER = 1 / 4
NUM_SPEAKERS = 4


def simulated(num_recordings: int, seed: int) -> dict[str, Errors]:
    """Recordings of 2 to 13 minutes (in 90 %), some of them much more difficult than others."""
    rng = np.random.default_rng([num_recordings, seed])
    errors = {}
    for number in range(num_recordings):
        seconds = 300 * rng.lognormal(0.0, 0.55)
        rate = rng.beta(2, 10)
        jaccard = rng.beta(2, 6) * rng.uniform(0, 2, NUM_SPEAKERS)
        errors[str(number)] = Errors(
            scored=seconds,
            missed=0.0,
            false_alarm=0.0,
            confusion=rate * seconds,
            speech=seconds,
            overlapped=0.0,
            jaccard=tuple(jaccard.tolist()),
            num_speakers=NUM_SPEAKERS,
            num_found=NUM_SPEAKERS,
        )
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("num_recordings", [10, 40])
def test_intervals_have_their_nominal_coverage(num_recordings):
    num = 400
    num_der = 0
    num_jer = 0
    for seed in range(num):
        errors = simulated(num_recordings, seed)
        total = results_of(errors, {})["total"]
        low, high = total["der_ci95"]
        num_der += low <= TRUE_DER <= high
        low, high = total["jer_ci95"]
        num_jer += low <= TRUE_JER <= high
    standard_error = np.sqrt(0.95 * 0.05 / num)
    for num_covered in (num_der, num_jer):
        share = num_covered / num
        assert abs(share - 0.95) < 2.6 * standard_error
