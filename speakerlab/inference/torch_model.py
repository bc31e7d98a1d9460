"""Published models in PyTorch: embeddings and, for models trained to classify, posteriors.

Letters: B rows, S samples, N embeddings, C classes, D embedding dimensions.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import softmax

from speakerlab.checkpoints.model_files import (
    PLDA,
    find_model,
    parse_plda,
    read_card,
    read_classes,
    read_plda_bytes,
    space_of,
)
from speakerlab.checkpoints.published import load_published, read_tensors_of
from speakerlab.config.schema import load_config
from speakerlab.core.counting import count_of
from speakerlab.embedder import Embedder
from speakerlab.inference.passes import PASSES
from speakerlab.losses.head import Head
from speakerlab.models.frames import find_pooling
from speakerlab.scoring.plda import Plda
from speakerlab.training.devices import count_gpus
from speakerlab.training.precision import card_of, resolve_precision

MIN_COSINE_TO_CPU = 0.999  # rounding, also in bf16, leaves more

# A forked process lacks the threads that its parent's OpenMP has started, and would wait for them
# for ever, so it computes in a single thread.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def choose_device(name: str | torch.device) -> torch.device:
    """Return the device of a name: auto, cpu, cuda, cuda:N or mps, or a `torch.device`.

    Only `auto` falls back to the CPU, which is much slower; else ValueError without the GPU. It
    never takes mps, Apple's GPU, because no test has run on one.
    """
    name = str(name)
    if name == "mps":
        if torch.backends.mps.is_available():
            return torch.device(name)
        raise ValueError("device: mps requested, but no Apple GPU was found; use cpu")
    num_gpus = 0 if name == "cpu" else count_gpus()
    if name == "auto":
        return torch.device("cuda" if num_gpus else "cpu")
    named_gpu = re.fullmatch(r"cuda(?::(\d+))?", name)
    if name != "cpu" and named_gpu is None:
        raise ValueError(
            f"device: must be auto, cpu, cuda, cuda:N or mps, got '{name}'"
        )
    if named_gpu is not None and int(named_gpu[1] or 0) >= num_gpus:
        number = count_of(num_gpus, "GPU") if num_gpus else "no GPU"
        raise ValueError(
            f"device: {name} requested, but {number} was found; use cpu or auto"
        )
    return torch.device(name)


def check_against_cpu(embedder: Embedder, device: torch.device) -> None:
    """Move an embedder from the CPU to a device; ValueError if its embeddings are others there.

    For devices on which no test has run: the embeddings of a second of noise are compared.
    """
    num_samples = max(embedder.sample_rate, embedder.min_samples)
    num_samples = min(num_samples, embedder.max_samples)
    noise_S = np.random.default_rng(0).normal(scale=0.1, size=num_samples)
    wave_1S = torch.from_numpy(noise_S.astype(np.float32))[None]
    with torch.inference_mode():
        on_cpu_1D = embedder.embed_window(wave_1S).float()
        embedder.to(device)
        on_device_1D = embedder.embed_window(wave_1S.to(device)).float().cpu()
    cosine = torch.cosine_similarity(on_cpu_1D, on_device_1D).item()
    # Not `<`, which is false for NaN.
    if not cosine >= MIN_COSINE_TO_CPU:
        raise ValueError(
            f"device: {device} computes other embeddings than the CPU (cosine"
            f" {cosine:.4f}); use cpu, and report it with the output of speakerlab doctor"
        )


class TorchModel:
    """PyTorch runtime of `SpeakerModel`; the other runtime is `OnnxModel`."""

    def __init__(
        self,
        path: Path,
        *,
        device: str | torch.device = "auto",
        precision: str = "fp32",
    ) -> None:
        """Load the model of a folder or experiment. device: see `choose_device`."""
        self.device = choose_device(device)
        published = load_published(path)
        self.process = os.getpid()
        card = card_of(self.device)
        resolved = resolve_precision(precision, self.device, [card])
        self.precision = resolved.name

        # Fold on the CPU, so that a model has the same weights on any device.
        published.embedder.eval()
        folded = published.embedder.for_inference(resolved)
        if self.device.type == "mps":
            check_against_cpu(folded, self.device)
        embedder = folded.to(self.device)
        self.embedder = embedder
        self.sample_rate = embedder.sample_rate
        self.embed_dim = embedder.embed_dim
        self.min_samples = embedder.min_samples
        self.max_samples = embedder.max_samples
        self.vad = embedder.vad

        self.source = path
        self.family = published.config.model.name
        self.sha256 = published.sha256
        self.space = space_of(read_card(published.folder))
        self.calibration = published.calibration
        self.tuning = published.tuning
        self.folder = published.folder
        # A verification model may have a head too, but its classes are the speakers of training.
        self.classifier: Classifier | None = None
        if published.config.task == "identification":
            self.classifier = load_classifier(published.folder)

    def read_plda(self) -> Plda:
        """Return the PLDA of vbx; ValueError with one line if the model has none."""
        data = read_plda_bytes(self.folder, self.tuning)
        where = str(self.folder / PLDA)
        return parse_plda(data, embed_dim=self.embed_dim, where=where)

    def embed_window(self, wave_BS: np.ndarray) -> np.ndarray:
        """Return emb_BD of waves of `min_samples` to `max_samples`.

        Raises ValueError in a process that was forked after the model was loaded on a GPU.
        """
        with PASSES.running(), torch.inference_mode():
            emb_BD = self.embedder.embed_window(self._on_device(wave_BS))
            return emb_BD.float().cpu().numpy()

    def frames_of_window(self, wave_1S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the middle sample (T,) and the values frames_TF of what the model pools.

        wave_1S: as of `embed_window`. Raises ValueError if the network has no `Pooling`.
        """
        if find_pooling(self.embedder.backbone) is None:
            raise ValueError(
                f"{self.source}: {self.family} pools its frames without a `Pooling`, so"
                " it has no frames to return; use another network"
            )
        with PASSES.running(), torch.inference_mode():
            wave = self._on_device(wave_1S)
            frames_1CT, middle_T = self.embedder.frames_of_window(wave)
            (frames_CT,) = frames_1CT.cpu().numpy()
        return middle_T.numpy(), np.ascontiguousarray(frames_CT.T)

    def _on_device(self, wave_BS: np.ndarray) -> torch.Tensor:
        """Return waves as a tensor; ValueError in a process that cannot use the model's GPU."""
        if self.device.type == "cuda" and self.process != os.getpid():
            raise ValueError(
                f"{self.source}: was loaded on a GPU before this process was forked; load"
                " the model after the fork, or use spawn instead of fork"
            )
        # torch rejects arrays with negative strides, such as a reversed array.
        contiguous_BS = np.ascontiguousarray(wave_BS)
        return torch.from_numpy(contiguous_BS).to(self.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled model, which was loaded in another process but not by a fork."""
        self.__dict__.update(state)
        self.process = os.getpid()


@dataclass(frozen=True)
class Classifier:
    """Training head and the classes of its rows."""

    head: Head
    classes: Sequence[str]

    def logits(self, emb_ND: np.ndarray) -> np.ndarray:
        """Return logits_NC, float32, without a margin; scale * cosine for an angular head."""
        weight_CD = self.head.get_parameter("weight_CD")
        emb = torch.from_numpy(emb_ND).to(weight_CD.device)
        # The head needs labels only for its loss, which is not used.
        any_label_N = emb.new_zeros(len(emb), dtype=torch.int64)
        no_margin = 0.0  # only training has one
        with torch.inference_mode():
            _, logits_NC = self.head(emb, any_label_N, no_margin)
            return logits_NC.float().cpu().numpy()

    def posteriors(self, emb_ND: np.ndarray) -> np.ndarray:
        """Return the softmax of the logits, (N, C), float64."""
        # float64, because float32 rounds posteriors near 1 to 1.
        logits_NC = self.logits(emb_ND)
        return softmax(logits_NC.astype(np.float64), axis=1)


def load_classifier(path: Path) -> Classifier:
    """Load the head of a published model, on the CPU.

    Raises ValueError if the model was not trained for identification or has no head.
    """
    # Imported here, because it imports training code, which other models do not need.
    from speakerlab.config.build import build_head

    folder = find_model(path)
    config = load_config([folder / "config.yaml"])
    if config.task != "identification":
        raise ValueError(
            f"{folder}: must be trained with task identification, got {config.task}; "
            "use --task lid in a recipe, or compare recordings (`speakerlab verify`)"
        )
    if not (folder / "head.safetensors").exists():
        raise ValueError(
            f"{folder}: has no head.safetensors to classify with; `speakerlab train`"
        )
    classes = read_classes(folder)
    embed_dim = read_card(folder)["embed_dim"]
    num_classes = len(classes)
    head = build_head(config, embed_dim=embed_dim, num_classes=num_classes)
    weights = read_tensors_of(head, folder / "head.safetensors")
    head.load_state_dict(weights)
    return Classifier(head.eval(), classes)
