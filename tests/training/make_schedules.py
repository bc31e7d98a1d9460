"""Write schedules.json, learning rates of WeSpeaker, 3D-Speaker and SpeechBrain.

    python tests/training/make_schedules.py --wespeaker DIR --3d-speaker DIR --speechbrain DIR

In: checkouts of the projects (Apache-2.0); runs their `wespeaker/utils/schedulers.py`,
`speakerlab/process/scheduler.py` and, cut out of its file, `CyclicLRScheduler` of
`speechbrain/nnet/schedulers.py`. Imports nothing of this project, because 3D-Speaker's package has
the same name. Out, next to this file: the learning rate of every step of 5 epochs of 8 steps, from
0.1 to 1e-3, with a warm-up of one epoch, or of none where the name says so.
"""

import argparse
import importlib.util
import json
import math
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

EPOCHS = 5
PER_EPOCH = 8
PEAK = 0.1
FINAL = 1e-3


def import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cyclic_of(path: Path) -> Any:
    """Return SpeechBrain's class, without importing the package and what it needs."""
    source = path.read_text(encoding="utf-8")
    match = re.search(
        r"^class CyclicLRScheduler.*?(?=^@)", source, re.MULTILINE | re.DOTALL
    )
    assert match is not None
    names: dict[str, Any] = {"math": math}
    # the decorator needs the package
    source = re.sub(r"@checkpoints\.\w+\n", "\n", match[0])
    exec(source, names)
    return names["CyclicLRScheduler"]


def lrs_of(scheduler: Any, optimizer: Any) -> list[float]:
    lrs = []
    for step in range(EPOCHS * PER_EPOCH):
        scheduler.step(step)
        lrs.append(optimizer.param_groups[0]["lr"])
    return lrs


def main() -> None:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=description)
    folders = [
        ("--wespeaker", "wespeaker"),
        ("--3d-speaker", "three"),
        ("--speechbrain", "speechbrain"),
    ]
    for option, name in folders:
        parser.add_argument(
            option,
            dest=name,
            type=Path,
            required=True,
            metavar="DIR",
        )
    options = parser.parse_args()
    we = import_file(options.wespeaker / "wespeaker/utils/schedulers.py")
    three = import_file(options.three / "speakerlab/process/scheduler.py")
    triangular = cyclic_of(options.speechbrain / "speechbrain/nnet/schedulers.py")

    optimizer = SimpleNamespace(param_groups=[{"lr": PEAK}])
    size = {"num_epochs": EPOCHS, "epoch_iter": PER_EPOCH}
    ends = {
        "initial_lr": PEAK,
        "final_lr": FINAL,
        "warm_up_epoch": 1,
    }
    span = {"min_lr": FINAL, "max_lr": PEAK, "fix_epoch": EPOCHS}
    steps = {
        "scale_ratio": 1.0,
        "warmup_step": 1,
        "decay_step": 2,
        "gamma": 0.1,
    }
    made = {
        "wespeaker.ExponentialDecrease": we.ExponentialDecrease(
            optimizer, **size, **ends, warm_from_zero=True
        ),
        "wespeaker.TriAngular2 without warm-up": we.TriAngular2(
            optimizer, **size, **(ends | {"warm_up_epoch": 0})
        ),
        "wespeaker.WarmupCosineScheduler": we.WarmupCosineScheduler(
            optimizer,
            **size,
            **span,
            warmup_epoch=1,
            scale_ratio=1.0,
        ),
        "wespeaker.WarmupLR_withStepDecay": we.WarmupLR_withStepDecay(
            optimizer, **size, **steps
        ),
        "3dspeaker.WarmupCosineScheduler": three.WarmupCosineScheduler(
            optimizer, **span, warmup_epoch=1, step_per_epoch=PER_EPOCH
        ),
        "3dspeaker.StepScheduler without warm-up": three.StepScheduler(
            optimizer, PEAK, PER_EPOCH, 2
        ),
    }
    lrs = {}
    for name, scheduler in made.items():
        lrs[name] = lrs_of(scheduler, optimizer)
    cyclic = triangular(base_lr=FINAL, max_lr=PEAK, step_size=PER_EPOCH)
    name = "speechbrain.CyclicLRScheduler without warm-up"
    lrs[name] = [cyclic.clr(step) for step in range(EPOCHS * PER_EPOCH)]
    target = Path(__file__).with_name("schedules.json")
    rows = []
    for name, row in lrs.items():
        rows.append(f"  {json.dumps(name)}: {json.dumps(row)}")
    text = ",\n".join(rows)
    target.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
