"""Typed configuration. In: YAML layers and `--set` values. Out: one frozen `Config`, or all errors.

A component's `args` are checked against the signature of its constructor: the signature is the
schema. Unknown keys are refused with the nearest known one.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, create_model, model_validator

from speakerlab.config.layers import flatten, merge_layers, section_at, to_yaml
from speakerlab.config.messages import note_error, where_from
from speakerlab.config.sections import (
    STRICT,
    AugmentConfig,
    Component,
    Count,
    NotNegative,
    Positive,
    Section,
    Share,
    ViewsConfig,
)
from speakerlab.core.atomic import write_text
from speakerlab.core.faults import Faults, nearest
from speakerlab.frontend.augment import AUGMENTATIONS
from speakerlab.frontend.augment import SUPPLIED as AUGMENT_SUPPLIED
from speakerlab.frontend.augment.specaugment import SpecAugment
from speakerlab.frontend.fbank import Fbank
from speakerlab.frontend.vad import EnergyVad
from speakerlab.losses import HEADS, OBJECTIVES
from speakerlab.models import MODELS
from speakerlab.training.schedules import SCHEDULES, SUPPLIED
from speakerlab.training.update import OPTIMIZERS

Constructor = Callable[..., Any]
# Section -> (the values of its `name`, constructor arguments that the program gives).
NAMED: Mapping[str, tuple[Mapping[str, Constructor], tuple[str, ...]]] = {
    "model": (MODELS, ("feat_dim",)),
    "head": (HEADS, ("embed_dim", "num_classes")),
    "objective": (OBJECTIVES, ("embed_dim", "shards")),
    "optimizer": (OPTIMIZERS, ("lr",)),
    "schedule": (SCHEDULES, SUPPLIED),
}
# Place of a component with one implementation -> (constructor, arguments that the program gives).
FIXED: Mapping[tuple[str, ...], tuple[Constructor, tuple[str, ...]]] = {
    ("frontend",): (Fbank, ()),
    ("augment", "spec"): (SpecAugment, AUGMENT_SUPPLIED),
    ("vad",): (EnergyVad, ("sample_rate",)),
}


class ModelConfig(Component):
    """The backbone. Input longer than `max_seconds` is embedded in windows, everywhere."""

    max_seconds: Positive = 120.0


class DataConfig(Section):
    """Where the data directories are: names below `dir`; null for no noise or no rooms."""

    dir: str = "data"
    train: tuple[str, ...] = ("train",)
    labels: Annotated[str, Field(pattern=r"^utt2[a-z0-9_]+$")] = "utt2spk"  # the table of classes
    noise: str | None = "noise"
    rirs: str | None = "rirs"
    features: Literal["wave", "fbank"] = "wave"  # computed in training, or stored by stage 2
    crop_seconds: Positive = 3.0
    # Held out; null: max(10, 1 %), at most a fifth and 500. In identification, utterances if the
    # classes are the speakers; null: at least one of each class, without the limit of 500.
    valid_speakers: Annotated[int, Field(ge=0)] | None = None


class MarginConfig(Section):
    """The margin of the head: `initial` until `start_epoch`, `final` from `end_epoch` on."""

    initial: Annotated[float, Field(ge=0, lt=1.5)] = 0.0
    final: Annotated[float, Field(ge=0, lt=1.5)] = 0.2
    start_epoch: NotNegative = 0.0
    end_epoch: NotNegative = 0.0

    @model_validator(mode="after")
    def _end_after_start(self) -> "MarginConfig":
        if self.end_epoch < self.start_epoch:
            raise ValueError("has end_epoch before start_epoch; raise end_epoch")
        return self


class TrainingConfig(Section):
    """What is learned and how, on any hardware."""

    num_epochs: Count = 60
    extended: tuple[tuple[Count, Count], ...] = ()  # written: [step, num_epochs until then], ...
    one_crop_per: Positive | Literal["utterance"] | None = None  # s; null: as many as fit
    epoch_hours: Positive | None = None  # of crops; null: the corpus, but at least a global batch
    speaker_balance: Share = 0.0  # 0: speakers in proportion to their speech; 1: all equally often
    global_batch: Count = 256
    lr: Positive = 0.1  # peak, at a global batch of `lr_base_batch`; scaled in proportion
    lr_base_batch: Count = 256
    final_lr: Positive = 1e-4  # scaled too
    warmup_epochs: NotNegative = 5.0
    margin: MarginConfig = MarginConfig()
    clip_norm: Positive = 50.0  # far above the usual 5 to 20: only outliers are clipped
    init_head: Literal["match", "keep", "drop"] = "match"  # rows of the --init model's head
    freeze_epochs: NotNegative = 0.0  # at the start, when only the head learns
    sampled_share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the head's classes, each step
    bn_batch: Count | None = None  # crops that BatchNorm normalises together; null: what fits
    valid_every_epochs: Count = 1
    checkpoint_every_steps: Count = 1000
    keep_checkpoints: Count = 3  # the newest; the best validated one is kept too
    average_checkpoints: Count = 1  # newest ones whose mean is published
    on_divergence: Literal["warn", "stop"] = "warn"  # if the model does not learn or diverges


class RuntimeConfig(Section):
    """Settings of the machine; they do not change what is learned."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one
    micro_batch: Literal["auto"] | Count | dict[str, Count] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    tf32: Literal["auto", "off"] = "auto"  # auto: in convolutions, never in matrix products
    sync_bn: Literal["auto", "off"] = "auto"  # auto: ranks with fewer than 32 crops join
    compile: bool = False  # the backbone, by torch.compile; minutes at the start
    cuda_graph: Literal["auto", "on", "off"] = "off"  # auto: where a step can be captured
    channels_last: Literal["auto"] | bool = "auto"  # layout of 2-D convolutions
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    stall_seconds: Positive = 60.0  # a slower batch is logged, with its cause
    bank_gb: Positive = 4.0  # noise and rooms on the device; beyond it noise stays on the host
    split_head: Literal["auto", "on", "off"] = "auto"  # rows over the ranks; auto: from 50,000 on
    checkpoint_minutes: Positive = 30.0  # longest time between two checkpoints
    deterministic: bool = False  # slower; makes a GPU deterministic too, as a CPU always is
    log_every_steps: Count = 10
    log_every_seconds: Positive = 10.0
    timeout_minutes: Positive = 10.0


