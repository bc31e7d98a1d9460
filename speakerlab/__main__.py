"""`speakerlab COMMAND ...`, also `python -m speakerlab COMMAND ...`."""

import importlib
import keyword
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import speakerlab
from speakerlab.bin.command import run
from speakerlab.checkpoints.provenance import commit
from speakerlab.core.distribution import refuse_other
from speakerlab.core.encoding import use_utf8
from speakerlab.core.faults import nearest
from speakerlab.core.system import IS_LINUX, LINUX_ONLY, limit_spinning

# Command -> its line in `speakerlab --help`. The module is bin/<command>.py, see `module_of`.
COMMANDS = {
    "check": "check data directories, write utt2dur and list what is rejected",
    "pack": "pack audio or features into shards for training",
    "doctor": "check this machine before a training run",
    "plan": "estimate which batch size fits the memory of a GPU",
    "train": "train a model, or resume a stopped training run",
    "average": "publish the mean of the last checkpoints of a training run",
    "extract": "extract embeddings of a data directory",
    "pseudo-label": (
        "write a data directory with clusters of embeddings as its speakers"
    ),
    "clean": "find wrong labels and copies in a data directory, write one without them",
    "score": "score trial lists, write results.json and report.html",
    "classify": "classify the utterances of a data directory (language or other class)",
    "fuse": "fuse the score files of several systems",
    "compare": "compare systems on trial lists, with confidence intervals",
    "compare-runs": "compare experiments: settings, EERs, significance of differences",
    "plot": "draw a figure for a paper: DET, ROC, scores, durations, confusions",
    "table": "print a table for a paper: EER and minDCF of systems on trial lists",
    "choose": "compare models on your labelled recordings, and recommend one",
    "der": "score diarization: DER and JER of RTTM files",
    "embed": "extract embeddings of audio files",
    "verify": "compare two recordings: score, likelihood ratio, decision",
    "enroll": "enrol a speaker from recordings",
    "identify": "identify the enrolled speaker of a recording",
    "diarize": "find who spoke when in recordings",
    "link": "find who is the same person in diarized recordings",
    "words": "add speakers to the words of transcripts, from turns in RTTM",
    "calibrate": "learn a model's calibration from a data directory",
    "import": "import a checkpoint of 3D-Speaker or WeSpeaker; list published models",
    "card": "print what is known about a model",
    "publish": "publish a model on huggingface.co, or in a folder, with its page",
    "check-part": "test a model, head, augmentation, ... of your own",
    "bench": "benchmark this machine, a model and the data path",
    "export": "export a model to ONNX or to a 3D-Speaker checkpoint",
}
# Trainings need fork, the signals of schedulers and the kernel's shared memory.
LINUX_COMMANDS = ("train", "launch", "bench", "check-part")
# For other scripts: takes torchrun's options, and is in no help.
UNLISTED_COMMANDS = ("launch",)


def main() -> None:
    """Run the command that the first argument names."""
    use_utf8()
    run(run_command, sys.argv[1:])


def run_command(arguments: Sequence[str]) -> None:
    """Run a command, or print the help; raise ValueError if there is no such command."""
    refuse_other()
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(help_text())
        return
    command = arguments[0]
    if command == "--version":
        sys.stdout.write(f"{versions()}\n")
        return
    if command not in COMMANDS and command not in UNLISTED_COMMANDS:
        hint = nearest(command, COMMANDS, otherwise="see --help")
        raise ValueError(f"speakerlab: unknown command '{command}'{hint}")

    if command in LINUX_COMMANDS and not IS_LINUX:
        raise ValueError(f"speakerlab {command}: {LINUX_ONLY}; see docs/install.md")

    # Libraries that do not expect it end without a word, or with an error of their own.
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ValueError(
            "speakerlab: the current folder was deleted; cd to another one"
        ) from None
    limit_spinning()
    # Imported here, so that `run` turns a missing package into one line.
    module = importlib.import_module(module_of(command))
    module.main(arguments[1:])


def help_text() -> str:
    """Return the list of commands."""
    rows = "\n".join(f"  {name:12} {summary}" for name, summary in COMMANDS.items())
    end = (
        "`speakerlab COMMAND --help` lists the options of a command, --version all"
        " versions."
    )
    return f"usage: speakerlab COMMAND ...\n\n{rows}\n\n{end}\n"


def module_of(command: str) -> str:
    """Return the module of a command: `pseudo_label` of pseudo-label, `import_` of import."""
    name = command.replace("-", "_")
    if keyword.iskeyword(command):
        name += "_"
    return f"speakerlab.bin.{name}"


def versions() -> str:
    """Return the versions that a bug report should state; torch is not imported."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "not installed"
    our_version = f"{speakerlab.__version__} (commit {commit()})"
    python_version = platform.python_version()
    return f"speakerlab {our_version}, torch {torch_version}, Python {python_version}"


if __name__ == "__main__":
    main()
