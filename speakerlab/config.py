"""Typed configuration. In: YAML layers and `--set` values. Out: one frozen `Config`, or all faults.

Layers are merged left to right; a layer that changes a component's `name` replaces its `args`.
A component's `args` are checked against the signature of its constructor (`build.py` knows which):
the signature is the schema. Unknown keys are refused with the nearest known one.
"""

import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from speakerlab import build
from speakerlab.faults import Faults

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A part of the configuration: unknown keys and wrong types are faults."""

    model_config = STRICT


class Component(Section):
    """Something built by name; `args` are those of its constructor."""

    name: str
    args: dict[str, Any] = {}


class ModelConfig(Component):
    """The backbone. Input longer than `max_seconds` is embedded in windows, everywhere."""

    max_seconds: Positive = 120.0


class AugmentConfig(Section):
    """What is done to a training crop. The first speed is 1; others make new speakers."""

    speeds: tuple[Annotated[float, Field(ge=0.5, le=2)], ...] = (1.0, 0.9, 1.1)
    room_prob: Share = 0.4
    noise_prob: Share = 0.4
    snr_db: tuple[float, float] = (0.0, 15.0)
    spec: dict[str, Any] = {}  # args of SpecAugment


class DataConfig(Section):
    """Where the data directories are: names below `dir`; null for no noise or no rooms."""

    dir: str = "data"
    train: tuple[str, ...] = ("train",)
    noise: str | None = "noise"
    rirs: str | None = "rirs"
    crop_seconds: Positive = 3.0
    valid_speakers: Annotated[int, Field(ge=0)] | None = None  # null: max(10, 1 %)


class MarginConfig(Section):
    """The margin of the head: `initial` until `start_epoch`, `final` from `end_epoch` on."""

    initial: Annotated[float, Field(ge=0, lt=1.5)] = 0.0
    final: Annotated[float, Field(ge=0, lt=1.5)] = 0.2
    start_epoch: Annotated[float, Field(ge=0)] = 0.0
    end_epoch: Annotated[float, Field(ge=0)] = 0.0


class TrainingConfig(Section):
    """What is learned and how; hardware has no say here."""

    num_epochs: Count = 60
    epoch_hours: Positive | None = None  # hours of crops in an epoch; null: as long as the corpus
    global_batch: Count = 256
    lr: Positive = 0.1  # peak, at a global batch of `lr_base_batch`; scaled in proportion
    lr_base_batch: Count = 256
    final_lr: Positive = 1e-4
    warmup_epochs: Annotated[float, Field(ge=0)] = 5.0
    margin: MarginConfig = MarginConfig()
    clip_norm: Positive = 10.0
    init_head: Literal["match", "keep", "drop"] = "match"  # rows of the head that --init brings
    bn_batch: Count | None = None  # crops BatchNorm must see at once; null: whatever fits
    valid_every_epochs: Count = 1
    checkpoint_every_steps: Count = 1000
    keep_checkpoints: Count = 3


class RuntimeConfig(Section):
    """What depends on the machine and must not change what is learned."""

    micro_batch: Literal["auto"] | Count | dict[str, Count] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    bank_gb: Positive = 4.0  # noise and rooms kept on the device
    deterministic: bool = False  # bit for bit on a GPU too, slower; a CPU always is
    log_every_steps: Count = 10
    log_every_seconds: Positive = 10.0
    timeout_minutes: Positive = 10.0


class Config(Section):
    """One experiment, whole. Written to `exp/<name>/config.yaml`."""

    seed: Annotated[int, Field(ge=0)] = 0
    model: ModelConfig
    head: Component = Component(name="aam_softmax")
    frontend: dict[str, Any] = {}  # args of Fbank
    augment: AugmentConfig = AugmentConfig()
    data: DataConfig = DataConfig()
    optimizer: Component = Component(name="sgd")
    training: TrainingConfig = TrainingConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in YAML."""
        return self.model_dump(mode="json")

    def write(self, path: Path) -> None:
        """Write as YAML, whole or not at all."""
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")
        temporary.replace(path)


