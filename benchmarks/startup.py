"""How long a user waits: for help, for a wrong option to be told, for the first training step.

    python benchmarks/startup.py --peer DIR --json FILE      # DIR: a checkout of 3D-Speaker

In: nothing; or --data, the data directory of egs/mini after stage 2, else synthetic recordings take
its place. Out: a line and a row for each, in seconds, medians over --turns, the files in the
system's cache; with a peer both sides take turns.

`startup.help`, `startup.train_help`, `startup.wrong_option` are commands from their start to their
end. `startup.first_step` is `bash egs/mini/run.sh --stage 3` to the line that tells of step 1, of
the small model of the mini recipe. `startup.first_step.campplus` is the same with CAM++, steps of
--micro-batch crops and one loader worker, beside 3D-Speaker's train.py as its run.sh starts it, by
torchrun, on the same recordings with the same numbers (startup_peer.py says what was replaced).
"""

import argparse
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import speech
from rows import report, write_rows
from sides import ROOT, Measured, add_peers, environment, recognise_peers, say

sys.path.insert(0, str(ROOT))
from speakerlab.core import process

HERE = Path(__file__).parent
MARKS = {"3dspeaker": "speakerlab/bin/train.py"}
RECIPE = "egs/3dspeaker/sv-cam++/conf/cam++.yaml"
COMMANDS = {
    "help": ["--help"],
    "train_help": ["train", "--help"],
    "wrong_option": ["train", "--epx", "x"],
}
FIRST_STEP = r" step 1/"
PEER_FIRST_STEP = r"Epoch: \[1\]"  # its log's first line on a step, told when that is done
EVERY_STEP = ["runtime.log_every_steps=1", "runtime.log_every_seconds=0.001"]
PATIENCE_SECONDS = 300.0


def seconds_to(line: str, command: Sequence[str], root: Path, threads: int | None) -> float:
    """From the start of a command to a line that has the pattern; the command is then killed."""
    start, told = time.perf_counter(), list[str]()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(root, threads),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that all it has started can be ended
        preexec_fn=process.die_with_parent,
    ) as started:
        assert started.stdout is not None
        try:
            for text in started.stdout:
                if re.search(line, text):
                    return time.perf_counter() - start
                told.append(text)
                if time.perf_counter() - start > PATIENCE_SECONDS:
                    break
        finally:
            _kill(started.pid)
    raise SystemExit(f"startup.py: {command[0]}: never told '{line}'\n{''.join(told[-20:])}")


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def seconds_of(words: Sequence[str], threads: int | None) -> float:
    """Of a command of ours, from its start to its end."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "speakerlab", *words]
    subprocess.run(command, cwd=ROOT, env=environment(ROOT, threads), capture_output=True)
    return time.perf_counter() - start


def first_step(data: Path, exp: Path, options: argparse.Namespace, more: Sequence[str]) -> float:
    """Of stage 3 of the mini recipe; more: its further options, --set last."""
    words = ["--stage=3", "--stop-stage=3", f"--data={data}", f"--exp={exp}", *more]
    command = ["bash", "egs/mini/run.sh", *words, *EVERY_STEP]
    return seconds_to(FIRST_STEP, command, ROOT, options.threads)


def peer_first_step(folder: Path, exp: Path, options: argparse.Namespace) -> float:
    """Of 3D-Speaker's training of CAM++, by torchrun."""
    root = options.peers["3dspeaker"]
    words = [f"--config={root / RECIPE}", "--gpu", "0"]
    values = {"batch_size": options.micro_batch, "num_workers": 1, "exp_dir": exp}
    values |= {"noise": folder / "noise/wav.scp", "reverb": folder / "rirs/wav.scp"}
    words += [f"--data={folder / 'wav'}", *(f"--{name}={value}" for name, value in values.items())]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    command = [*launch, str(HERE / "startup_peer.py"), *words]
    return seconds_to(PEER_FIRST_STEP, command, root, options.threads)


def medians(sides: Sequence[Callable[[], float]], turns: int) -> Measured:
    """Seconds of one side, or of two in turn; each is first run once untimed."""
    for side in sides:
        side()
    own, *peer = zip(*[[side() for side in sides] for _ in range(turns)])
    median = statistics.median(own)
    if not peer:
        return Measured(median, None, None, None)
    low, _, high = statistics.quantiles([mine / its for mine, its in zip(own, peer[0])], n=4)
    peer_median = statistics.median(peer[0])
    return Measured(median, peer_median, median / peer_median, (low, high))


def lay_out(folder: Path) -> Path:
    """The recipe's data directory after stage 2, of what data_corpus.py has made."""
    data = folder / "data"
    data.mkdir()
    for name, source in (("train", "shard"), ("noise", "noise"), ("rirs", "rirs")):
        (data / name).symlink_to(folder / source)
    for stage in (1, 2):
        (data / f".stage{stage}").touch()
    return data


def compare(folder: Path, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """All rows."""
    for name, words in COMMANDS.items():
        alone = medians([lambda words=words: seconds_of(words, options.threads)], options.turns)
        yield report(f"startup.{name}", alone, unit="s")
    made = lay_out(folder)
    exps = (folder / f"exp{number}" for number in range(1 << 20))
    data = options.data or made
    mini = medians([lambda: first_step(data, next(exps), options, ["--set"])], options.turns)
    yield report("startup.first_step", mini, unit="s")
    size = options.micro_batch
    alike = [f"training.global_batch={size}", f"runtime.micro_batch={size}"]
    alike += ["training.bn_batch=null", "runtime.num_workers=1"]
    more = ["--model=campplus", "--set", *alike]
    sides = [lambda: first_step(made, next(exps), options, more)]
    if "3dspeaker" in options.peers:
        sides.append(lambda: peer_first_step(folder, next(exps), options))
    yield report("startup.first_step.campplus", medians(sides, options.turns), unit="s")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_peers(parser, MARKS)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--data", type=Path, help="egs/mini/data after stage 2 (synthetic)")
    parser.add_argument("--micro-batch", type=int, default=16, help="of the comparison")
    parser.add_argument("--threads", type=int, help="of each side; default: what torch takes")
    parser.add_argument("--turns", type=int, default=5, help="of each side")
    options = parser.parse_args(words)
    if options.turns < 2:
        parser.error(f"--turns: must be at least 2 to tell a spread, got {options.turns}")
    options.peers = recognise_peers(parser, options.peer, MARKS)
    if options.data is not None and not (options.data / "train").is_dir():
        parser.error(f"--data: must hold `train`, got {options.data}")
    options.data = options.data and options.data.resolve()
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        made = argparse.Namespace(audio=None, noise=None, rirs=None, utterance_seconds=None)
        found = speech.make(Path(name), made, crop_seconds=3.0, sources=["shard"])
        say(f"{found}; the first step of {options.data or 'these'}")
        rows = list(compare(Path(name), options))
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
