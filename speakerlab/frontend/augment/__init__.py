"""Augmentations by name, in the order in which they are applied.

To add one, write a file with one class (see `base.Augmentation`), add its line below and its keys
to `AugmentConfig`; `tests/frontend/test_contract_of_augmentations.py` then tests it.

The first is applied by the data worker. The order on the device follows the path of speech: speed,
pitch and formants (the speaker), room, noise, telephone, its codec, and masks over the features.
Speed must stay the first of these: it reduces the samples read for it to a crop.
Babble is a kind of noise: a crop gets one noise or one babble, so one class draws both.
"""

from collections.abc import Mapping

from speakerlab.core.registry import Registry
from speakerlab.frontend.augment.base import SUPPLIED, Augment, Augmentation

AUGMENTATIONS: Mapping[str, type[Augmentation]] = Registry(
    __name__,
    {
        "reencode": "reencode:Reencode",
        "speed": "speed:Speed",
        "pitch": "pitch:Pitch",
        "formants": "formants:Formants",
        "room": "room:Room",
        "noise": "noise:Noise",
        "telephone": "telephone:Telephone",
        "codec": "codec:Codec",
        "spec": "specaugment:SpecAugment",
    },
)

__all__ = ["AUGMENTATIONS", "SUPPLIED", "Augment", "Augmentation"]
