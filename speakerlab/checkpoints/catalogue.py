"""The published models that `hub:NAME` finds: files, names, training data and licences.

3D-Speaker lists its models in speakerlab/bin/infer_sv.py and hosts them on ModelScope; its
repository describes their training data and has a licence for its code only. WeSpeaker lists its
models in docs/pretrained.md and wespeaker/cli/hub.py; each model has the licence of its data set
(VoxBlink2's licence is in the repository of that data set). WeSpeaker's copies of 3D-Speaker's
models take 3D-Speaker's features. The authors of ReDimNet2 (README.md of PalabraAI/redimnet2 at
ffe8f27) and of w2v-BERT 2.0 for speaker verification (README.md and License.md of
ZXHY-82/w2v-BERT-2.0_SV at 98ff0e2) state one licence for code and models. No publisher states
digests. To add a model: a row in catalogue.tsv.
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
    """Published model, one row of the table."""

    name: str
    short_name: str
    # On a mirror: `models/ID/resolve/REVISION/FILE` of ModelScope, `wespeaker/ARCHIVE`, or
    # `github/` or `huggingface/` and the path there.
    path: str
    frontend: Toolkit
    training_data: str
    licence: str
    page: str
    # `hf:owner/name`, whose description the import needs; "" for most models.
    pretrained: str

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]


# The columns of the table have the names of `HubModel`'s fields.
MODELS: dict[str, HubModel] = {}
_path = Path(__file__).with_suffix(".tsv")
with _path.open(encoding="utf-8", newline="") as _table:
    _row: dict[str, Any]
    for _row in csv.DictReader(_table, delimiter="\t"):
        MODELS[_row["name"]] = HubModel(**_row)
# A model's full name, its name without the owner, or its short name -> its full name.
NAMES: dict[str, str] = {}
for _name, _model in MODELS.items():
    _, _, _without_owner = _name.partition("/")
    for _alias in (_name, _without_owner, _model.short_name):
        NAMES[_alias] = _name


def known_name(name: str) -> str:
    """Return the full name of a published model; ValueError with the nearest name if unknown.

    The owner may be left out; `damo/`, ModelScope's former owner, is `iic/`.
    """
    current = name
    if name.startswith("damo/"):
        current = name.replace("damo/", "iic/", 1)
    if current not in NAMES:
        raise ValueError(
            f"{PREFIX}{name}: no such published model; {near_miss(name) or LIST}"
        )
    return NAMES[current]


def near_miss(name: str) -> str:
    """Return "did you mean hub:NAME?" if a published model has almost this name, else ""."""
    # Case is ignored, because it is easily mistaken in names such as `CAM++` and `ERes2Net`.
    lower = {alias.lower(): alias for alias in NAMES}
    matches = get_close_matches(name.lower(), lower, n=1, cutoff=NEAR)
    if not matches:
        return ""
    (match,) = matches
    return f"did you mean {PREFIX}{lower[match]}?"


def table() -> str:
    """Return the list of published models, by training data and licence.

    A line has the name of a model and its full name, which also works.
    """
    groups: dict[tuple[str, str], list[HubModel]] = {}
    for model in MODELS.values():
        group = (model.training_data, model.licence)
        groups.setdefault(group, []).append(model)
    width = max(len(model.short_name) for model in MODELS.values())
    name_column = "name".ljust(width + len(PREFIX))
    lines = ["training data; licence", f"  {name_column}  full name"]
    for (training_data, licence), models in groups.items():
        lines += ["", f"{training_data}; {licence}"]
        for model in models:
            short_name = model.short_name.ljust(width)
            lines.append(f"  {PREFIX}{short_name}  {PREFIX}{model.name}")
    note = (
        "not stated: the publisher's repository states none for its models; see the"
        f" page of the model,\n{MODELSCOPE}models/iic/..., before you use or share it"
    )
    lines += ["", note]
    return "\n".join(lines) + "\n"
