"""Log the start of a training: `train.log`, its first lines, and `run.json`."""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speakerlab.checkpoints import provenance
from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.core.atomic import write_json
from speakerlab.core.counting import count_of
from speakerlab.core.reading import read_json
from speakerlab.experiments import consistency
from speakerlab.experiments.corpus import class_speeds, counted
from speakerlab.experiments.train_batches import TrainBatches
from speakerlab.training.appended import LogFile
from speakerlab.training.checkpoint import was_begun
from speakerlab.training.devices import reason_for_device
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import Precision
from speakerlab.training.task import Task

log = logging.getLogger(__name__)

# The linear scaling rule of the learning rate (Goyal et al., arXiv 1706.02677) fails far from the
# base batch.
MAX_LR_SCALE = 4.0


def log_to(exp_dir: Path, ranks: Ranks) -> None:
    """Also log rank 0 to `exp/train.log`; on other ranks, show only errors and stalled readers."""
    if ranks.is_first:
        file = LogFile(exp_dir / "train.log")
        file.setFormatter(
            logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
        )
        logging.getLogger().addHandler(file)
    else:
        # Rank 0 logs the same warnings, except those about this rank's data workers.
        logging.getLogger().setLevel(logging.ERROR)
        logging.getLogger("speakerlab.data.workers").setLevel(logging.WARNING)
        warnings.simplefilter("ignore")


@contextmanager
def undone_if_refused(exp_dir: Path, *, is_new: bool) -> Iterator[None]:
    """Remove a new experiment if this block refuses it, and stop logging to its folder."""
    try:
        yield
    except (ValueError, OSError):
        # The folder would look like a training in progress.
        if is_new:
            logger = logging.getLogger()
            logger.handlers = [
                handler
                for handler in logger.handlers
                if not isinstance(handler, LogFile)
            ]
            # On NFS, the open lock file outlives the removal: its errors do not matter.
            shutil.rmtree(exp_dir, ignore_errors=True)
        raise


def log_device(
    exp_dir: Path, config: Config, ranks: Ranks, precision: Precision
) -> None:
    """Log the device, the precision and its reason: the first lines of a run."""
    if ranks.device.type == "cpu":
        place = "the CPU"
    elif ranks.world_size > 1:
        place = "GPUs"
    else:
        place = "a GPU"
    log.info(
        "%s: trains on %s: %s; %s (%s)",
        exp_dir,
        place,
        reason_for_device(ranks.device, config.runtime.device),
        precision.name,
        precision.reason,
    )

    # A resumed run may be on another GPU, on which `auto` means another precision.
    recorded = exp_dir / "run.json"
    if recorded.exists() and was_begun(exp_dir):
        first_precision = read_json(recorded).get("precision", precision.name)
        if first_precision != precision.name:
            log.warning(
                "%s: the run began in %s and continues in %s, so its result is not that"
                " of an uninterrupted run; to keep %s, set runtime.precision=%s",
                exp_dir,
                first_precision,
                precision.name,
                first_precision,
                first_precision,
            )


def collect_facts(source: TrainBatches, precision: Precision) -> dict[str, Any]:
    """Return facts about the run, for run.json, the model's card and the log."""
    config = source.config
    ranks = source.ranks
    plan = source.plan
    corpus = source.corpus
    train = corpus.train
    valid = corpus.valid
    train_unit, valid_unit = counted(config)
    # Identification validates on the training classes, so log utterances instead of classes.
    num_valid = len(valid) if valid_unit == "utterances" else len(valid.speakers)

    # Only training without labels has an objective instead of a head.
    objective = config.objective if config.task == "ssl" else None
    # fp32 needs no autocast.
    autocast_dtype = None
    if precision.name != "fp32":
        autocast_dtype = str(precision.dtype).removeprefix("torch.")

    return {
        **provenance.environment(ranks.device),
        "precision": precision.name,
        "precision_reason": precision.reason,
        "autocast_dtype": autocast_dtype,
        "loss_scaling": precision.scales_loss,
        "world_size": ranks.world_size,
        "batch": str(plan),
        "bn_batch": plan.bn_batch,
        "bn_joined_ranks": plan.joined_ranks,
        "seed": config.seed,
        f"train_{train_unit}": len(train.speakers),
        "train_utterances": len(train),
        "classes": len(source.classes),
        "objective": None if objective is None else objective.name,
        "train_hours": round(train.hours, 3),
        "train_sha256": corpus.train_sha256(),
        f"valid_{valid_unit}": num_valid,
        "rooms": len(corpus.rooms),
        "noises": len(corpus.noise),
        "noise_on_device": corpus.noise_on_device,
        "steps_per_epoch": source.order.steps_per_epoch,
        "crops_dropped_per_epoch": source.order.num_dropped,
    }


