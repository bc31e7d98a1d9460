"""Typed configuration. In: YAML layers and `--set` values. Out: one frozen `Config`, or all errors.

A component's `args` are checked against the signature of its constructor: the signature is the
schema. An unknown key is refused with a hint at the nearest valid key.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    create_model,
    model_serializer,
    model_validator,
)

from speakerlab.config.layers import flatten, merge_layers, section_at, to_yaml
from speakerlab.config.messages import note_error, where_from
from speakerlab.config.sections import (
    STRICT,
    AugmentConfig,
    Component,
    ConversationsConfig,
    Count,
    CountFromZero,
    DistilConfig,
    NotNegative,
    Positive,
    Section,
    Share,
    Speeds,
    ViewsConfig,
)
from speakerlab.core.atomic import write_text
from speakerlab.core.faults import Faults, nearest
from speakerlab.data.tables import is_address
from speakerlab.frontend import DEFAULT, FRONTENDS, PRETRAINED, WAVE
from speakerlab.frontend.augment import AUGMENTATIONS
from speakerlab.frontend.augment import SUPPLIED as AUGMENT_SUPPLIED
from speakerlab.frontend.augment.specaugment import SpecAugment
from speakerlab.frontend.vad import EnergyVad
from speakerlab.losses import HEADS, OBJECTIVES
from speakerlab.losses.distillation import DISTILLATION_LOSSES
from speakerlab.models import MODELS, SEGMENTERS
from speakerlab.training.optimizers import OPTIMIZERS
from speakerlab.training.schedules import SCHEDULES, SUPPLIED

Constructor = Callable[..., Any]
Registry = Mapping[str, Constructor]  # name in the YAML -> constructor
Names = tuple[str, ...]
Place = tuple[str, ...]  # keys from the outermost section inwards
Margin = Annotated[float, Field(ge=0, lt=1.5)]
Factor = Annotated[float, Field(gt=0, le=1)]
# Prefixes of the keys that do not change the result of training.
NOT_LEARNED = (
    "runtime.",
    "data.dir",
    "training.keep_checkpoints",
    "training.num_epochs",  # `consistency.record_config` checks this and the next
    "training.extended",
    "training.checkpoint_every_steps",
    "training.valid_every_epochs",
    "training.average_checkpoints",
    "training.keep_better",
    "training.on_divergence",
    "frontend.model",  # its sha256 is compared
    "frontend.publish",
    "distil.teachers",  # `consistency.check_teachers` compares their weights
)
# Section -> (the values of its `name`, constructor arguments that the program supplies).
NAMED: Mapping[str, tuple[Registry, Names]] = {
    "model": (MODELS, ("feat_dim", "num_layers")),
    "head": (HEADS, ("embed_dim", "num_classes")),
    "objective": (OBJECTIVES, ("embed_dim", "shards")),
    "optimizer": (OPTIMIZERS, ("lr",)),
    "schedule": (SCHEDULES, SUPPLIED),
}
# Place of a component without a name -> (constructor, arguments that the program supplies).
FIXED: Mapping[Place, tuple[Constructor, Names]] = {
    ("augment", "spec"): (SpecAugment, AUGMENT_SUPPLIED),
    ("vad",): (EnergyVad, ("sample_rate",)),
}


class ModelConfig(Component):
    """The backbone. Every command embeds input longer than `max_seconds` in windows."""

    max_seconds: Positive = 120.0


class CorpusConfig(Section):
    """A training directory of a mixture, and what differs there from the others."""

    dir: str  # below data.dir, or an address such as s3://bucket/train
    # Of the crops of an epoch; null: what the others leave, in proportion to the speech.
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    # shared: an id of a speaker means the same person as in the other directories.
    speakers: Literal["own", "shared"] = "own"
    # null, in all of these: as in the sections data, training and augment.
    labels: Annotated[str, Field(pattern=r"^utt2[a-z0-9_]+$")] | None = None
    one_crop_per: Positive | Literal["utterance"] | None = None
    speeds: Speeds | None = None
    noise_prob: Share | None = None
    room_prob: Share | None = None

    @property
    def name(self) -> str:
        """Return the name in ids, metrics and files; of an address its last part."""
        if is_address(self.dir):
            return self.dir.rstrip("/").rpartition("/")[2]
        return self.dir

    @model_serializer(mode="wrap")
    def _only_what_differs(self, handler: SerializerFunctionWrapHandler) -> Any:
        """Write `{dir: a, share: 0.5}`, as people do, without all other keys."""
        values: dict[str, Any] = handler(self)
        differing: dict[str, Any] = {}
        for key, value in values.items():
            if value != type(self).model_fields[key].default:
                differing[key] = value
        return differing


class DataConfig(Section):
    """Data directories, by name below `dir`; null for no noise or no rooms."""

    dir: str = "data"
    train: Annotated[tuple[str | CorpusConfig, ...], Field(min_length=1)] = ("train",)
    # The table with the class of each utterance.
    labels: Annotated[str, Field(pattern=r"^utt2[a-z0-9_]+$")] = "utt2spk"
    noise: str | None = "noise"
    rirs: str | None = "rirs"
    features: Literal["wave", "fbank"] = "wave"  # computed, or packed
    crop_seconds: Positive = 3.0
    # Number of speakers that are held out for validation. null: 1 % of the speakers and at least
    # 10, but at most a fifth of them and at most 500.
    # In identification, if the classes are the speakers, a number of utterances. null: the same
    # share of the utterances, but at least one of each class and without the limit of 500.
    # In distillation without labels, a number of utterances.
    valid_speakers: CountFromZero | None = None

    @property
    def corpora(self) -> list[CorpusConfig]:
        """Return the entries of `train` as sections; a name alone becomes one, too."""
        sections: list[CorpusConfig] = []
        for entry in self.train:
            is_name = isinstance(entry, str)
            sections.append(CorpusConfig(dir=entry) if is_name else entry)
        return sections

    @property
    def tables(self) -> list[str]:
        """Return the name of the table of classes in each training directory."""
        return [corpus.labels or self.labels for corpus in self.corpora]

    @property
    def has_speaker_labels(self) -> bool:
        """Return whether the classes are the speakers."""
        return set(self.tables) == {"utt2spk"}

    def train_folders(self) -> list[Path]:
        """Return the training directories; of those in a store, download the tables if need be."""
        # Stores need modules that only Linux has.
        from speakerlab.data.remote_tables import local_folder

        folders: list[Path] = []
        for corpus in self.corpora:
            if is_address(corpus.dir):
                folders.append(local_folder(corpus.dir))
            else:
                folders.append(Path(self.dir, corpus.dir))
        return folders

    @model_validator(mode="after")
    def _noise_and_rooms_are_local(self) -> "DataConfig":
        if is_address(self.dir):
            raise ValueError(
                f"has the address {self.dir} as dir, where noise and rooms are read from;"
                f" set data.train=[{self.dir.rstrip('/')}/train], and dir to a folder"
            )
        return self

    @model_validator(mode="after")
    def _each_once(self) -> "DataConfig":
        names = [corpus.name for corpus in self.corpora]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(
                f"has {min(repeated)} twice in train; give it a larger share instead"
            )
        return self


class MarginConfig(Section):
    """The margin of the head: `initial` until `start_epoch`, `final` from `end_epoch` on."""

    initial: Margin = 0.0
    final: Margin = 0.2
    start_epoch: NotNegative = 0.0
    end_epoch: NotNegative = 0.0

    @model_validator(mode="after")
    def _end_after_start(self) -> "MarginConfig":
        if self.end_epoch < self.start_epoch:
            raise ValueError("has end_epoch before start_epoch; raise end_epoch")
        return self


class TrainingConfig(Section):
    """Settings that determine the result of training, on any hardware."""

    num_epochs: Count = 60
    # Written by training when a run is extended: [step, num_epochs until then], ...
    extended: tuple[tuple[Count, Count], ...] = ()
    # Seconds of speech for each crop; null: as many crops as fit.
    one_crop_per: Positive | Literal["utterance"] | None = None
    # Hours of crops in an epoch; null: the corpus, but at least a global batch.
    epoch_hours: Positive | None = None
    # 0: speakers in proportion to their speech; 1: all equally often.
    speaker_balance: Share = 0.0
    global_batch: Count = 256
    # Peak, at a global batch of `lr_base_batch`; scaled in proportion.
    lr: Positive = 0.1
    lr_base_batch: Count = 256
    final_lr: Positive = 1e-4  # scaled too
    warmup_epochs: NotNegative = 5.0
    margin: MarginConfig = MarginConfig()
    clip_norm: Positive = 50.0  # far above the usual 5 to 20: only outliers are clipped
    # What to do with the rows of the --init model's head.
    init_head: Literal["match", "keep", "drop"] = "match"
    freeze_epochs: NotNegative = 0.0  # at the start, when only the head learns
    # Parts of the embedder that never learn, such as [frontend] or [frontend.encoder].
    freeze: tuple[str, ...] = ()
    # Of a pretrained model: factor on the learning rate of its highest layer, and of each lower
    # layer relative to the layer above.
    pretrained_lr: Factor = 1.0
    layer_decay: Factor = 1.0
    # After --init, publish the initial weights unless training has lowered the validation EER;
    # false: always publish the trained weights.
    keep_better: bool = True
    # Share of the head's classes that each step uses.
    sampled_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    # Crops that BatchNorm normalises together; null: as many as fit.
    bn_batch: Count | None = None
    valid_every_epochs: Count = 1
    checkpoint_every_steps: Count = 1000
    keep_checkpoints: Count = 3  # the newest; the best validated one is kept too
    average_checkpoints: Count = 1  # the newest; their mean is published
    # Of the weights of --init in those that are published; the rest is of the trained ones.
    initial_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    # Reaction if the model does not learn or diverges.
    on_divergence: Literal["warn", "stop"] = "warn"


class RuntimeConfig(Section):
    """Settings of the machine; they do not change the result of training."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one
    micro_batch: Literal["auto"] | Count | dict[str, Count] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    # auto: in convolutions, never in matrix products.
    tf32: Literal["auto", "off"] = "auto"
    # auto: ranks with fewer than 32 crops share BatchNorm's statistics.
    sync_bn: Literal["auto", "off"] = "auto"
    # Compute the layers of a pretrained model again in the backward pass, which takes less memory
    # and about a third more time. auto: where otherwise too few crops fit for a good BatchNorm.
    checkpoint_layers: Literal["auto"] | bool = "auto"
    # Compile the backbone, which takes minutes at the start. reduce-overhead: with CUDA graphs.
    compile: bool | Literal["reduce-overhead"] = False
    channels_last: Literal["auto"] | bool = "auto"  # layout of 2-D convolutions
    num_workers: Literal["auto"] | CountFromZero = "auto"
    # Threads of torch in each rank, and in each process of `extract`. auto: the cores of the host,
    # divided among its ranks.
    num_threads: Literal["auto"] | Count = "auto"
    stall_seconds: Positive = 60.0  # a slower batch is logged, with its cause
    # Memory for noise and rooms on the device; noise that needs more stays on the host. auto: what
    # the planned batch leaves of a GPU's memory; of the host's free memory, a quarter, at most 4.
    bank_gb: Literal["auto"] | Positive = "auto"
    # Disk of a host for parts of shards that are in an object store, and the folder for them, on a
    # local disk; null: $SPEAKERLAB_CACHE/shards, or ~/.cache/speakerlab/shards.
    cache_gb: Positive = 100.0
    cache_dir: str | None = None
    # Split the head's rows over the ranks; auto: from 50,000 classes on.
    split_head: Literal["auto", "on", "off"] = "auto"
    checkpoint_minutes: Positive = 30.0  # longest time between two checkpoints
    # Slower; makes training on a GPU deterministic, as training on a CPU always is.
    deterministic: bool = False
    log_every_steps: Count = 10
    log_every_seconds: Positive = 10.0
    timeout_minutes: Positive = 10.0


