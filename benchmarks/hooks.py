"""What surviving costs: the share of a training step that guard, monitor and checkpoints take.

    python benchmarks/hooks.py --json FILE

In: a synthetic corpus and a real training of --steps steps (--model, --global-batch, --micro-batch)
with a row of metrics each 10 steps and a checkpoint each 50. Out: per hook milliseconds a step, and
the share of all hooks in the time of a step, median over the steps and mean. The front end, the
model, the reduction and the optimizer are not hooks; the norm of the gradients, which clipping
needs anyway, is not either.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rows import STARTED, lone_row, write_rows
from sides import ROOT, environment, say
from stopwatch import Hop, Stopwatch

sys.path.insert(0, str(ROOT))
from speakerlab.config.schema import load_config
from speakerlab.core import process
from speakerlab.experiments.train import build_training
from speakerlab.training.distributed import start_ranks
from speakerlab.training.guard import Guard
from speakerlab.training.metric_sums import Window
from speakerlab.training.monitor import Monitor
from speakerlab.training.run_state import Keeper
from speakerlab.training.signals import Signals
from speakerlab.training.trainer import Trainer
from speakerlab.training.update import Updater

HOPS: list[Hop] = [
    ("guard: copy of BatchNorm", Guard, "before_step"),
    ("guard: verdict", Guard, "judge"),
    ("guard: host reads it", Updater, "check"),
    ("monitor: sums", Window, "add"),
    ("monitor: sums", Window, "add_step"),
    ("monitor: sums", Window, "add_crops"),
    ("monitor: row, files, console", Trainer, "_log"),
    ("checkpoint: is it due", Trainer, "_checkpoint"),
    ("checkpoint: copy of the state", Keeper, "save"),
]


def measure(
    options: argparse.Namespace, folder: Path
) -> tuple[Stopwatch, list[float], list[float]]:
    """(the hooks' times, each step's seconds, each step's share of hooks)."""
    settings = [
        *(f"data.dir={folder}", "data.train=[wav]", "data.valid_speakers=0"),
        *(f"training.global_batch={options.global_batch}", "training.checkpoint_every_steps=50"),
        *(f"runtime.micro_batch={options.micro_batch}", "training.num_epochs=10000"),
        *("runtime.num_workers=1", "runtime.precision=fp32"),
    ]
    config = load_config([ROOT / "conf" / f"{options.model}.yaml"], settings)
    exp = folder / "exp"
    exp.mkdir()
    ranks = start_ranks(timeout_minutes=1)
    trainer = build_training(exp, None, config, ranks, Signals(process.leave)).trainer
    monitor = Monitor(exp, start_step=0, total_steps=options.steps, every_seconds=10)
    inputs = trainer.inputs(0)
    watch, seconds, shares = Stopwatch(), [], []
    with watch.watching(HOPS):
        for step in range(options.steps + options.warm_up):
            if step == options.warm_up:
                watch.seconds.clear()
            began, spent = time.perf_counter(), sum(watch.seconds.values())
            trainer.run_step(inputs)
            trainer.keeper.progress.step += 1
            trainer._log(monitor, inputs)  # noqa: SLF001
            trainer._checkpoint(asked=False, valid=None)  # noqa: SLF001
            if step >= options.warm_up:
                seconds.append(time.perf_counter() - began)
                shares.append((sum(watch.seconds.values()) - spent) / seconds[-1])
    trainer.keeper.writer.wait()
    inputs.close()
    monitor.close()
    return watch, seconds, shares


def main() -> None:
    """Print the table; write one row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="campplus_tiny", metavar="NAME")
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="has no such thing: left alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [f"--folder={folder}", "--crop-seconds=3"]
        command = [sys.executable, str(Path(__file__).with_name("data_corpus.py")), *words]
        subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment(ROOT, 1))
        watch, seconds, shares = measure(options, folder)
    for hop, total in sorted(watch.seconds.items(), key=lambda item: -item[1]):
        say(f"{1000 * total / options.steps:8.3f} ms a step  {hop}")
    step = statistics.median(seconds)
    mean = sum(watch.seconds.values()) / sum(seconds)
    say(f"{1000 * step:8.1f} ms, the median step of {options.model}, {options.steps} steps")
    say(f"hooks: {statistics.median(shares):.2%} of a step (median), {mean:.2%} of the time")
    say("measured {date} at {commit}".format(**STARTED))
    row = lone_row(f"hooks.{options.model}", statistics.median(shares), "share")
    write_rows(options.json, [row])
    process.leave(0)


if __name__ == "__main__":
    main()
