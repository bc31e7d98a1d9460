"""Resume on another number of ranks, with the same global batch.

Accumulation makes up for missing ranks. BatchNorm normalises one micro-batch at a time, so the
losses stay the same (up to rounding) if it sees as many crops as before.
"""

import logging
from pathlib import Path
from typing import NamedTuple

from speakerlab.config import build
from speakerlab.config.schema import Config, load_config
from speakerlab.core.counting import count_of
from speakerlab.experiments.device_memory import configured_micro_batch
from speakerlab.experiments.run_log import recorded_facts
from speakerlab.training.batch_size import (
    BatchPlan,
    BatchRequest,
    micro_batches,
)
from speakerlab.training.checkpoint import was_begun
from speakerlab.training.distributed import Ranks

log = logging.getLogger(__name__)


class EarlierPlan(NamedTuple):
    """How the run divided its global batch when it was last started."""

    world_size: int
    micro_batch: int
    bn_batch: int  # crops that BatchNorm sees at once


def read_earlier_plan(
    config: Config,
    exp_dir: Path,
    ranks: Ranks,
) -> EarlierPlan | None:
    """Return the plan of the last start that this one must follow, or None.

    It must if it has another number of ranks, or if an earlier start had, and so has written the
    micro-batch into the configuration of the experiment.
    """

    def read() -> EarlierPlan | None:
        facts = recorded_facts(exp_dir)
        # Without a checkpoint, nothing was trained on the other ranks.
        if not was_begun(exp_dir) or "world_size" not in facts:
            return None
        recorded = load_config([exp_dir / "config.yaml"])
        is_auto = configured_micro_batch(config) is None
        was_kept = is_auto and configured_micro_batch(recorded) is not None
        if facts["world_size"] == ranks.world_size and not was_kept:
            return None
        return EarlierPlan(
            world_size=facts["world_size"],
            micro_batch=facts["bn_batch"] // facts["bn_joined_ranks"],
            bn_batch=facts["bn_batch"],
        )

    # Another host may see older files on a network file system.
    return ranks.on_first(read)


def keep_bn_batch(config: Config, earlier: EarlierPlan, world_size: int) -> Config:
    """Return the configuration with a micro-batch that keeps BatchNorm's, if there is one.

    A configured micro-batch is not changed, and neither is the batch of a training that cannot
    accumulate.
    """
    if configured_micro_batch(config) is not None or build.why_undivided(config):
        return config
    sizes = micro_batches(config.training.global_batch, world_size)
    before = earlier.micro_batch
    # The earlier micro-batch and smaller ones fit into the memory; larger ones may not.
    sizes.sort(key=lambda size: (size > before, abs(size - before)))
    for size in sizes:
        request = BatchRequest(
            global_batch=config.training.global_batch,
            world_size=world_size,
            micro_batch=size,
            bn_batch=config.training.bn_batch,
            join_ranks=config.runtime.sync_bn == "auto",
        )
        if request.bn_batch_of(size) == earlier.bn_batch:
            runtime = config.runtime.model_copy(update={"micro_batch": size})
            return config.model_copy(update={"runtime": runtime})
    return config


def log_other_ranks(config: Config, earlier: EarlierPlan, plan: BatchPlan) -> None:
    """Log what has changed with the number of ranks; a warning if BatchNorm's batch has."""
    unit, _ = build.batch_unit(config)
    if plan.world_size == earlier.world_size:
        log.info(
            "runtime.micro_batch: auto is %d in this run, so that BatchNorm sees %s as"
            " before",
            plan.micro_batch,
            count_of(plan.bn_batch, unit),
        )
        return
    earlier_accumulation = plan.global_batch // (
        earlier.micro_batch * earlier.world_size
    )
    change = (
        f"resumes on {count_of(plan.world_size, 'rank')} instead of"
        f" {earlier.world_size}: micro-batch {plan.micro_batch} x"
        f" {count_of(plan.accumulation, 'accumulation')} instead of"
        f" {earlier.micro_batch} x {earlier_accumulation}"
    )
    if plan.bn_batch == earlier.bn_batch:
        log.info(
            "%s; BatchNorm sees %s as before, so losses are the same up to rounding",
            change,
            count_of(plan.bn_batch, unit),
        )
        return
    log.warning(
        "%s; BatchNorm sees %s instead of %d, so losses differ from those of the same"
        " ranks",
        change,
        count_of(plan.bn_batch, unit),
        earlier.bn_batch,
    )
