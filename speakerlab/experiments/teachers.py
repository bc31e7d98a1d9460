"""Teachers of distillation: load them, check that they fit, and compute their embeddings.

A teacher is a model that is never trained here. It keeps its own front end, and may be an
experiment, a model folder, hub:NAME or an exported .onnx file. Several teachers make one target:
their embeddings of length 1, side by side.

Letters: B rows, R rows at a time, N utterances, V speeds ("voices"), S samples, D dimensions of all
teachers, K common directions, T frames, C channels of a frame.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.checkpoints.hub import local
from speakerlab.checkpoints.model_files import (
    find_model,
    read_card,
    read_source,
    space_of,
)
from speakerlab.checkpoints.published import load_published
from speakerlab.config.build import build_network, crop_samples
from speakerlab.config.schema import Config, load_config
from speakerlab.core.atomic import check_writable
from speakerlab.core.directions import common_directions
from speakerlab.core.shapes import shapes_only
from speakerlab.data.decoders import FULL_SCALE
from speakerlab.data.manifest import Manifest
from speakerlab.data.target_frames import TargetFrames
from speakerlab.experiments.stored_frames import StoredTargets, stored_frames
from speakerlab.experiments.validation import num_readers
from speakerlab.inference.at_speed import at_speed
from speakerlab.inference.batches import embed_batches
from speakerlab.inference.extraction import Extraction, plan_extraction
from speakerlab.inference.onnx_embedder import OnnxEmbedder
from speakerlab.inference.onnx_model import OnnxModel
from speakerlab.inference.workers import sharing_threads
from speakerlab.models.frames import num_channels
from speakerlab.training.distillation import Heard
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import Precision

log = logging.getLogger(__name__)
# Rows that a teacher embeds at a time, which bounds its memory.
MAX_ROWS = 64
# Training utterances in which the common directions of teachers that hear crops are measured.
MAX_MEASURED = 300
# Utterances in whose middle the mean and the deviation of a teacher's frames are measured.
NUM_FRAME_CROPS = 64
# A channel that is almost always 0 would have huge values in units of its own deviation.
LEAST_DEVIATION = 0.3  # of the median channel's


@dataclass(frozen=True)
class TeacherModel:
    """A loaded teacher. Its embedder maps waves (B, S) in [-1, 1] to embeddings of `embed_dim`."""

    name: str  # as configured
    embedder: Any  # Embedder or OnnxEmbedder
    sha256: str
    facts: dict[str, Any]  # for the student's card

    @property
    def embed_dim(self) -> int:
        return self.embedder.embed_dim


class TeacherGroup:
    """All teachers of a training, as one function; see `training.distillation.Teacher`."""

    def __init__(self, embedders: Sequence[Any], *, frames: bool = False) -> None:
        """frames: whether the frames of the only teacher are returned, too."""
        self.embedders = embedders
        self.returns_frames = frames

    @torch.no_grad()
    def __call__(self, wave_BS: Tensor) -> Heard:
        """Return the unit embeddings of all teachers side by side."""
        targets: list[Tensor] = []
        frames: list[Tensor] = []
        for rows_RS in wave_BS.split(MAX_ROWS):
            embeddings: list[Tensor] = []
            for embedder in self.embedders:
                noting: Any = nullcontext()
                if self.returns_frames:
                    noting = embedder.noting_frames()
                with noting as noted:
                    emb_RD: Tensor = embedder(rows_RS)
                embeddings.append(F.normalize(emb_RD.float(), dim=1))
                if noted is not None:
                    frames.append(noted.take().float())
            targets.append(torch.cat(embeddings, dim=1))
        return Heard(torch.cat(targets), torch.cat(frames) if frames else None)


class FrameUnits(NamedTuple):
    """Units in which the frames of a teacher are compared."""

    mean_C: np.ndarray
    deviation_C: np.ndarray


@dataclass(frozen=True)
class Teaching:
    """What the teachers contribute to a training."""

    facts: dict[str, Any]  # for run.json and the card
    # What the teachers' embeddings of training utterances have in common.
    common_KD: np.ndarray
    valid_target_ND: np.ndarray
    # Of the training utterances at each speed; None where the teachers hear the crops.
    train_target_VND: np.ndarray | None
    # Of each speed; empty unless frames are stored.
    train_frames: Sequence[TargetFrames]
    frame_units: FrameUnits | None  # None unless frames are compared
    teacher: TeacherGroup | None  # on the device; None where all targets are stored

    @property
    def target_dim(self) -> int:
        return self.common_KD.shape[1]

    @property
    def num_channels(self) -> int:
        """Return the channels of the teacher's frames; 0 if they are not compared."""
        return 0 if self.frame_units is None else len(self.frame_units.mean_C)


