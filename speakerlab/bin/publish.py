"""Publish a model with its page on huggingface.co, or in a folder."""

import logging
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.checkpoints.hub import local, upload
from speakerlab.core import huggingface

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    source = local(args.model)

    # It loads torch, which `--help` does not need.
    from speakerlab.experiments.publishing import write_model_folder

    if not args.to.startswith(huggingface.PREFIX):
        folder = write_model_folder(
            source,
            Path(args.to),
            name="FOLDER",
            licence=args.licence,
            force=args.force,
        )
        log.info(
            "%s: written to a folder; %s%s publishes it",
            folder,
            huggingface.PREFIX,
            args.to if is_repository_name(args.to) else "owner/name",
        )
        sys.stdout.write(f"{folder}\n")
        return

    # Before the model is written, which takes longer.
    huggingface.require_package(args.to)
    name = args.to
    if args.revision is not None:
        name += f"@{args.revision}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model_folder(
            source,
            Path(scratch, "model"),
            name=name,
            licence=args.licence,
            force=False,
        )
        pinned = upload(
            folder,
            args.to,
            branch=args.revision,
            private=args.private,
            force=args.force,
        )
    log.info("%s: published, see %s", args.to, huggingface.page_here(args.to))
    # For scripts: the name that always means this model.
    sys.stdout.write(f"{pinned}\n")


def is_repository_name(text: str) -> bool:
    """Return whether a text would be a repository with `hf:` before it."""
    try:
        huggingface.parse(f"{huggingface.PREFIX}{text}")
    except ValueError:
        return False
    return True


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("publish", __doc__)
    options.add("model EXP", "experiment or model folder")
    options.add(
        "--to hf:owner/name|DIR",
        "repository of huggingface.co, made if it does not exist, or folder to write",
        required=True,
    )
    options.add("--revision BRANCH", "branch of the repository (default: main)")
    options.add("--private", "make a new repository that only its owner sees")
    options.add(
        "--licence NAME",
        "licence of the model, such as cc-by-4.0 (default: that of the models that it"
        " came from, or none)",
    )
    options.add("--force", "replace another model")
    args = options.parse_args(arguments)
    is_remote = args.to.startswith(huggingface.PREFIX)
    if is_remote and huggingface.parse(args.to).revision is not None:
        raise ValueError(
            f"--to: {args.to} names a revision; give a branch with --revision"
        )
    for option, is_given in (
        ("--revision", args.revision),
        ("--private", args.private),
    ):
        if is_given and not is_remote:
            raise ValueError(f"{option}: has no effect on a folder; leave it out")
    return args
