"""Parts of all commands: common options, log lines, one-line errors, exit codes."""

import argparse
import codecs
import io
import json
import logging
import math
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from speakerlab.core import ctrl_c, distribution, process, system
from speakerlab.core.faults import nearest
from speakerlab.core.registry import use_plugins

if TYPE_CHECKING:
    from speakerlab.inference.speaker_model import SpeakerModel

DEBUG_VARIABLE = "SPEAKERLAB_DEBUG"  # if set, user errors also show a traceback
SPEAKERS = Path("speakers.safetensors")  # default of --speakers


def _stem(text: str) -> Path:
    """Read the path of files without their ending; refuse a folder."""
    if text.endswith(("/", os.sep)):  # Windows has both
        raise argparse.ArgumentTypeError(
            f"{text} is a folder; add the name of the files, such as {text}emb"
        )
    return Path(text)


def _share(text: str) -> float:
    """Read a share, from 0 to 1."""
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:  # NaN is not
        raise argparse.ArgumentTypeError(
            f"must be from 0 to 1, got {text}; 1 % is 0.01"
        )
    return share


def _prior(text: str) -> float:
    """Read the prior of a minDCF."""
    try:
        prior = float(text)
    except ValueError:
        prior = math.nan
    if not 0 < prior < 1:  # NaN is not
        raise argparse.ArgumentTypeError(
            f"must be between 0 and 1, got {text}; several are separated by blanks, as"
            " 0.01 0.05"
        )
    return prior


# The type of an option's value by its metavar; str for all other metavars.
TYPE_OF_METAVAR: dict[str, Callable[[str], Any]] = {
    "DIR": Path,
    "EXP": Path,
    "FILE": Path,
    "HYP": Path,
    "MODEL": Path,
    "REF": Path,
    "SCORES": Path,
    "STEM": _stem,
    "YAML": Path,
    "COSINE": float,
    "P": _prior,
    "RATE": _share,
    "SHARE": _share,
}