class Config(Section):
    """A complete experiment. Written to `exp/<name>/config.yaml`.

    task: verification compares unseen speakers; identification predicts one of the training
    classes, which are speakers or the labels of `data.labels`; ssl (self-supervised learning)
    trains for verification without labels, with an `objective` instead of a head; distil trains for
    verification with the embeddings of a teacher, and a head only if `distil.label_weight` is set;
    segmentation finds who speaks when in a window, with a network that embeds nothing.
    """

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    task: Literal["verification", "identification", "ssl", "distil", "segmentation"] = (
        "verification"
    )
    model: ModelConfig
    head: Component = Component(name="aam_softmax")
    objective: Component | None = None  # of the task ssl
    views: ViewsConfig = ViewsConfig()
    distil: DistilConfig = DistilConfig()
    conversations: ConversationsConfig = ConversationsConfig()
    # Args of Fbank or, with `name: ssl`, of a pretrained model.
    frontend: dict[str, Any] = {}
    vad: dict[str, Any] | None = None  # args of EnergyVad; null: silence is kept
    augment: AugmentConfig = AugmentConfig()
    data: DataConfig = DataConfig()
    optimizer: Component = Component(name="sgd")
    schedule: Component = Component(name="cosine")  # of the learning rate
    training: TrainingConfig = TrainingConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> "Config":
        self._check_features()
        self._check_labels()
        self._check_frontend()
        self._check_voices()
        if self.task == "ssl":
            self._check_views()
        if self.task == "distil":
            self._check_distil()
        if self.task == "segmentation":
            self._check_segmentation()
        self._check_initial_share()
        return self

    @property
    def has_head(self) -> bool:
        """Return whether training uses the labels of the utterances, for a head."""
        if self.task == "distil":
            return self.distil.label_weight > 0
        return self.task not in ("ssl", "segmentation")

    @property
    def is_pretrained(self) -> bool:
        """Return whether the front end is a pretrained model."""
        return self.frontend.get("name", DEFAULT) == PRETRAINED

    @property
    def _has_masks(self) -> bool:
        """Return whether SpecAugment masks mel features."""
        spec = self.augment.spec
        return bool(spec.get("num_freq_masks") or spec.get("num_time_masks"))

    def _check_features(self) -> None:
        """Raise ValueError if an augmentation would change stored features."""
        has_speeds = self.augment.speeds != (1.0,)
        is_augmented = has_speeds or bool(self.augment.more)
        settings = self.augment.model_dump()
        for key, value in settings.items():
            if key.endswith("_prob") and value:
                is_augmented = True
        if self.data.features == "fbank" and is_augmented:
            raise ValueError(
                "stored features cannot be augmented: augment.speeds must be [1.0] and"
                " every augment.*_prob 0, without augment.more; set them, or"
                " data.features to wave"
            )

    def _check_labels(self) -> None:
        """Raise ValueError for labels or classes of speeds that do not fit the task."""
        is_identification = self.task == "identification"
        if not (self.data.has_speaker_labels or is_identification):
            tables = set(self.data.tables) - {"utt2spk"}
            raise ValueError(
                f"data.labels: {min(tables)} is only for identification; set task"
                " to identification, or data.labels to utt2spk"
            )
        if is_identification and self.augment.speed_classes == "on":
            raise ValueError(
                "augment.speed_classes: on is only for verification; use auto or off"
            )

    def _check_frontend(self) -> None:
        """Raise ValueError unless model and training fit the front end."""
        takes_wave = self.frontend.get("name", DEFAULT) == WAVE
        if takes_wave != (self.task == "segmentation"):
            raise ValueError(
                "frontend.name: wave and task segmentation belong together; set both, or"
                " neither (--config segmentation/pyannet has both)"
            )
        if self.is_pretrained:
            self._check_pretrained()
        else:
            self._check_without_pretrained()

    def _check_without_pretrained(self) -> None:
        """Raise ValueError for settings that need a pretrained model."""
        training = self.training
        if training.pretrained_lr != 1.0 or training.layer_decay != 1.0:
            raise ValueError(
                "training.pretrained_lr and training.layer_decay: are for a"
                " pretrained model; set them to 1, or frontend.name=ssl"
            )
        if takes_layers(self.model.name):
            raise ValueError(
                f"model.name: {self.model.name} takes the layers of a pretrained"
                " model; set frontend.name=ssl and frontend.model"
            )

    def _check_pretrained(self) -> None:
        """Raise ValueError for settings that do not fit a pretrained model."""
        if self.task == "ssl":
            raise ValueError(
                "task: ssl does not train pretrained models, which have learned without"
                " labels; set task=verification, or another frontend"
            )
        if self.data.features != "wave":
            raise ValueError(
                "data.features: a pretrained model hears waves, not stored features; set"
                " data.features=wave"
            )
        if self._has_masks:
            raise ValueError(
                "augment.spec: its masks are for mel features; set"
                " augment.spec.num_freq_masks=0 augment.spec.num_time_masks=0"
            )

    def _check_distil(self) -> None:
        """Raise ValueError unless the settings fit training with a teacher."""
        self._check_distil_losses()
        if self.distil.frame_weight:
            self._check_frames()
        if self.data.features != "wave":
            raise ValueError(
                "data.features: a teacher hears waves, not stored features; set"
                " data.features=wave"
            )
        self._check_shared_targets()
        if self.training.freeze_epochs:
            raise ValueError(
                "training.freeze_epochs: without a head alone to train, nothing would"
                " learn; set it to 0"
            )
        if self.training.speaker_balance and not self.has_head:
            raise ValueError(
                "training.speaker_balance: labels are not used; set it to 0, or a"
                " distil.label_weight above 0"
            )

    def _check_distil_losses(self) -> None:
        """Raise ValueError for losses that are unknown, or without weight."""
        known_losses = ", ".join(DISTILLATION_LOSSES)
        for name in self.distil.losses:
            if name not in DISTILLATION_LOSSES:
                raise ValueError(
                    f"distil.losses: unknown loss '{name}'; use {known_losses}"
                )
        if not any(self.distil.losses.values()):
            raise ValueError(
                f"distil.losses: all weights are 0; set one of {known_losses}"
            )

    def _check_shared_targets(self) -> None:
        """Raise ValueError unless the views of a crop may share a target, and fill the batch."""
        views = self.distil.views
        shares_targets = self.distil.targets == "crop" and self.distil.hears == "clean"
        if views > 1 and not shares_targets:
            raise ValueError(
                f"distil.views: {views} augmentations of a crop share a target only with"
                " distil.targets=crop and distil.hears=clean; set it to 1"
            )
        if self.training.global_batch % views:
            raise ValueError(
                f"distil.views: {views} does not divide training.global_batch,"
                f" {self.training.global_batch}; change one of them"
            )

    def _check_frames(self) -> None:
        """Raise ValueError unless student and teacher have frames to compare."""
        frames = "distil.frame_weight: the frames of"
        if len(self.distil.teachers) > 1:
            raise ValueError(
                f"{frames} several teachers cannot be joined; set it to 0, or give one"
                " teacher"
            )
        if any(name.endswith(".onnx") for name in self.distil.teachers):
            raise ValueError(
                f"{frames} an .onnx file are not among its outputs; set it to 0, or give"
                " the model that was exported"
            )
        if self.runtime.compile:
            raise ValueError(
                f"{frames} a compiled student cannot be read; set it to 0, or"
                " runtime.compile=false"
            )

    def _check_voices(self) -> None:
        """Raise ValueError if a changed voice would have a label or target that is not its own."""
        changes: list[str] = []
        if self.augment.pitch_prob:
            changes.append("augment.pitch_prob")
        if self.augment.formants_prob:
            changes.append("augment.formants_prob")
        # A language or a sex stays the same; a teacher says what it hears.
        names_other_classes = not self.data.has_speaker_labels
        hears_crops = self.task == "distil" and self.distil.targets == "crop"
        has_targets = hears_crops and not self.has_head
        if changes and not names_other_classes and not has_targets:
            raise ValueError(
                f"{', '.join(changes)}: the changed voice is not the speaker's; set it to"
                " 0, or train with a teacher that hears it (task distil,"
                " distil.targets=crop, distil.label_weight=0)"
            )

    def _check_segmentation(self) -> None:
        """Raise ValueError for settings that only make sense for single speakers."""
        # Setting that would be accepted -> whether the current value is refused.
        refused = {
            "augment.speeds=[1.0]": self.augment.speeds != (1.0,),
            "augment.spec.num_freq_masks=0 augment.spec.num_time_masks=0": self._has_masks,
            "data.features=wave": self.data.features != "wave",
            "training.freeze_epochs=0": self.training.freeze_epochs,
            "runtime.compile=false": self.runtime.compile,
            "vad=null": self.vad is not None,
        }
        settings = [setting for setting, value in refused.items() if value]
        if settings:
            raise ValueError(
                "task: segmentation hears whole windows at their own speed, and has no"
                f" head; set {' '.join(settings)}"
            )

    def _check_views(self) -> None:
        """Raise ValueError for settings that do not fit training without labels."""
        if self.objective is None:
            raise ValueError("objective: is missing; add a layer of conf/ssl/")
        if self.objective.name in OBJECTIVES:
            OBJECTIVES[self.objective.name].check_views(
                self.views.long, self.views.short
            )
        views = self.views
        spec = self.augment.spec
        longest = self.data.crop_seconds
        is_short_view_long = views.short > 0 and views.short_seconds > longest
        # Setting that would be accepted -> whether the current value is refused.
        refused = {
            f"views.short_seconds={longest:g}": is_short_view_long,
            f"views.clean={views.long}": views.clean > views.long,
            "training.speaker_balance=0": self.training.speaker_balance,
            "training.freeze_epochs=0": self.training.freeze_epochs,
            "data.features=wave": self.data.features != "wave",
            "augment.spec.num_freq_masks=0": spec.get("num_freq_masks"),
            "augment.spec.num_time_masks=0": spec.get("num_time_masks"),
        }
        settings = [setting for setting, value in refused.items() if value]
        if settings:
            raise ValueError(
                "task: ssl has no labels, masks or longer short views; set"
                f" {' '.join(settings)}"
            )

    def _check_initial_share(self) -> None:
        """Raise ValueError for `training.initial_share` with a task that it does not fit."""
        can_be_averaged = self.task in ("verification", "segmentation")
        if self.training.initial_share and not can_be_averaged:
            raise ValueError(
                "training.initial_share: the weights of --init fit only tasks whose network"
                " is used without a head or a teacher; set it to 0"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain values, as YAML and JSON hold them."""
        return self.model_dump(mode="json")

    def write(self, path: Path) -> None:
        """Write all settings as YAML, atomically."""
        write_text(path, to_yaml(self.to_dict()))


def takes_layers(model: str) -> bool:
    """Return whether a backbone takes all layers of a pretrained model, not their sum."""
    return (
        model in MODELS and "num_layers" in inspect.signature(MODELS[model]).parameters
    )


def load_config(layers: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Merge YAML files and `key.path=value` overrides; ValueError lists every error."""
    merged, origin = merge_layers(layers, overrides)
    return parse_config(merged, origin=origin)


def parse_config(
    values: Mapping[str, Any],
    *,
    origin: Mapping[str, str] | None = None,
) -> Config:
    """Check plain values; component arguments get the defaults of their constructors."""
    faults = Faults()
    where = dict(origin or {})

    # First the arguments of components, against their constructors. Defaults are added to a copy,
    # because the caller keeps its values.
    text = json.dumps(values, default=str)
    filled = json.loads(text)
    _add_default_names(filled)
    for place, constructor, given in _components(filled, faults, where):
        args = section_at(filled, place)
        if args is None:  # not a section: reported below
            continue
        schema = args_schema(constructor, given=given)
        _check_args(args, schema=schema, place=place, faults=faults, origin=where)

    # Then everything else; all errors are reported together.
    config: Config | None = None
    try:
        config = Config.model_validate_json(json.dumps(filled))
    except ValidationError as error:
        note_error(
            error,
            schema=Config,
            values=filled,
            place=(),
            faults=faults,
            origin=where,
        )
    faults.raise_if_any()
    assert config is not None
    return config


def _check_args(
    args: dict[str, Any],
    *,
    schema: type[BaseModel],
    place: Place,
    faults: Faults,
    origin: Mapping[str, str],
) -> None:
    """Check the arguments of a component, and add the defaults of its constructor to them."""
    args_alone = args
    if place == ("frontend",):
        # The name of a front end is among its arguments.
        args_alone = {key: args[key] for key in args if key != "name"}
    try:
        checked = schema.model_validate_json(json.dumps(args_alone))
    except ValidationError as error:
        note_error(
            error,
            schema=schema,
            values=args_alone,
            place=place,
            faults=faults,
            origin=origin,
        )
        return
    args.update(checked.model_dump(mode="json"))


def args_schema(constructor: Constructor, *, given: Iterable[str]) -> type[BaseModel]:
    """Make a schema from a signature, without the arguments `given` by the program."""
    fields: dict[str, Any] = {}
    signature = inspect.signature(constructor, eval_str=True)
    for name, parameter in signature.parameters.items():
        is_setting = parameter.kind is parameter.KEYWORD_ONLY
        if name in given or not is_setting:
            continue
        is_required = parameter.default is parameter.empty
        # Pydantic writes "required" as the default `...`.
        default = ... if is_required else parameter.default
        fields[name] = (parameter.annotation, default)
    return create_model(constructor.__name__, __config__=STRICT, **fields)


def differences(old: Config, new: Config) -> list[str]:
    """Return the changed settings that affect the result of training, as "key: old -> new"."""
    old_values = flatten(old.to_dict())
    new_values = flatten(new.to_dict())
    lines: list[str] = []
    keys = old_values.keys() | new_values.keys()
    for key in sorted(keys):
        old_value = old_values.get(key)
        new_value = new_values.get(key)
        if old_value != new_value and not key.startswith(NOT_LEARNED):
            lines.append(f"{key}: {old_value} -> {new_value}")
    return lines


def _frontend(
    values: dict[str, Any],
    faults: Faults,
    origin: Mapping[str, str],
) -> Iterable[tuple[Place, Constructor, Names]]:
    """Yield the front end, whose name is among its arguments."""
    section = values["frontend"]
    if not isinstance(section, dict):
        return
    name = section.get("name", DEFAULT)
    if name in FRONTENDS:
        yield ("frontend",), FRONTENDS[name], ("joins_layers",)
        return
    where = where_from(origin, ("frontend", "name"))
    hint = nearest(str(name), FRONTENDS)
    faults.add("unknown components", f"{where}: unknown frontend '{name}'{hint}")


def _registries(values: Mapping[str, Any]) -> Mapping[str, tuple[Registry, Names]]:
    """Return the components of each section; the task decides what a model is."""
    if values.get("task") == "segmentation":
        return {**NAMED, "model": (SEGMENTERS, ("feat_dim",))}
    return NAMED


def _add_default_names(values: dict[str, Any]) -> None:
    """Add the default name to each component that has one, and an empty section `frontend`.

    A section may hold any value, because the values are not checked yet.
    """
    for section in NAMED:
        default = Config.model_fields[section].default
        component = values.get(section, {})
        if isinstance(default, Component) and isinstance(component, dict):
            values[section] = {"name": default.name, **component}
    values.setdefault("frontend", {})


def _components(
    values: dict[str, Any],
    faults: Faults,
    origin: Mapping[str, str],
) -> Iterable[tuple[Place, Constructor, Names]]:
    """Yield (place of the args, constructor, arguments from the program) of each component.

    Unknown names go to `faults`.
    """
    # Values are not checked yet: a component may be any value.
    named: list[tuple[Place, Any, Registry, Names]] = []
    for section, (registry, given) in _registries(values).items():
        component = values.get(section, {})
        place: Place = (section,)
        named.append((place, component, registry, given))
    further_augmentations = section_at(values, ("augment", "more")) or {}
    for key, component in further_augmentations.items():
        place = ("augment", "more", key)
        named.append((place, component, AUGMENTATIONS, AUGMENT_SUPPLIED))

    for place, component, registry, given in named:
        # A component or name of a wrong type is reported with everything else.
        name = component.get("name") if isinstance(component, dict) else None
        if not isinstance(name, str):
            continue
        where = where_from(origin, (*place, "name"))
        if name not in registry:
            hint = nearest(name, registry)
            line = f"{where}: unknown {place[0]} '{name}'{hint}"
            faults.add("unknown components", line)
            continue
        try:
            constructor = registry[name]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        yield (*place, "args"), constructor, given

    yield from _frontend(values, faults, origin)
    for place, (constructor, given) in FIXED.items():
        section = place[0]
        is_optional = Config.model_fields[section].default is None
        if is_optional and values.get(section) is None:
            continue
        yield place, constructor, given
