"""The group of ranks that environment variables describe, or one line about their fault."""

from pathlib import Path

import pytest
from refusals import refuses

from speakerlab.bin import train
from speakerlab.bin.train import check_group, parse
from speakerlab.training.group import PORTS, Group, find_group

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
PYTORCHJOB = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}
# Task 3 of 4, on the second of two hosts.
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "5",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "8",  # of the job
    "SLURM_NNODES": "4",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
ONE_HOST = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "1",
    "SLURM_PROCID": "1",
}
PORT_OF_SRUN = PORTS[7 * 1234 + 5]


def group(
    starter: str, place: tuple[int, int, int, int], address: str, port: int
) -> Group:
    """Return a group; place: rank, world size, local rank, local size."""
    return Group(starter, *place, address, port)


FOUND = {  # name -> variables, the group
    "torchrun": (TORCHRUN, group("torchrun", (3, 4, 1, 2), "10.0.0.1", 29500)),
    "torchrun inside a Slurm task": (
        {**TORCHRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
        group("torchrun", (3, 4, 1, 2), "10.0.0.1", 29500),
    ),
    "PyTorchJob": (
        PYTORCHJOB,
        group("RANK and WORLD_SIZE", (1, 2, 0, 1), "job-master-0", 23456),
    ),
    "ranks of one host, set by hand": (
        {**PYTORCHJOB, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        group("RANK and WORLD_SIZE", (1, 2, 1, 2), "job-master-0", 23456),
    ),
    "srun on two hosts": (SRUN, group("srun", (3, 4, 1, 2), "gpu07", PORT_OF_SRUN)),
    "srun with an address and a port": (
        {**SRUN, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "12345"},
        group("srun", (3, 4, 1, 2), "10.0.0.7", 12345),
    ),
    "srun with other numbers of tasks on its hosts": (
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"},
        group("srun", (3, 4, 0, 1), "gpu07", PORT_OF_SRUN),
    ),
    "srun whose step has all tasks of the job": (
        {
            "SLURM_NTASKS": "4",
            "SLURM_NNODES": "2",
            "SLURM_NODELIST": "a1,b2",
            "SLURM_TASKS_PER_NODE": "2(x2)",
            "SLURM_PROCID": "2",
            "SLURM_NODEID": "1",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_ID": "0",
        },
        group("srun", (2, 4, 0, 2), "a1", PORTS[0]),
    ),
    "srun on one host": (
        ONE_HOST,
        group("srun", (1, 2, 1, 2), "127.0.0.1", PORTS[7 * 1234]),
    ),
    "the fewest variables of srun": (
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
        group("srun", (1, 2, 1, 2), "127.0.0.1", PORTS[0]),
    ),
    "a wrapper of srun that also sets RANK": (
        {**SRUN, **PYTORCHJOB, "RANK": "3", "WORLD_SIZE": "4"},
        group("RANK and WORLD_SIZE", (3, 4, 0, 1), "job-master-0", 23456),
    ),
}
ALONE = {  # name -> variables of a process that trains alone, or starts its ranks
    "nothing": {},
    "an operator with one process": {"RANK": "0", "WORLD_SIZE": "1"},
    "an address only": {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
    "a single task of srun": {**ONE_HOST, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    "a step of one task in a job of eight": {
        **SRUN,
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
    },
    "a shell of salloc": {
        "SLURM_JOB_ID": "1234",
        "SLURM_NTASKS": "8",
        "SLURM_NNODES": "2",
    },
}


@pytest.mark.parametrize("name", FOUND)
def test_a_group_is_found(name, tmp_path):
    variables, expected = FOUND[name]
    assert find_group(variables, root=tmp_path) == expected


@pytest.mark.parametrize("name", ALONE)
def test_a_process_on_its_own_has_no_group(name, tmp_path):
    assert find_group(ALONE[name], root=tmp_path) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[01-04],x", "gpu01"),
        ("gpu[3,5-7]", "gpu3"),
        ("login,gpu[01-02]", "login"),
        ("node-17.cluster", "node-17.cluster"),
        ("rack1-gpu[1-2]", "rack1-gpu1"),
        ("gpu[01-04]-ib,x", "gpu01-ib"),
        ("rack[1-2]n[03,05]", "rack1n03"),
    ],
)
def test_the_first_host_of_slurms_list_is_the_address(hosts, first, tmp_path):
    group = find_group({**SRUN, "SLURM_STEP_NODELIST": hosts}, root=tmp_path)
    assert group is not None
    assert group.address == first


def test_steps_of_a_job_use_different_ports(tmp_path):
    steps = [{**ONE_HOST, "SLURM_STEP_ID": str(number)} for number in range(5)]
    groups = [find_group(variables, root=tmp_path) for variables in steps]
    assert len({group.port for group in groups if group is not None}) == 5


def test_torch_reads_the_place_from_the_variables(tmp_path):
    group = find_group(SRUN, root=tmp_path)
    assert group is not None
    assert group.variables() == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(PORT_OF_SRUN),
    }


# The batch script of a Slurm job


def write_processes(root: Path, command_lines: dict[str, bytes]) -> Path:
    """Write a `proc` with this process, its parent 20 and its grandparent 10, with these words."""
    parents = {"self": "20", "20": "10", "10": "1", "1": "0"}
    for process, parent in parents.items():
        folder = root / "proc" / process
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{process} (a (b) c) S {parent} 1 1 0")
        (folder / "cmdline").write_bytes(
            command_lines.get(process, b"python\0-m\0speakerlab\0")
        )
    return root


BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "1"}


