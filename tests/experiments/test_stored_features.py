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

RATE, CROP = 16000, 12000
ROOT = Path(__file__).parents[2]
SIZES = {"num_frames": 73, "num_mel_bins": 40}
FRONTEND = {"sample_rate": RATE, "num_mel_bins": 40, "window": "hamming", "mean_norm": True}


@pytest.fixture
def folder(make_data_dir) -> Path:
    """Data directory with stored features."""
    folder = make_data_dir(speakers=[0, 1], seconds=[0.3, 1.0, 2.7])
    stored = StoredFbank(FRONTEND)
    pack_data_dir(folder, layout=stored.layout, features=stored, facts=stored.facts)
    return folder


def crops_of(folder: Path, **more) -> TrainCrops:
    manifest = read_manifest([folder], sample_rate=RATE)
    labels, spec = np.arange(2).reshape(1, 2), SpecAugment(**SIZES, num_time_masks=1)
    draws = {"spec": spec.draw}
    return TrainCrops(manifest, draws, crop_samples=CROP, label_KN=labels, seed=0, **more)


def test_stored_are_the_energies_of_the_whole_utterance(folder):
    manifest = read_manifest([folder], sample_rate=RATE)
    fbank = Fbank(**{**FRONTEND, "mean_norm": False})
    for row, num_samples in enumerate(map(int, manifest.num_samples_N)):
        wave_S = manifest.read(row, 0, num_samples)
        wanted_TF = fbank(torch.from_numpy(wave_S / 32768).float().unsqueeze(0))[0].numpy()
        found_TF = manifest.read_features(row, 0, len(wanted_TF))
        assert found_TF.dtype == np.float32
        assert np.array_equal(found_TF, wanted_TF)
        assert np.array_equal(manifest.read_features(row, 7, 9), wanted_TF[7:16])
        twice_TF = manifest.read_features(row, 0, len(wanted_TF) + 3)
        assert np.array_equal(twice_TF[-3:], wanted_TF[:3])  # repeated like waves


def test_a_crop_has_the_features_of_its_wave(folder):
    """Stored frames begin at the crop's first sample, or up to a frame shift before."""
    frames = frames_to_read(read_manifest([folder], sample_rate=RATE), FRONTEND, CROP)
    assert frames == {"crop_frames": 73, "frame_shift": 160}
    stored, waves, fbank = crops_of(folder, **frames), crops_of(folder), Fbank(**FRONTEND)
    longest = int(np.argmax(stored.manifest.num_samples_N))
    for position in range(30):
        found, wanted = stored[0, position, longest], waves[0, position, longest]
        assert (found.first, found.label, found.row) == (wanted.first, wanted.label, wanted.row)
        masks = [crop.draws["spec"].values["frames"] for crop in (found, wanted)]
        assert np.array_equal(*masks)
        first = found.first // 160 * 160
        wave_S = waves.manifest.read(longest, first, CROP)
        wave_1S = torch.from_numpy(wave_S / 32768).float().unsqueeze(0)
        batch = collate([found])
        assert batch.feats_BTF.shape == (1, 73, 40) and batch.wave_BS.shape == (1, 0)
        assert torch.allclose(fbank.normalise(batch.feats_BTF), fbank(wave_1S), atol=1e-4)


def test_waves_and_features_may_both_be_there(folder):
    assert read_manifest([folder], sample_rate=RATE).parts[0].waves is None
    crop: Crop = crops_of(folder)[0, 0, 0]
    assert len(crop.wave_S) == CROP and crop.feats_TF is None


def test_another_front_end_is_refused_and_so_is_none_stored(folder, make_data_dir):
    manifest = read_manifest([folder], sample_rate=RATE)
    frames_to_read(manifest, {**FRONTEND, "mean_norm": False}, CROP)
    frames_to_read(manifest, {**FRONTEND, "snip_edges": True}, CROP)  # the folder does not say it
    with refuses(str(manifest.parts[0].features.folder), "snip_edges True instead of False"):
        frames_to_read(manifest, {**FRONTEND, "snip_edges": False}, CROP)
    with refuses(str(manifest.parts[0].features.folder), "window hamming"):
        frames_to_read(manifest, {**FRONTEND, "window": "povey"}, CROP)
    loose = read_manifest([make_data_dir("loose")], sample_rate=RATE)
    with refuses("data.features", "fbank"):
        frames_to_read(loose, FRONTEND, CROP)
    with refuses("frontend.dither", 1.0):
        StoredFbank({**FRONTEND, "dither": 1.0})


def test_stored_features_are_not_augmented():
    layers = [ROOT / "conf/campplus_tiny.yaml", ROOT / "conf/features/fbank.yaml"]
    assert load_config(layers).data.features == "fbank"
    for wrong in ("augment.noise_prob=0.1", "augment.speeds=[1.0, 0.9]"):
        with pytest.raises(ValueError, match="stored features cannot be augmented"):
            load_config(layers, [wrong])
