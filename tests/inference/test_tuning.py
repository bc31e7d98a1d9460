"""Clustering learned for a model on recordings with known turns."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from refusals import refuses

from speakerlab.core.reading import parse_json
from speakerlab.core.tuning import Tuning
from speakerlab.diarization.regions import Turn
from speakerlab.inference import tuning
from speakerlab.inference.tuning import tune
from speakerlab.scoring.plda import Plda

RATE = 8000
LOUDNESS = 4000


class Loudness:
    """A model that knows voices by their loudness: cosines are 0.77 within and 0.55 between."""

    sample_rate = RATE
    sha256 = ""
    speakers = {}
    calibration = None
    tuning = Tuning()

    def embed_many(self, sources, **_):
        voice_N = []
        for read in sources:
            loudness = read().max() / LOUDNESS
            voice_N.append(round(loudness))
        num_sources = len(voice_N)

        # The squares are 0.72 common to all, 0.28 of the voice, and 0.3 of noise.
        emb_ND = np.zeros((num_sources, 9))
        emb_ND[:, 0] = 0.72**0.5
        emb_ND[range(num_sources), voice_N] = 0.28**0.5
        rng = np.random.default_rng(0)
        noise_ND = rng.normal(size=(num_sources, 64))
        noise_ND = noise_ND * (0.3 / 64) ** 0.5
        return np.hstack([emb_ND, noise_ND])


MODEL: Any = Loudness()


def talk(*turns: tuple[int, float]) -> tuple[np.ndarray, list[Turn]]:
    """A wave of (voice, seconds), each turn followed by a second of silence; the turns."""
    waves: list[np.ndarray] = []
    truth: list[Turn] = []
    now = 0.0  # seconds
    silence_S = np.zeros(RATE)
    for voice, seconds in turns:
        num_samples = round(seconds * RATE)
        square_wave_S = np.resize(10 * [1] + 10 * [-1], num_samples)
        waves.append(voice * LOUDNESS * square_wave_S)
        waves.append(silence_S)
        turn = Turn(now, now + seconds, str(voice))
        truth.append(turn)
        now += seconds + 1.0
    wave_S = np.concatenate(waves)
    return wave_S.astype(np.int16), truth


SHORT_AUDIO, SHORT_TURNS = talk((1, 6.0), (2, 2.0))
EQUAL_AUDIO, EQUAL_TURNS = talk((1, 9.0), (2, 9.0), (3, 9.0), (1, 3.0))
AUDIO = {"short": SHORT_AUDIO, "equal": EQUAL_AUDIO}
REFERENCE = {"short": SHORT_TURNS, "equal": EQUAL_TURNS}


def test_the_method_and_threshold_have_the_lowest_der():
    learned = tune(MODEL, AUDIO, REFERENCE, source="dev")
    # At 0.4 all voices are one, and spectral clustering does not find the voice of 2 s.
    assert learned.threshold == 0.6
    assert learned.method == "ahc"
    assert learned.der["ahc"] < 0.05
    assert learned.der["spectral"] > 0.05
    assert learned.source == "dev: 2 recordings"

    text = json.dumps(asdict(learned))
    again = parse_json(text, Tuning, where="file")
    assert again == learned

    # Of methods with the same DER, spectral clustering is taken.
    audio = {"equal": EQUAL_AUDIO}
    reference = {"equal": EQUAL_TURNS}
    learned = tune(MODEL, audio, reference, source="dev")
    assert learned.method == "spectral"
    assert learned.threshold == 0.6


def test_vbx_is_compared_where_there_is_a_plda(monkeypatch):
    # Of the unit vectors of the model: 9 dimensions of voices, 64 of noise.
    noise_variance = 0.3 / 64 / 1.3
    scale_D = np.full(73, noise_variance**-0.5)
    psi_D = np.zeros(73)
    psi_D[:9] = 0.28 / 1.3 / noise_variance
    plda = Plda(np.zeros(73), np.diag(scale_D), psi_D)
    # Spectral clustering does not find a voice of 3 s.
    wave_S, turns = talk((1, 24.0), (2, 3.0))
    audio, reference = {"long": wave_S}, {"long": turns}
    learned = tune(MODEL, audio, reference, source="dev", plda=plda)
    assert [*learned.der] == ["spectral", "ahc", "vbx"]
    assert learned.der["vbx"] < 0.05
    # Of methods with the same DER, the first is taken.
    assert learned.method == "ahc"
    assert learned.fb == Tuning().fb

    # Where the others fail, it is chosen.
    monkeypatch.setattr(tuning, "THRESHOLDS", [0.1])
    monkeypatch.setattr(tuning, "FBS", [1e6, 2.0])
    learned = tune(MODEL, audio, reference, source="dev", plda=plda)
    assert learned.method == "vbx"
    assert learned.der["vbx"] < 0.05 < learned.der["ahc"]
    assert learned.fb == 2.0


def test_only_the_regions_are_scored():
    # Of one voice each: no threshold is better than another.
    regions = {
        "short": [(0.0, 6.0)],
        "equal": [(0.0, 9.0)],
    }
    learned = tune(
        MODEL,
        AUDIO,
        REFERENCE,
        regions=regions,
        source="dev",
    )
    assert learned.threshold == Tuning().threshold
    assert learned.der["ahc"] == pytest.approx(0)


def test_what_nothing_is_learned_from_is_refused():
    one_recording = {"short": SHORT_AUDIO}
    with refuses("dev", "equal"):
        tune(MODEL, one_recording, REFERENCE, source="dev")

    regions = {"short": [(0.0, 1.0)]}
    with refuses("equal", "regions"):
        tune(MODEL, AUDIO, REFERENCE, regions=regions, source="dev")

    silence = {name: [(99.0, 100.0)] for name in AUDIO}
    with refuses("dev", "speech"):
        tune(MODEL, AUDIO, REFERENCE, regions=silence, source="dev")

    for values in (
        {"method": "vbx"},
        {"threshold": float("nan")},
        {"threshold": "0"},
        {"x": 1},
    ):
        text = json.dumps(values)
        with refuses("file", *values):
            parse_json(text, Tuning, where="file")
