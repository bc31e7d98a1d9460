"""What all commands share: options, log lines, errors of one line, exit codes."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from speakerlab.core import process
from speakerlab.core.faults import nearest

DEBUG_VARIABLE = "SPEAKERLAB_DEBUG"  # if set, errors of the user show a traceback too


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line that name the nearest option."""

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        options = [option for action in self._actions for option in action.option_strings]
        word = unknown[0].partition("=")[0] if unknown else ""
        hint = nearest(word, options, otherwise="see --help")
        sys.stderr.write(f"{self.prog}: {message}{hint}\n")
        raise SystemExit(process.EXIT_INPUT)


def parser(name: str, description: str | None) -> Parser:
    """Return the parser of a command; abbreviated options are refused."""
    first = (description or "").partition("\n")[0]
    return Parser(prog=f"speakerlab {name}", description=first, allow_abbrev=False)


def plain_text(error: Exception) -> str:
    """Return the message of an error for the user, without the traceback of a data worker."""
    if isinstance(error, OSError) and error.errno is not None:  # not one of our own messages
        where = error.filename or "a file"
        return f"{where}: {error.strerror}; check the disk and the permissions"
    if isinstance(error, ModuleNotFoundError) and error.name:  # not one of our own messages
        package = error.name.partition(".")[0].replace("yaml", "pyyaml")
        return f"{package}: is not installed; pip install {package}"
    text = str(error)
    if text.startswith("Caught ") and "Original Traceback" in text:
        return text.rstrip().splitlines()[-1].partition(": ")[2]
    return text


def print_error(text: str) -> None:
    """Write to the terminal, and to the log file of a training run."""
    sys.stderr.write(f"{text}\n")
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(logging.makeLogRecord({"msg": text, "levelno": logging.ERROR}))


def run(main: Callable[[Sequence[str]], None], words: Sequence[str]) -> NoReturn:
    """Call `main` and exit: 1 with its message for wrong input, a traceback for a bug."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    code = 0
    try:
        main(words)
    except (ValueError, OSError, ImportError) as error:
        if DEBUG_VARIABLE in os.environ:
            logging.exception("traceback, shown because %s is set", DEBUG_VARIABLE)
        print_error(plain_text(error))
        code = process.EXIT_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        code = 130
    process.leave(code)
