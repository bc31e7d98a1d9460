"""Two hosts: network namespaces joined by a cable (veth), each with its name and its mounts.

They share the file system, as hosts of a cluster do, but for what a test mounts on one of them.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import crew_of, end_all, rows, step_of, wait_until_gone
from tiny import prepared, stage_3, training_of

PORT = 29400
CABLE = "cable"
END_SECONDS = 60  # a dead rank has ended the run on all hosts by then
MOUNT_SECONDS = 60  # in which a host may see what another has written
READ_ONLY = (
    'mount --bind "{0}" "{0}" && mount -o remount,bind,ro "{0}" && ! touch "{0}/x" 2>/dev/null'
)
INSTEAD = 'mount --bind "{1}" "{0}"'


@dataclass
class Host:
    """A network namespace; `mounts` is a line of shell that only this host sees the effect of."""

    namespace: str
    address: str
    mounts: str = "true"

    def start(self, words: list[str], environment: dict[str, str], log: Path) -> "Run":
        inside = f'hostname "{self.namespace}" && {self.mounts} && exec "$@"'
        command = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, "bash", "-c", inside, "bash", *words],
                env={**environment, "GLOO_SOCKET_IFNAME": CABLE},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return Run(process, log)


@dataclass
class Run:
    """What was started on a host, and what it says."""

    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text()


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts, 10.77.0.1 and 10.77.0.2."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("makes network namespaces, so needs root, ip and unshare")
    pair = [Host(f"host{i}-{os.getpid()}", f"10.77.0.{i + 1}") for i in range(2)]
    names = [host.namespace for host in pair]
    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"-netns {names[0]} link add {CABLE} type veth peer name {CABLE} netns {names[1]}")
        for host in pair:
            ip(f"-netns {host.namespace} address add {host.address}/24 dev {CABLE}")
            ip(f"-netns {host.namespace} link set lo up")
            ip(f"-netns {host.namespace} link set {CABLE} up")
    except subprocess.CalledProcessError as error:
        remove(names)
        pytest.skip(f"this machine does not let tests make networks: {error.stderr.strip()}")
    yield pair
    remove(names)


def remove(namespaces: list[str]) -> None:
    for name in namespaces:
        if Path(f"/run/netns/{name}").exists():
            ip(f"netns delete {name}")


@pytest.fixture
def copy(data, tmp_path) -> Path:
    return prepared(data, tmp_path / "data")


@pytest.fixture
def exp(tmp_path) -> Iterator[Path]:
    """The experiment; whoever still works for it at the end is ended."""
    folder = tmp_path / "hosts"
    folder.mkdir()
    yield folder
    end_all(folder)


@pytest.fixture
def start(hosts, copy, settings, environment, exp) -> Callable[..., list[Run]]:
    """start("a.setting=1") -> the runs of stage 3 on both hosts; whole: through run.sh."""

    def start_on(number: int, more: tuple[str, ...], whole: bool) -> Run:
        rdzv = ("--rdzv", f"{hosts[0].address}:{PORT}")
        options = ("--nnodes", "2", "--node-rank", str(number), *rdzv)
        words = stage_3(copy, exp, settings, *options, *more)
        log = exp.with_name(f"host{number}.log")
        return hosts[number].start(words if whole else training_of(words), environment, log)

    return lambda *more, whole=False: [start_on(number, more, whole) for number in range(2)]


def wait_for_both(runs: list[Run], seconds: float) -> list[int]:
    """Exit codes; on each host run.sh and torchrun have ended by then."""
    deadline = time.monotonic() + seconds
    try:
        return [run.process.wait(timeout=deadline - time.monotonic()) for run in runs]
    except subprocess.TimeoutExpired:
        raise AssertionError("\n".join(run.text() for run in runs)) from None


def left_by(exp: Path) -> tuple[list[str], list[tuple[float | str | None, ...]]]:
    """Digests of the weights, and all that metrics.jsonl says about learning."""
    files = [exp / "model" / f"{name}.safetensors" for name in ("embedder", "head")]
    names = ("kind", "step", "loss", "accuracy", "grad_norm", "eer")
    learned = [tuple(row.get(name) for name in names) for row in rows(exp)]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files], learned


def test_two_hosts_equal_one_and_only_rank_0_writes(
    hosts, start, exp, copy, tmp_path, settings, environment
):
    """For the second host the experiment is on a read-only file system."""
    hosts[1].mounts = READ_ONLY.format(exp)
    runs = start("training.num_epochs=1")
    codes = wait_for_both(runs, 120)
    assert codes == [0, 0], "\n".join(each.text() for each in runs)
    words = stage_3(copy, tmp_path / "one", settings, "--nproc", "2", "training.num_epochs=1")
    words = training_of(words)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert left_by(exp) == left_by(tmp_path / "one")
    assert [row["kind"] for row in rows(exp)] == ["train"] * 6 + ["valid"]
    assert "step 6/6" in runs[0].text() and "step 6/6" not in runs[1].text()


@pytest.mark.slow
def test_a_rank_killed_on_one_host_ends_both(start, exp):
    runs = start("training.num_epochs=4000", whole=True)
    deadline = time.monotonic() + 100
    while step_of(exp) < 4:
        assert time.monotonic() < deadline, "\n".join(run.text() for run in runs)
        time.sleep(0.05)
    os.kill(crew_of(exp).ranks[1], signal.SIGKILL)
    codes = wait_for_both(runs, END_SECONDS)
    assert all(codes), codes
    wait_until_gone(exp, seconds=5)
    assert re.search(r"rank 1( on host1\S*)?: ended the run, got SIGKILL of", runs[1].text())
    assert re.search(r"rank 0( on host0\S*)?: ended the run", runs[0].text())


@pytest.mark.slow
def test_a_host_with_other_data_is_told(hosts, start, copy, tmp_path):
    """One utterance is missing on the second host's mount."""
    other = tmp_path / "other"
    shutil.copytree(copy, other)
    for table in ("wav.scp", "utt2spk", "utt2dur"):
        path = other / "train" / table
        path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    hosts[1].mounts = INSTEAD.format(copy, other)
    runs = start("training.num_epochs=1")
    codes = wait_for_both(runs, MOUNT_SECONDS + END_SECONDS)
    assert all(codes), codes
    told = "\n".join(run.text() for run in runs)
    assert re.search(r"rank 1\b.*\bdiffer", told), told
    assert hosts[1].namespace in told
