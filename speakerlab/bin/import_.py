"""Open a checkpoint of 3D-Speaker or WeSpeaker as a model of ours."""

import logging
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.checkpoints.toolkit_config import FRONTENDS

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab import FILE --out DIR [--model-config FILE] [--frontend F] [--speakers FILE]`"""
    options = parser("import", __doc__)
    options.add_argument("checkpoint", type=Path, metavar="FILE", help="or a folder, or an archive")
    options.add_argument("--out", type=Path, required=True, metavar="DIR", help="model folder")
    options.add_argument(
        "--model-config", type=Path, metavar="FILE", help="config.yaml, if it is not beside FILE"
    )
    options.add_argument(
        "--frontend", choices=sorted(FRONTENDS), help="whose features the model takes"
    )
    options.add_argument(
        "--speakers",
        type=Path,
        metavar="FILE",
        help="train.csv or utt2spk of the training: names the head",
    )
    args = options.parse_args(words)
    from speakerlab.checkpoints.foreign import import_checkpoint  # torch: as late as can be

    published = import_checkpoint(
        args.checkpoint,
        args.out,
        config=args.model_config,
        frontend=args.frontend,
        speakers=args.speakers,
    )
    log.info("%s: %d dimensions, %s", args.out, published.embedder.embed_dim, published.sha256)
