"""PyanNet against pyannote.audio's own, and its frames; see make_pyannet.py."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from make_pyannet import LENGTHS, waves, weights_of
from refusals import refuses

from speakerlab.core.powerset import MAX_AT_ONCE, MAX_SPEAKERS, speaker_sets
from speakerlab.core.shapes import shapes_only
from speakerlab.diarization import local_speakers
from speakerlab.models.pyannet import PyanNet

FIGURES = np.load(Path(__file__).with_name("pyannet.npz"))


@pytest.fixture(scope="module")
def network():
    return PyanNet().eval()


def compare(network, name):
    network = network.double()
    for length in LENGTHS:
        with torch.no_grad():
            log_prob_BFC = network(waves(length)[:, :, None])
        np.testing.assert_allclose(
            log_prob_BFC.numpy(), FIGURES[f"{name}_{length}"], rtol=0, atol=1e-12
        )


def test_equals_the_original_in_float64(network):
    shapes = {n: tuple(p.shape) for n, p in network.named_parameters()}
    missing, unexpected = network.load_state_dict(weights_of(shapes), strict=False)
    assert (missing, unexpected) == ([], [])
    compare(network, "random")


def test_equals_the_original_with_the_published_weights(tmp_path):
    """SPEAKERLAB_PYANNOTE=pytorch_model.bin of pyannote/segmentation-3.0."""
    from speakerlab.checkpoints.foreign import import_checkpoint
    from speakerlab.checkpoints.published import PublishedSegmenter

    file = os.environ.get("SPEAKERLAB_PYANNOTE")
    if not file:
        pytest.skip("SPEAKERLAB_PYANNOTE is not set")
    published = import_checkpoint(Path(file), tmp_path / "model")
    assert isinstance(published, PublishedSegmenter)
    compare(published.segmenter.backbone, "published")


def test_frames_and_classes_are_those_of_diarization(network):
    assert network.hop_samples == local_speakers.HOP_SAMPLES
    assert network.field_samples == local_speakers.FIELD_SAMPLES
    sets_CL = speaker_sets(MAX_SPEAKERS, MAX_AT_ONCE)
    np.testing.assert_array_equal(sets_CL, local_speakers.SPEAKERS_CL)
    # 10 s, as in the published network.
    assert network.num_frames(160000) == 589
    assert sum(p.numel() for p in network.parameters()) == 1_473_265


@pytest.mark.parametrize("num_samples", [1261, 1530, 1531, 5000])
def test_the_number_of_frames_is_predicted(network, num_samples):
    wave_1S1 = torch.zeros(1, num_samples, 1, dtype=torch.float32)
    with torch.no_grad():
        log_prob_1FC = network.float()(wave_1S1)
    assert log_prob_1FC.shape == (1, network.num_frames(num_samples), 7)
    torch.testing.assert_close(
        log_prob_1FC.exp().sum(2), torch.ones(1, len(log_prob_1FC[0]))
    )


def test_filters_keep_their_values_in_half_precision(network):
    wave_1S1 = torch.randn(1, 8000, 1)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):  # noqa: TID251
        half_1FC = network.float()(wave_1S1)
    with torch.no_grad():
        full_1FC = network(wave_1S1)
    assert half_1FC.dtype == torch.float32
    # The random weights give nearly uniform probabilities; a wrong sine gives others.
    torch.testing.assert_close(half_1FC.exp(), full_1FC.exp(), rtol=0, atol=0.05)


def test_only_shapes_and_refusals():
    with shapes_only():
        network = PyanNet(lstm_layers=1, linear_layers=0)
    assert network.classifier.weight.shape == (7, 256)
    with refuses("frontend", "80 features", "frontend.name=wave"):
        PyanNet(feat_dim=80)
    with refuses("model.args.num_filters", "even", "81"):
        PyanNet(num_filters=81)
    with refuses("model.args.dropout", "1.5"):
        PyanNet(dropout=1.5)
