"""Parts of all commands: common options, log lines, errors of one line, exit codes."""

import argparse
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from speakerlab.core import process
from speakerlab.core.faults import nearest
from speakerlab.core.registry import use_plugins

if TYPE_CHECKING:
    from speakerlab.inference.speaker_model import SpeakerModel

DEBUG_VARIABLE = "SPEAKERLAB_DEBUG"  # if set, errors of the user show a traceback too
SPEAKERS = Path("speakers.safetensors")  # default of --speakers
KINDS: dict[str, Any] = {  # metavar -> type, for others str
    **dict.fromkeys(("DIR", "EXP", "FILE", "HYP", "MODEL", "REF", "SCORES", "STEM", "YAML"), Path),
    **dict.fromkeys(("COSINE", "P", "RATE", "SHARE"), float),
}
WITHOUT_PARTS = ("card", "check", "compare", "der", "fuse", "import")  # they build no component


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line that name the nearest option; every option has a help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse; report an unknown option first, because it may be a required one, misspelt."""
        for word in args or ():
            if word == "--":
                break
            name = word.partition("=")[0]
            if re.fullmatch(r"--?[a-zA-Z][\w-]*", name) and name not in self._option_string_actions:
                self.error(f"unrecognized arguments: {word}")
        found = super().parse_known_args(args, namespace)
        if plugins := getattr(found[0], "plugins", None):
            use_plugins(plugins)
        return found

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        options = [option for action in self._actions for option in action.option_strings]
        word = unknown[0].partition("=")[0] if unknown else ""
        hint = nearest(word, options, otherwise="see --help")
        sys.stderr.write(f"{self.prog}: {message.removeprefix('argument ')}{hint}\n")
        raise SystemExit(process.EXIT_INPUT)

    def add(
        self, spec: str, text: str, *, least: float | None = None, group: Any = None, **more: Any
    ) -> None:
        """Add the option "--name METAVAR", the flag "--name" or the argument "name METAVAR".

        The metavar gives the type, see KINDS. least: of a finite number, which has its type. The
        help ends with the default, unless it describes one.
        """
        name, _, metavar = spec.partition(" ")
        if metavar:
            kind = KINDS.get(metavar, str) if least is None else _number(least)
            more = {"type": kind, "metavar": metavar, **more}
        elif "choices" not in more:
            more["action"] = "store_true"
        default = more.get("default")
        if isinstance(default, int | float | str | Path) and "default" not in text:
            text += f" (default {default})"
        (group or self).add_argument(name, help=text, **more)

    def add_settings(self, text: str = "change settings, as in `speakerlab train`") -> None:
        self.add("--set KEY=VALUE", text, nargs="*", action="extend", default=[])

    def add_job(self, text: str) -> None:
        self.add("--job I/N", text, type=_job, default=(1, 1))

    def add_nproc(self) -> None:
        self.add("--nproc N", "processes, one per GPU", least=1, default=1)

    def add_rate_and_workers(self) -> None:
        """Add `--sample-rate` and `--num-workers` of the commands that read all audio."""
        self.add("--sample-rate HZ", "sample rate of every file", least=1, default=16000)
        workers = "processes that read audio (default: one for each CPU)"
        self.add("--num-workers N", workers, least=0, default=process.available_cpus())

    def add_model_options(self) -> None:
        self.add("--model MODEL", "experiment, model folder, .onnx file or hub:NAME", required=True)
        devices = "where to run (default: a GPU if there is one)"
        self.add("--device", devices, choices=("auto", "cpu", "cuda"), default="auto")
        self.add_precision()

    def add_treatments(self, text: str) -> None:
        """Add the options that `data.treatments` reads; text: what is done with the utterances."""
        durations = f"{text} cut to so many seconds, or full, e.g. 1 2 3 5 full"
        self.add("--durations SECONDS", durations, nargs="+", default=[])
        codecs = f"{text} encoded and decoded, or not (none), e.g. none mp3:16k opus:12k gsm"
        self.add("--codecs NAME", codecs, nargs="+", default=[])

    def add_precision(self) -> None:
        text = "precision of the network (default fp32); auto: bf16 on hardware that has it"
        self.add("--precision", text, choices=("fp32", "bf16", "auto"), default="fp32")

    def add_speakers(self) -> None:
        self.add("--speakers FILE", "file of the enrolled speakers", default=SPEAKERS)

    def add_far(self) -> None:
        self.add("--far RATE", "decide at this false-alarm rate instead of at the EER, e.g. 0.01")


def parser(name: str, description: str | None) -> Parser:
    """Return the parser of a command, with `--plugins`; abbreviated options are refused."""
    first = (description or "").partition("\n")[0]
    options = Parser(prog=f"speakerlab {name}", description=first, allow_abbrev=False)
    if name not in WITHOUT_PARTS:
        options.add("--plugins DIR", "folder of modules of parts that are named module:Class")
    return options


def _number(least: float) -> Callable[[str], float]:
    """Return a function that reads a finite number from `least` on, of the type of `least`."""
    kind = type(least)

    def read(word: str) -> float:
        value = kind(word)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{word} is not a number from {least:g} on")
        return value

    read.__name__ = kind.__name__  # in the message of argparse for other words
    return read


def _job(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not found or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{text} is not I/N with I from 1 to N, such as 1/4")
    return int(found[1]), int(found[2])


def model_of(args: argparse.Namespace) -> "SpeakerModel":
    from speakerlab.inference.speaker_model import load_model

    return load_model(args.model, device=args.device, precision=args.precision)


def plain_text(error: Exception) -> str:
    """Return the message of an error for the user, without the traceback of a data worker.

    Control characters, which names in damaged tables may have, are escaped.
    """
    text = _message(error)
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:  # not one of our own messages
        where = error.filename or "a file"
        if isinstance(error, FileNotFoundError):
            return f"{where}: does not exist; check the path"
        return f"{where}: {error.strerror}; check the disk and the permissions"
    if isinstance(error, ModuleNotFoundError) and error.name:  # not one of our own messages
        package = error.name.partition(".")[0].replace("yaml", "pyyaml")
        return f"{package}: is not installed; pip install {package}"
    text = str(error)
    if text.startswith("Caught ") and "Original Traceback" in text:
        return text.rstrip().splitlines()[-1].partition(": ")[2]
    return text


def run(main: Callable[[Sequence[str]], None], words: Sequence[str]) -> NoReturn:
    """Call `main` and exit: 1 with its message for wrong input, a traceback for a bug."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    process.name_user()
    code = 0
    try:
        main(words)
    except (ValueError, OSError, ImportError) as error:
        if DEBUG_VARIABLE in os.environ:
            logging.exception("traceback, shown because %s is set", DEBUG_VARIABLE)
        text, code = plain_text(error), process.EXIT_INPUT
        sys.stderr.write(f"{text}\n")
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.FileHandler):  # the log of a training run
                handler.emit(logging.makeLogRecord({"msg": text, "levelno": logging.ERROR}))
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        code = 130
    process.leave(code)
