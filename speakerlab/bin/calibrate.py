"""Learn from a data directory how to decide or to diarize, and store it with the model."""

import logging
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.checkpoints.catalogue import PREFIX
from speakerlab.checkpoints.hub import local
from speakerlab.checkpoints.model_files import CALIBRATION, TUNING, find_model, read_card
from speakerlab.core.atomic import check_writable, replacing_folder, write_json
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import read_table
from speakerlab.diarization.regions import read_rttm, read_uem

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    options = parser("calibrate", __doc__)
    options.add("--model MODEL", "experiment, model folder, or hub:NAME with --out", required=True)
    data = (
        "checked data directory of speakers that the model was not trained on; for diarization its "
        "wav.scp with the true turns, ref.rttm, and perhaps the regions to score, ref.uem"
    )
    options.add("--data DIR", data, required=True)
    purposes = "thresholds to learn: of verification (default), or the clustering of `diarize`"
    kinds = ("verification", "diarization")
    options.add("--for", purposes, dest="purpose", choices=kinds, default=kinds[0])
    options.add("--far RATE", "false-alarm rates to store thresholds for", nargs="+", default=[])
    options.add("--out EXP", "copy the model to EXP/model and store the calibration there")
    options.add("--force", "replace the calibration that the model has")
    args = options.parse_args(words)
    if args.purpose == "diarization":
        if args.far:
            options.error("--far: is not of diarization")
        learn_tuning(args)
        return
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

    published = load_published(open_model(args.model, args.out, CALIBRATION, force=args.force))
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
    write_json(published.folder / CALIBRATION, asdict(learned))
    sys.stdout.write(
        f"log-likelihood ratio = {learned.slope:.3f} x score {learned.intercept:+.3f}\n"
        f"threshold {learned.threshold:.4f} at the EER, {100 * learned.eer:.2f} %\n"
    )
    for rate, threshold in learned.threshold_at_far.items():
        sys.stdout.write(f"threshold {threshold:.4f} at {100 * float(rate):g} % false alarms\n")
    log.info("%s: written, from %s", published.folder / CALIBRATION, learned.source)


def learn_tuning(args: Namespace) -> None:
    """Find the clustering with the lowest DER on the recordings of the data directory."""
    reference = read_rttm(args.data / "ref.rttm")
    uem = args.data / "ref.uem"
    regions = read_uem(uem) if uem.exists() else None
    folder = open_model(args.model, args.out, TUNING, force=args.force)
    from speakerlab.inference.speaker_model import load_model
    from speakerlab.inference.tuning import tune

    paths, name = read_table(args.data / "wav.scp"), args.data.name
    learned = tune(
        load_model(folder), paths, reference, regions=regions, source=name, progress=True
    )
    write_json(folder / TUNING, asdict(learned))
    for method, der in learned.der.items():
        threshold = f", threshold {learned.threshold:g}" if method == "ahc" else ""
        sys.stdout.write(f"{method}{threshold}: DER {100 * der:.2f} %, collar 0, overlap scored\n")
    log.info("%s: %s, from %s", folder / TUNING, learned.method, learned.source)


def open_model(model: Path, exp_dir: Path | None, name: str, *, force: bool) -> Path:
    """Return the folder to store file `name` in, of the model or of its copy in an experiment."""
    source = find_model(local(model))
    target = source if exp_dir is None else exp_dir / "model"
    check_writable(target / name)
    if exp_dir is not None and target.resolve() != source.resolve():
        copy_model(source, exp_dir)
    elif str(model).startswith(PREFIX):
        raise ValueError(f"--out: missing; give a folder for the calibrated copy of {model}")
    elif (source / name).exists() and not force:
        raise ValueError(
            f"{source / name}: already exists; use --force to replace it, or --out to "
            "calibrate a copy"
        )
    return target


def copy_model(source: Path, exp_dir: Path) -> None:
    """Copy a model folder into an experiment folder, unless the model is there."""
    from speakerlab.training.checkpoint import was_begun

    target = exp_dir / "model"
    if was_begun(exp_dir):
        raise ValueError(f"{exp_dir}: holds a training run; use another folder")
    if not target.exists():
        with replacing_folder(target) as fresh:
            shutil.copytree(source, fresh, dirs_exist_ok=True)
        shutil.copyfile(source / "config.yaml", exp_dir / "config.yaml")
    elif read_card(target)["sha256"] != read_card(source)["sha256"]:  # else keep its other purpose
        raise ValueError(f"{exp_dir}: holds another model than {source}; use another folder")
