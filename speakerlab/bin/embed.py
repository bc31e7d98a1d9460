"""Write the embeddings of audio files, in any format and at any sample rate."""

import logging
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from speakerlab.bin.command import parser
from speakerlab.bin.model_options import add_model_options, open_model
from speakerlab.core import process
from speakerlab.core.atomic import write_text
from speakerlab.core.faults import Faults
from speakerlab.data.files import one_line
from speakerlab.data.tables import read_table
from speakerlab.inference.embedding_files import WRITERS
from speakerlab.inference.progress import Progress
from speakerlab.inference.speaker_model import SpeakerModel
from speakerlab.scoring.embeddings import EmbeddingTable

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab embed FILE... --model MODEL --out STEM [--format npy|ark|safetensors|jsonl]`"""
    options = parser("embed", __doc__)
    options.add_argument("files", type=Path, nargs="*", metavar="FILE", help="its name is its id")
    options.add_argument("--list", type=Path, metavar="FILE", help="a path a line")
    options.add_argument("--wav-scp", type=Path, metavar="FILE", help="an id and a path a line")
    options.add_argument("--out", type=Path, required=True, metavar="STEM", help="without ending")
    options.add_argument("--format", choices=sorted(WRITERS), default="npy")
    options.add_argument("--runtime", choices=("torch", "onnx"), help="refuse a model of the other")
    share = "how many may be unreadable, e.g. 0.01 (default 0)"
    options.add_argument("--allow-rejected", type=float, default=0.0, metavar="SHARE", help=share)
    add_model_options(options)
    args = options.parse_args(words)
    check_runtime(args.model, args.runtime)
    if args.out.suffix == f".{args.format}":
        args.out = args.out.with_suffix("")
    elif args.out.suffix.removeprefix(".") in WRITERS:
        raise ValueError(
            f"--out: ends like another format than {args.format}, got {args.out}; add --format"
        )
    files = find_files(args)
    model, ids = open_model(args), list(files)
    rows, emb_ND, rejected = embed_files(model, list(files.values()))
    list_rejected(args.out, {ids[row]: (files[ids[row]], text) for row, text in rejected.items()})
    if rows:
        facts = {"precision": model.precision}
        table = EmbeddingTable([ids[row] for row in rows], emb_ND[rows], model.sha256, facts)
        written = WRITERS[args.format](args.out, table)
        log.info("%s: %d embeddings of %d dimensions", written, len(rows), model.embed_dim)
    if len(rejected) > args.allow_rejected * len(files):
        log.error("%d of %d files could not be embedded", len(rejected), len(files))
        process.leave(process.EXIT_INPUT)


def check_runtime(model: str, runtime: str | None) -> None:
    """The kind of the model says what runs it; ValueError where another runtime was asked for."""
    found = "onnx" if model.endswith(".onnx") else "torch"
    if runtime not in (None, found):
        remedy = "write one with `speakerlab export`" if runtime == "onnx" else "give its folder"
        raise ValueError(f"--runtime: {model} runs with {found}, got {runtime}; {remedy}")


def find_files(args: Namespace) -> dict[str, Path]:
    """id -> path, from whichever of the three ways of naming files was used."""
    ways = [bool(args.files), args.list is not None, args.wav_scp is not None]
    if sum(ways) != 1:
        raise ValueError(
            f"embed: needs one of FILE..., --list and --wav-scp, got {sum(ways)}; see --help"
        )
    if args.wav_scp is not None:
        return {name: Path(path) for name, path in read_table(args.wav_scp).items()}
    paths: list[Path] = args.files
    if args.list is not None:
        if not args.list.is_file():
            raise FileNotFoundError(f"{args.list}: no such file; correct --list")
        lines = args.list.read_text(encoding="utf-8").splitlines()
        paths = [Path(line.strip()) for line in lines if line.strip()]
    files: dict[str, Path] = {}
    faults = Faults()
    for path in paths:
        name = re.sub(r"\s", "_", path.stem)
        if name in files:
            faults.add(
                "duplicate ids", f"{path}: has the id of {files[name]}, got {name}; use --wav-scp"
            )
        files[name] = path
    faults.raise_if_any("embed: refused, ids must be unique")
    return files


def embed_files(
    model: SpeakerModel, paths: Sequence[Path]
) -> tuple[list[int], np.ndarray, dict[int, str]]:
    """(rows that went well, emb_ND, row -> what is wrong with it), telling of progress."""
    emb_ND = np.empty((len(paths), model.embed_dim), dtype=np.float32)
    rejected: dict[int, str] = {}
    progress = Progress(len(paths), what="files")
    for done, (row, result) in enumerate(model.embed_each(paths), 1):
        if isinstance(result, Exception):
            rejected[row] = str(result)
        else:
            emb_ND[row] = result
        progress.tell(done)
    return [row for row in range(len(paths)) if row not in rejected], emb_ND, rejected


def list_rejected(out: Path, rejected: dict[str, tuple[Path, str]]) -> None:
    """A line each to stderr, and all in `<out>.rejected.tsv`, which is there for no other run."""
    listing = Path(f"{out}.rejected.tsv")
    listing.unlink(missing_ok=True)
    if rejected:
        sys.stderr.writelines(f"{text}\n" for _, text in rejected.values())
        rows = ((name, one_line(path), text) for name, (path, text) in rejected.items())
        lines = ("\t".join(row) + "\n" for row in rows)
        write_text(listing, "".join(lines))