class Parser(argparse.ArgumentParser):
    """argparse parser whose one-line errors name the nearest option; all options have a help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse; report unknown options first, because one may be a misspelt required option."""
        for argument in args or ():
            if argument == "--":
                break
            name = argument.partition("=")[0]
            is_option = re.fullmatch(r"--?[a-zA-Z][\w-]*", name)
            if is_option and name not in self._option_string_actions:
                self.error(f"unrecognized arguments: {argument}")

        values, remaining = super().parse_known_args(args, namespace)
        # Import the modules of the folder before anything is built.
        plugins = getattr(values, "plugins", None)
        if plugins:
            use_plugins(plugins)
        return values, remaining

    def error(self, message: str) -> NoReturn:
        """Print one line with the nearest option, without argparse's usage, and exit."""
        _, _, unrecognized = message.partition("unrecognized arguments: ")
        misspelt = ""
        otherwise = "see --help"
        if unrecognized.split():
            # argparse lists all unknown options; "--name=value" is one of them.
            first = unrecognized.split()[0]
            misspelt = first.partition("=")[0]
            if Path(first).is_file():
                otherwise = f"write ./{first} for the file of this name"
        options = list(self._option_string_actions)
        # Options are short: any two have some letters in common.
        hint = nearest(misspelt, options, otherwise=otherwise, cutoff=0.6)
        sys.stderr.write(f"{self.prog}: {message.removeprefix('argument ')}{hint}\n")
        raise SystemExit(process.EXIT_INPUT)

    def add(
        self,
        spec: str,
        text: str,
        *,
        least: float | None = None,
        value_type: Callable[[str], Any] | None = None,
        nargs: str | None = None,
        choices: Collection[str] | None = None,
        default: Any = None,
        required: bool = False,
        dest: str | None = None,
        group: Any = None,
    ) -> None:
        """Add the option "--name METAVAR", the flag "--name" or the argument "name METAVAR".

        The metavar determines the type of the value, see TYPE_OF_METAVAR. least: the value is a
        finite number of the type of `least`, and not smaller. value_type: another function to
        parse the value. group: a group of mutually exclusive options. Other parameters: as in
        argparse's `add_argument`. The help ends with the default, unless the text describes one.
        """
        name, _, metavar = spec.partition(" ")
        if least is not None:
            value_type = _number(least)
        elif value_type is None:
            value_type = TYPE_OF_METAVAR.get(metavar, str)

        # argparse refuses settings that do not apply to a flag or an argument, even None.
        optional = {
            "nargs": nargs,
            "choices": choices,
            "default": default,
            "dest": dest,
        }
        settings = {key: value for key, value in optional.items() if value is not None}
        if required:
            settings["required"] = True
        if metavar:
            settings["type"] = value_type
            settings["metavar"] = metavar
        elif choices is None:
            settings["action"] = "store_true"

        is_plain = isinstance(default, int | float | str | Path)
        if is_plain and "default" not in text:
            text += f" (default {default})"
        target = self if group is None else group
        target.add_argument(name, help=text, **settings)

    def add_settings(
        self, text: str = "change settings, as in `speakerlab train`"
    ) -> None:
        # `extend`: --set may be given several times.
        self.add_argument(
            "--set",
            metavar="KEY=VALUE",
            help=text,
            nargs="*",
            action="extend",
            default=[],
        )

    def add_job(self, text: str) -> None:
        self.add("--job I/N", text, value_type=_job, default=(1, 1))

    def add_gpus(self, text: str) -> None:
        text = (
            f'{text}, e.g. "0 1", or "" for the CPU (default auto: a GPU if there is'
            " one)"
        )
        self.add("--gpus NUMBERS", text, default="auto")

    def add_nproc(self) -> None:
        self.add("--nproc N", "processes, one per GPU", least=1, default=1)

    def add_rate_and_workers(self) -> None:
        """Add `--sample-rate` and `--num-workers` of the commands that read all audio."""
        self.add(
            "--sample-rate HZ", "sample rate of every file", least=1, default=16000
        )
        workers = "processes that read audio (default: one for each CPU)"
        num_cpus = system.available_cpus()
        self.add("--num-workers N", workers, least=0, default=num_cpus)

    def add_model_options(self) -> None:
        self.add(
            "--model MODEL",
            "experiment, model folder, .onnx file, hub:NAME or hf:owner/name",
            required=True,
        )
        devices = (
            "cpu, cuda, cuda:N, mps (Apple) or auto (default): cuda if there is a GPU"
        )
        self.add("--device NAME", devices, default="auto")
        self.add_precision()

    def add_treatments(self, text: str) -> None:
        """Add the options for `data.treatments`; text: help on the use of treated utterances."""
        durations = f"{text} cut to so many seconds, or full, e.g. 1 2 3 5 full"
        self.add("--durations SECONDS", durations, nargs="+", default=[])
        codecs = (
            f"{text} encoded and decoded, or not (none), e.g. none mp3:16k opus:12k gsm"
        )
        self.add("--codecs NAME", codecs, nargs="+", default=[])

    def add_systems(self, *, several_lists: bool = True) -> None:
        """Add the systems and their trial lists, as `experiments.systems` reads them.

        several_lists: whether the command takes more than one list.
        """
        systems = (
            "experiments with results, or score files; of several lists, a score file for"
            " each --trials, all with one NAME"
        )
        lists = (
            "trial list, beside its utt2spk, or its name in the results; give it again for"
            " more lists (default: those of the experiments' results)"
        )
        if not several_lists:
            systems = "experiments with results, or score files"
            lists = (
                "the one trial list, beside its utt2spk, or its name in the results"
                " (default: that of the experiments' results)"
            )
        self.add("systems [NAME=]SYSTEM", systems, nargs="+")
        # `append` takes one list each time, so that the option may come before the systems.
        self.add_argument(
            "--trials",
            metavar="[NAME=]FILE",
            help=lists,
            action="append",
            default=[],
        )

    def add_precision(self) -> None:
        text = (
            "precision of the network (default fp32); auto: bf16 on hardware that"
            " has it"
        )
        self.add("--precision", text, choices=("fp32", "bf16", "auto"), default="fp32")

    def add_channel(self, each: str = "", *, takes_two: bool = False) -> None:
        """Add `--channel`; each: what `--channel each` does, for commands that have it.

        takes_two: the command has two recordings, and takes a channel for each of them.
        """
        text = "channel to use: its number (default 1), or mix, the mean of all"
        metavar = "N|mix"
        if each:
            text += f", or each, {each}"
            metavar += "|each"
        read = _channel(metavar)
        if takes_two:
            text += ", or two, as 1,2: of the first recording and of the second"
            metavar += "|N,N"
            read = _channel_or_two
        self.add(f"--channel {metavar}", text, value_type=read)

    def add_speakers(self) -> None:
        self.add("--speakers FILE", "file of the enrolled speakers", default=SPEAKERS)

    def add_far(self, group: Any = None) -> None:
        self.add(
            "--far RATE",
            "decide at this false-alarm rate instead of at the EER, e.g. 0.01",
            group=group,
        )

    def add_threshold(self, group: Any) -> None:
        self.add(
            "--threshold COSINE",
            "decide at this cosine instead of at the calibrated one, e.g. 0.4",
            least=-1.0,
            group=group,
        )

    def add_json(self, each: str) -> None:
        self.add("--json", f"print one JSON object per {each}, each on a line")


