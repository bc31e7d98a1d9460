"""Learn from a data directory how to decide or to diarize, and store it with the model."""

import logging
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from speakerlab.bin.command import choose_gpus, parser
from speakerlab.checkpoints import model_files
from speakerlab.checkpoints.hub import is_published, local
from speakerlab.checkpoints.model_files import (
    CALIBRATION,
    PLDA,
    TUNING,
    find_model,
    read_card,
    read_classes,
    read_tuning,
    write_calibration,
    write_plda,
    write_tuning,
)
from speakerlab.core import done
from speakerlab.core.atomic import (
    check_writable,
    locked,
    replacing_folder,
    write_text,
)
from speakerlab.core.reading import read_text
from speakerlab.core.tuning import Tuning
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import list_tables, read_table
from speakerlab.diarization.regions import Region, Turn, read_rttm, read_uem

log = logging.getLogger(__name__)
# In the model folder: the inputs of its clustering, and of its calibration.
RECORD = ".tuning"
CALIBRATION_RECORD = ".calibration"
# Also there: held while one of them is learned, so that it and its record are of one command.
TUNING_LOCK = ".tuning.lock"
CALIBRATION_LOCK = ".calibration.lock"
COPY_LOCK = ".copy.lock"  # in the experiment of --out


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    if args.purpose == "diarization":
        learn_tuning(args)
    else:
        learn_calibration(args)


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("calibrate", __doc__)
    options.add(
        "--model MODEL",
        "experiment, model folder, or hub:NAME or hf:owner/name with --out",
        required=True,
    )
    data = (
        "checked data directory of speakers that the model was not trained on; for"
        " diarization its wav.scp with the true turns, ref.rttm, and perhaps the"
        " regions to score, ref.uem"
    )
    options.add("--data DIR", data, required=True)
    purposes = (
        "thresholds to learn: of verification (default), or the clustering of `diarize`"
    )
    # `for` is a Python keyword: args.for would be a syntax error.
    options.add(
        "--for",
        purposes,
        dest="purpose",
        choices=("verification", "diarization"),
        default="verification",
    )
    options.add(
        "--far RATE", "false-alarm rates to store thresholds for", nargs="+", default=[]
    )
    options.add(
        "--out EXP", "copy the model to EXP/model and store the calibration there"
    )
    options.add(
        "--development DIR",
        "with --for diarization, checked data of at least 80 speakers: also compare vbx,"
        " and store the PLDA that it learns from them",
    )
    options.add("--force", "replace the calibration that the model has")
    options.add_gpus("to embed with")
    args = options.parse_args(arguments)
    choose_gpus(args.gpus)
    if args.purpose == "diarization" and args.far:
        options.error("--far: is not of diarization")
    if args.purpose == "verification" and args.development is not None:
        options.error("--development: needs --for diarization")
    return args


def learn_calibration(args: Namespace) -> None:
    """Learn likelihood ratios and thresholds from pairs of the data directory's utterances."""
    labels = args.data / "utt2spk"
    if not labels.exists():
        if not args.data.exists():
            raise FileNotFoundError(f"{args.data}: does not exist; correct the path")
        raise FileNotFoundError(
            f"{labels}: does not exist; calibration needs speaker labels"
        )
    folder = open_model(args.model, args.out, CALIBRATION, force=args.force)
    with locked(folder / CALIBRATION_LOCK):
        # Another command may have stored a calibration since.
        open_model(args.model, args.out, CALIBRATION, force=args.force)
        store_calibration(args, folder)


