"""How long a user waits: for help, for a wrong option's message, for the first training step.

    python benchmarks/startup.py --peer DIR --json FILE      # DIR: a checkout of 3D-Speaker

In: nothing, or --data, the data directory of egs/mini after stage 2; else synthetic recordings
(corpus.py). Out: rows in seconds, medians over --turns, the files in the system's cache.

`startup.help`, `startup.train_help` and `startup.wrong_option` are commands from start to end.
`startup.first_step` is `bash egs/mini/run.sh --stage 3` up to the log line of step 1, of the small
model of the recipe. `startup.first_step.campplus` is the same with CAM++, steps of --micro-batch
crops and one loader worker, beside 3D-Speaker's train.py as its run.sh starts it, by torchrun, on
the same recordings with the same settings; this file is then the script that torchrun starts.

Replaced in 3D-Speaker where there is no GPU, besides what data.py replaces: `cuda` leaves modules
and tensors where they are, and ranks communicate by gloo, which starts sooner.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import data
import torch
from end_to_end import RECIPES
from sides import (
    ROOT,
    die_with_parent,
    environment,
    import_peer,
    report,
    run_case,
    say,
    wants,
)

PEERS = ("3dspeaker",)
QUICK = ("--turns=2",)
COMMANDS = {
    "help": ["--help"],
    "train_help": ["train", "--help"],
    "wrong_option": ["train", "--epx", "x"],
}
FIRST_STEP = r" step 1/"
PEER_FIRST_STEP = r"Epoch: \[1\]"  # the first line of its log on a step, after that step
EVERY_STEP = ["runtime.log_every_steps=1", "runtime.log_every_seconds=0.001"]
PATIENCE_SECONDS = 300.0
CROP_SECONDS = 3.0


def seconds_of(words: Sequence[str], threads: int | None) -> float:
    """Return the seconds of a command of ours, from start to end."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "speakerlab", *words]
    subprocess.run(command, cwd=ROOT, env=environment(ROOT, threads), capture_output=True)
    return time.perf_counter() - start


def seconds_to(pattern: str, command: Sequence[str], root: Path, threads: int | None) -> float:
    """Return the seconds from a command's start to a line with the pattern; then kill it."""
    start, lines = time.perf_counter(), list[str]()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(root, threads),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that all that it started can be killed
        preexec_fn=die_with_parent,
    ) as started:
        assert started.stdout is not None
        try:
            for line in started.stdout:
                if re.search(pattern, line):
                    return time.perf_counter() - start
                lines.append(line)
                if time.perf_counter() - start > PATIENCE_SECONDS:
                    break
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    raise SystemExit(f"startup.py: {command[0]}: no line '{pattern}' in\n{''.join(lines[-20:])}")


def first_step(
    data_dir: Path, exp: Path, options: argparse.Namespace, more: Sequence[str]
) -> float:
    """Return the seconds of stage 3 of the mini recipe; more: its further options, --set last."""
    words = ["--stage=3", "--stop-stage=3", f"--data={data_dir}", f"--exp={exp}", *more]
    command = ["bash", "egs/mini/run.sh", *words, *EVERY_STEP]
    return seconds_to(FIRST_STEP, command, ROOT, options.threads)


def peer_first_step(exp: Path, options: argparse.Namespace) -> float:
    """Return the seconds of 3D-Speaker's training of CAM++, by torchrun."""
    root = options.peers["3dspeaker"]
    values = {
        "config": root / RECIPES["campplus"],
        "data": options.folder / "wav",
        "batch_size": options.micro_batch,
        "num_workers": 1,
        "exp_dir": exp,
        "noise": options.folder / "noise/wav.scp",
        "reverb": options.folder / "rirs/wav.scp",
    }
    words = [*(f"--{name}={value}" for name, value in values.items()), "--gpu", "0"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    return seconds_to(PEER_FIRST_STEP, [*launch, __file__, *words], root, options.threads)


def train_peer() -> None:
    """Run 3D-Speaker's train.py on a CPU: what torchrun starts, with the words of its train.py."""
    data.replace_torchaudio()
    if not torch.cuda.is_available():
        replace_cuda()
    die_with_parent()  # else it survives torchrun
    data_dir = next(word for word in sys.argv if word.startswith("--data=")).partition("=")[2]
    rows = data.write_list(Path(data_dir), CROP_SECONDS)
    sys.argv = [f"--data={rows}" if word.startswith("--data=") else word for word in sys.argv]
    import_peer("speakerlab.bin.train").main()


def replace_cuda(**group: Any) -> None:
    """Have `cuda` leave modules and tensors where they are, and ranks communicate by gloo."""
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda **_asked: start(backend="gloo", **group)
    torch.cuda.set_device = lambda _index: None
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_args, **_more: self


def lay_out(folder: Path) -> Path:
    """Return the recipe's data directory after stage 2, of what corpus.py has made."""
    data_dir = folder / "data"
    data_dir.mkdir()
    for name, source in (("train", "shard"), ("noise", "noise"), ("rirs", "rirs")):
        (data_dir / name).symlink_to(folder / source)
    for stage in (1, 2):
        (data_dir / f".stage{stage}").touch()
    return data_dir


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield all rows."""
    import corpus

    if options.data is not None and not (options.data / "train").is_dir():
        raise SystemExit(f"--data: {options.data}: no folder `train` in it")
    say(corpus.make(options, crop_seconds=CROP_SECONDS, pack=True, defaults=dict.fromkeys(())))
    made, exps = lay_out(options.folder), (options.folder / f"exp{n}" for n in range(1 << 20))
    mini = made if options.data is None else options.data.resolve()
    size = options.micro_batch
    alike = [f"training.global_batch={size}", f"runtime.micro_batch={size}"]
    alike += ["training.bn_batch=null", "runtime.num_workers=1"]
    more = ["--model=campplus", "--set", *alike]
    sides: dict[str, list[Callable[[], float]]] = {
        name: [lambda words=words: seconds_of(words, options.threads)]
        for name, words in COMMANDS.items()
    }
    sides["first_step"] = [lambda: first_step(mini, next(exps), options, ["--set"])]
    sides["first_step.campplus"] = [lambda: first_step(made, next(exps), options, more)]
    if options.peers:
        sides["first_step.campplus"].append(lambda: peer_first_step(next(exps), options))
    for name, works in sides.items():
        if wants(options, f"startup.{name}"):
            for work in works:
                work()  # once untimed
            turns = [[work() for work in works] for _ in range(options.turns)]
            yield report(f"startup.{name}", turns, unit="s")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="egs/mini/data after stage 2 (synthetic)")
    parser.add_argument("--micro-batch", type=int, default=16, help="of the comparison")
    parser.add_argument("--turns", type=int, default=5, help="of each side")
    parser.set_defaults(audio=None, noise=None, rirs=None, utterance_seconds=None)


if __name__ == "__main__" and "TORCHELASTIC_RUN_ID" in os.environ:
    train_peer()
elif __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