def load_config(layers: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Merge YAML files and `key.path=value` overrides, left to right.

    Raises ValueError listing every fault, FileNotFoundError for a layer that is not there.
    """
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}  # key path -> the layer that set it last
    for layer in layers:
        _merge(merged, _read_yaml(layer), str(layer), origin)
    for override in overrides:
        _merge(merged, _parse_override(override), f"--set {override}", origin)
    return parse_config(merged, origin=origin)


def parse_config(values: Mapping[str, Any], *, origin: Mapping[str, str] | None = None) -> Config:
    """Check plain values; component arguments get the defaults of their constructors."""
    faults, where = Faults(), dict(origin or {})
    filled = json.loads(json.dumps(values))
    for place, constructor, given in _components(filled, faults, where):
        schema = args_schema(constructor, given=given)
        args = _section(filled, place)
        try:
            args.update(schema.model_validate_json(json.dumps(args)).model_dump(mode="json"))
        except ValidationError as error:
            _note(error, schema, place, faults, where)
    config: Config | None = None
    try:
        config = Config.model_validate_json(json.dumps(filled))
    except ValidationError as error:
        _note(error, Config, (), faults, where)
    faults.raise_if_any("configuration refused")
    assert config is not None
    _check_together(config)
    return config


def args_schema(constructor: Callable[..., Any], *, given: Iterable[str]) -> type[BaseModel]:
    """A schema made from a signature, without the arguments `given` by the program."""
    hints = get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if name in given or parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        required = parameter.default is parameter.empty
        fields[name] = (hints[name], ... if required else parameter.default)
    return create_model(constructor.__name__, __config__=STRICT, **fields)


def differences(old: Config, new: Config) -> list[str]:
    """Keys outside `runtime` (and the place of the data) that differ, as "key: old -> new"."""
    a, b = _flatten(old.to_dict()), _flatten(new.to_dict())
    free = ("runtime.", "data.dir", "training.keep_checkpoints")
    return [
        f"{key}: {a.get(key)} -> {b.get(key)}"
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key) and not key.startswith(free)
    ]


def _components(
    values: dict[str, Any], faults: Faults, origin: Mapping[str, str]
) -> Iterable[tuple[tuple[str, ...], Callable[..., Any], tuple[str, ...]]]:
    """(place of the args, constructor, arguments the program gives) of each component named."""
    for section, registry in build.REGISTRIES.items():
        default = Config.model_fields[section].default
        if section not in values and isinstance(default, Component):
            values[section] = {"name": default.name}
        component = values.get(section)
        name = component.get("name") if isinstance(component, dict) else None
        if isinstance(name, str) and name in registry:
            yield (section, "args"), registry[name], build.GIVEN[section]
        elif isinstance(name, str):
            line = f"{_where(origin, (section, 'name'))}: unknown {section}, got '{name}'"
            faults.add("unknown components", line + _nearest(name, registry))
    for place, constructor in build.FIXED.items():
        yield place, constructor, build.GIVEN[place[-1]]


def _check_together(config: Config) -> None:
    """What no single key can tell."""
    faults = Faults()
    if config.augment.speeds[:1] != (1.0,) or len(set(config.augment.speeds)) < len(
        config.augment.speeds
    ):
        line = "augment.speeds: must begin with 1.0 and name each speed once"
        faults.add("speeds", f"{line}, got {list(config.augment.speeds)}; write [1.0, 0.9, 1.1]")
    low, high = config.augment.snr_db
    if low > high:
        faults.add("ranges", f"augment.snr_db: must be [low, high], got [{low}, {high}]; swap them")
    if config.training.margin.end_epoch < config.training.margin.start_epoch:
        line = "training.margin.end_epoch: must not precede start_epoch"
        faults.add("ranges", f"{line}, got {config.training.margin.end_epoch}; raise it")
    faults.raise_if_any("configuration refused")


def _note(
    error: ValidationError,
    schema: type[BaseModel],
    place: tuple[str, ...],
    faults: Faults,
    origin: Mapping[str, str],
) -> None:
    """One line for each fault that pydantic found below `place`."""
    seen: set[tuple[str, ...]] = set()
    for item in error.errors():
        path = place + tuple(str(part) for part in item["loc"] if _is_key(part))
        if path in seen:  # the other branches of a union
            continue
        seen.add(path)
        where = _where(origin, path)
        if item["type"] == "extra_forbidden":
            known = _fields_at(schema, item["loc"][:-1])
            faults.add("unknown keys", f"{where}: unknown key{_nearest(path[-1], known)}")
        elif item["type"] == "missing":
            faults.add("missing keys", f"{where}: is missing; add it")
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            faults.add("bad values", f"{where}: {message}, got {item['input']!r}; correct it")


def _is_key(part: int | str) -> bool:
    """Whether a part of pydantic's location is a key, not the tag of a union's branch."""
    return (
        isinstance(part, int)
        or bool(re.fullmatch(r"[a-z][a-z0-9_]*", part))
        and part
        not in (
            "int",
            "float",
            "str",
            "bool",
            "constrained-int",
        )
    )


def _fields_at(schema: type[BaseModel], location: Sequence[int | str]) -> Iterable[str]:
    for part in location:
        annotation = schema.model_fields[str(part)].annotation if isinstance(part, str) else None
        if not (inspect.isclass(annotation) and issubclass(annotation, BaseModel)):
            return ()
        schema = annotation
    return schema.model_fields


def _nearest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known are {', '.join(sorted(known))}"


def _where(origin: Mapping[str, str], path: Sequence[str]) -> str:
    """The key, and the layer that set it."""
    key = ".".join(path)
    layer = origin.get(key, "")
    return f"{layer}: {key}" if layer and not layer.startswith("--set") else layer or key


def _merge(target: dict[str, Any], layer: Any, name: str, origin: dict[str, str]) -> None:
    if layer is None:
        return
    if not isinstance(layer, dict):
        raise ValueError(f"{name}: must hold 'section: ...' lines, got {layer!r}; see conf/")
    _merge_section(target, layer, (), name, origin)


def _merge_section(
    target: dict[str, Any],
    layer: dict[str, Any],
    place: tuple[str, ...],
    source: str,
    origin: dict[str, str],
) -> None:
    if "name" in layer and target.get("name") not in (None, layer["name"]):
        target.pop("args", None)
    for key, value in layer.items():
        path = (*place, str(key))
        origin[".".join(path)] = source
        if isinstance(value, dict):
            if not isinstance(target.get(key), dict):
                target[key] = {}
            _merge_section(target[key], value, path, source, origin)
        else:
            target[key] = value


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--set: must be key.path=value, got '{text}'; write e.g. training.lr=0.1")
    nested: Any = _parse_yaml(value, f"--set {text}")
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def _section(values: dict[str, Any], place: Sequence[str]) -> dict[str, Any]:
    for part in place:
        values = values.setdefault(part, {})
    return values


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: only true and false are booleans, 1e-3 is a number; no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"key '{key}' stands twice in the section of line {line}")
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, expression) for tag, expression in rows if not tag.endswith((":bool", ":float"))]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|false"), list("tf"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$"),
    list("-+.0123456789"),
)


def _read_yaml(path: Path) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such configuration; see conf/ for those there are")
    return _parse_yaml(path.read_text(encoding="utf-8"), str(path))


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: builds plain values only
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: is not valid YAML, got '{reason}'; correct it") from None
