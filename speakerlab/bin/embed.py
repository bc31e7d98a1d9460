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


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    files = find_files(args)
    # Check before the work: an error at the end would lose the results.
    check_writable(Path(f"{args.out}.json"))
    model = model_of(args)
    ids = list(files)
    emb_of: dict[str, np.ndarray] = {}
    rejected: dict[str, tuple[str, str]] = {}  # id -> path, reason
    # Recordings of similar length are embedded together, so results are not in order.
    paths = list(files.values())
    for row, result in model.embed_each(paths, progress=True):
        name = ids[row]
        if isinstance(result, Exception):
            rejected[name] = (str(files[name]), str(result))
        else:
            emb_of[name] = result

    # In the order of the files, unlike the results.
    for name in ids:
        if name in rejected:
            _, reason = rejected[name]
            sys.stderr.write(f"{reason}\n")
    write_rejected(args.out.parent, rejected, name=f"{args.out.name}.rejected.tsv")

    embedded_ids = [name for name in ids if name in emb_of]
    if embedded_ids:
        embeddings = [emb_of[name] for name in embedded_ids]
        table = EmbeddingTable(
            ids=embedded_ids,
            emb_ND=np.stack(embeddings),
            model_sha256=model.sha256,
            facts={"precision": model.precision},
        )
        write = WRITERS[args.format]
        written = write(args.out, table)
        log.info(
            "%s: %d embeddings of %d dimensions",
            written,
            len(embedded_ids),
            model.embed_dim,
        )
    max_rejected = args.allow_rejected * len(files)
    if len(rejected) > max_rejected:
        log.error("%d of %d files could not be embedded", len(rejected), len(files))
        process.leave(process.EXIT_INPUT)


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("embed", __doc__)
    names = (
        "recordings; ids are file names without endings, or relative paths if two are"
        " equal"
    )
    options.add("files FILE", names, nargs="*")
    options.add("--list FILE", "list of paths, one per line")
    options.add("--wav-scp FILE", "list of ids and paths, one pair per line")
    options.add(
        "--out STEM", "path of the files to write, without ending", required=True
    )
    options.add(
        "--format",
        "file format of the embeddings",
        choices=sorted(WRITERS),
        default="npy",
    )
    runtime = "expected runtime; fails if the model needs the other one"
    options.add("--runtime", runtime, choices=("torch", "onnx"))
    options.add(
        "--allow-rejected SHARE", "share of files that may be unreadable", default=0.0
    )
    options.add_model_options()
    args = options.parse_args(arguments)
    runtime = "onnx" if args.model.suffix == ".onnx" else "torch"
    if args.runtime not in (None, runtime):
        fix = "make one with `speakerlab export`"
        if runtime == "onnx":
            fix = "give the model folder"
        raise ValueError(
            f"--runtime: {args.model} runs with {runtime}, not {args.runtime}; {fix}"
        )
    # The writer appends the ending of the format. Any other ending is part of the name.
    if args.out.suffix == f".{args.format}":
        args.out = args.out.with_suffix("")
    elif args.out.suffix.removeprefix(".") in WRITERS:
        raise ValueError(
            f"--out: {args.out} has another ending than --format {args.format}; change"
            " one of them"
        )
    return args


def find_files(args: Namespace) -> dict[str, Path]:
    """Return id -> path of the recordings given by the options."""
    has_files = bool(args.files)
    has_list = args.list is not None
    has_wav_scp = args.wav_scp is not None
    num_sources = has_files + has_list + has_wav_scp
    if num_sources != 1:
        raise ValueError(
            f"embed: {num_sources} of FILE..., --list and --wav-scp given; give one"
        )
    if has_wav_scp:
        path_of = read_table(args.wav_scp)
        return {name: Path(path) for name, path in path_of.items()}
    paths: list[Path] = args.files
    if has_list:
        paths = []
        for line in read_text(args.list).splitlines():
            text = line.strip()
            if text:
                paths.append(Path(text))
    files: dict[str, Path] = {}
    for path, name in zip(paths, name_files(paths)):
        if name in files:
            raise ValueError(
                f"{path}: has the same id '{name}' as {files[name]}; ids must be"
                " unique, use --wav-scp"
            )
        files[name] = path
    return files


def name_files(paths: Sequence[Path]) -> list[str]:
    """Return the id of each file: its name without the ending, or its path if names are equal.

    Paths are relative to the common folder of all files.
    """
    names = [Path(path.name) for path in paths]
    distinct_ids = {name.stem for name in names}
    if len(distinct_ids) < len(paths):
        # normpath instead of resolve: links to one recording have different names.
        full_paths: list[Path] = []
        for path in paths:
            full_path = os.path.normpath(path.absolute())
            full_paths.append(Path(full_path))
        folders = [path.parent for path in full_paths]
        common = os.path.commonpath(folders)
        names = [path.relative_to(common) for path in full_paths]
    # Ids must not contain white space, which is the separator in Kaldi's tables.
    ids: list[str] = []
    for name in names:
        without_ending = name.with_suffix("").as_posix()
        ids.append(re.sub(r"\s", "_", without_ending))
    return ids
