"""Stored features equal those that training computes from waves.

Letters: B rows, S samples, T frames, F mel bins.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses

from speakerlab.config.schema import load_config
from speakerlab.core.batch import Crop
from speakerlab.data.loader import TrainCrops, collate
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import pack_data_dir
from speakerlab.experiments.stored_features import StoredFbank, frames_to_read
from speakerlab.frontend.augment.specaugment import SpecAugment
from speakerlab.frontend.fbank import Fbank

RATE = 16000
CROP = 12000
ROOT = Path(__file__).parents[2]
SIZES = {"num_frames": 73, "num_mel_bins": 40}
FRONTEND = {
    "sample_rate": RATE,
    "num_mel_bins": 40,
    "window": "hamming",
    "mean_norm": True,
}


@pytest.fixture
def folder(make_data_dir) -> Path:
    """Data directory with stored features."""
    folder = make_data_dir(speakers=[0, 1], seconds=[0.3, 1.0, 2.7])
    stored = StoredFbank(FRONTEND)
    pack_data_dir(
        folder,
        layout=stored.layout,
        features=stored,
        facts=stored.facts,
    )
    return folder


def crops_of(folder: Path, **options) -> TrainCrops:
    manifest = read_manifest([folder], sample_rate=RATE)
    labels = np.arange(2).reshape(1, 2)
    spec = SpecAugment(**SIZES, num_time_masks=1)
    draws = {"spec": spec.draw}
    return TrainCrops(
        manifest,
        draws,
        crop_samples=CROP,
        label_KN=labels,
        seed=0,
        **options,
    )


def test_stored_are_the_energies_of_the_whole_utterance(folder):
    manifest = read_manifest([folder], sample_rate=RATE)
    settings = FRONTEND | {"mean_norm": False}
    fbank = Fbank(**settings)
    for row, num_samples in enumerate(manifest.num_samples_N.tolist()):
        wave_S = manifest.read(row, 0, num_samples)
        wave_1S = torch.from_numpy(wave_S / 32768).float()[None]
        expected_TF = fbank(wave_1S)[0].numpy()
        num_frames = len(expected_TF)
        stored_TF = manifest.read_features(row, 0, num_frames)
        assert stored_TF.dtype == np.float32
        assert np.array_equal(stored_TF, expected_TF)

        part_TF = manifest.read_features(row, 7, 9)
        assert np.array_equal(part_TF, expected_TF[7:16])
        # repeated like waves
        longer_TF = manifest.read_features(row, 0, num_frames + 3)
        assert np.array_equal(longer_TF[-3:], expected_TF[:3])


def test_a_crop_has_the_features_of_its_wave(folder):
    """Stored frames begin at the crop's first sample, or up to a frame shift before."""
    manifest = read_manifest([folder], sample_rate=RATE)
    frames = frames_to_read(manifest, FRONTEND, CROP)
    assert frames == {"crop_frames": 73, "frame_shift": 160}
    stored = crops_of(folder, **frames)
    waves = crops_of(folder)
    fbank = Fbank(**FRONTEND)
    longest = int(np.argmax(manifest.num_samples_N))
    for position in range(30):
        stored_crop = stored[0, position, longest]
        wave_crop = waves[0, position, longest]
        assert stored_crop.first == wave_crop.first
        assert stored_crop.label == wave_crop.label
        assert stored_crop.row == wave_crop.row
        stored_mask = stored_crop.draws["spec"].values["frames"]
        wave_mask = wave_crop.draws["spec"].values["frames"]
        assert np.array_equal(stored_mask, wave_mask)

        batch = collate([stored_crop])
        assert batch.feats_BTF.shape == (1, 73, 40)
        assert batch.wave_BS.shape == (1, 0)

        first = stored_crop.first // 160 * 160
        wave_S = waves.manifest.read(longest, first, CROP)
        wave_1S = torch.from_numpy(wave_S / 32768).float()[None]
        expected_1TF = fbank(wave_1S)
        feats_1TF = fbank.normalise(batch.feats_BTF)
        assert torch.allclose(feats_1TF, expected_1TF, atol=1e-4)


def test_waves_and_features_may_both_be_there(folder):
    manifest = read_manifest([folder], sample_rate=RATE)
    assert manifest.parts[0].waves is None
    crop: Crop = crops_of(folder)[0, 0, 0]
    assert len(crop.wave_S) == CROP
    assert crop.feats_TF is None


def test_another_front_end_is_refused_and_so_is_none_stored(folder, make_data_dir):
    manifest = read_manifest([folder], sample_rate=RATE)
    stored = str(manifest.parts[0].features.folder)
    without_mean_norm = FRONTEND | {"mean_norm": False}
    frames_to_read(manifest, without_mean_norm, CROP)
    # the default, which the folder does not name
    as_default = FRONTEND | {"snip_edges": True}
    frames_to_read(manifest, as_default, CROP)

    other_edges = FRONTEND | {"snip_edges": False}
    with refuses(stored, "snip_edges True instead of False"):
        frames_to_read(manifest, other_edges, CROP)
    other_window = FRONTEND | {"window": "povey"}
    with refuses(stored, "window hamming"):
        frames_to_read(manifest, other_window, CROP)

    loose_folder = make_data_dir("loose")
    loose = read_manifest([loose_folder], sample_rate=RATE)
    with refuses("data.features", "fbank"):
        frames_to_read(loose, FRONTEND, CROP)
    with refuses("frontend.dither", 1.0):
        StoredFbank(FRONTEND | {"dither": 1.0})


def test_stored_features_are_not_augmented():
    layers = [ROOT / "conf/campplus_tiny.yaml", ROOT / "conf/features/fbank.yaml"]
    assert load_config(layers).data.features == "fbank"
    for wrong in ("augment.noise_prob=0.1", "augment.speeds=[1.0, 0.9]"):
        with pytest.raises(ValueError, match="stored features cannot be augmented"):
            load_config(layers, [wrong])