def store_calibration(args: Namespace, folder: Path) -> None:
    """Learn a calibration and write it into the model folder, which is locked."""
    import torch  # only after the options are checked

    from speakerlab.checkpoints.published import load_published
    from speakerlab.data.workers import auto_workers
    from speakerlab.experiments.validation import PairValidation
    from speakerlab.inference.batches import embed_pieces
    from speakerlab.inference.workers import share_threads
    from speakerlab.training.devices import count_gpus

    published = load_published(folder)
    sample_rate = published.embedder.sample_rate
    manifest = read_manifest([args.data], sample_rate=sample_rate)
    if len(manifest.speakers) < 2:
        raise ValueError(f"{args.data}: has one speaker; calibration needs at least 2")
    trained = set(read_classes(folder)).intersection(manifest.speakers)
    if trained:
        log.warning(
            "%s: the model was trained on %d of its %d speakers, so the threshold is"
            " unreliable; give other speakers",
            args.data,
            len(trained),
            len(manifest.speakers),
        )

    inputs = {"data": args.data.absolute(), "sha256": manifest.sha256()}
    record = folder / CALIBRATION_RECORD
    # An experiment of a recipe is of one corpus.
    before = done.read_record(record)
    if before.get("sha256", inputs["sha256"]) != inputs["sha256"] and not args.force:
        raise ValueError(
            f"{folder}: its threshold was learned from other recordings, of"
            f" {before['data']}; use another --out (run.sh: --exp), or --force to"
            " replace it"
        )

    validation = PairValidation(manifest)
    on_gpu = count_gpus() > 0
    emb_ND = embed_pieces(
        published.embedder.for_inference(in_place=True),
        validation.pieces,
        device=torch.device("cuda" if on_gpu else "cpu"),
        progress=True,
        num_threads=share_threads(1),
        # On a CPU, workers would take CPU time from the network.
        num_workers=auto_workers(1) if on_gpu else 0,
    )

    learned = validation.calibrate(emb_ND, source=args.data.name, fars=args.far)
    # A low score would then mean the same speaker.
    if learned.slope <= 0:
        raise ValueError(
            f"{args.data}: recordings of one speaker are no more alike than those of"
            f" different speakers (EER {100 * learned.eer:.1f} %), so there is no"
            " threshold; check that utt2spk names the speakers, and the model"
        )
    # Without a record, if this command ends before the new one.
    done.forget(record)
    write_calibration(folder, learned)
    done.record(record, inputs)
    sys.stdout.write(
        f"log-likelihood ratio = {learned.slope:.3f} x score {learned.intercept:+.3f}\n"
        f"threshold {learned.threshold:.4f} at the EER, {100 * learned.eer:.2f} %\n"
    )
    for rate, threshold in learned.threshold_at_far.items():
        sys.stdout.write(
            f"threshold {threshold:.4f} at {100 * float(rate):g} % false alarms\n"
        )
    log.info("%s: written, from %s", folder / CALIBRATION, learned.source)


def learn_tuning(args: Namespace) -> None:
    """Find the clustering with the lowest DER on the recordings of the data directory."""
    reference = read_rttm(args.data / "ref.rttm")
    uem = args.data / "ref.uem"
    # Without a UEM file, the whole extent of the turns is scored.
    regions = read_uem(uem) if uem.exists() else None
    paths = read_table(args.data / "wav.scp")

    folder = open_model(args.model, args.out, TUNING, force=args.force)
    with locked(folder / TUNING_LOCK):
        # Another command may have stored a clustering since.
        open_model(args.model, args.out, TUNING, force=args.force)
        store_tuning(
            folder,
            data=args.data,
            paths=paths,
            reference=reference,
            regions=regions,
            development=args.development,
        )


def store_tuning(
    folder: Path,
    *,
    data: Path,
    paths: Mapping[str, str],
    reference: Mapping[str, Sequence[Turn]],
    regions: Mapping[str, Sequence[Region]] | None,
    development: Path | None,
) -> None:
    """Learn a clustering and write it into the model folder, which is locked.

    development: whose speakers a PLDA is learned from (None: the PLDA of the model stays).
    """
    inputs = tuning_inputs(folder, data, paths, development)
    stored = folder / TUNING
    if done.is_done(folder / RECORD, {**inputs, **stored_digests(folder)}):
        log.info("%s: already calibrated with this model and data, kept", stored)
        print_tuning(read_tuning(folder))
        return
    from speakerlab.inference.speaker_model import load_model
    from speakerlab.inference.tuning import learn_window_plda, tune

    model = load_model(folder)
    before = model.tuning
    plda = None
    plda_source = before.plda_source
    if development is not None:
        plda, plda_source = learn_window_plda(model, development, progress=True)
    elif before.plda_sha256 is not None:
        plda = model.read_plda()
    learned = tune(
        model,
        paths,
        reference,
        regions=regions,
        source=data.name,
        plda=plda,
        progress=True,
    )
    done.forget(folder / RECORD)
    if plda is not None:
        plda_sha256 = write_plda(folder, plda)
        learned = replace(learned, plda_sha256=plda_sha256, plda_source=plda_source)
    write_tuning(folder, learned)
    done.record(folder / RECORD, {**inputs, **stored_digests(folder)})
    print_tuning(learned)
    log.info("%s: %s, from %s", stored, learned.method, learned.source)


