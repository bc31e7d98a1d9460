"""The build of PyTorch for the cards and the driver that nvidia-smi reports."""

import subprocess
import sys
from pathlib import Path
from shlex import quote

import pytest

from speakerlab.core import torch_builds

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "speakerlab/core/torch_builds.py"
INDEX = "https://download.pytorch.org/whl"


class Machine:
    """A machine whose only program is an nvidia-smi."""

    def __init__(self, folder: Path) -> None:
        self.path = folder

    def write_nvidia_smi(self, script: str) -> None:
        path = self.path / "nvidia-smi"
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def write_gpus(self, *gpus: str) -> None:
        """Write an nvidia-smi for these GPUs: name, driver and, if it knows it, capability."""
        rows = [gpu.split(", ") for gpu in gpus]
        fields = ("name", "driver_version", "compute_cap")[: len(rows[0])]
        cases = []
        for field, values in zip(fields, zip(*rows)):
            answer = "\n".join(values)
            cases.append(f"--query-gpu={field}) echo {quote(answer)} ;;")
        self.write_nvidia_smi(f"case $1 in {' '.join(cases)} *) exit 2 ;; esac")

    def choose(self, *options: str, **variables: str) -> tuple[list[str], list[str]]:
        """Return the arguments of pip, and the messages."""
        # -I: this runs before any package is installed, and wherever the user is.
        done = subprocess.run(
            [sys.executable, "-I", SCRIPT, *options],
            env={"PATH": str(self.path), **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split(), done.stderr.splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def pinned_torch() -> str:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    (pin,) = [line for line in lines if line.startswith("torch==")]
    return pin


# What nvidia-smi prints -> the index of the build.
CARDS = {
    "V100": (["Tesla V100-SXM2-16GB, 580.95.05, 7.0"], "cu126"),
    "P100": (["Tesla P100-PCIE-16GB, 535.104.05, 6.0"], "cu126"),
    "1080 Ti": (["NVIDIA GeForce GTX 1080 Ti, 580.65.06, 6.1"], "cu126"),
    "980": (["NVIDIA GeForce GTX 980, 535.104.05, 5.2"], "cu126"),
    "old driver": (["NVIDIA A100-SXM4-80GB, 535.104.05, 8.0"], "cu126"),
    "newest old driver": (["NVIDIA GeForce RTX 4090, 579.99, 8.9"], "cu126"),
    "A100": (["NVIDIA A100-SXM4-80GB, 580.65.06, 8.0"], ""),
    "2080 Ti": (["NVIDIA GeForce RTX 2080 Ti, 590.44, 7.5"], ""),
    "5090": (["NVIDIA GeForce RTX 5090, 580.65.06, 12.0"], ""),
    # CUDA 12.6 has no kernels for this generation.
    "5090, old driver": (["NVIDIA GeForce RTX 5090, 570.86.10, 12.0"], "cu128"),
    "mixed": (["Tesla V100, 580.1, 7.0", "NVIDIA A100, 580.1, 8.0"], "cu126"),
    "unknown card": (["NVIDIA X, 999.1, [N/A]"], ""),
}


@pytest.mark.parametrize("card", CARDS)
def test_the_build_of_torch_follows_from_the_card_and_the_driver(machine, card):
    lines, index = CARDS[card]
    machine.write_gpus(*lines)
    arguments, (message,) = machine.choose()
    if index:
        build = f"{pinned_torch()}+{index}"
        assert arguments == [build, "--extra-index-url", f"{INDEX}/{index}"]
    else:
        assert arguments == []
    cuda = index.replace("cu12", "12.") or "13.0"
    assert message == f"env: PyTorch for CUDA {cuda}: download 3 GB, disk 5 GB"


def test_the_builds_are_of_the_pinned_torch():
    """Other releases have other cards and drivers: look at RELEASE.md of PyTorch again."""
    assert pinned_torch().startswith("torch==2.11.")


def test_a_card_without_kernels_in_the_chosen_build_is_named(machine):
    machine.write_gpus("Tesla V100, 580.1, 7.0", "NVIDIA RTX 5090, 580.1, 12.0")
    _, messages = machine.choose()
    assert messages[0] == "env: Tesla V100: this PyTorch has no kernels for it"
    assert not any("RTX 5090: this" in message for message in messages)


def test_a_driver_that_is_too_old_for_every_build_is_named(machine):
    """Such a driver does not know the capability of its cards either."""
    machine.write_gpus("Tesla P40, 470.82.01")
    arguments, messages = machine.choose()
    assert messages[0] == (
        "env: NVIDIA driver 470 is too old for any build of this PyTorch: update it to"
        " 525 or newer, or use --torch cpu"
    )
    assert arguments[0].endswith("+cu126")


@pytest.mark.parametrize(
    "script",
    [
        "echo No devices were found",
        "echo NVIDIA-SMI has failed: it could not communicate with the driver; exit 9",
        "echo Failed to initialize NVML: NVML library version: 535.183; exit 18",
        "exit 0",
        None,  # is not installed
    ],
)
def test_an_nvidia_smi_without_gpus_is_no_gpu(machine, script):
    if script is not None:
        machine.write_nvidia_smi(script)
    arguments, (message,) = machine.choose()
    assert arguments == []
    assert message == (
        "env: no NVIDIA GPU found; PyTorch with CUDA: download 3 GB, disk 5 GB;"
        " --torch cpu takes it without: download 0.4 GB, disk 1 GB"
    )


def test_the_user_may_choose_torch_without_cuda(machine):
    build = [f"{pinned_torch()}+cpu", "--extra-index-url", f"{INDEX}/cpu"]
    small = "env: PyTorch without CUDA: download 0.4 GB, disk 1 GB"
    assert machine.choose("--torch", "cpu") == (build, [small])
    machine.write_gpus("NVIDIA A100, 580.1, 8.0")
    not_used = "env: --torch cpu: NVIDIA A100 will not be used"
    assert machine.choose("--torch", "cpu") == (build, [not_used, small])


def test_a_build_that_the_settings_of_pip_choose_is_kept(machine):
    machine.write_gpus("Tesla V100, 580.1, 7.0")
    mirror = "https://mirror.example/pytorch/whl/cu126"
    for name in torch_builds.PIP_INDICES:
        arguments, messages = machine.choose(**{name: mirror})
        assert arguments == []
        assert messages == ["env: PyTorch of the index in pip's settings"]