def prepare_teaching(
    config: Config,
    precision: Precision,
    ranks: Ranks,
    *,
    train: Manifest,
    valid: Manifest,
) -> Teaching:
    """Load the teachers and compute the stored targets; every rank must call it.

    precision: of teachers that hear crops; stored targets are computed in fp32. train, valid: the
    utterances of the corpus. Raises ValueError or FileNotFoundError, one line, for a teacher that
    is missing or does not fit.
    """
    models = load_teachers(config)
    hears_crops = config.distil.targets == "crop"
    has_frames = config.distil.frame_weight > 0
    valid_targets: list[np.ndarray] = []
    for model in models:
        valid_targets.append(stored_targets(model, valid, config, ranks, kind="valid"))
    # Where crops are heard, a sample is enough. Manifests are ordered by a hash of the ids, so the
    # first utterances are a random choice.
    measured = train
    if hears_crops:
        rows = np.arange(min(len(train), MAX_MEASURED))
        measured = train.of_rows(rows)

    train_frames: list[TargetFrames] = []
    if hears_crops:
        target_VND = targets_of_speeds(models, measured, config, ranks, kind="mean")
    elif has_frames:
        (model,) = models
        stored = frames_of_speeds(model, train, config, ranks)
        target_VND = np.stack([heard.emb_ND for heard in stored])
        train_frames = [heard.frames for heard in stored]
    else:
        target_VND = targets_of_speeds(models, train, config, ranks, kind="train")
    # Computed once for all ranks: on another host, the rounding may differ.
    all_targets = target_VND.reshape(-1, target_VND.shape[2])
    common_KD = ranks.on_first(lambda: common_directions(all_targets))

    teacher = None
    frame_units = None
    if hears_crops:
        teacher = _group_on_device(models, precision, ranks, frames=has_frames)
        if has_frames:
            crops_BS = middle_crops(measured, config).to(ranks.device)
            frames_BCT = teacher(crops_BS).frames_BCT
            assert frames_BCT is not None
            frame_units = ranks.on_first(lambda: measure_frames(frames_BCT))
    elif train_frames:
        frame_units = measure_frames(middle_frames(train_frames[0]))
    # torch keeps the memory of the extraction, and the plan of the batch would count it as taken.
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return Teaching(
        facts={
            "teachers": [model.facts for model in models],
            "space": space_of_student(config, models),
        },
        common_KD=common_KD,
        valid_target_ND=np.concatenate(valid_targets, axis=1),
        train_target_VND=None if hears_crops else target_VND,
        train_frames=train_frames,
        frame_units=frame_units,
        teacher=teacher,
    )


def _group_on_device(
    models: Sequence[TeacherModel],
    precision: Precision,
    ranks: Ranks,
    *,
    frames: bool,
) -> TeacherGroup:
    """Move the teachers to the device of this rank, where they will hear crops."""
    embedders: list[nn.Module] = []
    for model in models:
        embedder = model.embedder.for_inference(precision, in_place=True)
        embedders.append(embedder.to(ranks.device))
    return TeacherGroup(embedders, frames=frames)


def targets_of_speeds(
    models: Sequence[TeacherModel],
    manifest: Manifest,
    config: Config,
    ranks: Ranks,
    *,
    kind: str,
) -> np.ndarray:
    """Return target_VND: the targets of all teachers side by side, at each speed.

    kind: "train" for all speeds of the training; "mean" for the original speed alone.
    """
    speeds = config.augment.speeds if kind == "train" else (1.0,)
    targets_V: list[np.ndarray] = []
    for speed in speeds:
        targets: list[np.ndarray] = []
        for model in models:
            target_ND = stored_targets(
                model,
                manifest,
                config,
                ranks,
                kind=kind,
                speed=speed,
            )
            targets.append(target_ND)
        targets_V.append(np.concatenate(targets, axis=1))
    return np.stack(targets_V)


def frames_of_speeds(
    model: TeacherModel, manifest: Manifest, config: Config, ranks: Ranks
) -> list[StoredTargets]:
    """Return the teacher's embeddings and frames at each speed."""
    folders: dict[float, Path] = {}
    for speed in config.augment.speeds:
        kind = kind_at("frames", speed)
        folders[speed] = target_stem(model, manifest, config, kind=kind)
    return stored_frames(
        model.embedder,
        manifest,
        ranks,
        folders=folders,
        model_sha256=model.sha256,
        crop_samples=crop_samples(config),
    )