def parser(
    name: str,
    description: str | None,
    *,
    builds_components: bool = True,
) -> Parser:
    """Return the parser of a command; abbreviated options are refused.

    description: the docstring of the command's module, whose first line is the help.
    builds_components: whether the command builds models, heads, augmentations, ...; if so, the
    parser has the option `--plugins`.
    """
    first_line = (description or "").partition("\n")[0]
    options = Parser(
        prog=f"speakerlab {name}", description=first_line, allow_abbrev=False
    )
    if builds_components:
        options.add(
            "--plugins DIR", "folder of modules of parts that are named module:Class"
        )
    return options


def check_threshold(threshold: float | None) -> None:
    """Raise ValueError for a threshold that no cosine reaches."""
    if threshold is not None and threshold > 1:
        raise ValueError(
            f"--threshold: a cosine is at most 1, got {threshold:g}; correct it"
        )


def _number(least: float) -> Callable[[str], float]:
    """Return a function that reads a finite number >= `least`, of the type of `least`."""
    number_type = type(least)

    def read(text: str) -> float:
        value = number_type(text)
        # The comparison is also false for nan.
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(
                f"{text} is not a number from {least:g} on"
            )
        return value

    # If `number_type` raises ValueError, argparse prints "invalid <this name> value".
    read.__name__ = number_type.__name__
    return read


def _channel(metavar: str) -> Callable[[str], int | str]:
    """Return a function that reads a channel: a number from 1 on, or a word of the metavar."""
    _, *names = metavar.split("|")

    def read(text: str) -> int | str:
        if text in names:
            return text
        if re.fullmatch(r"[1-9]\d*", text):
            return int(text)
        raise argparse.ArgumentTypeError(
            f"{text} is not a number from 1 on, or {' or '.join(names)}"
        )

    return read


def _channel_or_two(text: str) -> int | str | tuple[int | str, int | str]:
    """Read a channel for two recordings, or one for each, with a comma between."""
    read = _channel("N|mix")
    first, comma, second = text.partition(",")
    if not comma:
        return read(text)
    return read(first), read(second)


def _job(text: str) -> tuple[int, int]:
    """Read the value I/N of --job; both count from 1."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match:
        part = int(match[1])
        num_parts = int(match[2])
        if part <= num_parts:
            return part, num_parts
    raise argparse.ArgumentTypeError(
        f"{text} is not I/N with I from 1 to N, such as 1/4"
    )


def choose_gpus(numbers: str) -> list[str]:
    """Make only these GPUs visible to this process and its children, before torch is imported.

    numbers: the value of `--gpus`. Returns the GPUs; [] for the CPU, and for auto, which changes
    nothing.
    """
    if numbers == "auto":
        return []
    gpus = numbers.replace(",", " ").split()
    for gpu in gpus:
        # CUDA identifies a GPU by its number or its UUID.
        is_gpu = re.fullmatch(r"\d+|(GPU|MIG)-\S+", gpu)
        if not is_gpu or gpus.count(gpu) > 1:
            problem = f"must be different numbers of GPUs, not '{numbers}'"
            raise ValueError(
                f'--gpus: {problem}; see nvidia-smi -L, or use "" for the CPU'
            )
    # No GPU has the number -1, so no GPU is visible.
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus) or "-1"
    return gpus


def model_of(args: argparse.Namespace) -> "SpeakerModel":
    """Load the model given by the options of `Parser.add_model_options`."""
    from speakerlab.inference.speaker_model import load_model

    return load_model(args.model, device=args.device, precision=args.precision)


class _WarningList(logging.Handler):
    """Texts of the warnings that one thread logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self.thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self.thread:
            self.texts.append(record.getMessage())


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Yield a list that gets the text of each warning that this thread logs within the block.

    The warnings are printed, too.
    """
    handler = _WarningList()
    logger = logging.getLogger("speakerlab")
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


def json_line(fields: Mapping[str, Any]) -> str:
    """Return an object as one line of JSON.

    Names in all scripts are written as they are, unless the output is not UTF-8: then they are
    escaped.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    is_utf8 = codecs.lookup(encoding).name == "utf-8"
    text = json.dumps(fields, ensure_ascii=not is_utf8)
    return f"{text}\n"


