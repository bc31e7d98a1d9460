"""Import a checkpoint of 3D-Speaker or WeSpeaker, or a published model, as a model folder."""

import logging
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.checkpoints.catalogue import PREFIX, table
from speakerlab.checkpoints.hub import local
from speakerlab.checkpoints.toolkit_config import FRONTENDS
from speakerlab.core.atomic import copy_files, file_sha256, replacing_folder

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    if args.list:
        sys.stdout.write(table())
        return
    if str(args.checkpoint).startswith(PREFIX):
        folder = import_from_hub(args.checkpoint, args.out, force=args.force)
        sys.stdout.write(f"{folder}\n")
        return

    # The import loads torch, which `--help` does not need.
    from speakerlab.checkpoints.foreign import import_checkpoint

    published = import_checkpoint(
        args.checkpoint,
        args.out,
        config=args.model_config,
        frontend=args.frontend,
        speakers=args.speakers,
        pretrained=None if args.pretrained is None else str(args.pretrained),
        force=args.force,
    )
    log.info(
        "%s: written, %d dimensions, sha256 %s",
        args.out,
        published.embedder.embed_dim,
        published.sha256,
    )


def import_from_hub(name: Path, out: Path | None, *, force: bool) -> Path:
    """Download a published model; return its folder: `out` or, by default, a cache folder.

    force: also replace another model in `out`.
    """
    from speakerlab.checkpoints.published import refuse_loss, refuse_other_folder

    # Check before the download, which may take long.
    if out is not None:
        refuse_other_folder(out)
    folder = local(name)
    if out is None:
        return folder
    if not force:
        digest = file_sha256(folder / "embedder.safetensors")
        refuse_loss(out, digest)
    with replacing_folder(out) as fresh:
        copy_files(folder, fresh)
    return out


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("import", __doc__, builds_components=False)
    options.add(
        "checkpoint FILE", "checkpoint, its folder or archive, or hub:NAME", nargs="?"
    )
    options.add(
        "--list", "list the names, training data and licences of all published models"
    )
    options.add("--out DIR", "model folder to write (default for hub:NAME: the cache)")
    options.add("--force", "replace another model, or a calibrated one, in DIR")
    options.add(
        "--model-config FILE",
        "config.yaml of the toolkit (default: the one beside FILE)",
    )
    frontend = "toolkit whose features the model needs (default: detected)"
    options.add("--frontend", frontend, choices=sorted(FRONTENDS))
    options.add(
        "--speakers FILE",
        "train.csv or utt2spk of the training, to import the head too",
    )
    options.add(
        "--pretrained MODEL",
        "folder or hf:owner/name of the pretrained model in the checkpoint (WavLM,"
        " w2v-BERT, Whisper)",
    )
    args = options.parse_args(arguments)
    if args.checkpoint is None and not args.list:
        raise ValueError(
            "import: no checkpoint given; give FILE or hub:NAME, or use --list"
        )
    # A published model may stay in the cache, without --out.
    is_hub = str(args.checkpoint).startswith(PREFIX)
    needs_out = not is_hub and not args.list
    if args.out is None and needs_out:
        raise ValueError(
            f"--out: missing; give the model folder to write from {args.checkpoint}"
        )
    if args.force and args.out is None:
        raise ValueError("--force: has no effect without --out; leave it out")
    # Published models come with their configuration, front end and head.
    options_of_files = {
        "--model-config": args.model_config,
        "--frontend": args.frontend,
        "--speakers": args.speakers,
        "--pretrained": args.pretrained,
    }
    for option, value in options_of_files.items():
        if is_hub and value is not None:
            raise ValueError(
                f"{option}: has no effect with {args.checkpoint}; leave it out"
            )
    return args
