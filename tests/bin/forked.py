"""Run commands in processes forked from one that has imported torch: each starts at once.

Except for their names in the process table they are what `python *words` would be.
"""

import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path

import torch

EXIT_LOST = 6  # of a rank that lost another one
SERVER = get_context("forkserver")
# The slow imports of a training are done once, in the server.
SERVER.set_forkserver_preload(
    [
        "speakerlab.bin.train",
        "speakerlab.experiments.train",
        "torch._dynamo",
    ]
)


def become(
    arguments: list[str], environment: dict[str, str], cwd: str, output: Path
) -> None:
    """Be `python *words`; stdout goes to `output`, stderr to `output` with the ending .err."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, path in ((1, output), (2, output.with_suffix(".err"))):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    # torch was imported with the environment of the server.
    threads = environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    torch.set_num_threads(int(threads))
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    start = runpy.run_module if is_module else runpy.run_path
    start(sys.argv[0], run_name="__main__")


def start_forked(
    arguments: Sequence[object], environment: Mapping[str, str], output: Path, cwd="."
):
    """Start `python *words`; return the process."""
    args = ([str(word) for word in arguments], dict(environment), str(cwd), output)
    process = SERVER.Process(target=become, args=args)
    process.start()
    return process


def as_ranks(num_ranks: int) -> list[dict[str, str]]:
    """Return the environment that torchrun gives to each rank."""
    # Port 0 is any free port.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environments = []
    for rank in range(num_ranks):
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        environments.append(variables)
    return environments


def run_forked(
    arguments: Sequence[object],
    environment: Mapping[str, str],
    *,
    folder: Path,
    ranks: int = 1,
    cwd: object = ".",
) -> "subprocess.CompletedProcess[str]":
    """Run `python *words` as so many ranks, which must end with the same code.

    The text is what all of them wrote, rank after rank; `folder` is an empty one for it.
    """
    environments = as_ranks(ranks) if ranks > 1 else [{}]
    outputs = [folder / str(rank) for rank in range(ranks)]
    processes = []
    for variables, output in zip(environments, outputs):
        process = start_forked(arguments, {**environment, **variables}, output, cwd)
        processes.append(process)
    try:
        for process in processes:
            process.join(200)
    finally:
        for process in processes:
            process.kill()
    out = "".join(output.read_text() for output in outputs)
    err = "".join(output.with_suffix(".err").read_text() for output in outputs)
    codes = {process.exitcode for process in processes}
    # The code of a rank that lost another one says less than the other one's.
    codes = codes - {EXIT_LOST} or codes
    assert len(codes) == 1, f"ended with {codes}\n{err}"
    assert None not in codes, f"ended with {codes}\n{err}"
    return subprocess.CompletedProcess(list(arguments), codes.pop() or 0, out, err)
