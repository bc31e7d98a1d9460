"""Row of a table of published networks; members.py merges the tables."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Member:
    """Published network: how to build it here and upstream, and the error allowed."""

    model: str  # a name in speakerlab.models.MODELS
    args: dict[str, object]
    toolkit: Literal[
        "3dspeaker", "wespeaker"
    ]  # the rules of speakerlab.checkpoints.architectures apply
    upstream: str  # "module:class or function" that builds the published network ...
    upstream_args: dict[str, object] = field(default_factory=dict)  # ... from these arguments
    # The error allowed in fp32. Random weights amplify rounding in some networks: then this is what
    # the published code itself shows, inf where it overflows. The exact test is the one in float64.
    fp32: float = 1e-5
    smallest: bool = False  # of its family: tested by `make test`, the others by `make test-all`

    @property
    def feat_dim(self) -> int:
        """The mel bins that it was published for."""
        feat_dim = self.args.get("feat_dim", 80)
        assert isinstance(feat_dim, int)
        return feat_dim
