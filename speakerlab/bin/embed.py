"""Extract the embeddings of audio files, in any format and at any sample rate."""

import logging
import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from speakerlab.bin.command import model_of, parser
from speakerlab.core import process
from speakerlab.core.atomic import check_writable
from speakerlab.core.reading import read_text
from speakerlab.data.tables import read_table, write_rejected
from speakerlab.inference.embedding_files import WRITERS
from speakerlab.scoring.embeddings import EmbeddingTable

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    args = parse(words)
    files = find_files(args)
    check_writable(Path(f"{args.out}.json"))
    model = model_of(args)
    ids = list(files)
    embs: dict[str, np.ndarray] = {}
    rejected: dict[str, tuple[str, str]] = {}
    for row, result in model.embed_each(list(files.values()), progress=True):
        if isinstance(result, Exception):
            rejected[ids[row]] = str(files[ids[row]]), str(result)
        else:
            embs[ids[row]] = result
    sys.stderr.writelines(f"{rejected[name][1]}\n" for name in ids if name in rejected)
    write_rejected(args.out.parent, rejected, name=f"{args.out.name}.rejected.tsv")
    if kept := [name for name in ids if name in embs]:
        emb_ND = np.stack([embs[name] for name in kept])
        table = EmbeddingTable(kept, emb_ND, model.sha256, {"precision": model.precision})
        written = WRITERS[args.format](args.out, table)
        log.info("%s: %d embeddings of %d dimensions", written, len(kept), model.embed_dim)
    if len(rejected) > args.allow_rejected * len(files):
        log.error("%d of %d files could not be embedded", len(rejected), len(files))
        process.leave(process.EXIT_INPUT)


def parse(words: Sequence[str]) -> Namespace:
    options = parser("embed", __doc__)
    names = "recordings; ids are file names without endings, or relative paths if two are equal"
    options.add("files FILE", names, nargs="*")
    options.add("--list FILE", "list of paths, one per line")
    options.add("--wav-scp FILE", "list of ids and paths, one pair per line")
    options.add("--out STEM", "path of the files to write, without ending", required=True)
    options.add("--format", "file format of the embeddings", choices=sorted(WRITERS), default="npy")
    runtime = "expected runtime; fails if the model needs the other one"
    options.add("--runtime", runtime, choices=("torch", "onnx"))
    options.add("--allow-rejected SHARE", "share of files that may be unreadable", default=0.0)
    options.add_model_options()
    args = options.parse_args(words)
    runtime = "onnx" if args.model.suffix == ".onnx" else "torch"
    if args.runtime not in (None, runtime):
        fix = "give the model folder" if runtime == "onnx" else "make one with `speakerlab export`"
        raise ValueError(f"--runtime: {args.model} runs with {runtime}, not {args.runtime}; {fix}")
    if args.out.suffix == f".{args.format}":
        args.out = args.out.with_suffix("")
    elif args.out.suffix.removeprefix(".") in WRITERS:
        raise ValueError(
            f"--out: {args.out} has another ending than --format {args.format}; change one of them"
        )
    return args


def find_files(args: Namespace) -> dict[str, Path]:
    """Return id -> path of the recordings that the options name."""
    given = [bool(args.files), args.list is not None, args.wav_scp is not None]
    if sum(given) != 1:
        raise ValueError(f"embed: {sum(given)} of FILE..., --list and --wav-scp given; give one")
    if args.wav_scp is not None:
        return {name: Path(path) for name, path in read_table(args.wav_scp).items()}
    paths: list[Path] = args.files
    if args.list is not None:
        lines = read_text(args.list).splitlines()
        paths = [Path(line.strip()) for line in lines if line.strip()]
    files: dict[str, Path] = {}
    for path, name in zip(paths, name_files(paths)):
        if name in files:
            raise ValueError(
                f"{path}: has the same id '{name}' as {files[name]}; ids must be unique, use "
                "--wav-scp"
            )
        files[name] = path
    return files


def name_files(paths: Sequence[Path]) -> list[str]:
    """Return the id of each file: its name without the ending, or if two are equal, its path.

    Paths are relative to the folder that all files are in.
    """
    names = [Path(path.name) for path in paths]
    if len({name.stem for name in names}) < len(paths):
        full = [Path(os.path.normpath(path.absolute())) for path in paths]
        common = os.path.commonpath([path.parent for path in full])
        names = [path.relative_to(common) for path in full]
    return [re.sub(r"\s", "_", name.with_suffix("").as_posix()) for name in names]
