"""YAML layers and `--set` values merged into one nested dictionary.

In: files and `key.path=value` texts, left to right. Out: plain values, and the source of every key.
A layer that changes a component's `name` replaces its `args`.

A file may end with `variants:`, a table of names and of values that override the rest of the file.
A variant is named like a file in the same folder, so `--config resnet101` is conf/resnet.yaml with
the values of `resnet101` on top.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from speakerlab.core.faults import nearest

log = logging.getLogger(__name__)
# Limits of a text. YAML references that repeat each other could expand to far more values.
MAX_VALUES = 100_000
MAX_DEPTH = 50
SURROGATE = re.compile("[\ud800-\udfff]")  # of a byte that is not UTF-8
PACKAGE = Path(__file__).parents[1]
CONF = (PACKAGE / "conf").resolve()  # in a clone, a link to the repository's conf/
RECORDED = "config.yaml"  # in an experiment and in a model
VARIANTS = "variants"  # the section of a file that is never merged itself
HAS_VARIANTS = re.compile(rb"^variants:", re.MULTILINE)


Values = dict[str, Any]  # key -> value, or the values of a section


@dataclass(frozen=True)
class Layer:
    """A file, or one of its variants."""

    file: Path
    variant: str | None = None


def merge_layers(
    layers: Sequence[Path],
    overrides: Sequence[str] = (),
) -> tuple[Values, dict[str, str]]:
    """Return (merged values, key path -> the layer that set it last)."""
    merged: Values = {}
    names = [str(path) for path in layers]
    origin = {"": ", ".join(names)}  # "": the source of keys that no layer has

    def merge(values: Values, source: str) -> None:
        _update_old_settings(values, source)
        _merge(merged, values, place=(), source=source, origin=origin)

    for path in layers:
        layer = find_layer(path)
        values, variants = read_layer(layer.file)
        merge(values, str(layer.file))
        if layer.variant is not None:
            source = f"{layer.file}: {VARIANTS}.{layer.variant}"
            merge(variants[layer.variant], source)
    for override in overrides:
        merge(_parse_override(override), f"--set {override}")
    return merged, origin


def find_layer(given: Path) -> Layer:
    """Return the file or variant of a path, or of a name in conf/ without `.yaml`."""
    # A file of the user's has precedence over one in conf/ with the same name.
    for path in (given, CONF / f"{given}.yaml"):
        if path.exists() and not path.is_dir():
            return Layer(path)
    variant = _find_variant(given)
    if variant is not None:
        return variant

    # There is nothing of this name.
    if given.is_dir():
        hint = "a file, or a name of conf/ such as campplus"
        for path in given.glob("conf*.yaml"):
            hint = str(path)
            break
        raise ValueError(f"{given}: is a folder, not a YAML file; use {hint}")
    hint = nearest(given.stem, _shipped_names(), otherwise=f"see {CONF}")
    raise FileNotFoundError(f"{given}: no such configuration{hint}")


def _find_variant(given: Path) -> Layer | None:
    """Return the variant named like a file that does not exist, in another file of its folder."""
    absent = given if given.suffix == ".yaml" else CONF / f"{given}.yaml"
    holders: list[Path] = []
    for name, file in _variants_in(absent.parent, text=absent.stem):
        if name == absent.stem:
            holders.append(file)
    if len(holders) > 1:
        raise ValueError(
            f"{given}: is in {holders[0]} and in {holders[1]}; rename one of them"
        )
    return Layer(holders[0], absent.stem) if holders else None


def read_layer(file: Path) -> tuple[Values, dict[str, Values]]:
    """Return (values of a file, variant -> the values that it changes)."""
    values = parse_yaml(file.read_bytes(), str(file))
    if values is None:  # an empty file
        values = {}
    if not isinstance(values, dict):
        raise ValueError(
            f"{file}: {values!r} is not a set of 'section: ...' lines; see conf/"
        )
    variants = values.pop(VARIANTS, {})
    if not isinstance(variants, dict):
        raise ValueError(
            f"{file}: {VARIANTS}: {variants!r} is not a set of 'name: ...' lines"
        )
    for name, changes in variants.items():
        where = f"{file}: {VARIANTS}.{name}"
        if not isinstance(name, str):
            raise ValueError(f"{where}: {name!r} is not a name; write it in quotes")
        if not isinstance(changes, dict):
            raise ValueError(
                f"{where}: {changes!r} is not a set of 'section: ...' values"
            )
    return values, variants


def model_names() -> list[str]:
    """Return the names of all models in conf/, of files and of variants."""
    overlays = [path.stem for path in CONF.glob("*.yaml") if not _is_model(path)]
    return [name for name in layer_names(CONF) if name not in overlays]


def _is_model(path: Path) -> bool:
    values = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    return isinstance(values, dict) and "model" in values


def layer_names(folder: Path) -> list[str]:
    """Return the names of the layers in a folder: its files without `.yaml`, and their variants."""
    files = [path.stem for path in folder.glob("*.yaml")]
    variants = [name for name, _ in _variants_in(folder)]
    return sorted([*files, *variants])


def _shipped_names() -> list[str]:
    """Return the names of all layers in conf/ and its folders, in the form for `find_layer`."""
    names = layer_names(CONF)
    for folder in sorted(CONF.iterdir()):
        if folder.is_dir():
            names += [f"{folder.name}/{name}" for name in layer_names(folder)]
    return names


def _variants_in(
    folder: Path,
    *,
    text: str = "",
) -> list[tuple[str, Path]]:
    """Return the (variant, file) pairs of the files in a folder that contain `text`."""
    pairs: list[tuple[str, Path]] = []
    for file in sorted(folder.glob("*.yaml")):
        content = file.read_bytes() if file.is_file() else b""
        # Parsing is slow, and a folder of the user's may hold YAML files of other programs.
        has_text = os.fsencode(text) in content
        if has_text and HAS_VARIANTS.search(content):
            _, variants = read_layer(file)
            pairs += [(name, file) for name in variants]
    return pairs


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return YAML that is read back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def section_at(values: Values, place: Sequence[str]) -> Values | None:
    """Return the section at `place`, created if needed; None if the place holds another value."""
    for key in place:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            return None
    return values


def flatten(values: Mapping[str, Any], prefix: str = "") -> Values:
    """Return key path -> value of all keys that are not sections."""
    flat: Values = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _update_old_settings(layer: Values, source: str) -> None:
    """Update settings of earlier versions in a layer, so that their models still load.

    `runtime.micro_batch: probe` becomes `auto`, and `runtime.cuda_graph: on` becomes
    `runtime.compile: reduce-overhead`. Other values of `runtime.cuda_graph`, and
    `model.args.memory_efficient: false`, are removed. docs/releases.md says how long.
    """
    changes: list[tuple[str, str]] = []  # the old setting, and what to do
    # Layers are not checked yet: a section may hold any value.
    runtime = layer.get("runtime")
    if isinstance(runtime, dict):
        if runtime.get("micro_batch") == "probe":
            runtime["micro_batch"] = "auto"
            changes.append(("runtime.micro_batch=probe", "write auto"))
        cuda_graph = runtime.pop("cuda_graph", None)
        if cuda_graph == "on":
            runtime["compile"] = "reduce-overhead"
            write = "write runtime.compile=reduce-overhead"
            changes.append(("runtime.cuda_graph=on", write))
        elif cuda_graph is not None:
            changes.append((f"runtime.cuda_graph={cuda_graph}", "leave it out"))

    model = layer.get("model")
    if isinstance(model, dict):
        args = model.get("args")
        if isinstance(args, dict) and args.get("memory_efficient") is False:
            del args["memory_efficient"]
            changes.append(("model.args.memory_efficient=false", "leave it out"))
    # What a run or a model has recorded is read for ever, and nobody can change it.
    if Path(source).name != RECORDED:
        for old, fix in changes:
            _warn_of_old_setting(source, old, fix)


@cache  # once, although layers are read several times
def _warn_of_old_setting(source: str, old: str, fix: str) -> None:
    """Log a setting of an earlier version, and what to do about it."""
    log.warning(
        "%s: %s is of an earlier version and will be refused; %s", source, old, fix
    )


def _merge(
    target: Values,
    layer: Values,
    *,
    place: tuple[str, ...],
    source: str,
    origin: dict[str, str],
) -> None:
    """Merge the section of a layer at `place` into `target`, and note the source of each key."""
    # The old arguments belong to the component that is replaced.
    old_name = target.get("name")
    if "name" in layer and old_name not in (None, layer["name"]):
        target.pop("args", None)
    for key, value in layer.items():
        path = (*place, str(key))
        origin[".".join(path)] = source
        if isinstance(value, dict):
            if not isinstance(target.get(key), dict):
                target[key] = {}
            _merge(target[key], value, place=path, source=source, origin=origin)
        else:
            target[key] = value


def _parse_override(text: str) -> Values:
    key, equals, value = text.partition("=")
    names = key.split(".")
    if not equals or "" in names:
        raise ValueError(
            f"--set: '{text}' is not key.path=value, such as training.lr=0.1"
        )
    nested: Any = value
    # A path is taken literally, because ' #' and ': ' have a meaning in YAML.
    is_path = value.startswith("/") or PureWindowsPath(value).is_absolute()
    if not is_path:
        nested = parse_yaml(value, f"--set {text}")
    for name in reversed(names):
        nested = {name: nested}
    _refuse_odd(nested, f"--set {text}")
    return nested


class _Loader(yaml.SafeLoader):
    """Scalars of YAML 1.2: only true and false are booleans, 1e-3 is a number; no duplicate key."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:
        keys: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            keys.append(key)
        for number, key in enumerate(keys):
            if key in keys[:number]:
                mark = node.value[number][0].start_mark
                raise yaml.MarkedYAMLError(
                    None, None, f"key '{key}' occurs twice", mark
                )
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 reads yes, on and 1:30 as booleans and numbers. Keep only its rules for null and merging.
_Loader.yaml_implicit_resolvers = {}
for first_character, rules in yaml.SafeLoader.yaml_implicit_resolvers.items():
    remaining_rules: list[Any] = []
    for tag, regexp in rules:
        if tag.endswith((":null", ":merge")):
            remaining_rules.append((tag, regexp))
    _Loader.yaml_implicit_resolvers[first_character] = remaining_rules
