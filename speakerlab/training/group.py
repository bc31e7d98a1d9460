"""The group of ranks that another program has started this process in.

torchrun, Slurm's srun and operators such as Kubeflow's PyTorchJob describe a process's place in
environment variables. In: these variables. Out: one `Group`, or None for a process on its own.
Variables that contradict each other raise ValueError: ranks that disagree on their number wait for
each other until a timeout.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Ports for the ranks of a Slurm job that names no port.
PORTS = range(20_000, 30_000)
# Patterns for Slurm's list of hosts, such as `gpu[01-04,7]-ib,login`: the first entry is
# `gpu[01-04,7]-ib`, since a comma in brackets ends no entry, and its first number is `01`.
FIRST_ENTRY = r"(?:[^\[\],]|\[[^\]]*\])+"
FIRST_NUMBER = r"\[(\d+)[^\]]*\]"


@dataclass(frozen=True)
class Group:
    """The place of this process among the ranks."""

    starter: str  # the program that started the ranks, for messages
    rank: int
    world_size: int
    local_rank: int  # among the ranks of this host
    local_size: int
    address: str  # of rank 0's host
    port: int

    def variables(self) -> dict[str, str]:
        """Return the place as the variables that torch.distributed reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def find_group(variables: Mapping[str, str], *, root: Path = Path("/")) -> Group | None:
    """Return the group that the environment describes; None for a process on its own.

    root: where `proc` lies. Raises ValueError if variables are incomplete or contradict each other.
    """
    if "TORCHELASTIC_RUN_ID" in variables:
        return _read_group(variables, starter="torchrun")
    num_tasks = _slurm_tasks(variables, root)
    is_named = "RANK" in variables or "WORLD_SIZE" in variables
    if not is_named:
        if num_tasks is None:
            return None
        return _read_slurm(variables, num_tasks=num_tasks)

    # A script for Slurm may export RANK and WORLD_SIZE. A stale or constant RANK would give two
    # tasks the same rank, and both would wait for the missing one.
    group = _read_group(variables, starter="RANK and WORLD_SIZE")
    if num_tasks is not None:
        _check_agreement(group, variables, num_tasks=num_tasks)
    return group if group.world_size > 1 else None


def _read_group(variables: Mapping[str, str], *, starter: str) -> Group:
    """Read RANK, WORLD_SIZE and the variables beside them.

    Without LOCAL_RANK and LOCAL_WORLD_SIZE, each host has one rank.
    """
    rank = _number(variables, "RANK")
    world_size = _number(variables, "WORLD_SIZE")
    local_rank = _number(variables, "LOCAL_RANK", default=0)
    local_size = _number(variables, "LOCAL_WORLD_SIZE", default=1)
    # The ranks of a host share its GPUs and memory, so their number must not be guessed.
    if local_rank > 0 and "LOCAL_WORLD_SIZE" not in variables:
        raise ValueError(
            f"LOCAL_RANK: {local_rank}, but LOCAL_WORLD_SIZE is missing; set it to the"
            " number of ranks on this host"
        )
    _check_below("RANK", rank, "WORLD_SIZE", world_size)
    _check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    if local_size > world_size:
        raise ValueError(
            f"LOCAL_WORLD_SIZE: {local_size} ranks on this host, but WORLD_SIZE is"
            f" {world_size}; correct one of them"
        )

    address, port = _read_address(variables, world_size=world_size)
    return Group(
        starter=starter,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        address=address,
        port=port,
    )


def _read_address(variables: Mapping[str, str], *, world_size: int) -> tuple[str, int]:
    """Return address and port of rank 0's host, from MASTER_ADDR and MASTER_PORT."""
    # A single rank connects to no other rank, and needs neither.
    if world_size == 1:
        return "127.0.0.1", 0
    missing: list[str] = []
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not variables.get(name):
            missing.append(name)
    if missing:
        raise ValueError(
            f"{' and '.join(missing)}: missing, but WORLD_SIZE is {world_size}; set the"
            " address and an open port of rank 0's host, or unset RANK and WORLD_SIZE"
            " to train alone"
        )
    return variables["MASTER_ADDR"], _number(variables, "MASTER_PORT")


def _slurm_tasks(variables: Mapping[str, str], root: Path) -> int | None:
    """Return the number of tasks of this Slurm step; None outside of a step, or for a single one.

    A batch script has the variables of a task too, but no other tasks, unless srun starts them.
    """
    if "SLURM_PROCID" not in variables:
        return None
    # SLURM_NTASKS counts the tasks of the whole job; a step may start fewer tasks.
    name = "SLURM_NTASKS"
    if "SLURM_STEP_NUM_TASKS" in variables:
        name = "SLURM_STEP_NUM_TASKS"
    num_tasks = _number(variables, name, default=1)
    if num_tasks == 1:
        return None
    if "SLURM_STEP_ID" not in variables and _is_in_batch_script(root):
        return None
    return num_tasks


def _is_in_batch_script(root: Path) -> bool:
    """Return whether this process was started, directly or not, by the batch script of a Slurm job.

    Slurm copies a batch script to a file named `slurm_script`. Tasks that srun starts are children
    of a Slurm daemon instead.
    """
    process = "self"
    # The first process of a machine or container has the parent 0.
    while process != "0":
        folder = root / "proc" / process
        try:
            command_line = (folder / "cmdline").read_bytes()
            status = (folder / "stat").read_text()
        except OSError:
            return False
        # The script is the program itself, or the first argument of its interpreter.
        for argument in command_line.split(b"\0")[:2]:
            if argument.endswith(b"/slurm_script"):
                return True
        # `stat` is `NUMBER (NAME) STATE PARENT ...`; the name may contain spaces and brackets.
        _, _, after_name = status.rpartition(")")
        parent = after_name.split()[1]
        process = parent
    return False