def log_start(exp_dir: Path, config: Config, facts: dict[str, Any], task: Task) -> None:
    """Log batch, data, learning rate and size of the model; write run.json."""
    _log_batch_and_data(config, facts)
    _log_learning_rate(exp_dir, config, facts["steps_per_epoch"])

    training = config.training
    # Otherwise the learning rate or the margin never reaches its configured value.
    if training.num_epochs < max(training.warmup_epochs, training.margin.end_epoch):
        log.warning(
            "training.num_epochs: %d ends before warmup_epochs (%g) or margin.end_epoch"
            " (%g)",
            training.num_epochs,
            training.warmup_epochs,
            training.margin.end_epoch,
        )
    num_parameters = 0
    num_learned = 0
    for parameter in task.embedder.parameters():
        num_parameters += parameter.numel()
        if parameter.requires_grad:
            num_learned += parameter.numel()
    learned = ""
    if num_learned < num_parameters:
        learned = f", of which {num_learned / 1e6:.2f} M learn"
    log.info(
        "%s: %.2f M parameters%s", config.model.name, num_parameters / 1e6, learned
    )
    write_json(exp_dir / "run.json", facts)


def recorded_facts(exp_dir: Path) -> dict[str, Any]:
    """Return the facts in run.json about the training; empty without this file."""
    path = exp_dir / "run.json"
    return read_json(path) if path.exists() else {}


def _log_batch_and_data(config: Config, facts: dict[str, Any]) -> None:
    batch_unit, _ = build.batch_unit(config)
    train_unit, valid_unit = counted(config)

    joined_ranks = ""
    if facts["bn_joined_ranks"] > 1:
        joined_ranks = f" of {facts['bn_joined_ranks']} ranks"
    log.info(
        "%s; BatchNorm sees %s%s at once",
        facts["batch"],
        count_of(facts["bn_batch"], batch_unit),
        joined_ranks,
    )

    # The number of utterances is always logged after this count.
    train_count = ""
    if train_unit != "utterances":
        train_count = f"{facts[f'train_{train_unit}']} {train_unit}, "
    log.info(
        "%s%s, %.2f h; %d validation %s; %s, %s; %s per epoch, %s of the incomplete last"
        " step dropped",
        train_count,
        count_of(facts["train_utterances"], "utterance"),
        facts["train_hours"],
        facts[f"valid_{valid_unit}"],
        valid_unit,
        count_of(facts["rooms"], "room"),
        count_of(facts["noises"], "noise"),
        count_of(facts["steps_per_epoch"], "step"),
        count_of(facts["crops_dropped_per_epoch"], batch_unit),
    )

    if config.task == "verification" and len(config.augment.speeds) > 1:
        # With speed classes, the head has several rows per speaker.
        makes_speakers = len(class_speeds(config)) > 1
        log.info(
            "%s: speeds %s (augment.speed_classes: %s)",
            count_of(facts["classes"], "class"),
            "make new speakers" if makes_speakers else "keep the speaker",
            config.augment.speed_classes,
        )


def _log_learning_rate(exp_dir: Path, config: Config, steps_per_epoch: int) -> None:
    training = config.training
    lr_at = build.build_learning_rate(config, steps_per_epoch)
    last_lr = lr_at(lr_at.total_steps - 1)
    log.info(
        "learning rate %g after the warm-up, %g at the end (schedule %s; training.lr:"
        " %g for a global batch of %d); gradients clipped at %g",
        lr_at(lr_at.warmup_steps),
        last_lr,
        config.schedule.name,
        training.lr,
        training.lr_base_batch,
        training.clip_norm,
    )
    # The configured learning rate is for `lr_base_batch`.
    scale = training.global_batch / training.lr_base_batch
    if scale > MAX_LR_SCALE:
        log.warning(
            "training.lr: scaled by %.1f for the global batch; above %g training often"
            " diverges",
            scale,
            MAX_LR_SCALE,
        )

    # Log only the latest change of the number of epochs.
    if training.extended:
        step, old_num_epochs = training.extended[-1]
        log.info(
            "step %d: %d instead of %s; the learning rate continues at %.3g, to %.3g",
            step,
            training.num_epochs,
            count_of(old_num_epochs, "epoch"),
            lr_at(step),
            last_lr,
        )
        # The learning rate had already decayed to its final value before the extension.
        if max(lr_at(step), last_lr) <= lr_at.final:
            log.warning(
                "training.num_epochs: the learning rate stays at %.3g; for a higher"
                " one, repeat the command with --exp %s --init %s",
                last_lr,
                consistency.unused_name(exp_dir),
                exp_dir,
            )
