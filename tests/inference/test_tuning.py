"""Clustering learned for a model on recordings with known turns."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from refusals import refuses

from speakerlab.core.reading import parse_json
from speakerlab.diarization.clustering import Tuning
from speakerlab.diarization.regions import Turn
from speakerlab.inference.tuning import tune

RATE, LOUDNESS = 8000, 4000


class Loudness:
    """A model that knows voices by their loudness: cosines are 0.77 within and 0.55 between."""

    sample_rate, sha256, speakers, calibration, tuning = RATE, "", {}, None, Tuning()

    def embed_many(self, sources, **_):
        voice_N = [round(read().max() / LOUDNESS) for read in sources]
        emb_ND = np.zeros((len(voice_N), 9))
        emb_ND[:, 0] = 0.72**0.5
        emb_ND[np.arange(len(voice_N)), voice_N] = 0.28**0.5
        noise_ND = np.random.default_rng(0).normal(size=(len(voice_N), 64))
        return np.hstack([emb_ND, noise_ND * (0.3 / 64) ** 0.5])


MODEL: Any = Loudness()


def talk(*turns: tuple[int, float]) -> tuple[np.ndarray, list[Turn]]:
    """A wave of (voice, seconds), each turn followed by a second of silence; the turns."""
    waves, truth, now = [], [], 0.0
    for voice, seconds in turns:
        sign_S = np.resize([1] * 10 + [-1] * 10, round(seconds * RATE))
        waves += [voice * LOUDNESS * sign_S, np.zeros(RATE)]
        truth.append(Turn(now, now + seconds, str(voice)))
        now += seconds + 1.0
    return np.concatenate(waves).astype(np.int16), truth


TALKS = {
    "short": talk((1, 6.0), (2, 2.0)),
    "equal": talk((1, 9.0), (2, 9.0), (3, 9.0), (1, 3.0)),
}
AUDIO = {name: wave_S for name, (wave_S, _) in TALKS.items()}
REFERENCE = {name: turns for name, (_, turns) in TALKS.items()}


def test_the_method_and_threshold_have_the_lowest_der():
    learned = tune(MODEL, AUDIO, REFERENCE, source="dev")
    # at 0.4 all voices are one, and spectral clustering does not find the voice of 2 s
    assert (learned.threshold, learned.method) == (0.6, "ahc")
    assert learned.der["ahc"] < 0.05 < learned.der["spectral"]
    assert learned.source == "dev: 2 recordings"
    assert parse_json(json.dumps(asdict(learned)), Tuning, where="file") == learned
    equal = {"equal": AUDIO["equal"]}
    learned = tune(MODEL, equal, {"equal": REFERENCE["equal"]}, source="dev")
    assert (learned.method, learned.threshold) == ("spectral", 0.6)  # of the same DER


def test_only_the_regions_are_scored():
    regions = {"short": [(0.0, 6.0)], "equal": [(0.0, 9.0)]}  # of one voice each
    learned = tune(MODEL, AUDIO, REFERENCE, regions=regions, source="dev")
    assert (learned.threshold, learned.der["ahc"]) == (Tuning().threshold, pytest.approx(0))


def test_what_nothing_is_learned_from_is_refused():
    with refuses("dev", "equal"):
        tune(MODEL, {"short": AUDIO["short"]}, REFERENCE, source="dev")
    with refuses("equal", "regions"):
        tune(MODEL, AUDIO, REFERENCE, regions={"short": [(0.0, 1.0)]}, source="dev")
    silence = {name: [(99.0, 100.0)] for name in AUDIO}
    with refuses("dev", "speech"):
        tune(MODEL, AUDIO, REFERENCE, regions=silence, source="dev")
    for values in ({"method": "vbx"}, {"threshold": float("nan")}, {"threshold": "0"}, {"x": 1}):
        with refuses("file", *values):
            parse_json(json.dumps(values), Tuning, where="file")
