"""Names made of settings: of the experiments of `--exp auto`, and of columns that show settings.

In: layers of YAML and `--set` values. Out: a name such as `campplus_s0_lr0.05_margin0.3`: the
configurations, the seed, and each setting of `--set` that changes the result of the training.

A name depends on the command only, so every rank and every host finds the same one. Names of
different settings differ: parts are joined by `_`, which no part contains, and a value that cannot
be written as it is ends with `~` and a digest.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from speakerlab.config.layers import (
    CONF,
    find_layer,
    flatten,
    merge_layers,
    read_layer,
)
from speakerlab.config.schema import NOT_LEARNED, load_config

# Settings that a run may change, but that make another model: they are part of the name.
ANOTHER_MODEL = (
    "training.num_epochs",
    "training.average_checkpoints",
    "training.keep_better",
    "frontend.model",
    "frontend.publish",
    "distil.teachers",
)
# Keys whose last part alone says too little.
KNOWN_LABELS = {"training.margin.final": "margin"}
SEED = "s"
INIT = "init"
# Names of experiments are part of other file names, which have at most 255 bytes.
MAX_NAME = 120
MAX_TEXT = 40
MAX_HINT = 16  # readable part of a text that a digest abbreviates
DIGEST = 10  # hexadecimal digits
# No blanks, no characters with a meaning for shells or file systems, and none that join parts.
SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
SAFE_LAYER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")
WORDS = ("null", "true", "false")
NUMBER = re.compile(r"-?[\d.]+(e-?\d+)?")


def experiment_name(
    layers: Sequence[Path],
    overrides: Sequence[str],
    init: Path | None = None,
) -> str:
    """Return the name of the experiment with these layers, `--set` values and initial model.

    The order of the `--set` values, and how they write a number, make no difference. Raises
    ValueError for a wrong configuration.
    """
    config = load_config(layers, overrides)
    values = flatten(config.to_dict())
    labels = labels_of(values, reserved=(SEED, INIT))
    changed, _ = merge_layers([], overrides)
    settings: dict[str, Any] = {}
    for key in flatten(changed):
        # A later `--set model.name=...` removes the arguments of the earlier model.
        if key in values and key != "seed" and changes_result(key):
            settings[labels[key]] = values[key]
    if init is not None:
        settings[INIT] = str(init)

    parts = [_join_layers(layers), f"{SEED}{config.seed}"]
    for label in sorted(settings):
        parts.append(_part(label, settings[label]))
    name = "_".join(parts)
    if len(name) > MAX_NAME:
        name = f"{name[: MAX_NAME - DIGEST - 1]}~{_digest(name)}"
    return name


def changes_result(key: str) -> bool:
    """Return whether a setting changes the published model, not only how it is trained."""
    return key.startswith(ANOTHER_MODEL) or not key.startswith(NOT_LEARNED)


def labels_of(keys: Iterable[str], reserved: Sequence[str] = ()) -> dict[str, str]:
    """Return key -> the end of it that no other key has: `training.lr` -> `lr`.

    `head.args.scale` is `scale`, and `head.name` is `head`. reserved: labels that are taken.
    """
    place_of = {key: _place(key) for key in keys}
    counts = Counter(reserved)
    for place in place_of.values():
        counts.update(_ends(place))
    labels: dict[str, str] = {}
    for key, place in place_of.items():
        labels[key] = place
        for end in _ends(place):
            if counts[end] == 1:
                labels[key] = end
                break
    return labels


def value_text(value: Any) -> str:
    """Return a value as text for a file name; different values have different texts.

    A long value, or one with characters other than letters, digits, dots and hyphens, is
    abbreviated and ends with `~` and a digest.
    """
    text = _plain(value)
    if text is not None and len(text) <= MAX_TEXT:
        return text
    return _abbreviate(_hint(value), value)


def _place(key: str) -> str:
    """Return a key without the parts that all components have."""
    if key in KNOWN_LABELS:
        return KNOWN_LABELS[key]
    return key.replace(".args.", ".").removesuffix(".name")


def _ends(place: str) -> list[str]:
    """Return the ends of a dotted key, shortest first: `c`, `b.c`, `a.b.c`."""
    names = place.split(".")
    return [".".join(names[start:]) for start in reversed(range(len(names)))]


def _part(label: str, value: Any) -> str:
    """Return a setting as `lr0.05`, or as `optimizer=adamw` where the text is no number."""
    text = value_text(value)
    label = label.replace("_", "-")
    if not SAFE.fullmatch(label):  # a name of the user's
        label = _abbreviate(label, label)
    is_number = isinstance(value, int | float) and text[0].isdigit()
    if is_number and label[-1].isalpha():
        return f"{label}{text}"
    return f"{label}={text}"


def _plain(value: Any) -> str | None:
    """Return the text of a value if it can be read back, else None."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return repr(value).removesuffix(".0").replace("e+", "e")
    if isinstance(value, str):
        is_other_type = value in WORDS or NUMBER.fullmatch(value)
        is_plain = SAFE.fullmatch(value) and not is_other_type
        return value if is_plain else None
    if isinstance(value, list) and value:
        texts = [None if isinstance(item, list) else _plain(item) for item in value]
        if None not in texts:
            # As in Python, a list of one value ends with a comma.
            end = "," if len(value) == 1 else ""
            return ",".join(map(str, texts)) + end
    return None


def _hint(value: Any) -> str:
    """Return what a person recognises a value by; of a path, the last folder."""
    while isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str):
        return json.dumps(value)
    names = [name for name in value.split("/") if name not in ("", "model")]
    return names[-1] if names else value


def _abbreviate(hint: str, value: Any) -> str:
    readable = UNSAFE.sub("-", hint)[:MAX_HINT].strip(".-")
    return f"{readable}~{_digest(value)}"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST]


def _join_layers(layers: Sequence[Path]) -> str:
    """Return the names of the layers, without those that do not change the result."""
    names = [_layer_name(path) for path in layers if _layer_changes_result(path)]
    return "+".join(names or ["default"])


def _layer_changes_result(given: Path) -> bool:
    """Return whether a layer sets more than how to train, as conf/hardware/ does."""
    layer = find_layer(given)
    values, variants = read_layer(layer.file)
    keys = [*flatten(values)]
    if layer.variant is not None:
        keys += flatten(variants[layer.variant])
    return any(changes_result(key) for key in keys)


def _layer_name(given: Path) -> str:
    """Return `finetune.large_margin` for a file of conf/, `configs.mine` for configs/mine.yaml."""
    layer = find_layer(given)
    folder = given.parent
    real_folder = layer.file.resolve().parent
    if real_folder.is_relative_to(CONF):
        folder = real_folder.relative_to(CONF)
    name = layer.variant or layer.file.stem
    names = [*folder.parts, name]
    text = ".".join(names)
    is_plain = all(SAFE_LAYER.fullmatch(part) for part in names)
    if is_plain and len(text) <= MAX_TEXT:
        return text
    return _abbreviate(name, str(folder / name))