# Type, pattern of its texts, characters that they begin with.
for kind, pattern, first_characters in (
    ("bool", r"(true|false)$", "tf"),
    ("int", r"[-+]?(0|[1-9]\d*)$", "-+0123456789"),
    ("float", r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{kind}", re.compile(pattern), list(first_characters)
    )


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader would read as a number."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\d+[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def parse_yaml(
    text: str | bytes,
    where: str,
    loader: type[yaml.SafeLoader] = _Loader,
) -> Any:
    """Return plain values; raise ValueError with `where` and, for a file, the line."""
    try:
        values = yaml.load(text, loader)  # a SafeLoader: builds plain values only
    except yaml.MarkedYAMLError as error:
        problem = str(error.problem)
        mark = error.problem_mark
        begin = error.context_mark
        if mark and isinstance(text, bytes):
            where = f"{where}:{mark.line + 1}"
            if begin:
                problem += f" ({error.context} of line {begin.line + 1})"
        raise ValueError(f"{where}: is not valid YAML: {problem}") from None
    except yaml.YAMLError as error:
        lines = str(error).split()
        problem = " ".join(lines)
        raise ValueError(f"{where}: is not valid YAML: {problem}") from None
    # Constructors of tags, such as !!timestamp, may raise anything.
    except Exception as error:
        raise ValueError(
            f"{where}: is not valid YAML: {type(error).__name__}"
        ) from None
    _refuse_odd(values, where)
    return values


def _refuse_odd(values: Any, where: str) -> None:
    """Refuse keys that are not scalars, and references that are cyclic or expand too far."""
    unchecked = [(values, 0)]  # and the depth of each
    count = 0
    while unchecked:
        value, depth = unchecked.pop()
        inner: list[Any] = []
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str | int | float | None):
                    raise ValueError(
                        f"{where}: is not valid YAML: {key!r} is not a key; write text"
                    )
            inner = [*value.values(), *value]  # keys count, and may be odd text, too
        elif isinstance(value, list):
            inner = value
        elif isinstance(value, str) and SURROGATE.search(value):
            raise ValueError(
                f"{where}: is not valid YAML: {value!r} is not text; correct it"
            )
        for inner_value in inner:
            unchecked.append((inner_value, depth + 1))
        count += 1
        if count > MAX_VALUES or depth > MAX_DEPTH:
            raise ValueError(
                f"{where}: has more than {MAX_VALUES} values or {MAX_DEPTH} nested ones;"
                " write fewer"
            )
