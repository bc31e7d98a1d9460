"""The parts of the suite, in the order in which they run.

In: the suite's options. Out: for each part its script and the words that it is called with.

To add a part: a script that takes --peer and --json, and a line in `PARTS`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A script beside this file."""

    name: str
    script: str
    peers: tuple[str, ...] = ()  # whose checkouts it can make use of
    passes: tuple[str, ...] = ()  # options of the suite that it has, too
    quick: tuple[str, ...] = ()  # words for --quick
    can_choose: bool = False  # has --rows

    def words(self, options: argparse.Namespace, rows: Sequence[str] = ()) -> list[str]:
        """What follows the script's name. rows: only these, where the part can choose."""
        words = list(self.quick) if options.quick else []
        for name in self.passes:
            value = getattr(options, name)
            words += [] if value is None else [f"--{name}={value}"]
        if rows and self.can_choose:
            words += ["--rows", *rows]
        given = [str(options.checkouts[peer]) for peer in self.peers if peer in options.checkouts]
        return words + (["--peer", *given] if given else [])


QUICK_ROWS = [
    f"{work}.{model}.{precision}"
    for model in ("campplus", "eres2net")
    for work in ("train", "infer")
    for precision in ("fp32", "bf16")
]
ALL = ("3dspeaker", "wespeaker", "speechbrain")
BOTH = ("device", "threads")
PARTS = (
    Part("roofline", "roofline.py", passes=BOTH, quick=("--seconds=5",)),
    Part("data", "data.py", ALL[:1], quick=("--seconds=3", "--source=shard")),
    Part("frontend", "frontend.py", ALL, ("device",), quick=("--seconds=3",)),
    Part(
        "models",
        "models.py",
        ALL,
        BOTH,
        quick=("--seconds=3", "--rows", *QUICK_ROWS),
        can_choose=True,
    ),
    Part(
        "end_to_end",
        "end_to_end.py",
        ALL[:1],
        BOTH,
        quick=("--seconds=3", "--model=campplus", "--precision=bf16"),
    ),
    Part(
        "extract",
        "extract.py",
        ALL[:1],
        ("threads",),
        quick=("--seconds=10", "--model=campplus"),
    ),
    Part("scoring", "scoring.py", ALL[:2], ("threads",), quick=("--turns=3", "--repeats=2")),
    Part("startup", "startup.py", ALL[:1], ("threads",), quick=("--turns=2",)),
)
