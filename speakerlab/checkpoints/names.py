"""How published checkpoints name the parameters of our models, where they name them differently.

`RENAMES[model][toolkit]` is a list of (pattern, replacement): each is applied in turn, as `re.sub`
does, to a published name; what comes out is our name. A name that becomes empty has no part in the
embedding, and its tensor is left out. A model or a toolkit that is not listed uses our names.

`model` is a name in `speakerlab.models.MODELS`. The parity tests hold every published architecture
to these rules, so a rule that is missing or too wide shows.

To add: a line for the model, the shortest patterns that match nothing else, and a comment that says
what the difference is. Tensors are never reshaped: only names change.
"""

import re
from typing import Literal

Toolkit = Literal["3dspeaker", "wespeaker"]

RENAMES: dict[str, dict[Toolkit, list[tuple[str, str]]]] = {
    "eres2net": {
        # In the two stages with attentive blocks the first of the 3x3 convolutions stands apart.
        # The numbers go up from the largest, so that none is counted up twice.
        "wespeaker": [
            (r"^(layer[34]\.\d+\.(?:convs|bns))\.2\.", r"\1.3."),
            (r"^(layer[34]\.\d+\.(?:convs|bns))\.1\.", r"\1.2."),
            (r"^(layer[34]\.\d+\.(?:convs|bns))\.0\.", r"\1.1."),
            (r"^(layer[34]\.\d+\.)(conv|bn)2_1\.", r"\1\2s.0."),
        ],
    },
    "redimnet": {
        "wespeaker": [
            # The weight of the first stage's only input: frozen, and one after the softmax.
            (r"^backbone\.inputs_weights\.0$", ""),
            (r"^backbone\.stage(\d)\.", r"backbone.stages.\1."),
            # A wrapper that chooses between two kinds of blocks.
            (r"^(backbone\.stages\.\d\.\d+)\.conv_block\.", r"\1."),
        ],
    },
}


def to_our_name(name: str, *, model: str, toolkit: Toolkit) -> str:
    """Our name of the published parameter or buffer `name`; empty where we have none."""
    for pattern, replacement in RENAMES.get(model, {}).get(toolkit, []):
        name = re.sub(pattern, replacement, name)
    return name