def middle_crops(manifest: Manifest, config: Config) -> Tensor:
    """Return wave_BS, float32 in [-1, 1]: a crop from the middle of each of some utterances."""
    num_samples = crop_samples(config)
    crops: list[np.ndarray] = []
    for row in range(min(len(manifest), NUM_FRAME_CROPS)):
        first = max(int(manifest.num_samples_N[row]) - num_samples, 0) // 2
        wave_S = manifest.read(row, first, num_samples)
        crops.append(wave_S.astype(np.float32) / FULL_SCALE)
    return torch.from_numpy(np.stack(crops))


def middle_frames(stored: TargetFrames) -> Tensor:
    """Return frames_BCT from the middle of each of some utterances."""
    frames: list[np.ndarray] = []
    for row in range(min(len(stored.num_samples_N), NUM_FRAME_CROPS)):
        middle = int(stored.num_samples_N[row]) // 2
        frames.append(stored.read(row, middle))
    return torch.from_numpy(np.stack(frames))


def measure_frames(frames_BCT: Tensor) -> FrameUnits:
    """Return mean and deviation of each channel over all frames of some crops."""
    frames_CN = frames_BCT.transpose(0, 1).flatten(1).cpu().double()
    deviation_C = frames_CN.std(dim=1)
    least = LEAST_DEVIATION * float(deviation_C.median())
    deviation_C = deviation_C.clamp_min(max(least, 1e-12))
    return FrameUnits(
        mean_C=frames_CN.mean(dim=1).float().numpy(),
        deviation_C=deviation_C.float().numpy(),
    )


def load_teachers(config: Config) -> list[TeacherModel]:
    """Load the teachers on the CPU; ValueError if one hears another sample rate."""
    models: list[TeacherModel] = []
    sample_rate = config.frontend["sample_rate"]
    for name in config.distil.teachers:
        model = load_teacher(name)
        if model.embedder.sample_rate != sample_rate:
            raise ValueError(
                f"distil.teachers: {name} hears {model.embedder.sample_rate} Hz, the"
                f" student {sample_rate} Hz; use a teacher of {sample_rate} Hz, or set"
                f" frontend.sample_rate={model.embedder.sample_rate}"
            )
        models.append(model)
    return models


def load_teacher(name: str) -> TeacherModel:
    """Load a teacher by its name; FileNotFoundError or ValueError with one line."""
    path = local(name)
    try:
        if path.suffix == ".onnx":
            # Its metadata name no source.
            onnx_model = OnnxModel(path)
            embedder: Any = OnnxEmbedder(onnx_model)
            sha256 = onnx_model.sha256
            source: dict[str, Any] = {}
            space = onnx_model.space
        else:
            published = load_published(path)
            embedder = published.embedder
            sha256 = published.sha256
            source = read_source(path) or {}
            space = space_of(read_card(path))
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"distil.teachers: {error}") from None
    facts = {
        "name": name,
        "sha256": sha256,
        "space": space,
        "page": source.get("page"),
        "licence": source.get("licence"),
        "hub": source.get("hub"),
    }
    return TeacherModel(name=name, embedder=embedder, sha256=sha256, facts=facts)


def digests_of(teachers: Sequence[str]) -> list[str]:
    """Return the sha256 of each teacher's weights, without building its network."""
    digests: list[str] = []
    for name in teachers:
        path = local(name)
        try:
            if path.suffix == ".onnx":
                digests.append(OnnxModel(path).sha256)
            else:
                digests.append(read_card(find_model(path))["sha256"])
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"distil.teachers: {error}") from None
    return digests


def space_of_student(config: Config, models: Sequence[TeacherModel]) -> str | None:
    """Return the space of the student's embeddings; None for one of its own."""
    # The embeddings of several teachers side by side are no model's.
    if config.distil.target_dim is None or len(models) > 1:
        return None
    return models[0].facts["space"]


def check_frames(config: Config) -> None:
    """Raise ValueError unless student and teacher have frames, in the same places."""
    if not config.distil.frame_weight:
        return
    _channels(config)
    for teacher in config.distil.teachers:
        channels_of(teacher)
        removes_silence = _config_of(teacher).vad is not None
        # A crop is heard whole, without the VAD.
        if removes_silence and config.distil.targets == "utterance":
            raise ValueError(
                f"distil.frame_weight: {teacher} removes silence (vad), so that its"
                " frames are not where the crops are; set it to 0, or"
                " distil.targets=crop"
            )


