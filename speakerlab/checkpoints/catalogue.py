"""The published models that `hub:NAME` finds: files, names, training data and licences.

3D-Speaker's models are those of its speakerlab/bin/infer_sv.py, on ModelScope; its repository
describes their training data and states a licence for its code only. WeSpeaker's models are those
of its docs/pretrained.md and wespeaker/cli/hub.py; it gives a model the licence of its data set
(VoxBlink2's is stated in the repository of that data set), and its copies of 3D-Speaker's models
take 3D-Speaker's features. To add a model: a row in catalogue.tsv.
"""

import csv
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from speakerlab.checkpoints.toolkit_config import Toolkit

PREFIX = "hub:"
MODELSCOPE = "https://www.modelscope.cn/"
NEAR = 0.82  # similarity of a name that is probably misspelled
LIST = "`speakerlab import --list` lists all"


@dataclass(frozen=True)
class HubModel:
    """One published model, a row of the table."""

    name: str
    short_name: str
    path: str  # on a mirror: `models/ID/resolve/REVISION/FILE` or `wespeaker/ARCHIVE`
    frontend: Toolkit
    training_data: str
    licence: str
    page: str

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]


with Path(__file__).with_suffix(".tsv").open(encoding="utf-8", newline="") as _table:
    _rows: list[dict[str, Any]] = [*csv.DictReader(_table, delimiter="\t")]
MODELS = {row["name"]: HubModel(**row) for row in _rows}
NAMES = {  # full, without the owner, or short -> full
    alias: name
    for name, model in MODELS.items()
    for alias in (name, name.partition("/")[2], model.short_name)
}


def known_name(name: str) -> str:
    """Return the full name of a published model; ValueError with the nearest for an unknown one.

    The owner may be left out; `damo/`, ModelScope's former owner, is `iic/`.
    """
    own = name.replace("damo/", "iic/", 1) if name.startswith("damo/") else name
    if own not in NAMES:
        raise ValueError(f"{PREFIX}{name}: no such published model; {near_miss(name) or LIST}")
    return NAMES[own]


def near_miss(name: str) -> str:
    """Return "did you mean hub:NAME?" if a published model has almost this name, else ""."""
    lower = {alias.lower(): alias for alias in NAMES}
    close = get_close_matches(name.lower(), lower, n=1, cutoff=NEAR)
    return f"did you mean {PREFIX}{lower[close[0]]}?" if close else ""


def table() -> str:
    """Return the list of published models, one per line, with what their publishers state."""
    rows = [("name", "training data", "licence", "other name")]
    for model in MODELS.values():
        names = f"{PREFIX}{model.short_name}", f"{PREFIX}{model.name}"
        rows.append((names[0], model.training_data, model.licence, names[1]))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    note = (
        "not stated: the publisher's repository states none for its models; see the page of the "
        f"model,\n{MODELSCOPE}models/iic/..., before you use or share it"
    )
    return "\n".join([*lines, "", note]) + "\n"
