"""ECAPA-TDNN: the shortest input.

Letters: B batch, T frames, C channels.
"""

import pytest
import torch

from speakerlab.models.ecapa_tdnn import ECAPATDNN


@torch.no_grad()
def test_five_frames_are_what_reflection_needs():
    model = ECAPATDNN(channels=16).eval()
    assert model.min_frames == 5
    assert model(torch.randn(2, 5, 80)).isfinite().all()
    model.min_frames = 4
    with pytest.raises(RuntimeError, match="Padding size"):
        model(torch.randn(2, 4, 80))
