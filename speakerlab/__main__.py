"""`speakerlab COMMAND ...`, also `python -m speakerlab COMMAND ...`."""

import importlib
import keyword
import sys

from speakerlab.bin.command import nearest, run

COMMANDS = {
    "check": "check data directories; writes utt2dur, lists what is wrong",
    "pack": "pack audio, or features, into shards that training reads",
    "doctor": "look at this machine before a run; each line ok or what to change",
    "plan": "how a training would fit the memory of a GPU",
    "train": "train a model, or resume where it was stopped",
    "average": "publish the mean of a training's last checkpoints",
    "extract": "embed every utterance of a data directory",
    "score": "score trial lists; writes results.json and report.html",
    "classify": "name the language, or the class, of a data directory's utterances",
    "fuse": "join the score files of several systems",
    "compare": "measure score files of one list, and whether they differ",
    "embed": "write the embeddings of audio files",
    "verify": "compare two recordings: score, likelihood ratio, decision",
    "enroll": "remember a speaker by recordings",
    "identify": "name the enrolled speaker of a recording",
    "calibrate": "learn what a model's scores mean from a data directory",
    "import": "open a checkpoint of 3D-Speaker or WeSpeaker",
    "bench": "how fast this machine, its models and data are; crops as they sound",
    "export": "write a model as ONNX, or as a 3D-Speaker checkpoint",
}


def main() -> None:
    """Run the command that the first word names."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:9} {what}" for name, what in COMMANDS.items())
        sys.stdout.write(f"usage: speakerlab COMMAND ...\n{rows}\n(COMMAND --help tells more)\n")
        return
    name = words[0]
    if name not in COMMANDS:
        sys.stderr.write(f"speakerlab: unknown command, got {name}{nearest(name, COMMANDS)}\n")
        sys.exit(1)
    module = f"speakerlab.bin.{name}{'_' if keyword.iskeyword(name) else ''}"
    run(importlib.import_module(module).main, words[1:])


if __name__ == "__main__":
    main()
