"""Export a model as an ONNX file, also for other programs, or as a 3D-Speaker checkpoint."""

import logging
from argparse import Namespace
from collections.abc import Sequence

from speakerlab.bin.command import parser
from speakerlab.checkpoints.hub import local
from speakerlab.checkpoints.model_files import has_segmenter
from speakerlab.core.atomic import check_writable

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    options = parser("export", __doc__)
    options.add("model MODEL", "experiment, model folder, hub:NAME or hf:owner/name")
    options.add("--out FILE", "file to write", required=True)
    options.add(
        "--format",
        "ONNX (default), ONNX for sherpa-onnx or for the programs that run WeSpeaker's"
        " models, such as pyannote.audio, or a checkpoint of 3D-Speaker",
        choices=("onnx", "sherpa-onnx", "wespeaker", "3dspeaker"),
        default="onnx",
    )
    speech = "recordings of speech, to compare the other program's embeddings with ours"
    options.add("--test FILE", speech, nargs="+", default=[])
    options.add("--force", "write the file for the other program although they differ")
    options.add("--int8", "quantise to 8 bits, for CPUs")
    options.add("--calibrate DIR", "checked data directory to calibrate int8 with")
    args = options.parse_args(arguments)
    check_combination(args)
    check_writable(args.out)
    model = local(args.model)

    # Import the runtimes only here, so that wrong options fail at once.
    if args.format == "onnx" and not args.int8 and has_segmenter(model):
        from speakerlab.inference.segmentation_export import export_segmentation

        export_segmentation(model, args.out)
    elif args.int8:
        from speakerlab.inference.quantize import export_int8

        export_int8(model, args.out, data_dir=args.calibrate)
    elif args.format == "sherpa-onnx":
        from speakerlab.inference.sherpa import export_sherpa

        export_sherpa(model, args.out, test=args.test, force=args.force)
    elif args.format == "wespeaker":
        from speakerlab.inference.wespeaker import export_wespeaker

        export_wespeaker(model, args.out, test=args.test, force=args.force)
    elif args.format == "3dspeaker":
        from speakerlab.checkpoints.foreign import export_3dspeaker

        export_3dspeaker(model, args.out)
    else:
        from speakerlab.inference.export import export_onnx

        export_onnx(model, args.out)
    log.info("%s: written", args.out)


def check_combination(args: Namespace) -> None:
    """Raise ValueError for conflicting options."""
    if args.format != "3dspeaker" and args.out.suffix != ".onnx":
        raise ValueError(
            f"--out: {args.out} must end in .onnx, as models of this format do"
        )
    # Int8 needs data for the activation ranges, and exists only for plain ONNX.
    has_data = args.calibrate is not None
    is_onnx = args.format == "onnx"
    if args.int8 != has_data or (args.int8 and not is_onnx):
        raise ValueError(
            "export: int8 needs --int8, --calibrate DIR and format onnx; see --help"
        )
    # These programs compute the features; other formats have no comparison to skip with --force.
    has_test = bool(args.test)
    is_sherpa = args.format == "sherpa-onnx"
    is_compared = is_sherpa or args.format == "wespeaker"
    if (is_sherpa and not has_test) or (has_test and not is_compared):
        raise ValueError(
            "export: sherpa-onnx needs --test FILE..., which wespeaker takes, too; omit it"
            " for other formats"
        )
    if args.force and not has_test:
        raise ValueError("export: --force needs --test FILE...; leave it out")
