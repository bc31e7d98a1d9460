"""Features computed once and stored (`data.features: fbank`).

The log mel energies of whole utterances are stored; training removes the mean of each crop. A model
has the same front end either way.
Letters: S samples, T frames, F mel bins.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch

from speakerlab.data.audio import FULL_SCALE
from speakerlab.data.manifest import Manifest
from speakerlab.data.shards import Layout
from speakerlab.frontend.fbank import Fbank


class StoredFbank:
    """Computes stored features; picklable for the packing processes, which build the module."""

    def __init__(self, frontend: dict[str, Any]) -> None:
        """Take `frontend`, arguments of `Fbank`; raise ValueError for dither, which is random."""
        if frontend.get("dither"):
            raise ValueError(f"frontend.dither: {frontend['dither']} cannot be stored; set it to 0")
        self.frontend = frontend
        fbank = Fbank(**frontend)
        frames = fbank.sample_rate // fbank.frame_shift  # in a second
        self.layout = Layout("fbank", fbank.sample_rate, frames, 4 * fbank.num_mel_bins)

    @property
    def facts(self) -> dict[str, Any]:
        """Return the settings that the features depend on, besides the audio."""
        return {"frontend": {k: v for k, v in self.frontend.items() if k != "mean_norm"}}

    @cached_property
    def fbank(self) -> Fbank:
        return Fbank(**{**self.frontend, "mean_norm": False})

    def __call__(self, wave_S: np.ndarray) -> np.ndarray:
        """Return feats_TF, float32, of wave_S, int16; no frames if it is shorter than one."""
        torch.set_num_threads(1)
        if len(wave_S) < self.fbank.min_samples:
            return np.empty((0, self.fbank.num_mel_bins), dtype=np.float32)
        with torch.inference_mode():
            wave_1S = torch.from_numpy(wave_S.astype(np.float32) / FULL_SCALE).unsqueeze(0)
            return self.fbank(wave_1S)[0].numpy()


def frames_to_read(
    manifest: Manifest, frontend: dict[str, Any], crop_samples: int
) -> dict[str, int]:
    """Return the frames of a crop and their shift, as arguments of `TrainCrops`.

    Raises ValueError if a directory has no stored features, or those of another front end.
    """
    wanted = StoredFbank(frontend).facts["frontend"]
    for part in manifest.parts:
        if part.features is None:
            raise ValueError(
                "data.features: fbank, but the training set has no stored features; run stage 2 "
                "with --features fbank"
            )
        known = {"snip_edges": True} | part.features.facts["frontend"]  # older folders lack it
        other = sorted(key for key in wanted if known.get(key) != wanted[key])
        if other:
            raise ValueError(
                f"{part.features.folder}: was made with another front end: {other[0]} "
                f"{known.get(other[0])} instead of {wanted[other[0]]}; run stage 2 again"
            )
    fbank = Fbank(**frontend)
    return {"crop_frames": fbank.num_frames(crop_samples), "frame_shift": fbank.frame_shift}
