"""Linking of real speech: twelve speakers, who were in no training, in thirty recordings.

Needs a trained model whose embeddings are good, such as the published CAM++:

    SPEAKERLAB_CAMPPLUS=MODEL python -m pytest -m slow tests/diarization/test_linked_speech.py -s
"""

import os
from pathlib import Path

import numpy as np
import pytest
from many_recordings import simulate

import speakerlab
from speakerlab.diarization.linking import purity_and_coverage
from speakerlab.diarization.regions import Turn
from speakerlab.inference.link import link, speakers_of
from speakerlab.scoring.calibration import Calibration, fit_calibration
from speakerlab.scoring.pair_scores import pairwise_eer

CORPORA = Path(__file__).parents[3] / "shared/data"
UNSEEN = [
    CORPORA / "librispeech-mini/test-other",
    CORPORA / "speechocean-mini/test-speechocean",
]
OTHERS = CORPORA / "speechocean-mini/train-speechocean"
MODEL = os.environ.get("SPEAKERLAB_CAMPPLUS", "")
NUM_CALIBRATED = 60  # speakers
NUM_PEOPLE = 12

pytestmark = [
    pytest.mark.skipif(not MODEL, reason="SPEAKERLAB_CAMPPLUS is not set"),
    pytest.mark.skipif(not OTHERS.is_dir(), reason="no ../shared"),
]


@pytest.fixture(scope="module")
def model():
    return speakerlab.load(MODEL, device="cpu")


@pytest.fixture(scope="module")
def calibration(model) -> Calibration:
    """Thresholds from speakers who are in no recording."""
    speakers = sorted(path for path in OTHERS.iterdir() if path.is_dir())
    paths: list[Path] = []
    labels: list[int] = []
    for number, folder in enumerate(speakers[:NUM_CALIBRATED]):
        files = sorted(folder.rglob("*.flac"))
        paths += files
        labels += [number] * len(files)
    emb_ND = model.embed_many(paths)
    _, scores, is_target = pairwise_eer(emb_ND, np.array(labels))
    return fit_calibration(scores, is_target, source="other speakers")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_twelve_people_in_thirty_recordings(model, calibration, tmp_path, seed):
    reference = simulate(UNSEEN, tmp_path, num_speakers=NUM_PEOPLE, seed=seed)
    speakers = []
    turns_of: dict[str, list[Turn]] = {}
    for name in reference:
        diarization = model.diarize(tmp_path / "wav" / f"{name}.flac")
        turns_of[name] = [Turn(*segment[:3]) for segment in diarization]
        speakers += speakers_of(diarization)
    linked = link(speakers, calibration=calibration)

    hypothesis = {name: linked.rename(name, turns) for name, turns in turns_of.items()}
    purity, coverage = purity_and_coverage(reference, hypothesis)
    num_people = sum(not identity.is_unknown for identity in linked)
    print(f"seed {seed}: {num_people} people, purity {purity:.3f}, {coverage=:.3f}")
    assert abs(num_people - NUM_PEOPLE) <= 2
    assert purity > 0.94
    assert coverage > 0.86
