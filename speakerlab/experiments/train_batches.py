"""Micro-batches of a training: the order of the crops, and the data workers that read them.

Letters: N training utterances, V speeds, D dimensions of a teacher.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.core.batch import Batch
from speakerlab.data.loader import TrainCrops, micro_batches, train_loader
from speakerlab.data.remote import crops_ahead
from speakerlab.data.sampler import EpochOrder, sampled_lengths
from speakerlab.data.target_frames import TargetFrames
from speakerlab.data.workers import SHARED_MEMORY, auto_workers, fit_workers
from speakerlab.experiments.conversations import conversation_crops
from speakerlab.experiments.corpus import Corpus, row_labels
from speakerlab.experiments.device_memory import configured_micro_batch
from speakerlab.experiments.footprint import batch_bytes
from speakerlab.experiments.mixture import (
    corpus_shares,
    draws_of_corpora,
    seconds_per_crop,
)
from speakerlab.experiments.stored_features import frames_to_read
from speakerlab.frontend.augment import Augment
from speakerlab.training.batch_size import (
    MAX_MICRO_BATCH,
    MIN_MICRO_BATCH,
    BatchPlan,
)
from speakerlab.training.distributed import Ranks

log = logging.getLogger(__name__)


@dataclass(eq=False)
class TrainBatches:
    """Micro-batches of this rank; each attempt has another order and other random draws."""

    config: Config
    corpus: Corpus
    classes: Sequence[str]
    augment: Augment
    ranks: Ranks
    plan: BatchPlan
    # A teacher's embedding at each speed of each training utterance; None without stored targets.
    target_VND: np.ndarray | None = None
    target_frames: Sequence[TargetFrames] = ()  # its frames at each speed

    def __post_init__(self) -> None:
        config = self.config
        # Rows of a batch for each entry of the order.
        self.views_each = build.views_each(config)
        self.crops_each = build.crops_each(config) * self.views_each
        self.shared_draws = shared_draws(self.augment, same_crop=self.views_each > 1)
        if self.plan.micro_batch % self.views_each:
            raise ValueError(
                f"distil.views: {self.views_each} does not divide the micro-batch,"
                f" {self.plan.micro_batch} crops; set runtime.micro_batch to a multiple"
            )
        # All attempts have the same number of steps per epoch, in different orders.
        self.order = self.order_of(attempt=0)
        # With epoch_hours, the user asked for a repeated corpus.
        if config.training.epoch_hours is None and self.order.repeats > 1:
            log.info(
                "the corpus is shorter than a global batch: each epoch repeats it %.1f"
                " times",
                self.order.repeats,
            )

        # Options of TrainCrops; empty if the corpus holds waves.
        self.stored: dict[str, Any] = {}
        if config.data.features != "wave":
            self.stored = frames_to_read(
                self.corpus.train, config.frontend, build.crop_samples(config)
            )
        self.num_workers = self._count_workers()

    def _count_workers(self) -> int:
        """Return the number of data workers of this rank that fit in shared memory."""
        num_ranks = self.ranks.local_size
        return count_workers(
            self.config,
            self.plan.micro_batch,
            noise=not self.corpus.noise_on_device,
            local_ranks=num_ranks,
            gpus=num_ranks if self.ranks.device.type == "cuda" else 0,
        )

    def read_from(self, step: int, attempt: int) -> Iterator[Batch]:
        """Read the micro-batches of an attempt from a step to the end of the training."""
        order = self.order_of(attempt=attempt)
        positions = micro_batches(
            order,
            start_step=step,
            stop_step=self.config.training.num_epochs * order.steps_per_epoch,
            micro_batch=self.plan.micro_batch // self.views_each,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            crops_each=self.crops_each,
        )
        return train_loader(
            self.crops_of(attempt=attempt),
            positions,
            num_workers=self.num_workers,
            # A GPU copies from pinned memory while it computes.
            pin_memory=self.ranks.device.type == "cuda",
            stall_seconds=self.config.runtime.stall_seconds,
            num_ahead=crops_ahead(self.ranks.local_size),
        )

    def order_of(self, *, attempt: int) -> EpochOrder:
        """Return the order of all epochs; every attempt has the same length."""
        training = self.config.training
        train = self.corpus.train

        # None: the whole corpus, but at least a global batch.
        epoch_samples = None
        if training.epoch_hours is not None:
            epoch_samples = training.epoch_hours * 3600 * train.sample_rate

        # Seconds of an utterance per crop; None: the sampler's default.
        crop_interval = seconds_per_crop(self.config, train)
        if crop_interval is not None:
            crop_interval = crop_interval * train.sample_rate
        lengths_N = train.num_samples_N
        if crop_interval is not None:
            lengths_N = sampled_lengths(
                lengths_N,
                crop_interval,
                crop_samples=build.crop_samples(self.config),
            )
        samples_of_corpora = np.bincount(
            train.part_N, weights=lengths_N, minlength=len(train.parts)
        )

        return EpochOrder(
            train.num_samples_N,
            crop_samples=build.crop_samples(self.config),
            # The order has an entry for each crop; its views are rows of the same batch.
            global_batch=training.global_batch // self.views_each,
            seed=self.config.seed,
            attempt=attempt,
            epoch_samples=epoch_samples,
            one_crop_per=crop_interval,
            speaker_N=train.speaker_N,
            speaker_balance=training.speaker_balance,
            corpus_N=train.part_N,
            corpus_shares=corpus_shares(self.config, samples_of_corpora.tolist()),
        )

    def crops_of(self, *, attempt: int) -> TrainCrops:
        """Return the reader of crops, with the labels and the random draws of an attempt."""
        config = self.config
        if config.task == "segmentation":
            return conversation_crops(
                config,
                self.corpus.train,
                self.corpus.references,
                self.augment.draws,
                seed=config.seed,
                attempt=attempt,
            )
        return TrainCrops(
            self.corpus.train,
            self.augment.draws,
            crop_samples=build.crop_samples(config),
            **self.stored,
            speeds=config.augment.speeds,
            codecs=config.augment.codecs,
            label_KN=row_labels(config, self.corpus, self.classes),
            seed=config.seed,
            attempt=attempt,
            crops_each=self.crops_each,
            shared_draws=self.shared_draws,
            # The first views of an utterance, which are not augmented.
            clean_crops=config.views.clean if config.task == "ssl" else 0,
            target_KND=self.target_VND,
            target_frames=self.target_frames,
            draws_of_parts=draws_of_corpora(config, self.augment.draws),
        )


def shared_draws(augment: Augment, *, same_crop: bool) -> set[str]:
    """Return the names of the draws that all crops of an entry share: those of their voice.

    same_crop: they also begin at the same sample.
    """
    names = {"crop"} if same_crop else set()
    for name, augmentation in augment.augmentations.items():
        if augmentation.changes_voice:
            names.add(name)
    return names


def count_workers(
    config: Config,
    micro_batch: int,
    *,
    noise: bool = False,
    local_ranks: int,
    gpus: int,
) -> int:
    """Return the number of data workers of each rank that fit in shared memory.

    noise: whether the workers also send noise. gpus: number of GPUs of this host that ranks use.
    Raises ValueError if a configured number does not fit.
    """
    configured = config.runtime.num_workers
    wanted = auto_workers(local_ranks) if configured == "auto" else configured
    num_workers = fit_workers(
        wanted,
        batch_bytes=batch_bytes(config, micro_batch, noise=noise),
        local_ranks=local_ranks,
        gpus=gpus,
    )
    if num_workers == wanted:
        return num_workers

    # Lower a default number; refuse a configured one.
    message = (
        f"runtime.num_workers: {wanted} for each of {local_ranks} ranks do not"
        f" fit in {SHARED_MEMORY}, {num_workers} do; enlarge it (docker"
        " run --shm-size=2g, or --ipc=host)"
    )
    if configured != "auto":
        raise ValueError(f"{message}, or lower runtime.num_workers (0 needs none)")
    if num_workers == 0:
        log.warning("%s; without workers, training waits for each batch", message)
    else:
        log.info("%s", message)
    return num_workers


def check_shared_memory(config: Config, *, local_ranks: int, gpus: int) -> None:
    """Check before hours of work whether the data workers of a training will fit.

    The micro-batch is not planned yet: a configured number of workers is refused if it does not
    even fit with the smallest one, and a default number warns as with the largest one.
    """
    training = config.training
    micro_batch = configured_micro_batch(config)
    if micro_batch is None and config.runtime.num_workers == "auto":
        micro_batch = training.bn_batch or MAX_MICRO_BATCH
    elif micro_batch is None:
        micro_batch = MIN_MICRO_BATCH
    count_workers(
        config,
        min(micro_batch, training.global_batch),
        local_ranks=local_ranks,
        gpus=gpus,
    )
