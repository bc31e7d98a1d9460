"""Every published member, and what the contract tests need to know of each model.

To add a member: a line in a table, `python tests/parity/make.py --toolkit ... --peer DIR NAME`, and
what comes out is stored in tests/parity/NAME.npz. A table `members_*.py` here holds

- `MEMBERS`: name of the figures -> `Member`
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
