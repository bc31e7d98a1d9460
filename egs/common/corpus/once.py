"""Preparing data directories once: a lock, and the record `.prepared` of what they were made from.

The record is text with a line `name=value` for each option and a digest of the scripts. Whoever
holds `.lock` writes the data directories; `speakerlab check` and `speakerlab pack` share it.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from egs.common.corpus.sources import require_folders
from speakerlab.core import done
from speakerlab.core.atomic import locked
from speakerlab.data.tables import NAMELESS, ROOT_LOCK, read_rejected

PREPARED = ".prepared"
EGS = Path(__file__).resolve().parents[2]
# Options that do not change what is prepared.
NO_INPUTS = ("download", "download_noise", "num_jobs", "default_corpus", "makes_corpus")


def prepare_once(
    data: Path, script: Path, args: argparse.Namespace, prepare: Callable[[], None]
) -> None:
    """Prepare data directories, unless they were prepared with the same options and scripts."""
    inputs = inputs_of(script, args)
    if is_prepared(data, inputs):
        return
    # A folder that does not exist is no other corpus.
    require_folders(args)
    refuse_other_corpus(data, args)
    with data_alone(data):
        if is_prepared(data, inputs):  # by the process that had the lock
            return
        done.forget(data / PREPARED)
        before = stamps_of(data)
        prepare()
        written = [
            name for name, stamp in stamps_of(data).items() if stamp != before.get(name)
        ]
        inputs["left_out"] = stamps_of_left_out(data)
        done.record(data / PREPARED, inputs, outputs=written)


def refuse_other_corpus(data: Path, args: argparse.Namespace) -> None:
    """Raise ValueError if data directories were prepared from another corpus: keep both."""
    record = data / PREPARED
    prepared_from = done.read_record(record).get("corpus")
    # What a recipe makes itself is the same in any folder.
    if args.makes_corpus or prepared_from in (None, str(args.corpus)):
        return
    if not args.corpus.exists():
        raise ValueError(
            f"--corpus: {args.corpus} does not exist; {data} was prepared from"
            f" {prepared_from}"
        )
    raise ValueError(
        f"--corpus: {args.corpus}, but {data} was prepared from {prepared_from}; give"
        f" each corpus folders of its own (run.sh: --data {data}_{args.corpus.name} and"
        f" another --exp), or remove {record} to replace the data here"
    )


def is_prepared(data: Path, inputs: dict[str, object]) -> bool:
    """Return whether everything is there already, and say so."""
    path = data / PREPARED
    if not done.is_done(path, {**inputs, "left_out": stamps_of_left_out(data)}):
        return False
    message = "already prepared with the same options and scripts, kept"
    print(f"{data}: {message}; to prepare it again, remove {path}", flush=True)
    return True


def inputs_of(script: Path, args: argparse.Namespace) -> dict[str, object]:
    """Return the script, the options, and a digest of all scripts that preparing may run."""
    options = {
        name: value for name, value in vars(args).items() if name not in NO_INPUTS
    }
    recipe_folders = [folder for folder in script.parents if EGS in folder.parents]
    names = []
    for folder in [*recipe_folders, Path(__file__).parent]:
        scripts = sorted(folder.glob("*.py"))
        names += [path.relative_to(EGS).as_posix() for path in scripts]
    return {"script": script, **options, "sha256": done.files_digest(EGS, names)}


def stamps_of_left_out(data: Path) -> str:
    """Return a digest of the time and size of the files that were left out; a repair changes it."""
    paths: list[str] = []
    for table in sorted(data.glob("*/rejected.tsv")):
        for name, (path, _) in read_rejected(table.parent).items():
            # `speakerlab check` adds others, under their ids.
            if name.startswith(NAMELESS):
                paths.append(path)
    return done.digest(done.stamps(paths))


def stamps_of(data: Path) -> dict[str, str]:
    """Return the path of each wav.scp of a data directory -> its stamp."""
    paths = sorted(data.glob("*/wav.scp"))
    return {path.relative_to(data).as_posix(): done.stamp(path) for path in paths}


@contextmanager
def data_alone(data: Path) -> Iterator[None]:
    """Keep other processes from preparing, checking or packing the data directories meanwhile."""
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{data}: cannot be written ({error.strerror}); correct its permissions, or"
            " choose another folder"
        ) from error
    with locked(data / ROOT_LOCK):
        yield
