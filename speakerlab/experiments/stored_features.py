"""Features computed once and stored (`data.features: fbank`).

The log mel energies of whole utterances are stored; training removes the mean of each crop. The
model has the same front end with and without stored features.
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
    """Extractor of stored features; picklable for the packing processes, which build its Fbank."""

    def __init__(self, frontend: dict[str, Any]) -> None:
        """Store `frontend`, arguments of `Fbank`; raise ValueError for dither, which is random."""
        if frontend.get("dither"):
            raise ValueError(
                f"frontend.dither: {frontend['dither']} cannot be stored; set it to 0"
            )
        self.frontend = frontend
        fbank = Fbank(**frontend)
        frames_per_second = fbank.sample_rate // fbank.frame_shift
        bytes_per_frame = 4 * fbank.num_mel_bins  # float32
        self.layout = Layout(
            "fbank",
            fbank.sample_rate,
            frames_per_second,
            bytes_per_frame,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Return the settings that the features depend on, besides the audio."""
        # Training removes the mean of each crop itself, so the files do not depend on `mean_norm`.
        frontend = dict(self.frontend)
        frontend.pop("mean_norm", None)
        return {"frontend": frontend}

    @cached_property
    def fbank(self) -> Fbank:
        arguments = {**self.frontend, "mean_norm": False}
        return Fbank(**arguments)

    def __call__(self, wave_S: np.ndarray) -> np.ndarray:
        """Return feats_TF, float32, of wave_S, int16; T is 0 if it is shorter than a frame."""
        # The packing processes already use all CPUs.
        torch.set_num_threads(1)
        if len(wave_S) < self.fbank.min_samples:
            return np.empty((0, self.fbank.num_mel_bins), dtype=np.float32)
        samples_S = wave_S.astype(np.float32) / FULL_SCALE
        wave_1S = torch.from_numpy(samples_S).unsqueeze(0)
        with torch.inference_mode():
            feats_1TF = self.fbank(wave_1S)
        return feats_1TF[0].numpy()


def frames_to_read(
    manifest: Manifest,
    frontend: dict[str, Any],
    crop_samples: int,
) -> dict[str, int]:
    """Return the number of frames of a crop and the frame shift, as arguments of `TrainCrops`.

    Raises ValueError if a directory has no stored features, or features of another front end.
    """
    # Training would not detect features of another front end.
    wanted = StoredFbank(frontend).facts["frontend"]
    for part in manifest.parts:
        if part.features is None:
            raise ValueError(
                "data.features: fbank, but the training set has no stored features; run"
                " `speakerlab pack` with --features fbank"
            )
        # Older folders do not state `snip_edges`, which was always true then.
        facts = {"snip_edges": True, **part.features.facts["frontend"]}
        changed = [key for key in wanted if facts.get(key) != wanted[key]]
        if changed:
            key = min(changed)  # one setting is enough for the message
            raise ValueError(
                f"{part.features.folder}: was made with another front end: {key}"
                f" {facts.get(key)} instead of {wanted[key]}; run `speakerlab pack`"
                " again"
            )
    fbank = Fbank(**frontend)
    return {
        "crop_frames": fbank.num_frames(crop_samples),
        "frame_shift": fbank.frame_shift,
    }
