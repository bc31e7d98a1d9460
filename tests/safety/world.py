"""Where trainings run under faults: a corpus, a small disk, and one host or two."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import MOUNTS, ONE_HOST, TWO_HOSTS, Fault, ip, may_mount
from tiny import TINY, stage_3, write_corpus

from speakerlab.data.pack import pack_data_dir
from speakerlab.data.shards import Layout

HERE = Path(__file__).resolve().parent
SETTINGS = [
    *TINY,
    "augment.speed_classes=on",
    "training.global_batch=12",
    "training.num_epochs=60",  # of 4 steps
    "training.checkpoint_every_steps=10",
    "training.valid_every_epochs=5",
]


@dataclass
class Run:
    """The command on a host, and what it printed."""

    process: subprocess.Popen[Any]
    log: Path

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class World:
    """Folders, commands and hosts of the rounds."""

    root: Path
    ranks: int
    hosts: int
    disk: Path
    can_mount: bool
    cables: list[str]

    @property
    def data(self) -> Path:
        return self.root / "data"

    def faults(self) -> dict[str, Fault]:
        with_several_ranks = {
            **(MOUNTS if self.can_mount else {}),
            **(TWO_HOSTS if self.cables else {}),
        }
        return {**ONE_HOST, **with_several_ranks}

    def start(self, exp: Path, harm: str, host: int) -> Run:
        """Type the command on a host."""
        harm = harm.format(last=self.ranks * self.hosts - 1)
        environment = {
            **os.environ,
            **{"HOME": str(self.root / "home"), "TMPDIR": str(self.root / "tmp")},
            **{
                "OMP_NUM_THREADS": "1",
                "CHAOS_HARM": harm,
                "CHAOS_TESTS": str(HERE.parent / "bin"),
            },
            "PYTHONPATH": f"{HERE / 'harm'}:{HERE.parent}",
        }
        options = ["--nproc", str(self.ranks)]
        prefix = []
        if self.cables:
            options += [
                "--nnodes",
                "2",
                "--node-rank",
                str(host),
                "--rdzv",
                "10.78.0.1:29411",
            ]
            prefix = ["ip", "netns", "exec", self.cables[host]]
            environment["GLOO_SOCKET_IFNAME"] = "cable"
        # stage_3 leaves out `--config FILE --set`, the first three words
        arguments = stage_3(self.data, exp, ["", "", "", *SETTINGS], *options)
        log = self.root / f"host{host}.log"
        here = self.root / "here"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*prefix, *arguments],
                cwd=here,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return Run(process, log)

    def touched(self) -> set[str]:
        """Return the files that no training may make."""
        places = (self.root / "here", self.root / "home")
        return {str(path) for place in places for path in place.rglob("*")}


@contextmanager
def build_world(root: Path, ranks: int, hosts: int) -> Iterator[World]:
    """Make the folders, the disk and the network."""
    for name in ("here", "home", "tmp"):
        (root / name).mkdir(parents=True)
    write_corpus(root / "data")
    pack_data_dir(
        root / "data/train", layout=Layout.of_waves("flac", sample_rate=16000)
    )
    disk = root / "disk"
    cables = [f"chaos{i}-{os.getpid()}" for i in range(2)]
    with ExitStack() as stack:
        can_mount = may_mount(disk)
        if can_mount:
            stack.callback(subprocess.run, ["umount", "--lazy", str(disk)])
        else:
            print("no mounts: needs root; without full and read-only disks")
        if hosts == 2:
            for name in cables:
                ip(f"netns add {name}")
                stack.callback(ip, f"netns delete {name}")
            ip(
                f"-netns {cables[0]} link add cable type veth peer name cable netns"
                f" {cables[1]}"
            )
            for number, name in enumerate(cables, 1):
                ip(f"-netns {name} address add 10.78.0.{number}/24 dev cable")
                ip(f"-netns {name} link set lo up")
                ip(f"-netns {name} link set cable up")
        yield World(root, ranks, hosts, disk, can_mount, cables if hosts == 2 else [])
