"""The builds of PyTorch, and the one that fits the NVIDIA GPUs and the driver of this machine.

    python speakerlab/core/torch_builds.py [--torch cpu]

prints pip's arguments for this build, one per line, and a message on stderr about the choice. Only
the standard library is used, because PyTorch is not installed yet.
"""

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
PYTORCH_INDEX = "https://download.pytorch.org/whl"
PIP_INDICES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
NVIDIA_SMI_SECONDS = 60
CUDA_SIZE = "download 3 GB, disk 5 GB"
CPU_SIZE = "download 0.4 GB, disk 1 GB"


@dataclass(frozen=True, kw_only=True)
class Build:
    """A build of the torch in requirements.txt, and the cards and drivers that it runs on."""

    index: str  # its name at download.pytorch.org; "" for pip's own index
    cuda: str
    # Capabilities of cards: it has kernels from `oldest` on, and none from `too_new` on.
    oldest: tuple[int, int]
    too_new: tuple[int, int]
    driver: int  # the oldest of NVIDIA's drivers that runs it

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return whether this build has kernels for a card."""
        return self.oldest <= capability < self.too_new


# Cards: github.com/pytorch/pytorch/blob/main/RELEASE.md, for release 2.11 on x86. Drivers:
# docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html.
CUDA_13_0 = Build(index="", cuda="13.0", oldest=(7, 5), too_new=(13, 0), driver=580)
CUDA_12_6 = Build(
    index="cu126", cuda="12.6", oldest=(5, 0), too_new=(10, 0), driver=525
)
CUDA_12_8 = Build(
    index="cu128", cuda="12.8", oldest=(7, 5), too_new=(13, 0), driver=525
)
# Best first: another is only taken for cards or a driver that the ones before cannot use.
BUILDS = [CUDA_13_0, CUDA_12_6, CUDA_12_8]


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi reports it; an old driver does not know the capability."""

    name: str
    driver: int  # 535 for 535.104.05
    capability: tuple[int, int] | None  # (7, 0) for sm_70


def main() -> None:
    """Print the arguments of pip."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch", choices=["auto", "cpu"], default="auto")
    gpus = find_gpus()
    if parser.parse_args().torch == "cpu":
        for gpu in gpus[:1]:
            report(f"--torch cpu: {gpu.name} will not be used")
        report(f"PyTorch without CUDA: {CPU_SIZE}")
        print(*pip_arguments("cpu"), sep="\n")
    # Where pip's settings name an index of PyTorch, or a mirror of it, the user has chosen.
    elif any("/whl/" in os.environ.get(name, "") for name in PIP_INDICES):
        report("PyTorch of the index in pip's settings")
    elif not gpus:
        report(
            f"no NVIDIA GPU found; PyTorch with CUDA: {CUDA_SIZE};"
            f" --torch cpu takes it without: {CPU_SIZE}"
        )
    else:
        build = choose_build(gpus)
        report(f"PyTorch for CUDA {build.cuda}: {CUDA_SIZE}")
        if build.index:
            print(*pip_arguments(build.index), sep="\n")


def choose_build(gpus: list[Gpu]) -> Build:
    """Return the build with kernels for most of the GPUs; report the GPUs that it cannot use."""
    driver = gpus[0].driver
    builds = [build for build in BUILDS if build.driver <= driver] or [CUDA_12_6]

    def count_usable(build: Build) -> int:
        # With a card of unknown capability, the driver alone decides.
        return sum(not gpu.capability or build.runs_on(gpu.capability) for gpu in gpus)

    # `max` returns the first of several.
    chosen = max(builds, key=count_usable)
    if chosen.driver > driver:
        report(
            f"NVIDIA driver {driver} is too old for any build of this PyTorch: update"
            f" it to {chosen.driver} or newer, or use --torch cpu"
        )
    for gpu in gpus:
        if gpu.capability and not chosen.runs_on(gpu.capability):
            report(f"{gpu.name}: this PyTorch has no kernels for it")
    return chosen


def pip_arguments(index: str) -> list[str]:
    """Return pip's arguments for the torch in requirements.txt from one of PyTorch's indices."""
    text = REQUIREMENTS.read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^torch==[0-9.]+", text, re.MULTILINE)
    # Without the name of the build, pip would keep another build that is installed.
    return [f"{pinned}+{index}", "--extra-index-url", f"{PYTORCH_INDEX}/{index}"]


def find_gpus() -> list[Gpu]:
    """Return the GPUs that nvidia-smi reports; none if it is missing or fails."""
    names = ask_nvidia_smi("name", r"(.+)")
    drivers = ask_nvidia_smi("driver_version", r"\b(\d{3,})\.\d")
    # Drivers before 510 do not know this field.
    capabilities = ask_nvidia_smi("compute_cap", r"\b(\d{1,2}\.\d)\b")
    gpus: list[Gpu] = []
    for index, (name, driver) in enumerate(zip(names, drivers)):
        capability = None
        if index < len(capabilities):
            major, minor = capabilities[index].split(".")
            capability = (int(major), int(minor))
        gpus.append(Gpu(name, int(driver), capability))
    return gpus


def ask_nvidia_smi(field: str, pattern: str) -> list[str]:
    """Return a field of each GPU, the part that matches in each line; none if nvidia-smi fails."""
    try:
        query = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True,
            timeout=NVIDIA_SMI_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if query.returncode != 0:
        return []
    return re.findall(pattern, os.fsdecode(query.stdout))


def report(message: str) -> None:
    """Print a message for the user."""
    print(f"env: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
