"""Faults of a cluster. Each draws its details, strikes a running training, and can be undone."""

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from processes import crew_of

DISK_MB = 96


@dataclass(frozen=True)
class Place:
    """Where a training runs: `disk` is a tmpfs that holds `exp`; cables are commands' prefixes."""

    disk: Path
    exp: Path
    data: Path
    shells: Sequence[int]  # process ids of the run.sh of each host
    cables: Sequence[str]  # network namespaces


@dataclass
class Struck:
    """What a fault did.

    Messages must name `path`, where the training cannot go on without a repair. `undo` repairs it,
    by itself after `seconds`. `kills`: the training must end.
    """

    text: str
    undo: Callable[[], None] = lambda: None
    seconds: float | None = None
    path: Path | None = None
    kills: bool = False


Fault = Callable[
    [Place, random.Random], Struck | None
]  # None: there was nothing to strike


def send(name: str, target: str) -> Fault:
    """Return a fault that sends a signal to a process of the training."""

    def strike(place: Place, draw: random.Random) -> Struck | None:
        crew = crew_of(place.exp)
        processes = {
            "shell": place.shells,
            "launcher": [*filter(None, [crew.launcher])],
            "rank": list(crew.ranks.values()),
            "worker": crew.workers,
        }[target]
        if name == "SIGINT":
            processes = [
                pid for pid in processes if pid in place.shells or has_started(pid)
            ]
        if not processes:
            return None
        pid = draw.choice(sorted(processes))
        text = f"{name} to a {target}"
        try:
            os.kill(pid, getattr(signal, name))
        except ProcessLookupError:
            return None
        if name != "SIGSTOP":
            return Struck(
                text, kills=target != "worker" or name == "SIGKILL"
            )  # which ignores others
        seconds = draw.uniform(1, 20)
        return Struck(f"{text} for {seconds:.0f} s", lambda: resume(pid), seconds)

    return strike


def has_started(pid: int) -> bool:
    """Return whether Python runs our code: until then, it prints a traceback for a SIGINT."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(after_name[11]) >= 0.3 * os.sysconf(
        "SC_CLK_TCK"
    )  # seconds of CPU in user mode


def resume(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def fill_disk(place: Place, draw: random.Random) -> Struck:
    filler = place.disk / "filler"
    seconds = draw.uniform(1, 15)
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    undo = lambda: filler.unlink(missing_ok=True)  # noqa: E731
    return Struck(f"a full disk for {seconds:.0f} s", undo, seconds, place.exp)


def forbid_writing(place: Place, draw: random.Random) -> Struck | None:
    """Mount the experiment read-only over itself: what is open stays writable."""
    if is_mounted(place.exp):
        return None
    seconds = draw.uniform(1, 15)
    exp = str(place.exp)
    mount("--bind", exp, exp)
    mount("-o", "remount,bind,ro", exp)

    def undo() -> None:
        if is_mounted(place.exp):
            subprocess.run(["umount", "--lazy", exp], check=True)

    return Struck(
        f"a read-only experiment for {seconds:.0f} s", undo, seconds, place.exp
    )


def is_mounted(folder: Path) -> bool:
    """Return whether it is a mount point, also where it is mounted on itself."""
    return f" {folder} " in Path("/proc/self/mountinfo").read_text()


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def damage(kind: str) -> Fault:
    """Return a fault that flips a byte of a file, or cuts the file."""

    def strike(place: Place, draw: random.Random) -> Struck | None:
        path = choose(kind, place, draw)
        if path is None or not path.stat().st_size:
            return None
        whole = path.read_bytes()
        at = draw.randrange(len(whole))
        if draw.random() < 0.5:
            damage_done = "flipped byte"
            broken = flip(whole, at, 1 + draw.randrange(255))
        else:
            damage_done = "cut"
            broken = whole[:at]
        with suppress(OSError):  # the disk may be full or read-only
            overwrite(path, broken)

        def undo() -> None:
            if path.exists():
                overwrite(path, whole)

        if kind in ("checkpoint", "metrics"):  # nobody has a copy
            undo = lambda: None  # noqa: E731
        return Struck(f"{damage_done} in {path.name} ({kind})", undo, None, path)

    return strike


def flip(data: bytes, at: int, by: int) -> bytes:
    return data[:at] + bytes([data[at] ^ by]) + data[at + 1 :]


def overwrite(path: Path, data: bytes) -> None:
    """Change a file in place, as a disk does: who has it open or mapped sees it."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate(len(data))


def remove(place: Place, draw: random.Random) -> Struck | None:
    path = choose(draw.choice(("shard", "table")), place, draw)
    if path is None:
        return None
    aside = path.with_name(f".{path.name}.aside")
    seconds = draw.uniform(2, 20)
    path.rename(aside)

    def undo() -> None:
        if aside.exists():
            aside.replace(path)

    return Struck(f"no {path.name} for {seconds:.0f} s", undo, seconds, path)


def choose(kind: str, place: Place, draw: random.Random) -> Path | None:
    if kind == "checkpoint":
        newest = sorted((place.exp / "checkpoints").glob("step_*"))[-1:]
        paths = [path for folder in newest for path in folder.glob("*")]
    elif kind == "metrics":
        paths = [*place.exp.glob("metrics.jsonl")]
    elif kind == "shard":
        paths = [*place.data.glob("*/shards/[!.]*")]
    else:
        names = ("wav.scp", "utt2spk", "utt2dur")
        paths = [path for name in names for path in place.data.glob(f"*/{name}")]
    return draw.choice(sorted(paths)) if paths else None


def cut_cable(place: Place, draw: random.Random) -> Struck:
    seconds = draw.uniform(5, 90)
    namespace = draw.choice(place.cables)
    ip(f"-netns {namespace} link set cable down")
    undo = lambda: ip(f"-netns {namespace} link set cable up")  # noqa: E731
    return Struck(f"no link for {seconds:.0f} s", undo, seconds)


def ip(arguments: str) -> None:
    subprocess.run(
        ["ip", *arguments.split()], check=True, capture_output=True, text=True
    )


KILLS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGUSR1")
ONE_HOST: Mapping[str, Fault] = {
    **{
        f"{name} {target}": send(name, target)
        for name in (*KILLS, "SIGSTOP")
        for target in ("shell", "launcher", "rank", "worker")
    },
    "damaged checkpoint": damage("checkpoint"),
    "damaged shard": damage("shard"),
    "damaged table": damage("table"),
    "damaged metrics": damage("metrics"),
    "removed file": remove,
}
MOUNTS: Mapping[str, Fault] = {"full disk": fill_disk, "read-only": forbid_writing}
TWO_HOSTS: Mapping[str, Fault] = {"link down": cut_cable}


def may_mount(disk: Path) -> bool:
    """Mount a tmpfs on an empty folder, if this user may."""
    disk.mkdir(parents=True)
    if os.geteuid() or not shutil.which("mount"):
        return False
    arguments = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)]
    return not subprocess.run(arguments, capture_output=True).returncode
