"""Install the wheel with the oldest versions that pyproject.toml allows, use it and test it.

    make test-oldest PYTHON=python3.10    # makes .venv-oldest (6 GB)

First without ONNX: the command is used in an empty folder, then the core of the tests runs, that is
those of all parts, of experiments, of inference and of training from end to end, except slow ones.
Then the same for the extra `onnx`, which needs a newer torch.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

sys.path.append(str(Path(__file__).parent / "bin"))
from installed import ROOT, Environment, read_project
from tiny import BARE, TINY
from voices import write_voices

CORE = """contracts/test_configs.py core config data frontend losses models scoring training
checkpoints inference experiments bin/test_train.py"""
ONNX = """models/test_onnx.py inference/test_export.py inference/test_onnx_model.py
inference/test_quantize.py inference/test_segmentation.py inference/test_sherpa.py
inference/test_wespeaker.py"""
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "kaldiio")


class Oldest(Environment):
    """An environment with the oldest versions, and an empty folder to use it in."""

    def __init__(self, venv: Path, folder: Path) -> None:
        super().__init__(venv, folder, name="test-oldest")
        self.project = read_project()

    def make(self, base: str) -> None:
        """Make the environment, and the wheel in the folder."""
        needed = self.project["requires-python"].removeprefix(">=")
        version = subprocess.run(
            [base, "-V"],
            capture_output=True,
            text=True,
        )
        if not version.stdout.startswith(f"Python {needed}."):
            output = version.stdout + version.stderr
            got = output.partition("\n")[0]
            sys.exit(
                f"PYTHON: {base} is not Python {needed} ({got}); give the path of one"
            )
        super().make(base)
        self.pip(
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            self.folder,
            ROOT,
        )

    def install(self, *extras: str) -> None:
        """Install the wheel with extras, and the tools of the tests."""
        texts = list(self.project["dependencies"])
        for extra in extras:
            texts += self.project["optional-dependencies"][extra]
        lines = {}
        for text in texts:
            requirement = Requirement(text)
            lines[requirement.name] = str(requirement).replace(">=", "==")
        constraints = self.folder / "constraints.txt"
        constraints.write_text("\n".join(lines.values()) + "\n")
        (wheel,) = self.folder.glob("*.whl")
        names = ",".join(extras)
        self.pip("install", "-c", constraints, f"{wheel}[{names}]", *TOOLS)

    def test(self, places: Iterable[str], without: Iterable[str] = ()) -> None:
        """Run tests, without the slow ones."""
        arguments = [self.bin / "python", "-m", "pytest"]
        arguments += ["-m", "not slow and not gpu"]
        arguments += ["-n", "auto", "--maxprocesses", "4"]
        arguments += ["--dist", "loadfile"]
        arguments += [f"tests/{place}" for place in places]
        arguments += [f"--ignore=tests/{place}" for place in without]
        self.run(arguments)


def main() -> None:
    """Install, use and test, without and with ONNX."""
    description = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--python", default="python3.10", help="of the oldest supported version"
    )
    parser.add_argument(
        "--venv",
        type=Path,
        default=ROOT / ".venv-oldest",
        help="replaced",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_voices(folder / "data/train", speakers=range(6))
        oldest = Oldest(args.venv, folder)
        oldest.make(args.python)
        oldest.install("report", "aac", "remote", "hub")
        oldest.use("--help")
        oldest.use("--version")
        oldest.use("plan --model campplus --gpu-mem 11")
        oldest.use(
            "train --config campplus_tiny --exp exp --set data.dir=data", *TINY, *BARE
        )
        oldest.use("embed data/wav/spk0-0.wav --model exp --out embeddings")
        oldest.test(CORE.split(), without=ONNX.split())
        oldest.install("report", "aac", "remote", "hub", "onnx")
        oldest.use("export exp --out model.onnx")
        oldest.use("embed data/wav/spk0-0.wav --model model.onnx --out onnx")
        oldest.test(ONNX.split())


if __name__ == "__main__":
    main()