class Config(Section):
    """A complete experiment. Written to `exp/<name>/config.yaml`.

    task: verification compares unseen speakers; identification names one of the training classes,
    which are speakers or the labels of `data.labels`; ssl (self-supervised learning) is training
    for verification without labels, with an `objective` instead of a head.
    """

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    task: Literal["verification", "identification", "ssl"] = "verification"
    model: ModelConfig
    head: Component = Component(name="aam_softmax")
    objective: Component | None = None  # of the task ssl
    views: ViewsConfig = ViewsConfig()
    frontend: dict[str, Any] = {}  # args of Fbank
    vad: dict[str, Any] | None = None  # args of EnergyVad; null: silence is kept
    augment: AugmentConfig = AugmentConfig()
    data: DataConfig = DataConfig()
    optimizer: Component = Component(name="sgd")
    schedule: Component = Component(name="cosine")  # of the learning rate
    training: TrainingConfig = TrainingConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> "Config":
        values = self.augment.model_dump()
        probs = [v for key, v in values.items() if key.endswith("_prob") or key == "more"]
        if self.data.features == "fbank" and (any(probs) or self.augment.speeds != (1.0,)):
            raise ValueError(
                "stored features cannot be augmented: augment.speeds must be [1.0] and every "
                "augment.*_prob 0, without augment.more; set them, or data.features to wave"
            )
        if self.task != "identification" and self.data.labels != "utt2spk":
            raise ValueError(
                f"data.labels: {self.data.labels} is only for identification; set task to "
                "identification, or data.labels to utt2spk"
            )
        if self.task == "identification" and self.augment.speed_classes == "on":
            raise ValueError("augment.speed_classes: on is only for verification; use auto or off")
        if self.task == "ssl":
            self._check_views()
        return self

    def _check_views(self) -> None:
        if self.objective is None:
            raise ValueError("objective: is missing; add a layer of conf/ssl/")
        if self.objective.name in OBJECTIVES:
            OBJECTIVES[self.objective.name].check_views(self.views.long, self.views.short)
        views, most, spec = self.views, self.data.crop_seconds, self.augment.spec
        refused = {
            f"views.short_seconds={most:g}": views.short and views.short_seconds > most,
            f"views.clean={views.long}": views.clean > views.long,
            "training.speaker_balance=0": self.training.speaker_balance,
            "training.freeze_epochs=0": self.training.freeze_epochs,
            "data.features=wave": self.data.features != "wave",
            "augment.spec.num_freq_masks=0": spec.get("num_freq_masks"),
            "augment.spec.num_time_masks=0": spec.get("num_time_masks"),
        }
        if settings := " ".join(setting for setting, is_refused in refused.items() if is_refused):
            raise ValueError(
                f"task: ssl has no labels, masks or longer short views; set {settings}"
            )

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def write(self, path: Path) -> None:
        write_text(path, to_yaml(self.to_dict()))


