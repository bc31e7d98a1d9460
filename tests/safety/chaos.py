"""Trainings under random faults, started again by the same command until they end.

    python tests/safety/chaos.py --minutes 60 --seed 0 [--ranks 2] [--hosts 2] [--work DIR]

A round is one training through run.sh, on packed audio with noise and rooms. Faults drawn from
(seed, round) strike it, several at once; after each end the same command is typed again, and what
its message asks for is repaired. Some rounds also have a NaN in fixed steps, or run out of memory.

Checked after every end: a documented exit code, one line that says why, no traceback, no process
left after 60 s, no file outside the experiment and the data. Checked at the end of a round: the
weights of the undisturbed training with the same NaN, bit for bit, and every row of metrics once.
(The weights may differ after running out of memory, which makes micro-batches smaller, and after a
roll-back, which returns to the last checkpoint: that of the last stop.)

Exits with 1 and the round's number if anything deviates; --round repeats that round alone. The
moments of faults depend on the clock, so a repetition strikes the same blows at other steps.
Mounts, and so full and read-only disks, and two hosts need root.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[1] / name) for name in ("..", ".", "bin")
)
from processes import end_all
from rounds import Deviation, Round, Tally, check
from tiny import rows, weights
from world import World, build_world

OF_TIME = {"crops_per_second", "data_wait", "gpu_memory_mb"}
HARMS = {  # of $CHAOS_HARM
    "": "none",
    "nan {last} 21 23": "NaN in steps 21 to 23",
    "inf-once {last} 31 60": "Inf in steps 31 to 60, so a roll-back",
    "full {last} 41 41": "out of memory in step 41",
}


def is_comparable(harm: str) -> bool:
    """Return whether the weights do not depend on when the training was stopped.

    A roll-back returns to the last checkpoint, which may be of a stop.
    """
    return not harm.startswith(("full", "inf-once"))


def comparable(exp: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in OF_TIME} for row in rows(exp)]


def play(
    world: World, seed: int, number: int, whole: Mapping[str, Path], tally: Tally
) -> None:
    """Play a round, and compare it with the undisturbed training."""
    draw = random.Random(f"{seed} {number}")
    harm = draw.choice(["", *HARMS])
    exp = world.disk / f"round{number}"
    exp.mkdir()
    print(f"round {number}: {HARMS[harm]}", flush=True)
    round_ = Round(world, exp, harm, draw, tally)
    try:
        round_.train()
        outcome = [] if round_.damaged_rows else comparable(exp)
        if not is_comparable(harm):
            trained = [row for row in outcome if row["kind"] == "train"]
            steps = [row["step"] for row in trained]
            check(
                not steps or steps == list(range(1, 241)), "rows are missing or double"
            )
            attempt = int(harm.startswith("inf-once"))
            check(
                not trained or trained[-1]["attempt"] == attempt,
                "another number of roll-backs",
            )
        else:
            check(
                weights(exp) == weights(whole[harm]), "other weights than undisturbed"
            )
            check(
                not outcome or outcome == comparable(whole[harm]),
                "other rows than undisturbed",
            )
    finally:
        round_.undo_all()
        end_all(exp)
    shutil.rmtree(exp)


def undisturbed(world: World) -> dict[str, Path]:
    """Return the training of each harm, without faults."""
    runs = {}
    for harm in HARMS:
        if not is_comparable(harm):
            continue
        exp = world.root / f"whole{len(runs)}"
        for run in [world.start(exp, harm, host) for host in range(world.hosts)]:
            check(run.process.wait(900) == 0, run.text)
        runs[harm] = exp
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add: Any = parser.add_argument
    add("--minutes", type=float, default=3, help="no round begins after these (3)")
    add("--seed", type=int, default=0)
    add("--ranks", type=int, default=1, help="of each host (1)")
    add("--hosts", type=int, default=1, choices=(1, 2), help="network namespaces (1)")
    add("--round", type=int, help="play this round alone")
    add("--work", type=Path, help="an empty or absent folder; kept (a temporary one)")
    options = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # not ignored, as after nohup or `&`
    work = options.work or Path(tempfile.mkdtemp(prefix="chaos-"))
    tally = Tally()
    began = time.monotonic()
    with build_world(work.resolve(), options.ranks, options.hosts) as world:
        whole = undisturbed(world)
        number = options.round or 0
        while True:
            try:
                play(world, options.seed, number, whole, tally)
            except Deviation as error:
                tally.print()
                sys.exit(f"seed {options.seed}, round {number}: {error}")
            number += 1
            if (
                options.round is not None
                or time.monotonic() - began > 60 * options.minutes
            ):
                break
    tally.print()
    if options.work is None:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
