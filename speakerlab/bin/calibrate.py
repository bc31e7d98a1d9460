"""Learn a model's calibration from a data directory, and store it with the model."""

import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.checkpoints.catalogue import PREFIX
from speakerlab.checkpoints.hub import local
from speakerlab.checkpoints.model_files import CALIBRATION, find_model
from speakerlab.core.atomic import check_writable, file_sha256, write_json
from speakerlab.data.manifest import read_manifest

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """Run `speakerlab calibrate --model MODEL --data DIR [--far RATE...] [--out EXP | --force]`."""
    options = parser("calibrate", __doc__)
    models = "experiment, model folder, or hub:NAME with --out"
    options.add_path("--model", "MODEL", models, required=True)
    data = "checked data directory of speakers that the model was not trained on"
    options.add_path("--data", "DIR", data, required=True)
    rates = "false-alarm rates to store thresholds for"
    options.add_argument("--far", type=float, nargs="+", default=[], metavar="RATE", help=rates)
    options.add_path("--out", "EXP", "copy the model to EXP/model and store the calibration there")
    force = "replace the calibration that the model has"
    options.add_argument("--force", action="store_true", help=force)
    args = options.parse_args(words)
    if not (args.data / "utt2spk").exists():
        missing = args.data / "utt2spk" if args.data.exists() else args.data
        raise FileNotFoundError(f"{missing}: does not exist; calibration needs speaker labels")
    import torch  # not before the options are checked

    from speakerlab.checkpoints.published import load_published
    from speakerlab.data.workers import auto_workers
    from speakerlab.experiments.validation import Validation
    from speakerlab.inference.batches import embed_pieces
    from speakerlab.inference.workers import share_threads
    from speakerlab.training.devices import count_gpus

    published = load_published(open_model(args.model, args.out, force=args.force))
    manifest = read_manifest([args.data], sample_rate=published.embedder.sample_rate)
    if len(manifest.speakers) < 2:
        raise ValueError(f"{args.data}: has one speaker; calibration needs at least 2")
    on_gpu, validation = count_gpus() > 0, Validation(manifest)
    emb_ND = embed_pieces(
        published.embedder.for_inference(in_place=True),
        validation.pieces,
        device=torch.device("cuda" if on_gpu else "cpu"),
        progress=True,
        num_threads=share_threads(1),
        num_workers=auto_workers(1) if on_gpu else 0,
    )
    learned = validation.calibrate(emb_ND, source=args.data.name, fars=args.far)
    write_json(published.folder / CALIBRATION, learned.to_dict())
    sys.stdout.write(
        f"log-likelihood ratio = {learned.slope:.3f} x score {learned.intercept:+.3f}\n"
        f"threshold {learned.threshold:.4f} at the EER, {100 * learned.eer:.2f} %\n"
    )
    for rate, threshold in learned.threshold_at_far.items():
        sys.stdout.write(f"threshold {threshold:.4f} at {100 * float(rate):g} % false alarms\n")
    log.info("%s: written, from %s", published.folder / CALIBRATION, learned.source)


def open_model(model: Path, exp_dir: Path | None, *, force: bool) -> Path:
    """Return the folder to calibrate, of the model or of its copy in an experiment folder."""
    source = find_model(local(model))
    if exp_dir is not None and (exp_dir / "model").resolve() != source.resolve():
        check_writable(exp_dir / "model" / CALIBRATION)
        return copy_model(source, exp_dir)
    if str(model).startswith(PREFIX):
        raise ValueError(f"--out: missing; give a folder for the calibrated copy of {model}")
    if (source / CALIBRATION).exists() and not force:
        raise ValueError(
            f"{source / CALIBRATION}: already exists; use --force to replace it, or --out to "
            "calibrate a copy"
        )
    check_writable(source / CALIBRATION)
    return source


def copy_model(source: Path, exp_dir: Path) -> Path:
    """Copy a model folder into an experiment folder."""
    from speakerlab.training.checkpoint import was_begun

    target = exp_dir / "model"
    if target.exists():
        old, new = (file_sha256(folder / "embedder.safetensors") for folder in (target, source))
        if old != new:
            raise ValueError(
                f"{exp_dir}: holds another model (sha256 {old[:12]}) than {source} ({new[:12]}); "
                "use another --out"
            )
    if was_begun(exp_dir):
        raise ValueError(f"{exp_dir}: holds a training run; use another --out")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    shutil.copyfile(source / "config.yaml", exp_dir / "config.yaml")
    return target
