"""Learn what a model's scores mean from a data directory; store it with the model."""

import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.checkpoints.model_files import CALIBRATION, find_model
from speakerlab.core.atomic import write_json
from speakerlab.data.manifest import read_manifest

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab calibrate --model DIR --data DIR [--far RATE...] [--out EXP]`"""
    options = parser("calibrate", __doc__)
    options.add_argument("--model", type=Path, required=True, metavar="DIR")
    options.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="checked, of unseen speakers"
    )
    options.add_argument(
        "--far", type=float, nargs="+", default=[], metavar="RATE", help="false-alarm rates to keep"
    )
    options.add_argument(
        "--out", type=Path, metavar="EXP", help="copy the model to EXP/model first"
    )
    args = options.parse_args(words)
    import torch  # not before the options are right

    from speakerlab.checkpoints.published import load_published
    from speakerlab.experiments.validation import Validation

    published = load_published(copied(args.model, args.out) if args.out else args.model)
    if not (args.data / "utt2spk").exists():
        raise FileNotFoundError(f"{args.data}/utt2spk: no such file; calibration needs speakers")
    manifest = read_manifest([args.data], sample_rate=published.embedder.sample_rate)
    if len(manifest.speakers) < 2:
        raise ValueError(
            f"{args.data}: calibration needs at least two speakers, got {len(manifest.speakers)}; "
            "add recordings of others"
        )
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


def copied(model: Path, exp_dir: Path) -> Path:
    """An experiment that holds a copy of a model."""
    from speakerlab.checkpoints.published import file_sha256
    from speakerlab.training.checkpoint import was_begun

    source, target = find_model(model), exp_dir / "model"
    if target.exists() and target.resolve() == source.resolve():
        return source
    weights = [folder / "embedder.safetensors" for folder in (source, target)]
    if target.exists() and file_sha256(weights[0]) != file_sha256(weights[1]):
        raise ValueError(
            f"{exp_dir}: holds another model than {model}, got sha256 "
            f"{file_sha256(weights[1])[:12]} for {file_sha256(weights[0])[:12]}; use another --exp"
        )
    if was_begun(exp_dir):
        raise ValueError(f"{exp_dir}: is a training, got its checkpoints; use another --exp")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    shutil.copyfile(source / "config.yaml", exp_dir / "config.yaml")
    return target
