"""SpecAugment with masks computed by hand."""

import numpy as np
import torch

from speakerlab.core.batch import Draws
from speakerlab.frontend.augment.specaugment import SpecAugment


def mask(
    feats_BTF: torch.Tensor,
    mask_BM2: torch.Tensor,
    **options: int,
) -> torch.Tensor:
    """Masked features; mask_BM2: what is drawn."""
    batch, num_frames, num_mel_bins = feats_BTF.shape
    spec = SpecAugment(
        num_frames=num_frames,
        num_mel_bins=num_mel_bins,
        **options,
    )
    assert spec.num_masks == mask_BM2.shape[1]
    drawn = [spec.masks(mask_M2) for mask_M2 in mask_BM2.numpy()]
    values = {}
    for key in drawn[0]:
        rows = [values_of_row[key] for values_of_row in drawn]
        values[key] = torch.from_numpy(np.stack(rows))
    draws = Draws(torch.arange(batch), values)
    return spec.apply(feats_BTF.clone(), draws)


def masked_columns(feats_TF: torch.Tensor) -> list[int]:
    is_masked_F = (feats_TF == 0).all(0)
    index_M = is_masked_F.nonzero().flatten()
    return index_M.tolist()


def masked_frames(feats_TF: torch.Tensor) -> list[int]:
    is_masked_T = (feats_TF == 0).all(1)
    index_M = is_masked_T.nonzero().flatten()
    return index_M.tolist()


def test_every_row_has_its_own_masks_at_the_places_computed_by_hand():
    options = {
        "num_freq_masks": 1,
        "max_freq_width": 8,
        "num_time_masks": 1,
        "max_time_width": 20,
    }
    # Row 0: floor(.5 x 9) = 4 bins from floor(.25 x (80 - 4 + 1)) = 19; floor(.99 x 21) = 20 frames
    # from 0. Row 1: floor(.12 x 9) = 1 from floor(.99 x 80) = 79; floor(.1 x 21) = 2 from
    # floor(.5 x 99) = 49. Row 2: floor(.1 x 9) = 0 and floor(.04 x 21) = 0: untouched.
    mask_BM2 = torch.tensor(
        [
            [[0.5, 0.25], [0.99, 0.0]],
            [[0.12, 0.99], [0.1, 0.5]],
            [[0.1, 0.5], [0.04, 0.7]],
        ]
    )
    feats_BTF = torch.rand(3, 100, 80) + 1
    out_BTF = mask(feats_BTF, mask_BM2, **options)
    first_TF, second_TF, third_TF = out_BTF
    assert masked_columns(first_TF) == [19, 20, 21, 22]
    assert masked_columns(second_TF) == [79]
    assert masked_columns(third_TF) == []
    assert masked_frames(first_TF) == list(range(20))
    assert masked_frames(second_TF) == [49, 50]
    assert masked_frames(third_TF) == []

    # The two masks of the first row cross; all other values stay as they are.
    in_columns = 4 * 100
    in_frames = 20 * 80
    in_both = 4 * 20
    num_masked = (first_TF == 0).sum()
    assert num_masked == in_columns + in_frames - in_both
    is_left = out_BTF != 0
    assert torch.equal(out_BTF[is_left], feats_BTF[is_left])


def test_several_masks_frequency_first():
    options = {
        "num_freq_masks": 2,
        "max_freq_width": 3,
        "num_time_masks": 1,
        "max_time_width": 1,
    }
    # floor(.99 x 4) = 3 from floor(.0 x 8) = 0; floor(.5 x 4) = 2 from floor(.5 x 9) = 4;
    # floor(.6 x 2) = 1 from floor(.5 x 6) = 3.
    mask_M2 = [
        [0.99, 0.0],
        [0.5, 0.5],
        [0.6, 0.5],
    ]
    mask_BM2 = torch.tensor([mask_M2])
    ones_BTF = torch.ones(1, 6, 10)
    out_BTF = mask(ones_BTF, mask_BM2, **options)
    (out_TF,) = out_BTF
    assert masked_columns(out_TF) == [0, 1, 2, 4, 5]
    assert masked_frames(out_TF) == [3]


def test_a_draw_that_rounds_to_one_stays_inside():
    options = {
        "num_freq_masks": 1,
        "max_freq_width": 4,
        "num_time_masks": 1,
        "max_time_width": 50,
    }
    # In float32, 1 - 1e-9 is 1.
    mask_BM2 = torch.full((1, 2, 2), 1 - 1e-9)
    assert (mask_BM2 == 1).all()
    ones_BTF = torch.ones(1, 100, 80)
    out_BTF = mask(ones_BTF, mask_BM2, **options)
    (out_TF,) = out_BTF
    assert masked_columns(out_TF) == [76, 77, 78, 79]
    assert masked_frames(out_TF) == list(range(50, 100))


def test_a_mask_wider_than_the_features_covers_them():
    options = {"num_time_masks": 1, "max_time_width": 20}
    mask_BM2 = torch.full((1, 1, 2), 0.9)
    ones_BTF = torch.ones(1, 5, 80)
    out_BTF = mask(ones_BTF, mask_BM2, **options)
    (out_TF,) = out_BTF
    assert masked_frames(out_TF) == [0, 1, 2, 3, 4]
