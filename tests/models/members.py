"""Every published network, and the facts that the contract tests need about each model.

To add a network, add a line to a table and run `python tests/parity/make.py --toolkit ... --peer
DIR NAME`, which writes tests/parity/NAME.npz. Each table `members_*.py` has

- `MEMBERS`: name -> `Member`
- `SMALL`: model -> arguments that make it small, so that a test takes milliseconds
- `POOLED`: model -> the submodule whose output, frames last, is what the model pools.
"""

import members_3dspeaker
import members_resnet_ecapa
import members_wespeaker_other
from member import Member

TABLES = (members_3dspeaker, members_resnet_ecapa, members_wespeaker_other)

MEMBERS: dict[str, Member] = {}
SMALL: dict[str, dict[str, object]] = {}
POOLED: dict[str, str] = {}
for table in TABLES:
    for merged, rows in (
        (MEMBERS, table.MEMBERS),
        (SMALL, table.SMALL),
        (POOLED, table.POOLED),
    ):
        assert not merged.keys() & rows.keys(), f"{table.__name__}: {merged.keys() & rows.keys()}"
        merged.update(rows)
