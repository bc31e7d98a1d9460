"""Conversations of the task `segmentation`: their truth, their windows, and the local DER of some.

In: the directories of a training, with `ref.rttm` (and `ref.uem`, if only parts have turns) or with
`utt2spk`. Letters: K local speakers, T frames, B windows, C sets of speakers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.core import done
from speakerlab.core.batch import Crop
from speakerlab.core.powerset import NUM_SETS
from speakerlab.core.shapes import shapes_only
from speakerlab.data.conversations import (
    ConversationCrops,
    FrameGrid,
    LocalTurn,
    Reference,
    References,
    Style,
)
from speakerlab.data.loader import DrawFunctions, collate
from speakerlab.data.manifest import Manifest
from speakerlab.diarization.regions import read_rttm, read_uem
from speakerlab.experiments.mixture import draws_of_corpora
from speakerlab.inference.speech import find_speech
from speakerlab.losses.powerset import local_errors
from speakerlab.training.distributed import Ranks

TURNS, REGIONS = "ref.rttm", "ref.uem"
# Windows of a part of the validation set, at most; of recordings, equally many of each. Simulated
# ones are so often as long as their speech.
MAX_VALID_WINDOWS = 200
VALID_REPEATS = 4
# Validation draws the same conversations for every seed, and none of a training.
VALID_SEED = 0
VALID_EPOCH = 1 << 40
VALID_BATCH = 8  # windows at once
# Columns of the errors of a validation: frames and, at last, windows.
MISSED, FALSE_ALARM, CONFUSION, SPOKEN, NOT_FINITE = range(5)
FRAME_COLUMNS = [MISSED, FALSE_ALARM, CONFUSION, SPOKEN]  # as of `local_errors`


def has_turns(folder: Path) -> bool:
    """Return whether a directory has the turns of its recordings."""
    return (folder / TURNS).exists()


def read_references(config: Config, manifest: Manifest) -> list[References]:
    """Return the truth about the recordings of each directory; None to simulate conversations.

    Raises FileNotFoundError for a directory with neither turns nor speakers, ValueError for one
    with turns that lacks a recording.
    """
    references: list[References] = []
    for part, folder in enumerate(config.data.train_folders()):
        if not has_turns(folder):
            if not (folder / "utt2spk").exists():
                raise FileNotFoundError(
                    f"{folder}: has neither {TURNS}, the turns of its recordings, nor"
                    " utt2spk, the speakers to simulate conversations of; add one"
                )
            references.append(None)
            continue
        references.append(_read_turns(folder, manifest, part))
    return references


def _read_turns(folder: Path, manifest: Manifest, part: int) -> dict[str, Reference]:
    rate = manifest.sample_rate
    turns = read_rttm(folder / TURNS)
    regions = {}
    if (folder / REGIONS).exists():
        regions = read_uem(folder / REGIONS)
    references: dict[str, Reference] = {}
    ids = manifest.parts[part].ids
    rows = np.flatnonzero(manifest.part_N == part)
    for row in rows.tolist():
        name = ids[int(manifest.row_N[row])]
        if name not in turns and name not in regions:
            raise ValueError(
                f"{folder / TURNS}: lacks {name}; add its turns, or list it in"
                f" {REGIONS} if nobody speaks, or remove it from wav.scp"
            )
        seconds = int(manifest.num_samples_N[row]) / rate
        local_turns: list[LocalTurn] = []
        for turn in turns.get(name, []):
            local_turn = LocalTurn(turn.start * rate, turn.end * rate, turn.speaker)
            local_turns.append(local_turn)
        local_regions: list[tuple[float, float]] = []
        for start, end in regions.get(name, [(0.0, seconds)]):
            if start < seconds:
                # A region may end after the recording by rounding.
                end = min(end, seconds)
                local_regions.append((start * rate, end * rate))
        if not local_regions:
            raise ValueError(
                f"{folder / REGIONS}: {name} has no region within its {seconds:.1f} s;"
                " correct it"
            )
        references[name] = Reference(local_turns, local_regions)
    return references


def references_digest(references: Sequence[References]) -> str:
    """Return a digest of all turns; a resumed run must keep them."""
    return done.digest([references])


def frame_grid(config: Config) -> FrameGrid:
    """Return the frames of the network's output for a crop."""
    with shapes_only():
        segmenter = build.build_segmenter(config)
    return FrameGrid(
        num_frames=segmenter.num_frames(segmenter.window_samples),
        first=segmenter.centre_samples(0),
        hop=segmenter.hop_samples,
    )


def conversation_crops(
    config: Config,
    manifest: Manifest,
    references: Sequence[References],
    draw_functions: DrawFunctions,
    *,
    seed: int,
    attempt: int = 0,
) -> ConversationCrops:
    """Return the reader of the windows of a manifest."""
    return ConversationCrops(
        manifest,
        draw_functions,
        crop_samples=build.crop_samples(config),
        grid=frame_grid(config),
        references=references,
        style=Style(**config.conversations.model_dump()),
        find_speech=partial(find_speech, sample_rate=manifest.sample_rate),
        seed=seed,
        attempt=attempt,
        codecs=config.augment.codecs,
        draws_of_parts=draws_of_corpora(config, draw_functions),
    )