def load_config(layers: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Merge YAML files and `key.path=value` overrides; ValueError lists every error."""
    merged, origin = merge_layers(layers, overrides)
    return parse_config(merged, origin=origin)


def parse_config(values: Mapping[str, Any], *, origin: Mapping[str, str] | None = None) -> Config:
    """Check plain values; component arguments get the defaults of their constructors."""
    faults, where = Faults(), dict(origin or {})
    filled = json.loads(json.dumps(values, default=str))
    for place, constructor, given in _components(filled, faults, where):
        args = section_at(filled, place)
        if args is None:  # not a section: reported below
            continue
        schema = args_schema(constructor, given=given)
        try:
            args.update(schema.model_validate_json(json.dumps(args)).model_dump(mode="json"))
        except ValidationError as error:
            note_error(error, schema, args, place, faults, where)
    config: Config | None = None
    try:
        config = Config.model_validate_json(json.dumps(filled))
    except ValidationError as error:
        note_error(error, Config, filled, (), faults, where)
    faults.raise_if_any()
    assert config is not None
    return config


def args_schema(constructor: Constructor, *, given: Iterable[str]) -> type[BaseModel]:
    """Make a schema from a signature, without the arguments `given` by the program."""
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(constructor, eval_str=True).parameters.items():
        if name in given or parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        required = parameter.default is parameter.empty
        fields[name] = (parameter.annotation, ... if required else parameter.default)
    return create_model(constructor.__name__, __config__=STRICT, **fields)


def differences(old: Config, new: Config) -> list[str]:
    """Return the settings that differ and change what is learned, as "key: old -> new"."""
    a, b = flatten(old.to_dict()), flatten(new.to_dict())
    free = (
        *("runtime.", "data.dir", "training.keep_checkpoints"),
        *("training.num_epochs", "training.extended"),  # `consistency.record_config` checks them
        *("training.checkpoint_every_steps", "training.valid_every_epochs"),
        *("training.average_checkpoints", "training.on_divergence"),
    )
    return [
        f"{key}: {a.get(key)} -> {b.get(key)}"
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key) and not key.startswith(free)
    ]


def _components(
    values: dict[str, Any], faults: Faults, origin: Mapping[str, str]
) -> Iterable[tuple[tuple[str, ...], Constructor, tuple[str, ...]]]:
    """Yield (place of the args, constructor, arguments the program gives) of each component."""
    named: list[tuple[tuple[str, ...], Any, Mapping[str, Constructor], tuple[str, ...]]] = []
    for section, (registry, given) in NAMED.items():
        default = Config.model_fields[section].default
        component = values.get(section, {})
        if isinstance(default, Component) and isinstance(component, dict):
            values[section] = component = {"name": default.name, **component}
        named.append(((section,), component, registry, given))
    for key, component in (section_at(values, ("augment", "more")) or {}).items():
        named.append((("augment", "more", key), component, AUGMENTATIONS, AUGMENT_SUPPLIED))
    for place, component, registry, given in named:
        name = component.get("name") if isinstance(component, dict) else None
        if not isinstance(name, str):
            continue
        where = where_from(origin, (*place, "name"))
        if name not in registry:
            line = f"{where}: unknown {place[0]} '{name}'"
            faults.add("unknown components", line + nearest(name, registry))
            continue
        try:
            constructor = registry[name]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        yield (*place, "args"), constructor, given
    for place, (constructor, given) in FIXED.items():
        if Config.model_fields[place[0]].default is None and values.get(place[0]) is None:
            continue  # optional, and not configured
        yield place, constructor, given
