"""Import a checkpoint of 3D-Speaker or WeSpeaker, or a published model, as a model folder.

A segmentation network of pyannote.audio is imported, too.
"""

import logging
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.checkpoints.catalogue import PREFIX, table
from speakerlab.checkpoints.hub import fetch_checkpoint, is_published, local
from speakerlab.checkpoints.model_files import copy_model, weights_in
from speakerlab.checkpoints.toolkit_config import FRONTENDS
from speakerlab.core.atomic import file_sha256, replacing_folder
from speakerlab.core.huggingface import origin_of, page_of

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    if args.list:
        sys.stdout.write(table())
        return
    checkpoint = args.checkpoint
    about: dict[str, str] = {}
    if is_published(checkpoint):
        # A repository of huggingface.co may have a checkpoint of another toolkit.
        fetched = None
        if not str(checkpoint).startswith(PREFIX):
            fetched = fetch_checkpoint(str(checkpoint))
        if fetched is None:
            refuse_options_of_files(args)
            folder = import_from_hub(checkpoint, args.out, force=args.force)
            sys.stdout.write(f"{folder}\n")
            return
        about = {"hub": origin_of(fetched) or "", "page": page_of(str(checkpoint))}
        checkpoint = fetched
        require_out(args)

    # The import loads torch, which `--help` does not need.
    from speakerlab.checkpoints.foreign import import_checkpoint
    from speakerlab.checkpoints.published import Published

    published = import_checkpoint(
        checkpoint,
        args.out,
        config=args.model_config,
        frontend=args.frontend,
        speakers=args.speakers,
        pretrained=None if args.pretrained is None else str(args.pretrained),
        about=about,
        force=args.force,
    )
    kind = "a segmentation network"
    if isinstance(published, Published):
        kind = f"{published.embedder.embed_dim} dimensions"
    log.info("%s: written, %s, sha256 %s", args.out, kind, published.sha256)


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
        weights = weights_in(folder)
        refuse_loss(out, file_sha256(folder / weights), weights)
    with replacing_folder(out) as fresh:
        copy_model(folder, fresh)
    return out


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("import", __doc__, builds_components=False)
    options.add(
        "checkpoint FILE",
        "checkpoint, its folder or archive, hub:NAME or hf:owner/name",
        nargs="?",
    )
    options.add(
        "--list", "list the names, training data and licences of all published models"
    )
    options.add(
        "--out DIR", "model folder to write (default for published models: the cache)"
    )
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
            "import: no checkpoint given; give FILE, hub:NAME or hf:owner/name, or use"
            " --list"
        )
    # A published model may stay in the cache, without --out.
    if args.checkpoint is not None and not is_published(args.checkpoint):
        require_out(args)
    if args.force and args.out is None:
        raise ValueError("--force: has no effect without --out; leave it out")
    if str(args.checkpoint).startswith(PREFIX):
        refuse_options_of_files(args)
    return args


def require_out(args: Namespace) -> None:
    """Raise ValueError if there is no folder to write the imported model to."""
    if args.out is None:
        raise ValueError(
            f"--out: missing; give the model folder to write from {args.checkpoint}"
        )


def refuse_options_of_files(args: Namespace) -> None:
    """Raise ValueError for options about a file of another toolkit."""
    # Published models come with their configuration, front end and head.
    options_of_files = {
        "--model-config": args.model_config,
        "--frontend": args.frontend,
        "--speakers": args.speakers,
        "--pretrained": args.pretrained,
    }
    for option, value in options_of_files.items():
        if value is not None:
            raise ValueError(
                f"{option}: has no effect with {args.checkpoint}; leave it out"
            )
