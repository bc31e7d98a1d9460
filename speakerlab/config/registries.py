"""The components that a configuration names, and the constructor arguments that it cannot set."""

from collections.abc import Callable, Mapping
from typing import Any

from speakerlab.frontend.augment.specaugment import SpecAugment
from speakerlab.frontend.fbank import Fbank
from speakerlab.frontend.vad import EnergyVad
from speakerlab.losses import HEADS
from speakerlab.models import MODELS
from speakerlab.training.update import OPTIMIZERS

Constructor = Callable[..., Any]
# Section -> (the values of its `name`, constructor arguments that the program gives).
NAMED: Mapping[str, tuple[Mapping[str, Constructor], tuple[str, ...]]] = {
    "model": (MODELS, ("feat_dim",)),
    "head": (HEADS, ("embed_dim", "num_classes")),
    "optimizer": (OPTIMIZERS, ("lr",)),
}
# Place of a component with one implementation -> (constructor, arguments that the program gives).
FIXED: Mapping[tuple[str, ...], tuple[Constructor, tuple[str, ...]]] = {
    ("frontend",): (Fbank, ()),
    ("augment", "spec"): (SpecAugment, ()),
    ("vad",): (EnergyVad, ("sample_rate",)),
}
