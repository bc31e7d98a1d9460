"""SpecAugment with masks computed by hand."""

import numpy as np
import torch

from speakerlab.core.batch import Draws
from speakerlab.frontend.augment.specaugment import SpecAugment


def mask(feats_BTF: torch.Tensor, mask_BM2: torch.Tensor, **how: int) -> torch.Tensor:
    """Masked features; mask_BM2: what is drawn."""
    spec = SpecAugment(num_frames=feats_BTF.shape[1], num_mel_bins=feats_BTF.shape[2], **how)
    assert spec.num_masks == mask_BM2.shape[1]
    drawn = [spec.masks(mask_M2.numpy()) for mask_M2 in mask_BM2]
    values = {key: torch.from_numpy(np.stack([one[key] for one in drawn])) for key in drawn[0]}
    return spec.apply(feats_BTF.clone(), Draws(torch.arange(len(feats_BTF)), values))


def masked_columns(feats_TF: torch.Tensor) -> list[int]:
    return (feats_TF == 0).all(0).nonzero()[:, 0].tolist()


def masked_frames(feats_TF: torch.Tensor) -> list[int]:
    return (feats_TF == 0).all(1).nonzero()[:, 0].tolist()


def test_every_row_has_its_own_masks_at_the_places_computed_by_hand():
    how = {"num_freq_masks": 1, "max_freq_width": 8, "num_time_masks": 1, "max_time_width": 20}
    # Row 0: floor(.5 x 9) = 4 bins from floor(.25 x (80 - 4 + 1)) = 19; floor(.99 x 21) = 20 frames
    # from 0. Row 1: floor(.12 x 9) = 1 from floor(.99 x 80) = 79; floor(.1 x 21) = 2 from
    # floor(.5 x 99) = 49. Row 2: floor(.1 x 9) = 0 and floor(.04 x 21) = 0: untouched.
    mask_BM2 = torch.tensor(
        [[[0.5, 0.25], [0.99, 0.0]], [[0.12, 0.99], [0.1, 0.5]], [[0.1, 0.5], [0.04, 0.7]]]
    )
    feats_BTF = torch.rand(3, 100, 80) + 1
    out_BTF = mask(feats_BTF, mask_BM2, **how)
    assert [masked_columns(out_TF) for out_TF in out_BTF] == [[19, 20, 21, 22], [79], []]
    assert [masked_frames(out_TF) for out_TF in out_BTF] == [list(range(20)), [49, 50], []]
    assert (out_BTF[0] == 0).sum() == 4 * 100 + 20 * 80 - 4 * 20
    assert torch.equal(out_BTF[out_BTF != 0], feats_BTF[out_BTF != 0])


def test_several_masks_frequency_first():
    how = {"num_freq_masks": 2, "max_freq_width": 3, "num_time_masks": 1, "max_time_width": 1}
    # floor(.99 x 4) = 3 from floor(.0 x 8) = 0; floor(.5 x 4) = 2 from floor(.5 x 9) = 4;
    # floor(.6 x 2) = 1 from floor(.5 x 6) = 3.
    mask_BM2 = torch.tensor([[[0.99, 0.0], [0.5, 0.5], [0.6, 0.5]]])
    out_BTF = mask(torch.ones(1, 6, 10), mask_BM2, **how)
    assert masked_columns(out_BTF[0]) == [0, 1, 2, 4, 5]
    assert masked_frames(out_BTF[0]) == [3]


def test_a_draw_that_rounds_to_one_stays_inside():
    how = {"num_freq_masks": 1, "max_freq_width": 4, "num_time_masks": 1, "max_time_width": 50}
    mask_BM2 = torch.full((1, 2, 2), 1 - 1e-9, dtype=torch.float64).float()
    assert (mask_BM2 == 1).all()
    out_BTF = mask(torch.ones(1, 100, 80), mask_BM2, **how)
    assert masked_columns(out_BTF[0]) == [76, 77, 78, 79]
    assert masked_frames(out_BTF[0]) == list(range(50, 100))


def test_a_mask_wider_than_the_features_covers_them():
    how = {"num_time_masks": 1, "max_time_width": 20}
    out_BTF = mask(torch.ones(1, 5, 80), torch.tensor([[[0.9, 0.9]]]), **how)
    assert masked_frames(out_BTF[0]) == [0, 1, 2, 3, 4]
