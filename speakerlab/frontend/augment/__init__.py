"""Augmentations by name, in the order in which they are applied.

To add one, write a file with one class (see `base.Augmentation`), add its line below and its keys
to `AugmentConfig`; `tests/frontend/test_contract_of_augmentations.py` then tests it.

The order is that of nature: somebody speaks (speed), in a room, beside noise, into a telephone,
whose codec comes last; masks are put over the features of what arrives. Speed must stay the first
wave augmentation, because it takes as many samples as were read for it and gives those of a crop.
Babble is a kind of noise: a crop gets one noise or one babble, so one class draws both.
"""

from collections.abc import Mapping

from speakerlab.frontend.augment.base import Augment, Augmentation
from speakerlab.frontend.augment.codec import Codec
from speakerlab.frontend.augment.noise import Noise
from speakerlab.frontend.augment.room import Room
from speakerlab.frontend.augment.specaugment import SpecAugment
from speakerlab.frontend.augment.speed import Speed
from speakerlab.frontend.augment.telephone import Telephone

AUGMENTATIONS: Mapping[str, type[Augmentation]] = {
    "speed": Speed,
    "room": Room,
    "noise": Noise,
    "telephone": Telephone,
    "codec": Codec,
    "spec": SpecAugment,
}

__all__ = ["AUGMENTATIONS", "Augment", "Augmentation"]