def channels_of(teacher: str) -> int:
    """Return the channels of a teacher's frames, from its configuration; ValueError without any."""
    return _channels(_config_of(teacher))


def _channels(config: Config) -> int:
    with shapes_only():
        _, backbone = build_network(config)
    return num_channels(backbone)


def _config_of(teacher: str) -> Config:
    return load_config([find_model(local(teacher)) / "config.yaml"])


def dims_of(teachers: Sequence[str]) -> int:
    """Return the number of dimensions of all teachers together, from their cards."""
    num_dims = 0
    for name in teachers:
        path = local(name)
        if path.suffix == ".onnx":
            num_dims += OnnxModel(path).embed_dim
        else:
            num_dims += read_card(path)["embed_dim"]
    return num_dims


def sizes_of(teachers: Sequence[str]) -> list[int]:
    """Return the number of parameters of each teacher, from its card or the size of its file."""
    sizes: list[int] = []
    for name in teachers:
        path = local(name)
        if path.suffix == ".onnx":
            sizes.append(path.stat().st_size // 4)  # fp32
        else:
            sizes.append(read_card(path)["parameters"])
    return sizes


def target_stem(
    model: TeacherModel, manifest: Manifest, config: Config, *, kind: str
) -> Path:
    """Return the path of a teacher's stored targets, without an ending; kind: a part of the name.

    The digest of the utterances is a part of it, too: a training that holds out other utterances
    does not overwrite targets that another training reads.
    """
    names = "+".join(corpus.name.replace("/", "_") for corpus in config.data.corpora)
    teacher = model.sha256[:12]
    utterances = manifest.sha256()[:8]
    folder = Path(config.data.dir) / "targets"
    return folder / f"{names}-{kind}-{teacher}-{utterances}"


def kind_at(kind: str, speed: float) -> str:
    """Return the kind of targets of utterances that are played at a speed."""
    return kind if speed == 1.0 else f"{kind}-speed{speed:g}"


def stored_targets(
    model: TeacherModel,
    manifest: Manifest,
    config: Config,
    ranks: Ranks,
    *,
    kind: str,
    speed: float = 1.0,
) -> np.ndarray:
    """Return target_ND, unit vectors of whole utterances, computed once and kept beside the data.

    Finished chunks are kept if the computation is interrupted, and tables of another teacher or
    other utterances are not used. kind: train, mean or valid. speed: at which they are played.
    """
    if not len(manifest):
        return np.zeros((0, model.embed_dim), dtype=np.float32)
    stem = target_stem(model, manifest, config, kind=kind_at(kind, speed))
    ranks.on_first(lambda: check_writable(Path(f"{stem}.json")))
    facts: dict[str, Any] = {"precision": "fp32"}
    # Tables that earlier versions wrote have the original speed.
    if speed != 1.0:
        facts["speed"] = speed
    embedder = at_speed(model.embedder, speed)
    table = plan_extraction(
        stem,
        manifest,
        embedder,
        model_sha256=model.sha256,
        facts=facts,
    )
    _compute(table, model, embedder, ranks)
    finished = table.read()
    if finished is None:
        raise ValueError(
            f"{stem}: rank {ranks.rank} cannot read the targets that rank 0 has written;"
            " let every host see the same data directories"
        )
    norm_N1 = np.linalg.norm(finished.emb_ND, axis=1, keepdims=True)
    return finished.emb_ND / np.maximum(norm_N1, 1e-12)


def _compute(
    table: Extraction, model: TeacherModel, embedder: Any, ranks: Ranks
) -> None:
    """Compute the missing chunks of a table, a share on each rank, and join them.

    embedder: of the model, at the speed of the table.
    """
    todo = ranks.on_first(lambda: table.todo((1, 1)))
    if todo is None:
        return
    if ranks.is_first:
        log.info(
            "teacher %s: embeds %d utterances for %s",
            model.name,
            len(table.pieces),
            table.stem,
        )
    # As in extraction: a batch on each thread, so that the bits do not depend on their number.
    with sharing_threads() as num_threads:
        for chunk in todo[ranks.rank :: ranks.world_size]:
            embedded = embed_batches(
                embedder,
                table.pieces,
                table.chunks[chunk],
                device=ranks.device,
                num_workers=num_readers(embedder, ranks),
                num_threads=num_threads,
            )
            embeddings = [emb_BD for _, emb_BD in embedded]
            table.save_part(chunk, np.concatenate(embeddings))
    ranks.barrier(f"targets {table.stem.name}")
    ranks.on_first(table.join)