class SegmentationValidation:
    """Local DER of windows of held-out speakers or recordings.

    Windows are simulated, with rooms and noise as in training, and the same for every seed; those
    of recordings follow each other and are left as they are. The errors of a window are counted
    with the best match of local speakers, and without a collar.
    """

    metric = "der"

    def __init__(
        self,
        config: Config,
        manifest: Manifest,
        references: Sequence[References],
        augment: Any,
    ) -> None:
        self.augment = augment
        self.crops = conversation_crops(
            config, manifest, references, augment.draws, seed=VALID_SEED
        )
        self.windows: list[Crop] = []
        for part, references_of_part in enumerate(references):
            rows = np.flatnonzero(manifest.part_N == part)
            if not len(rows):
                continue
            if references_of_part is None:
                self.windows += self._simulated(rows)
            else:
                self.windows += self._recorded(rows)
        self.names = manifest.names
        self.part_of = [int(manifest.part_N[window.row]) for window in self.windows]

    def run(
        self,
        embedder: Any,
        ranks: Ranks,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:
        """Return the metrics, or None on all ranks if `stop()` is true on any rank.

        embedder: the segmentation network, in the place of an embedder. Every rank takes a share
        of the windows. Raises FloatingPointError on every rank if an output is not finite.
        """
        ranks.copy_from_first(list(embedder.buffers()))
        errors = self._count(
            embedder,
            ranks.device,
            first=ranks.rank,
            step=ranks.world_size,
            stop=stop,
        )
        if any(ranks.gather_objects(stop())):
            return None
        errors = ranks.sum(torch.from_numpy(errors)).numpy()
        num_not_finite = errors[:, NOT_FINITE].sum()
        if num_not_finite:
            text = f"{num_not_finite:.0f} validation windows are not finite"
            raise FloatingPointError(text)
        return self._metrics(errors)

    def measure(self, segmenter: Any, device: torch.device) -> float:
        """Return the local DER of all windows, computed by this rank alone."""
        errors = self._count(segmenter, device, first=0, step=1)
        return self._metrics(errors)[self.metric]

    def _simulated(self, rows: np.ndarray) -> list[Crop]:
        """Return windows of conversations, in which the speakers of these rows take part."""
        num_samples = int(self.crops.manifest.num_samples_N[rows].sum())
        wanted = math.ceil(VALID_REPEATS * num_samples / self.crops.crop_samples)
        windows: list[Crop] = []
        for position in range(min(wanted, MAX_VALID_WINDOWS)):
            row = int(rows[position % len(rows)])
            windows.append(self.crops.draw((VALID_EPOCH, position, row)))
        return windows

    def _recorded(self, rows: np.ndarray) -> list[Crop]:
        """Return windows of the recordings in these rows, spread over each of them."""
        max_windows = max(1, MAX_VALID_WINDOWS // len(rows))
        windows: list[Crop] = []
        for row in rows.tolist():
            starts = self.crops.starts(row)
            num_windows = min(max_windows, len(starts))
            places = np.linspace(0, len(starts) - 1, num_windows)
            for index in np.round(places).astype(int).tolist():
                window = self.crops.draw((VALID_EPOCH, 0, row))
                windows.append(replace(window, first=starts[index], draws={}))
        return windows

    @torch.no_grad()
    def _count(
        self,
        segmenter: Any,
        device: torch.device,
        *,
        first: int,
        step: int,
        stop: Callable[[], bool] = lambda: False,
    ) -> np.ndarray:
        """Return the errors of every `step`-th window from `first` on, (parts, 5 columns)."""
        errors = np.zeros((len(self.names), 5))
        segmenter.eval()
        all_indices = range(first, len(self.windows), step)
        for start in range(0, len(all_indices), VALID_BATCH):
            if stop():
                break
            indices = all_indices[start : start + VALID_BATCH]
            crops = [self.crops.read(self.windows[index]) for index in indices]
            batch = collate(crops)
            wave_BS = self.augment(batch.to(device))
            self.augment.take_silent()
            log_prob_BTC = segmenter(wave_BS)
            best_BT = log_prob_BTC.argmax(dim=2)
            best_BTC = F.one_hot(best_BT, NUM_SETS).cpu().numpy()
            is_finite_B = log_prob_BTC.isfinite().all(dim=2).all(dim=1)
            assert batch.speech_BKT is not None
            speech_BKT = batch.speech_BKT.numpy()
            for index, best_TC, speech_KT, is_finite in zip(
                indices,
                best_BTC,
                speech_BKT,
                is_finite_B.tolist(),
            ):
                part = self.part_of[index]
                errors[part, FRAME_COLUMNS] += local_errors(best_TC, speech_KT)
                errors[part, NOT_FINITE] += not is_finite
        return errors

    def _metrics(self, errors: np.ndarray) -> dict[str, float]:
        """Return the local DER and its parts, and the DER of each of several corpora."""
        missed, false_alarm, confusion, spoken, _ = errors.sum(axis=0).tolist()
        # Without any speech, every found frame is an error.
        spoken = max(spoken, 1.0)
        metrics = {
            "der": (missed + false_alarm + confusion) / spoken,
            "missed": missed / spoken,
            "false_alarm": false_alarm / spoken,
            "confusion": confusion / spoken,
        }
        with_speech = np.flatnonzero(errors[:, SPOKEN]).tolist()
        if len(with_speech) > 1:
            for part in with_speech:
                name = self.names[part].strip("/")
                total = errors[part, [MISSED, FALSE_ALARM, CONFUSION]].sum()
                metrics[f"der/{name}"] = float(total / errors[part, SPOKEN])
        return metrics
