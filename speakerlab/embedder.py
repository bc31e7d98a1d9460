"""The one waveform-to-embedding module, and how it is published and found again.

In: wave_BS in [-1, 1]. Out: emb_BD. Training, extraction and every tool share this module.
A published model is a folder: `embedder.safetensors` (tensors only), `config.yaml` (all that is
needed to build it), `head.safetensors` and `speakers.txt` (to train on), `card.json` (facts).
Letters: B rows, S samples, D embedding, C classes.
"""

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from speakerlab.atomic import write_json
from speakerlab.frontend.fbank import Fbank

if TYPE_CHECKING:
    from speakerlab.config import Config

log = logging.getLogger(__name__)


class Embedder(nn.Module):
    """Front end and backbone as one.

    Input longer than `max_seconds` is cut in equal windows whose embeddings are averaged, so that
    memory is bounded; input too short for the backbone is repeated until it is long enough.
    """

    def __init__(self, *, fbank: Fbank, backbone: nn.Module, max_seconds: float = 120.0) -> None:
        super().__init__()
        self.fbank, self.backbone = fbank, backbone
        self.sample_rate = fbank.sample_rate
        self.embed_dim: int = backbone.embed_dim  # pyright: ignore[reportAttributeAccessIssue]
        self.max_samples = round(max_seconds * self.sample_rate)
        min_frames: int = backbone.min_frames  # pyright: ignore[reportAssignmentType]
        self.min_samples = fbank.min_samples + (min_frames - 1) * fbank.frame_shift

    def forward(self, wave_BS: Tensor) -> Tensor:
        num_samples = wave_BS.shape[1]
        if num_samples == 0:
            raise ValueError("embedder: needs audio, got 0 samples; drop the recording")
        if num_samples < self.min_samples:
            wave_BS = wave_BS.repeat(1, -(-self.min_samples // num_samples))[:, : self.min_samples]
        if num_samples <= self.max_samples:
            return self.backbone(self.fbank(wave_BS))
        # Windows of (nearly) equal length: their plain mean weighs every frame alike.
        windows = wave_BS.tensor_split(math.ceil(num_samples / self.max_samples), dim=1)
        shortest = min(window.shape[1] for window in windows)
        embs = [self.backbone(self.fbank(window[:, :shortest])) for window in windows]
        return torch.stack(embs).mean(dim=0)

    def batch_key(self, num_samples: int) -> tuple[int, int]:
        """Inputs of one key may share a batch: trimming them to the shortest changes nothing."""
        is_whole = self.min_samples <= num_samples <= self.max_samples  # not repeated, not cut
        frames = self.fbank.num_frames(max(num_samples, self.min_samples))
        return frames, 0 if is_whole else num_samples


@dataclass(frozen=True)
class Published:
    """A published model as found on disk."""

    folder: Path
    config: "Config"
    embedder: Embedder
    sha256: str


def publish(
    folder: Path,
    *,
    embedder: Embedder,
    head: nn.Module,
    config: "Config",
    speakers: Sequence[str],
    facts: Mapping[str, Any],
) -> str:
    """Write a model folder, replacing one that is there; return the sha256 of the weights."""
    fresh = folder.with_name(f".{folder.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file(_tensors(embedder), fresh / "embedder.safetensors")
    save_file(_tensors(head), fresh / "head.safetensors")
    config.write(fresh / "config.yaml")
    (fresh / "speakers.txt").write_text("".join(f"{s}\n" for s in speakers), encoding="utf-8")
    digest = file_sha256(fresh / "embedder.safetensors")
    card = {
        "sha256": digest,
        "embed_dim": embedder.embed_dim,
        "parameters": sum(p.numel() for p in embedder.parameters()),
        **facts,
    }
    write_json(fresh / "card.json", card)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.replace(folder)
    return digest


def find_model(path: Path) -> Path:
    """The model folder meant by a path: itself, or the one inside an experiment."""
    for folder in (path, path / "model"):
        if (folder / "embedder.safetensors").exists():
            return folder
    raise FileNotFoundError(f"{path}: has no model, got no embedder.safetensors; run stage 3")


def load_published(path: Path) -> Published:
    """The model of a folder or experiment, in eval mode, its weights checked against its card."""
    from speakerlab.build import build_embedder
    from speakerlab.config import load_config

    folder = find_model(path)
    weights = folder / "embedder.safetensors"
    digest = file_sha256(weights)
    wanted = json.loads((folder / "card.json").read_text(encoding="utf-8"))["sha256"]
    if digest != wanted:
        raise ValueError(f"{weights}: sha256 must be {wanted}, got {digest}; copy the model again")
    config = load_config([folder / "config.yaml"])
    embedder = build_embedder(config)
    embedder.load_state_dict(load_file(weights))
    return Published(folder, config, embedder.eval(), digest)


def init_from(
    path: Path, *, embedder: Embedder, head: nn.Module, classes: Sequence[str], head_rows: str
) -> None:
    """Start from a published model: all of its embedder, and its head's rows of the same name.

    head_rows: "drop" takes no rows. Says what was loaded; a tensor that does not fit is an error.
    """
    folder = find_model(path)
    loaded = load_file(folder / "embedder.safetensors")
    own = embedder.state_dict()
    odd = [
        name
        for name in sorted(own.keys() | loaded.keys())
        if name not in own or name not in loaded or own[name].shape != loaded[name].shape
    ]
    if odd:
        raise ValueError(
            f"{folder}: must hold the model of this configuration, got {len(odd)} tensors that are "
            f"missing, unexpected or of another shape ({', '.join(odd[:3])}); use its model section"
        )
    embedder.load_state_dict(loaded)
    rows = 0 if head_rows == "drop" else _copy_rows(folder, head, classes)
    log.info(
        "initialised from %s: %d tensors, %d of %d head rows by name",
        folder,
        len(own),
        rows,
        len(classes),
    )


def read_classes(path: Path) -> list[str]:
    """`speakers.txt` of a published model."""
    return (find_model(path) / "speakers.txt").read_text(encoding="utf-8").splitlines()


def file_sha256(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _copy_rows(folder: Path, head: nn.Module, classes: Sequence[str]) -> int:
    weight_CD = load_file(folder / "head.safetensors")["weight_CD"]
    known = {name: row for row, name in enumerate(read_classes(folder))}
    pairs = [(new, known[name]) for new, name in enumerate(classes) if name in known]
    own_CD = head.get_parameter("weight_CD")
    if pairs and own_CD.shape[1] == weight_CD.shape[1]:
        new, old = map(list, zip(*pairs))
        with torch.no_grad():
            own_CD[new] = weight_CD[old]
        return len(pairs)
    return 0


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().cpu().contiguous() for name, t in module.state_dict().items()}
