"""YAML layers and `--set` values merged into one nested dictionary.

In: files and `key.path=value` texts, left to right. Out: plain values, and the source of every key.
A layer that changes a component's `name` replaces its `args`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from speakerlab.core.faults import nearest

MAX_VALUES, MAX_DEPTH = 100_000, 50
SURROGATE = re.compile("[\ud800-\udfff]")  # of a byte that is not UTF-8
CONF = (Path(__file__).parents[1] / "conf").resolve()  # in a clone a link to its conf/


def merge_layers(
    layers: Sequence[Path], overrides: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (merged values, key path -> the layer that set it last)."""
    merged: dict[str, Any] = {}
    origin = {"": ", ".join(map(str, layers))}  # of what no layer has
    for path in map(find_layer, layers):
        layer = parse_yaml(path.read_bytes(), str(path))
        if layer is not None and not isinstance(layer, dict):
            raise ValueError(f"{path}: {layer!r} is not a set of 'section: ...' lines; see conf/")
        _merge(merged, _renamed(layer or {}), (), str(path), origin)
    for override in overrides:
        _merge(merged, _renamed(_parse_override(override)), (), f"--set {override}", origin)
    return merged, origin


def find_layer(given: Path) -> Path:
    """Return the file of a layer: a path, or the name of a file in conf/ without `.yaml`."""
    for path in (given, CONF / f"{given}.yaml"):
        if path.exists() and not path.is_dir():
            return path
    if given.is_dir():
        files = [*map(str, given.glob("conf*.yaml")), "a file, or a name of conf/ such as campplus"]
        raise ValueError(f"{given}: is a folder, not a YAML file; use {files[0]}")
    known = (str(path.relative_to(CONF).with_suffix("")) for path in CONF.rglob("*.yaml"))
    hint = nearest(given.stem, known, otherwise=f"see {CONF}")
    raise FileNotFoundError(f"{given}: no such configuration{hint}")


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return YAML that is read back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def section_at(values: dict[str, Any], place: Sequence[str]) -> dict[str, Any] | None:
    """Return the section at `place`, created if needed; None if the place holds another value."""
    for part in place:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            return None
    return values


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return key path -> value of everything that is not a section."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _renamed(layer: dict[str, Any]) -> dict[str, Any]:
    """Return a layer without two values of former versions, so that their models still load.

    They are `model.args.memory_efficient: false` and `runtime.micro_batch: probe`, now `auto`.
    """
    runtime, model = layer.get("runtime"), layer.get("model")
    if isinstance(runtime, dict) and runtime.get("micro_batch") == "probe":
        runtime["micro_batch"] = "auto"
    args = model.get("args") if isinstance(model, dict) else None
    if isinstance(args, dict) and args.get("memory_efficient") is False:
        del args["memory_efficient"]
    return layer


def _merge(
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
            _merge(target[key], value, path, source, origin)
        else:
            target[key] = value


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ValueError(f"--set: '{text}' is not key.path=value, such as training.lr=0.1")
    is_path = value.startswith("/")  # as it is, because YAML gives meaning to ' #' and ': '
    nested: Any = value if is_path else parse_yaml(value, f"--set {text}")
    for part in reversed(key.split(".")):
        nested = {part: nested}
    _refuse_odd(nested, f"--set {text}")
    return nested


class _Loader(yaml.SafeLoader):
    """Scalars of YAML 1.2: only true and false are booleans, 1e-3 is a number; no duplicate key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                mark = node.value[number][0].start_mark
                raise yaml.MarkedYAMLError(None, None, f"key '{key}' occurs twice", mark)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [row for row in rows if row[0].endswith((":null", ":merge"))]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for kind, pattern, starts in (
    ("bool", r"(true|false)$", "tf"),
    ("int", r"[-+]?(0|[1-9]\d*)$", "-+0123456789"),
    ("float", r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(pattern), list(starts))


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader would read as a number."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str | bytes, where: str, loader: type[yaml.SafeLoader] = _Loader) -> Any:
    """Return plain values; raise ValueError naming the place and the line of a file."""
    try:
        values = yaml.load(text, loader)  # a SafeLoader: builds plain values only
    except yaml.MarkedYAMLError as error:
        problem, mark, begin = f"{error.problem}", error.problem_mark, error.context_mark
        if mark and isinstance(text, bytes):
            where = f"{where}:{mark.line + 1}"
            problem += f" ({error.context} of line {begin.line + 1})" if begin else ""
        raise ValueError(f"{where}: is not valid YAML: {problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: is not valid YAML: {' '.join(str(error).split())}") from None
    except Exception as error:  # constructors of tags, such as !!timestamp, may raise anything
        raise ValueError(f"{where}: is not valid YAML: {type(error).__name__}") from None
    _refuse_odd(values, where)
    return values


def _refuse_odd(values: Any, where: str) -> None:
    """Refuse keys that are not scalars, and references that repeat much of a text, or itself."""
    left, count = [(values, 0)], 0
    while left:
        value, depth = left.pop()
        inner: list[Any] = []
        if isinstance(value, dict):
            if odd := [key for key in value if not isinstance(key, str | int | float | None)]:
                raise ValueError(f"{where}: is not valid YAML: {odd[0]!r} is not a key; write text")
            inner = [*value.values(), *value]
        elif isinstance(value, list):
            inner = value
        elif isinstance(value, str) and SURROGATE.search(value):
            raise ValueError(f"{where}: is not valid YAML: {value!r} is not text; correct it")
        left += [(one, depth + 1) for one in inner]
        count += 1
        if count > MAX_VALUES or depth > MAX_DEPTH:
            most = f"{MAX_VALUES} values or {MAX_DEPTH} nested ones"
            raise ValueError(f"{where}: has more than {most}; write fewer")