def test_a_batch_script_without_srun_is_no_task(tmp_path):
    script = b"/bin/bash\0/var/spool/slurmd/job01234/slurm_script\0--fast\0"
    assert find_group(BATCH, root=write_processes(tmp_path, {"10": script})) is None


def test_a_task_of_srun_is_no_child_of_the_batch_script(tmp_path):
    group = find_group(
        BATCH, root=write_processes(tmp_path, {"10": b"slurmstepd: [1234.0]\0"})
    )
    assert group is not None
    assert group.world_size == 4


def test_a_task_that_was_started_in_the_batch_script_has_a_step(tmp_path):
    root = write_processes(tmp_path, {"10": b"bash\0/x/slurm_script\0"})
    group = find_group({**BATCH, "SLURM_STEP_ID": "0"}, root=root)
    assert group is not None
    assert group.world_size == 4


# Variables that are incomplete, or contradict each other

REFUSED = {  # name -> variables, subject of the message, values that it names
    "RANK without WORLD_SIZE": ({"RANK": "1"}, "WORLD_SIZE", "missing"),
    "WORLD_SIZE without RANK": ({"WORLD_SIZE": "2"}, "RANK", "missing"),
    "RANK is too large": ({**PYTORCHJOB, "RANK": "2"}, "RANK", 2, "WORLD_SIZE"),
    "RANK is no number": ({**PYTORCHJOB, "RANK": "one"}, "RANK", "'one'"),
    "RANK is negative": ({**PYTORCHJOB, "RANK": "-1"}, "RANK", "'-1'"),
    "WORLD_SIZE is empty": ({**PYTORCHJOB, "WORLD_SIZE": ""}, "WORLD_SIZE", "missing"),
    "LOCAL_RANK without its size": (
        {**PYTORCHJOB, "LOCAL_RANK": "1"},
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE is missing",
    ),
    "LOCAL_RANK is too large": (
        {**PYTORCHJOB, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
        "LOCAL_RANK",
        2,
    ),
    "more ranks here than there are": (
        {**PYTORCHJOB, "LOCAL_WORLD_SIZE": "4"},
        "LOCAL_WORLD_SIZE",
        4,
        "WORLD_SIZE is 2",
    ),
    "no address": (
        {"RANK": "1", "WORLD_SIZE": "2"},
        "MASTER_ADDR and MASTER_PORT",
        "missing",
    ),
    "no port": ({**PYTORCHJOB, "MASTER_PORT": ""}, "MASTER_PORT", "missing"),
    "the port is no number": ({**PYTORCHJOB, "MASTER_PORT": "x"}, "MASTER_PORT", "'x'"),
    "torchrun's, incomplete": (
        {"TORCHELASTIC_RUN_ID": "none", "RANK": "0"},
        "WORLD_SIZE",
    ),
    "another RANK than Slurm's": (
        {**SRUN, **PYTORCHJOB, "WORLD_SIZE": "4"},
        "RANK, WORLD_SIZE",
        "1 of 4",
        "task 3 of 4",
    ),
    "another WORLD_SIZE than Slurm's": (
        {**ONE_HOST, **PYTORCHJOB, "WORLD_SIZE": "3"},
        "RANK, WORLD_SIZE",
        "1 of 3",
        "task 1 of 2",
    ),
    "a task beyond the last": ({**ONE_HOST, "SLURM_PROCID": "2"}, "SLURM_PROCID", 2),
    "a task that is no number": (
        {**ONE_HOST, "SLURM_PROCID": "x"},
        "SLURM_PROCID",
        "'x'",
    ),
    "hosts without local numbers": (
        {name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"},
        "SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE",
        "2 hosts",
    ),
    "hosts without numbers of tasks": (
        {name: value for name, value in SRUN.items() if "TASKS_PER_NODE" not in name},
        "SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE",
        "2 hosts",
    ),
    "numbers of tasks of another step": (
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
        "SLURM_STEP_TASKS_PER_NODE",
        "4(x2)",
        "8 tasks",
        4,
    ),
    "a local number beyond the last": (
        {**SRUN, "SLURM_LOCALID": "2"},
        "SLURM_LOCALID",
        2,
    ),
    "no list of hosts": (
        {**SRUN, "SLURM_STEP_NODELIST": ""},
        "SLURM_STEP_NODELIST",
        "MASTER_ADDR",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_faults_are_one_line(name, tmp_path):
    variables, *expected = REFUSED[name]
    with refuses(*map(str, expected)) as caught:
        find_group(variables, root=tmp_path)
    assert "\n" not in str(caught.value)


# Options of `speakerlab train` beside a group


@pytest.fixture
def options(monkeypatch):
    """options("--nproc", "2") -> parsed options of train; --gpus changes no other test."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    return lambda *arguments: parse(
        ["--exp", "exp", "--config", "campplus_tiny", *arguments]
    )


TWO_OF_TWO = FOUND["the fewest variables of srun"][1]
ONE_A_HOST = FOUND["PyTorchJob"][1]
TWO_HOSTS = ["--nnodes", "2", "--node-rank", "1", "--rdzv", "10.0.0.1:29400"]


@pytest.mark.parametrize(
    ("arguments", "found_group"),
    [
        ([], TWO_OF_TWO),
        (["--nproc", "1"], TWO_OF_TWO),
        (["--nproc", "2"], TWO_OF_TWO),  # the same as the group has
        (["--gpus", "0"], ONE_A_HOST),
        (["--nproc", "2"], None),
        (["--nproc", "2", *TWO_HOSTS], None),
    ],
)
def test_options_that_agree_with_the_group_are_accepted(
    options, arguments, found_group
):
    check_group(options(*arguments), found_group)


@pytest.mark.parametrize(
    ("arguments", "group"),
    [
        (["--nproc", "2"], FOUND["PyTorchJob"][1]),
        (["--nproc", "3"], TWO_OF_TWO),
        (["--gpus", "0 1 2"], TWO_OF_TWO),
        (["--nproc", "4"], FOUND["torchrun"][1]),
        (["--nproc", "2", *TWO_HOSTS], FOUND["torchrun"][1]),
    ],
)
def test_options_that_ask_for_other_ranks_are_refused(options, arguments, group):
    expected = (
        f"{group.starter} started this process as rank {group.rank} of"
        f" {group.world_size}"
    )
    with refuses("--gpus, --nproc, --nnodes", expected):
        check_group(options(*arguments), group)


ONE_TASK_A_HOST = {
    **SRUN,
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


def test_one_slurm_task_on_each_host_starts_its_ranks(monkeypatch):
    """Not refused: the options say that each task is a launcher, which all hosts together form."""
    started = []
    for name, value in {**ONE_TASK_A_HOST, "CUDA_VISIBLE_DEVICES": "-1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        train, "train_on_ranks", lambda args, arguments: started.append(args.nproc)
    )
    monkeypatch.setattr(
        train, "train_as_rank", lambda *_, **__: started.append("a rank")
    )
    train.main(
        ["--exp", "exp", "--config", "campplus_tiny", "--nproc", "2", *TWO_HOSTS]
    )
    assert started == [2]


def test_torchrun_with_a_single_rank_refuses_options_that_ask_for_more(options):
    single = group("torchrun", (0, 1, 0, 1), "127.0.0.1", 0)
    with refuses("--gpus, --nproc, --nnodes", "torchrun", "rank 0 of 1"):
        check_group(options("--nproc", "2"), single)
