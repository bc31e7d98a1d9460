"""Rows of metrics by hand: bad steps count as such and in nothing else."""

import torch

from speakerlab.training.metric_sums import Window, row_of


def sums_of(window):
    return dict(zip(Window.NAMES, window.sums.tolist()))


def step(window, *, loss, norm, bad):
    is_bad = torch.tensor(float(bad))
    window.add_crops(torch.tensor([4 * loss, 2, 4, 1], dtype=torch.float64), is_bad)
    window.add_step(torch.tensor(norm), is_bad, clip_norm=5.0)


def test_means_are_over_the_good_steps():
    window = Window(torch.device("cpu"))
    step(window, loss=2.0, norm=10.0, bad=False)
    step(window, loss=float("nan"), norm=float("nan"), bad=True)
    step(window, loss=4.0, norm=2.0, bad=False)
    row = row_of(sums_of(window), seconds=2.0)
    assert (row["loss"], row["accuracy"], row["grad_norm"]) == (3.0, 0.5, 6.0)
    assert row["clipped"] == 1 / 3 and row["silent"] == 2 and row["crops_per_second"] == 4.0


def test_where_all_were_skipped_there_is_no_loss():
    window = Window(torch.device("cpu"))
    step(window, loss=float("inf"), norm=float("inf"), bad=True)
    row = row_of(sums_of(window), seconds=1.0)
    assert row == {"clipped": 0.0, "silent": 0, "crops_per_second": 0.0}
