"""Sums between two rows of metrics. In: what each step adds, on the device. Out: a row's values."""

import time
from typing import Any

import torch
from torch import Tensor


class Window:
    """Sums since the last row; saved, so that a resumed run writes the same rows.

    Crops of skipped steps are left out: their loss may not be a number.
    """

    NAMES = ("loss", "correct", "crops", "silent", "grad_norm", "clipped", "skipped", "steps")

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(self.NAMES), dtype=torch.float64, device=device)
        self.started_at = time.monotonic()

    def reset(self) -> None:
        """Begin the next row."""
        self.sums.zero_()
        self.started_at = time.monotonic()

    def add(self, name: str, value: Tensor | float) -> None:
        """Add to one sum."""
        self.sums[self.NAMES.index(name)] += value

    def add_step(self, grad_norm: Tensor, is_bad: Tensor, clip_norm: float) -> None:
        """Count a step; of a bad one nothing but that it was."""
        self.add("grad_norm", torch.where(is_bad > 0, 0.0, grad_norm))
        self.add("clipped", (grad_norm > clip_norm) & (is_bad == 0))
        self.add("skipped", is_bad)
        self.add("steps", 1)

    def add_crops(self, sums: Tensor, is_bad: Tensor) -> None:
        """Add (loss, right ones, crops), the first of `NAMES`, of a step that is not bad."""
        self.sums[: len(sums)] += torch.where(is_bad > 0, 0.0, sums)


def row_of(sums: dict[str, float], *, seconds: float) -> dict[str, Any]:
    """Means over the crops and steps of a window whose sums are those of all ranks.

    Where every step was skipped there is no loss, accuracy or gradient norm.
    """
    crops, good = sums["crops"], sums["steps"] - sums["skipped"]
    means = (
        {}
        if not good
        else {
            "loss": round(sums["loss"] / crops, 6),
            "accuracy": round(sums["correct"] / crops, 6),
            "grad_norm": round(sums["grad_norm"] / good, 6),
        }
    )
    return {
        **means,
        "clipped": sums["clipped"] / sums["steps"],
        "silent": int(sums["silent"]),
        "crops_per_second": round(sums["crops"] / seconds, 1),
    }