def stored_digests(folder: Path) -> dict[str, str]:
    """Return the digests of what is stored, for its record: another command may replace it."""
    return {
        "tuning": done.file_digest(folder / TUNING),
        "plda": done.file_digest(folder / PLDA),
    }


def tuning_inputs(
    folder: Path, data: Path, paths: Mapping[str, str], development: Path | None
) -> dict[str, Any]:
    """Return the inputs that the clustering of a model folder depends on, for its record."""
    speakers = None
    if development is not None:
        tables = [*list_tables(development), "utt2dur", "rejected.tsv"]
        speakers = done.files_digest(development, tables)
    recordings = sorted(paths.values())
    # Sizes and times of the audio files, because reading the audio would take long.
    stamps = done.stamps(recordings)
    stamped_recordings = list(zip(recordings, stamps))
    return {
        "model": read_card(folder)["sha256"],
        "data": data.absolute(),
        "turns": done.files_digest(data, ["wav.scp", "ref.rttm", "ref.uem"]),
        "recordings": done.digest(stamped_recordings),
        "development": speakers,
        "code": done.code_digest(),
    }


def print_tuning(tuning: Tuning) -> None:
    """Print the DER of each method tried."""
    settings = {
        "ahc": f", threshold {tuning.threshold:g}",
        "vbx": f", Fb {tuning.fb:g}",
    }
    for method, der in tuning.der.items():
        setting = settings.get(method, "")
        sys.stdout.write(
            f"{method}{setting}: DER {100 * der:.2f} %, collar 0, overlap scored\n"
        )


def open_model(model: Path, exp_dir: Path | None, name: str, *, force: bool) -> Path:
    """Return the folder for file `name`: the model's, or its copy in an experiment."""
    source = find_model(local(model))
    target = source if exp_dir is None else exp_dir / "model"
    check_writable(target / name)
    # --out may be the model's own experiment: then there is nothing to copy.
    is_copy = target.resolve() != source.resolve()
    if exp_dir is not None and is_copy:
        copy_model(source, exp_dir)
    elif is_published(model):
        raise ValueError(
            f"--out: missing; give a folder for the calibrated copy of {model}"
        )
    elif (source / name).exists() and not force:
        raise ValueError(
            f"{source / name}: already exists; use --force to replace it, or --out to "
            "calibrate a copy"
        )
    return target


def copy_model(source: Path, exp_dir: Path) -> None:
    """Copy a model folder into an experiment folder, unless it already has the model."""
    from speakerlab.training.checkpoint import was_begun

    target = exp_dir / "model"
    if was_begun(exp_dir):
        raise ValueError(f"{exp_dir}: holds a training run; use another folder")
    if not target.exists():
        exp_dir.mkdir(parents=True, exist_ok=True)
        # Two commands may copy it at the same time, for verification and for diarization: the
        # second copy would replace what the first command has stored in its own.
        with locked(exp_dir / COPY_LOCK):
            if not target.exists():
                config = read_text(source / "config.yaml")
                write_text(exp_dir / "config.yaml", config)
                # Last: a folder `model` is never copied again.
                with replacing_folder(target) as fresh:
                    # The record is of the calibration that the copy will not have.
                    others = (CALIBRATION_RECORD, CALIBRATION_LOCK, TUNING_LOCK)
                    model_files.copy_model(source, fresh, leave_out=others)
    # Keep the copy of an earlier call, with its calibration or clustering.
    copied_sha256 = read_card(target)["sha256"]
    if copied_sha256 != read_card(source)["sha256"]:
        raise ValueError(
            f"{exp_dir}: holds another model than {source}; use another folder"
        )
