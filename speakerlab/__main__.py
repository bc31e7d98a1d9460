"""`speakerlab COMMAND ...`, also `python -m speakerlab COMMAND ...`."""

import importlib
import keyword
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import speakerlab
from speakerlab.bin.command import run
from speakerlab.checkpoints.provenance import commit
from speakerlab.core.faults import nearest

COMMANDS = {
    "check": "check data directories, write utt2dur and list what is rejected",
    "pack": "pack audio or features into shards for training",
    "doctor": "check this machine before a training run",
    "plan": "estimate which batch size fits the memory of a GPU",
    "train": "train a model, or resume a stopped training run",
    "average": "publish the mean of the last checkpoints of a training run",
    "extract": "extract embeddings of a data directory",
    "pseudo-label": "write a data directory with clusters of embeddings as its speakers",
    "score": "score trial lists, write results.json and report.html",
    "classify": "classify the utterances of a data directory (language or other class)",
    "fuse": "fuse the score files of several systems",
    "compare": "compare score files on one trial list, with confidence intervals",
    "der": "score diarization: DER and JER of RTTM files",
    "embed": "extract embeddings of audio files",
    "verify": "compare two recordings: score, likelihood ratio, decision",
    "enroll": "enrol a speaker from recordings",
    "identify": "identify the enrolled speaker of a recording",
    "diarize": "find who spoke when in recordings",
    "calibrate": "learn a model's calibration from a data directory",
    "import": "import a checkpoint of 3D-Speaker or WeSpeaker; list published models",
    "card": "print what is known about a model",
    "check-part": "test a model, head, augmentation, ... of your own",
    "bench": "benchmark this machine, a model and the data path",
    "export": "export a model to ONNX or to a 3D-Speaker checkpoint",
}


def main() -> None:
    """Run the command that the first argument names."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:12} {what}" for name, what in COMMANDS.items())
        end = "`speakerlab COMMAND --help` lists the options of a command, --version all versions."
        sys.stdout.write(f"usage: speakerlab COMMAND ...\n\n{rows}\n\n{end}\n")
        return
    name = words[0]
    if name == "--version":
        sys.stdout.write(f"{versions()}\n")
        return
    if name not in COMMANDS and name != "launch":  # for run.sh; takes torchrun's options
        hint = nearest(name, COMMANDS, otherwise="see --help")
        sys.stderr.write(f"speakerlab: unknown command '{name}'{hint}\n")
        sys.exit(1)  # noqa: TID251
    run(lambda words: importlib.import_module(module_of(name)).main(words), words[1:])


def module_of(command: str) -> str:
    """Return the module of a command."""
    return f"speakerlab.bin.{command.replace('-', '_')}{'_' * keyword.iskeyword(command)}"


def versions() -> str:
    """Return the versions that a bug report should state; torch is not imported."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    own = f"{speakerlab.__version__} (commit {commit()})"
    return f"speakerlab {own}, torch {torch}, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
