"""The front end: int16 waves in, features out, batched, on the device that the model is on.

    Batch.wave_BS -> Augment (speed, room, noise, ...) -> wave_BS -> front end -> feats_BTF -> masks

The front end belongs to the published model: training, extraction and export share it. It is
`Fbank`, or a pretrained speech model (`pretrained.py`), the only one here with parameters; networks
that segment take the samples themselves (`waveform.py`).
`augment/` exists in training only; its draws are made by the data workers and arrive in the
`Batch`. Features of sound are float32 under autocast too; the layers of a pretrained model are not.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from speakerlab.core.registry import Registry

if TYPE_CHECKING:  # this package is imported where torch is not, for its VAD
    from torch import nn

DEFAULT = "fbank"  # the front end of a section without a name
PRETRAINED = "ssl"
WAVE = "wave"  # for segmentation networks
# `name` in the section `frontend` -> front end. A front end has the attributes `sample_rate`,
# `min_samples`, `frame_shift`, `max_seconds` and `feat_dim`, and the methods `num_frames` and
# `samples_used` of `Fbank`.
FRONTENDS: "Mapping[str, type[nn.Module]]" = Registry(
    __name__,
    {
        DEFAULT: "fbank:Fbank",
        PRETRAINED: "pretrained:PretrainedFrontEnd",
        WAVE: "waveform:Waveform",
    },
)
