"""Import a checkpoint of 3D-Speaker or WeSpeaker, or a published model, as a model folder."""

import logging
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence

from speakerlab.bin.command import parser
from speakerlab.checkpoints.catalogue import PREFIX, table
from speakerlab.checkpoints.hub import local
from speakerlab.checkpoints.toolkit_config import FRONTENDS
from speakerlab.core.atomic import replacing_folder

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    args = parse(words)
    if args.list:
        sys.stdout.write(table())
        return
    if str(args.checkpoint).startswith(PREFIX):
        from speakerlab.checkpoints.published import refuse_other_folder

        if args.out is not None:
            refuse_other_folder(args.out)
        folder = local(args.checkpoint)
        if args.out is not None:
            with replacing_folder(args.out) as fresh:
                shutil.copytree(folder, fresh, dirs_exist_ok=True)
            folder = args.out
        sys.stdout.write(f"{folder}\n")
        return
    from speakerlab.checkpoints.foreign import import_checkpoint  # torch: `--help` needs none

    given = {"config": args.model_config, "frontend": args.frontend, "speakers": args.speakers}
    published = import_checkpoint(args.checkpoint, args.out, **given)
    embed_dim, digest = published.embedder.embed_dim, published.sha256
    log.info("%s: written, %d dimensions, sha256 %s", args.out, embed_dim, digest)


def parse(words: Sequence[str]) -> Namespace:
    options = parser("import", __doc__)
    options.add("checkpoint FILE", "checkpoint, its folder or archive, or hub:NAME", nargs="?")
    options.add("--list", "list the names, training data and licences of all published models")
    options.add("--out DIR", "model folder to write (default for hub:NAME: the cache)")
    options.add("--model-config FILE", "config.yaml of the toolkit (default: the one beside FILE)")
    frontend = "toolkit whose features the model needs (default: detected)"
    options.add("--frontend", frontend, choices=sorted(FRONTENDS))
    options.add("--speakers FILE", "train.csv or utt2spk of the training, to import the head too")
    args = options.parse_args(words)
    if args.checkpoint is None and not args.list:
        raise ValueError("import: no checkpoint given; give FILE or hub:NAME, or use --list")
    is_hub = str(args.checkpoint).startswith(PREFIX)
    if args.out is None and not is_hub and not args.list:
        raise ValueError(f"--out: missing; give the model folder to write from {args.checkpoint}")
    for name in ("model_config", "frontend", "speakers"):
        if is_hub and getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: has no effect with {args.checkpoint}; leave it out")
    return args
