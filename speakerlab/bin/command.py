"""What every command shares: log lines, one line a fault instead of a traceback, exit codes."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from speakerlab.core import process
from speakerlab.core.faults import nearest

DEBUG_VARIABLE = "SPEAKERLAB_DEBUG"  # any value: tracebacks are shown


class Parser(argparse.ArgumentParser):
    """argparse that answers in one line and names the nearest option."""

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        options = [option for action in self._actions for option in action.option_strings]
        word = unknown[0].partition("=")[0] if unknown else ""
        hint = nearest(word, options, otherwise="see --help")
        sys.stderr.write(f"{self.prog}: {message}{hint}\n")
        raise SystemExit(process.EXIT_INPUT)


def parser(name: str, description: str | None) -> Parser:
    """A parser for one command; abbreviated options are refused."""
    first = (description or "").partition("\n")[0]
    return Parser(prog=f"speakerlab {name}", description=first, allow_abbrev=False)


def plain_text(error: Exception) -> str:
    """What a user should read; of a fault in a loader's worker, not the traceback it comes in."""
    if isinstance(error, OSError) and error.errno is not None:  # not one of our own lines
        where = error.filename or "a file"
        return f"{where}: cannot be used, got '{error.strerror}'; look at the disk and permissions"
    text = str(error)
    if text.startswith("Caught ") and "Original Traceback" in text:
        return text.rstrip().splitlines()[-1].partition(": ")[2]
    return text


def tell(text: str) -> None:
    """To the terminal as it is, and to the log file of a training."""
    sys.stderr.write(f"{text}\n")
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(logging.makeLogRecord({"msg": text, "levelno": logging.ERROR}))


def run(main: Callable[[Sequence[str]], None], words: Sequence[str]) -> NoReturn:
    """Call `main`; wrong input is told in lines and exits 1, a bug shows its traceback."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    code = 0
    try:
        main(words)
    except (ValueError, OSError, ImportError) as error:
        if DEBUG_VARIABLE in os.environ:
            logging.exception("traceback, shown because %s is set", DEBUG_VARIABLE)
        tell(plain_text(error))
        code = process.EXIT_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        code = 130
    process.leave(code)
