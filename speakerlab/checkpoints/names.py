"""Names of parameters in published checkpoints, where they differ from ours.

`RENAMES[model][toolkit]` lists (pattern, replacement) pairs, applied in turn with `re.sub` to a
published name; the result is our name. A name that becomes empty has no part in the embedding, and
its tensor is left out. Models and toolkits that are not listed use our names. The parity tests
check every published architecture against these rules.

To add one: a line for the model with the shortest patterns that match nothing else, and a comment
about the difference. Tensors are never reshaped.
"""

import re
from typing import Literal

Toolkit = Literal["3dspeaker", "wespeaker"]

RENAMES: dict[str, dict[Toolkit, list[tuple[str, str]]]] = {
    "eres2net": {
        # In the two stages with attentive blocks the first of the 3x3 convolutions is separate.
        # The largest numbers are raised first, so that none is raised twice.
        "wespeaker": [
            (r"^(layer[34]\.\d+\.(?:convs|bns))\.2\.", r"\1.3."),
            (r"^(layer[34]\.\d+\.(?:convs|bns))\.1\.", r"\1.2."),
            (r"^(layer[34]\.\d+\.(?:convs|bns))\.0\.", r"\1.1."),
            (r"^(layer[34]\.\d+\.)(conv|bn)2_1\.", r"\1\2s.0."),
        ],
    },
    "redimnet": {
        "wespeaker": [
            # The weight of the first stage's only input: frozen, and 1 after the softmax.
            (r"^backbone\.inputs_weights\.0$", ""),
            (r"^backbone\.stage(\d)\.", r"backbone.stages.\1."),
            # A wrapper that chooses between two kinds of blocks.
            (r"^(backbone\.stages\.\d\.\d+)\.conv_block\.", r"\1."),
        ],
    },
}


def to_our_name(name: str, *, model: str, toolkit: Toolkit) -> str:
    """Return our name of a published parameter or buffer, empty if we have none."""
    for pattern, replacement in RENAMES.get(model, {}).get(toolkit, []):
        name = re.sub(pattern, replacement, name)
    return name