def plain_text(error: Exception) -> str:
    """Return the message of an error for the user, without the traceback of a data worker.

    Control characters, which may be in names from damaged tables, are escaped.
    """
    return "".join(map(_escape, _message(error)))


def _escape(character: str) -> str:
    """Return a character as it is if it can be printed, else its escape, such as \\x1b."""
    if character.isprintable() or character in "\n\t":
        return character
    return repr(character)[1:-1]


def _message(error: Exception) -> str:
    # System errors have an errno; an OSError of our own has only a message.
    if isinstance(error, OSError) and error.errno is not None:
        where = error.filename or "a file or the output"
        if isinstance(error, FileNotFoundError):
            return f"{where}: does not exist; check the path"
        return f"{where}: {error.strerror}; check the disk and the permissions"

    # Python's own errors have the name of the module, ours do not.
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        if module == distribution.OTHER:
            name = distribution.NAME
            return f"{error.name}: is missing; pip install --force-reinstall {name}"
        package = module.replace("yaml", "pyyaml")
        return f"{package}: is not installed; pip install {package}"

    # torch's loader raises the error of a data worker as text, with the worker's traceback.
    text = str(error)
    if text.startswith("Caught ") and "Original Traceback" in text:
        last_line = text.rstrip().splitlines()[-1]
        _, _, message = last_line.partition(": ")
        return message
    return text


def run(main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> NoReturn:
    """Call `main` and exit; wrong input: code 1 and one line; bug: a traceback.

    A command whose output is no longer read, as after `| head`, exits without a message.
    """
    logging.basicConfig(
        format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO
    )
    prepare_output()
    process.die_with_launcher()
    system.name_user()
    code = 0
    try:
        # The launcher holds Ctrl-C back while a rank starts.
        ctrl_c.let_ctrl_c_through()
        main(arguments)
        # Here, so that an error of the output is reported like any other.
        sys.stdout.flush()
    except (ValueError, OSError, ImportError) as error:
        code = report(error)
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        code = process.EXIT_SIGNAL + signal.SIGINT
    except SystemExit as request:  # of argparse, after the help or a wrong option
        code = int(request.code or 0)
    process.leave(code)


def prepare_output() -> None:
    """Make both outputs take any text; replace an output that the caller has closed by devnull."""
    for name in ("stdout", "stderr"):
        output = getattr(sys, name)
        if output is None:
            # The file takes the closed output's number. Otherwise, the next opened file would get
            # it, and C libraries would write their output into that file.
            output = Path(os.devnull).open("w")  # noqa: SIM115
            setattr(sys, name, output)
        # Escape what cannot be encoded, such as file names that are not UTF-8.
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")


def report(error: Exception) -> int:
    """Print an error on the terminal and in the log files; return the exit code."""
    if isinstance(error, BrokenPipeError) and is_output_closed():
        # Python turns the signal, of which other programs die here, into this error.
        return process.EXIT_UNREAD
    if DEBUG_VARIABLE in os.environ:
        logging.exception("traceback, shown because %s is set", DEBUG_VARIABLE)
    text = plain_text(error)
    sys.stderr.write(f"{text}\n")
    write_to_log_files(text)
    return process.EXIT_INPUT


def is_output_closed() -> bool:
    """Return whether the reader of the output or of the log is gone."""
    if not hasattr(select, "poll"):  # on Windows
        return True
    poll = select.poll()
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            # The mask 0 asks for no events: poll always reports errors.
            poll.register(stream.fileno(), 0)
    events = [event for _, event in poll.poll(0)]
    return any(event & select.POLLERR for event in events)


def write_to_log_files(text: str) -> None:
    """Write an error to the log files, such as a training's train.log, but not to the terminal."""
    record = logging.makeLogRecord({"msg": text, "levelno": logging.ERROR})
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(record)