def _read_slurm(variables: Mapping[str, str], *, num_tasks: int) -> Group:
    rank = _number(variables, "SLURM_PROCID")
    _check_below("SLURM_PROCID", rank, "SLURM_NTASKS", num_tasks)
    num_hosts = _optional_number(variables, "SLURM_STEP_NUM_NODES")
    if num_hosts is None:
        num_hosts = _number(variables, "SLURM_NNODES", default=1)

    # On a single host every task is local. On several hosts Slurm must provide the local rank.
    local_rank = _optional_number(variables, "SLURM_LOCALID")
    if local_rank is None and num_hosts == 1:
        local_rank = rank
    local_size = _tasks_of_host(variables, num_tasks=num_tasks, num_hosts=num_hosts)
    if local_rank is None or local_size is None:
        raise ValueError(
            f"SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE: missing on {num_hosts} hosts;"
            " start the ranks with srun"
        )
    _check_below("SLURM_LOCALID", local_rank, "the tasks of this host", local_size)

    address = variables.get("MASTER_ADDR")
    if not address:
        address = _first_host(variables, num_hosts=num_hosts)
    return Group(
        starter="srun",
        rank=rank,
        world_size=num_tasks,
        local_rank=local_rank,
        local_size=local_size,
        address=address,
        port=_slurm_port(variables),
    )


def _tasks_of_host(
    variables: Mapping[str, str], *, num_tasks: int, num_hosts: int
) -> int | None:
    """Return the number of tasks on this host; None if Slurm does not provide it."""
    if num_hosts == 1:
        return num_tasks
    tasks_per_node = variables.get("SLURM_STEP_TASKS_PER_NODE")
    if not tasks_per_node:
        tasks_per_node = variables.get("SLURM_TASKS_PER_NODE") or ""

    # The list `2(x3),1` means three hosts with 2 tasks each and one host with 1 task.
    counts: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        num_repeats = int(repeats or 1)
        counts += [int(count)] * num_repeats
    host = _optional_number(variables, "SLURM_NODEID")
    if host is None or len(counts) != num_hosts:
        return None
    if not 0 <= host < num_hosts:
        return None
    if sum(counts) != num_tasks:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE: {tasks_per_node} are {sum(counts)} tasks, but"
            f" SLURM_NTASKS is {num_tasks}; correct one of them"
        )
    return counts[host]


def _first_host(variables: Mapping[str, str], *, num_hosts: int) -> str:
    """Return the host of task 0: the first one of the step's list."""
    if num_hosts == 1:
        return "127.0.0.1"
    hosts = variables.get("SLURM_STEP_NODELIST")
    if not hosts:
        hosts = variables.get("SLURM_NODELIST") or ""
    match = re.match(FIRST_ENTRY, hosts)
    if not match:
        raise ValueError(
            f"SLURM_STEP_NODELIST: '{hosts}' names no host; export MASTER_ADDR, the"
            " address of task 0's host"
        )
    first_entry = match[0]
    return re.sub(FIRST_NUMBER, r"\1", first_entry)


def _slurm_port(variables: Mapping[str, str]) -> int:
    """Return MASTER_PORT, or a port that follows from the step, so that steps can share a host."""
    if variables.get("MASTER_PORT"):
        return _number(variables, "MASTER_PORT")
    # Every rank must compute the same port before it can connect to another rank. With the factor
    # 7, the first steps of consecutive jobs have different ports.
    job = _number(variables, "SLURM_JOB_ID", default=0)
    step = _number(variables, "SLURM_STEP_ID", default=0)
    index = (7 * job + step) % len(PORTS)
    return PORTS[index]


def _check_agreement(
    group: Group, variables: Mapping[str, str], *, num_tasks: int
) -> None:
    """Refuse RANK and WORLD_SIZE that contradict the variables of the Slurm task."""
    task = _number(variables, "SLURM_PROCID")
    is_same = group.rank == task and group.world_size == num_tasks
    if not is_same:
        raise ValueError(
            f"RANK, WORLD_SIZE: {group.rank} of {group.world_size}, but Slurm started"
            f" this process as task {task} of {num_tasks}; unset RANK and WORLD_SIZE"
        )


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise ValueError(
            f"{name}: {value}, but {limit_name} is {limit}; correct one of them"
        )


def _number(
    variables: Mapping[str, str], name: str, *, default: int | None = None
) -> int:
    """Return a variable as a whole number, or `default` if it is missing or empty.

    Without a default, a missing variable raises ValueError.
    """
    number = _optional_number(variables, name)
    if number is None:
        number = default
    if number is None:
        other = "WORLD_SIZE" if name == "RANK" else "RANK"
        raise ValueError(
            f"{name}: missing, but {other} is set; set both, or unset both"
        )
    return number


def _optional_number(variables: Mapping[str, str], name: str) -> int | None:
    """Return a variable as a whole number; None if it is missing or empty."""
    text = variables.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(
            f"{name}: '{text}' is not a whole number; correct it, or unset it"
        )
    return int(text)
