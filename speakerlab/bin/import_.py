"""Import a checkpoint of 3D-Speaker or WeSpeaker as a model folder."""

import logging
from collections.abc import Sequence

from speakerlab.bin.command import parser
from speakerlab.checkpoints.toolkit_config import FRONTENDS

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """Run `speakerlab import FILE --out DIR [--model-config FILE] [--frontend F] ...`."""
    options = parser("import", __doc__)
    checkpoint = "checkpoint, or a folder or archive that holds one"
    options.add_path("checkpoint", "FILE", checkpoint)
    options.add_path("--out", "DIR", "model folder to write", required=True)
    config = "config.yaml of the toolkit (default: the one beside FILE)"
    options.add_path("--model-config", "FILE", config)
    frontend = "toolkit whose features the model needs (default: detected)"
    options.add_argument("--frontend", choices=sorted(FRONTENDS), help=frontend)
    speakers = "train.csv or utt2spk of the training, to import the head too"
    options.add_path("--speakers", "FILE", speakers)
    args = options.parse_args(words)
    from speakerlab.checkpoints.foreign import import_checkpoint  # torch: `--help` needs none

    given = {"config": args.model_config, "frontend": args.frontend, "speakers": args.speakers}
    published = import_checkpoint(args.checkpoint, args.out, **given)
    embed_dim, digest = published.embedder.embed_dim, published.sha256
    log.info("%s: written, %d dimensions, sha256 %s", args.out, embed_dim, digest)
