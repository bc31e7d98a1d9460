"""Two hosts: network namespaces joined by a cable (veth), each with its name and its mounts.

They share the file system, as hosts of a cluster do, but for what a test mounts on one of them.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import crew_of, end_all, wait_for, wait_until_gone
from tiny import copy_data, losses, rows, stage_3, training_of, weights

PORT = 29400
CABLE = "cable"
END_SECONDS = 60  # a dead rank has ended the run on all hosts by then
MOUNT_SECONDS = 60  # in which a host may see what another has written
READ_ONLY = (
    'mount --bind "{0}" "{0}" && mount -o remount,bind,ro "{0}" && ! touch "{0}/x"'
    " 2>/dev/null"
)
INSTEAD = 'mount --bind "{1}" "{0}"'


@dataclass
class Host:
    """A network namespace; `mounts` is a line of shell that only this host sees the effect of."""

    namespace: str
    address: str
    log: Path
    mounts: str = "true"

    def start(
        self, arguments: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        inside = f'hostname "{self.namespace}" && {self.mounts} && exec "$@"'
        command = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts"]
        command += ["bash", "-c", inside, "bash", *arguments]
        with self.log.open("wb") as file:
            return subprocess.Popen(
                command,
                env={**environment, "GLOO_SOCKET_IFNAME": CABLE},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )


def ip(command: str) -> None:
    command_line = ["ip", *command.split()]
    subprocess.run(command_line, check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path) -> Iterator[list[Host]]:
    """Two hosts, 10.77.0.1 and 10.77.0.2."""
    has_tools = shutil.which("ip") and shutil.which("unshare")
    if os.geteuid() != 0 or not has_tools:
        pytest.skip("makes network namespaces, so needs root, ip and unshare")
    # Other runs of the tests may make namespaces at the same time.
    first = f"host0-{os.getpid()}"
    second = f"host1-{os.getpid()}"
    pair = [
        Host(first, "10.77.0.1", tmp_path / "1.log"),
        Host(second, "10.77.0.2", tmp_path / "2.log"),
    ]
    try:
        ip(f"netns add {first}")
        ip(f"netns add {second}")
        peer = f"peer name {CABLE} netns {second}"
        ip(f"-netns {first} link add {CABLE} type veth {peer}")
        for host in pair:
            ip(f"-netns {host.namespace} address add {host.address}/24 dev {CABLE}")
            ip(f"-netns {host.namespace} link set lo up")
            ip(f"-netns {host.namespace} link set {CABLE} up")
        yield pair
    except subprocess.CalledProcessError as error:
        problem = error.stderr.strip()
        pytest.skip(f"this machine does not let tests make networks: {problem}")
    finally:
        for name in (first, second):
            if Path(f"/run/netns/{name}").exists():
                ip(f"netns delete {name}")


@pytest.fixture
def copy(data, tmp_path) -> Path:
    return copy_data(data, tmp_path / "data")


@pytest.fixture
def exp(tmp_path) -> Iterator[Path]:
    """The experiment; its processes are ended after the test."""
    folder = tmp_path / "hosts"
    folder.mkdir()
    yield folder
    end_all(folder)


@pytest.fixture
def start(
    hosts, copy, settings, environment, exp
) -> Callable[..., list[subprocess.Popen[bytes]]]:
    """start("a.setting=1") -> stage 3, running on both hosts; whole: through run.sh."""

    def start_on(
        number: int, overrides: tuple[str, ...], whole: bool
    ) -> subprocess.Popen[bytes]:
        address = f"{hosts[0].address}:{PORT}"
        options = ("--nnodes", "2", "--node-rank", str(number), "--rdzv", address)
        recipe = stage_3(copy, exp, settings, *options, *overrides)
        command = recipe if whole else training_of(recipe)
        return hosts[number].start(command, environment)

    def start_both(
        *overrides: str, whole: bool = False
    ) -> list[subprocess.Popen[bytes]]:
        return [start_on(number, overrides, whole) for number in range(2)]

    return start_both


def logs_of(hosts: list[Host]) -> str:
    return "\n".join(host.log.read_text() for host in hosts)


def wait_for_both(
    runs: list[subprocess.Popen[bytes]], seconds: float
) -> list[int | None]:
    """Return the exit codes; on each host run.sh and the launcher have ended by then."""

    def have_ended() -> bool:
        codes = [run.poll() for run in runs]
        return None not in codes

    wait_for(have_ended, seconds=seconds)
    return [run.returncode for run in runs]


@pytest.mark.slow
def test_two_hosts_equal_one_and_only_rank_0_writes(
    hosts, start, exp, copy, settings, run
):
    """For the second host the experiment is on a read-only file system."""
    hosts[1].mounts = READ_ONLY.format(exp)
    runs = start("training.num_epochs=1")
    codes = wait_for_both(runs, 120)
    assert codes == [0, 0], logs_of(hosts)

    on_one_host = exp.with_name("one")
    recipe = stage_3(copy, on_one_host, settings, "training.num_epochs=1")
    _, *arguments = training_of(recipe)
    run(*arguments, ranks=2)
    assert weights(exp) == weights(on_one_host)
    assert losses(exp) == losses(on_one_host)
    expected = rows(on_one_host, "valid")
    assert rows(exp, "valid") == expected
    # Six steps and a validation.
    assert len(rows(exp)) == 6 + 1
    assert "step 6/6" in hosts[0].log.read_text()
    assert "step 6/6" not in hosts[1].log.read_text()


@pytest.mark.slow
def test_a_rank_killed_on_one_host_ends_both(hosts, start, exp):
    runs = start("training.num_epochs=4000", whole=True)
    wait_for(lambda: max(losses(exp), default=0) >= 4, seconds=100)
    os.kill(crew_of(exp).ranks[1], signal.SIGKILL)
    assert all(wait_for_both(runs, END_SECONDS))
    wait_until_gone(exp, seconds=5)
    first, second = [host.log.read_text() for host in hosts]
    assert re.search(r"rank 1( on host1\S*)?: .*SIGKILL", second)
    assert re.search(r"rank 0( on host0\S*)?: ", first)


@pytest.mark.slow
def test_a_host_with_other_data_is_named(hosts, start, copy, tmp_path):
    """One utterance is missing on the second host's mount."""
    other = tmp_path / "other"
    shutil.copytree(copy, other)
    for table in ("wav.scp", "utt2spk", "utt2dur"):
        path = other / "train" / table
        _, *lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines))
    hosts[1].mounts = INSTEAD.format(copy, other)
    runs = start("training.num_epochs=1")
    assert all(wait_for_both(runs, MOUNT_SECONDS + END_SECONDS))
    text = logs_of(hosts)
    assert re.search(r"rank 1\b.*\bdiffer", text)
    assert hosts[1].namespace in text
