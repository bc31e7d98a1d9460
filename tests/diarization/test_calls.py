"""Simulated calls: what remains of each channel, by the energy of the clean voices.

benchmarks/calls.py simulates the calls. They have synthetic voices here, and real ones with
../shared.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from speakerlab.diarization.channels import remove_cross_talk
from speakerlab.diarization.regions import Turn
from speakerlab.diarization.scoring import Errors, score, total
from speakerlab.inference.speech import find_speech, is_other_sound

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import calls

BESIDE = Path(__file__).parents[3] / "shared"
DATA = Path(os.environ.get("SPEAKERLAB_SHARED", BESIDE)) / "data"
RATE = calls.SOURCE_RATE
needs_shared = pytest.mark.skipif(
    not (DATA / "librispeech-mini").is_dir(),
    reason="needs ../shared",
)
FAST = ("usual", "channel 2 30 dB quieter", "8 kHz, mu-law")
# DER in %, otherwise 3. Noise hides quiet speech, a telephone some consonants, and speech below
# -70 dBFS, as of a line 30 dB quieter, counts as noise.
LIMITS = {
    "channel 2 30 dB quieter": 9.0,
    "noise at 20 dB": 8.0,
    "noise at 15 dB": 12.0,
    "8 kHz": 5.0,
    "8 kHz, mu-law": 5.0,
    "8 kHz, A-law": 5.0,
}


def speak(speaker: int, take: int) -> np.ndarray:
    """wave_S, float32: a sentence of syllables, each a gliding vowel after a short noise."""
    rng = np.random.default_rng([speaker, take])
    pitch = 95 + 23 * speaker
    pieces = []
    num_syllables = int(rng.integers(10, 20))
    for _ in range(num_syllables):
        noise_samples = round(RATE * rng.uniform(0.03, 0.08))
        noise_S = rng.standard_normal(noise_samples)
        # The difference makes it a fricative, with more power at high frequencies.
        pieces.append(400 * np.diff(noise_S, prepend=0))

        vowel_samples = round(RATE * rng.uniform(0.1, 0.25))
        vowel_S = make_vowel(pitch, vowel_samples, rng)
        place_S = np.arange(vowel_samples) / vowel_samples
        envelope_S = np.sin(np.pi * place_S) ** 0.5
        pieces.append(3000 * vowel_S * envelope_S)
    return np.concatenate(pieces).astype(np.float32)


def make_vowel(pitch: float, num_samples: int, rng: np.random.Generator) -> np.ndarray:
    """wave_S: the harmonics of a gliding pitch in Hz, with three formants."""
    first, last = rng.uniform(0.85, 1.15, size=2)
    frequency_S = pitch * np.linspace(first, last, num_samples)
    phase_S = 2 * np.pi * np.cumsum(frequency_S) / RATE
    formants = rng.uniform([300, 900, 2200], [850, 2200, 3500])
    peaks = np.array([1.0, 0.5, 0.25])  # of the formants, whose widths are 15 %
    vowel_S = np.zeros(num_samples)
    for harmonic in range(1, 40):
        distances = np.abs(harmonic * pitch - formants) / (0.15 * formants)
        amplitudes = peaks / (1 + distances**2)
        start = rng.uniform(0, 2 * np.pi)
        vowel_S += amplitudes.sum() * np.sin(harmonic * phase_S + start)
    return vowel_S


@pytest.fixture(scope="session")
def synthetic() -> dict[str, list[np.ndarray]]:
    return {
        f"voice{speaker}": [speak(speaker, take) for take in range(6)]
        for speaker in range(4)
    }


@pytest.fixture(scope="session")
def real() -> dict[str, list[np.ndarray]]:
    return calls.read_sentences(
        [
            DATA / "librispeech-mini/test-other",
            DATA / "speechocean-mini/test-speechocean",
        ]
    )


def errors_of(
    sentences: calls.Sentences, setting: calls.Setting, num_calls: int
) -> Errors:
    """Return the errors of calls, with a speaker on each channel."""
    errors = []
    for number in range(num_calls):
        call = calls.make_call(sentences, setting, [3, number])
        waves = list(np.ascontiguousarray(call.wave_SC.T))
        regions_of = []
        for wave_S in waves:
            is_speech = not is_other_sound(wave_S, sample_rate=call.rate)
            regions = find_speech(wave_S, sample_rate=call.rate) if is_speech else []
            regions_of.append(regions)
        own = remove_cross_talk(waves, regions_of, sample_rate=call.rate)
        reference = [
            turn._replace(speaker=turn.speaker.partition("-")[0]) for turn in call.turns
        ]
        hypothesis = [
            Turn(start, end, f"channel{number}")
            for number, regions in enumerate(own, start=1)
            for start, end in regions
        ]
        errors.append(score(reference, hypothesis))
    return total(errors)


def percent_wrong(sentences, name: str, num_calls: int) -> float:
    errors = errors_of(sentences, calls.SETTINGS[name], num_calls)
    if name != "second channel silent":
        assert errors.overlap > 0.05  # both sides speak at once
    return 100 * errors.wrong / errors.scored


@pytest.mark.parametrize("name", [*FAST, "cross-talk -15 dB", "second channel silent"])
def test_synthetic_voices_speak_on_their_channels(synthetic, name):
    assert percent_wrong(synthetic, name, 2) <= 3.0


@needs_shared
@pytest.mark.parametrize("name", FAST)
def test_real_voices_speak_on_their_channels(real, name):
    assert percent_wrong(real, name, 2) <= LIMITS.get(name, 3.0)


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # Copies have all speakers on one channel, and music is no speech.
    [name for name in calls.SETTINGS if name[:5] not in ("copie", "music")],
)
def test_real_voices_in_every_kind_of_call(real, name):
    assert percent_wrong(real, name, 10) <= LIMITS.get(name, 3.0)


def test_without_cross_talk_the_regions_stay(synthetic):
    setting = calls.SETTINGS["no cross-talk"]
    call = calls.make_call(synthetic, setting, [4, 0])
    waves = list(np.ascontiguousarray(call.wave_SC.T))
    regions_of = [find_speech(wave_S, sample_rate=RATE) for wave_S in waves]
    assert remove_cross_talk(waves, regions_of, sample_rate=RATE) == regions_of


def test_much_of_the_speech_would_be_wrong_with_cross_talk(synthetic, monkeypatch):
    """The calls are hard enough to test something."""
    monkeypatch.setitem(
        globals(), "remove_cross_talk", lambda waves, regions, **_: regions
    )
    assert percent_wrong(synthetic, "cross-talk -15 dB", 2) > 30.0


def test_the_same_key_gives_the_same_call(synthetic):
    setting = calls.SETTINGS["8 kHz, A-law"]
    first = calls.make_call(synthetic, setting, [5, 0])
    again = calls.make_call(synthetic, setting, [5, 0])
    other = calls.make_call(synthetic, setting, [5, 1])
    assert np.array_equal(first.wave_SC, again.wave_SC)
    assert first.turns == again.turns
    assert first.turns != other.turns
    assert first.rate == 8000
    assert {turn.speaker for turn in first.turns} == {"channel1-a", "channel2-a"}
    assert max(turn.end for turn in first.turns) <= len(first.wave_SC) / 8000
