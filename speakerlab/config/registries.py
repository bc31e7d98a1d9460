"""Registries of what a configuration can name, and the arguments that it cannot set."""

from collections.abc import Callable, Mapping
from typing import Any

from speakerlab.frontend.augment.specaugment import SpecAugment
from speakerlab.frontend.fbank import Fbank
from speakerlab.frontend.vad import EnergyVad
from speakerlab.losses import HEADS
from speakerlab.models import MODELS
from speakerlab.training.optim import OPTIMIZERS

# Section of the configuration -> the values its `name` can take.
REGISTRIES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "model": MODELS,
    "head": HEADS,
    "optimizer": OPTIMIZERS,
}
# Place of the arguments of a component that has only one implementation.
FIXED: Mapping[tuple[str, ...], Callable[..., Any]] = {
    ("frontend",): Fbank,
    ("augment", "spec"): SpecAugment,
    ("vad",): EnergyVad,
}
# Constructor arguments that follow from other parts and are never configured.
GIVEN: Mapping[str, tuple[str, ...]] = {
    "model": ("feat_dim",),
    "head": ("embed_dim", "num_classes"),
    "optimizer": ("lr",),
    "frontend": (),
    "spec": (),
    "vad": ("sample_rate",),
}
