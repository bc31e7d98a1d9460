"""Learn a model's calibration from a data directory, and store it with the model."""

import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.checkpoints.model_files import CALIBRATION, find_model
from speakerlab.core.atomic import file_sha256, write_json
from speakerlab.data.manifest import read_manifest

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """Run `speakerlab calibrate --model DIR --data DIR [--far RATE...] [--out EXP]`."""
    options = parser("calibrate", __doc__)
    options.add_path("--model", "DIR", "experiment or model folder", required=True)
    data = "checked data directory of speakers that the model was not trained on"
    options.add_path("--data", "DIR", data, required=True)
    rates = "false-alarm rates to store thresholds for"
    options.add_argument("--far", type=float, nargs="+", default=[], metavar="RATE", help=rates)
    options.add_path("--out", "EXP", "copy the model to EXP/model and store the calibration there")
    args = options.parse_args(words)
    import torch  # not before the options are checked

    from speakerlab.checkpoints.published import load_published
    from speakerlab.experiments.validation import Validation

    published = load_published(copy_model(args.model, args.out) if args.out else args.model)
    if not (args.data / "utt2spk").exists():
        raise FileNotFoundError(f"{args.data}/utt2spk: no such file; calibration needs speakers")
    manifest = read_manifest([args.data], sample_rate=published.embedder.sample_rate)
    if len(manifest.speakers) < 2:
        raise ValueError(f"{args.data}: has one speaker; calibration needs at least 2")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    learned = Validation(manifest).calibrate(
        published.embedder, device, source=args.data.name, fars=args.far
    )
    write_json(published.folder / CALIBRATION, learned.to_dict())
    sys.stdout.write(
        f"log-likelihood ratio = {learned.slope:.3f} x score {learned.intercept:+.3f}\n"
        f"threshold {learned.threshold:.4f} at the EER, {100 * learned.eer:.2f} %\n"
    )
    for rate, threshold in learned.threshold_at_far.items():
        sys.stdout.write(f"threshold {threshold:.4f} at {100 * float(rate):g} % false alarms\n")
    log.info("%s: written, from %s", published.folder / CALIBRATION, learned.source)


def copy_model(model: Path, exp_dir: Path) -> Path:
    """Copy a model into an experiment folder, unless it is there already."""
    from speakerlab.training.checkpoint import was_begun

    source, target = find_model(model), exp_dir / "model"
    if target.exists():
        if target.resolve() == source.resolve():
            return source
        old, new = (file_sha256(folder / "embedder.safetensors") for folder in (target, source))
        if old != new:
            raise ValueError(
                f"{exp_dir}: holds another model (sha256 {old[:12]}) than {model} ({new[:12]}); "
                "use another --out"
            )
    if was_begun(exp_dir):
        raise ValueError(f"{exp_dir}: holds a training run; use another --out")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    shutil.copyfile(source / "config.yaml", exp_dir / "config.yaml")
    return target
