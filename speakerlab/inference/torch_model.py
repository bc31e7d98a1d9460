"""A published model run by PyTorch: embeddings and, if it was trained to classify, posteriors.

Letters: B rows, S samples, N embeddings, C classes, D embedding dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.special import softmax

from speakerlab.checkpoints.model_files import find_model, read_card, read_classes
from speakerlab.checkpoints.published import load_published, read_tensors_of
from speakerlab.config.schema import load_config
from speakerlab.losses.head import Head
from speakerlab.training.devices import count_gpus
from speakerlab.training.precision import card_of, resolve_precision


class TorchModel:
    """The PyTorch runtime of `SpeakerModel`; `OnnxModel` is the other."""

    def __init__(self, path: Path, *, device: str = "auto", precision: str = "fp32") -> None:
        """Load the model of a folder or experiment. device: auto, cpu or cuda."""
        published = load_published(path)
        has_gpu = device != "cpu" and count_gpus() > 0
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device: must be auto, cpu or cuda, got '{device}'")
        if device == "cuda" and not has_gpu:
            raise ValueError("device: cuda requested, but no GPU was found; use cpu or auto")
        self.device = torch.device("cuda" if has_gpu else "cpu")
        used = resolve_precision(precision, self.device, [card_of(self.device)])
        self.precision, self.family, self.source = used.name, published.config.model.name, path
        self.embedder = published.embedder.eval().for_inference(used).to(self.device)
        self.sample_rate, self.embed_dim = self.embedder.sample_rate, self.embedder.embed_dim
        self.min_samples, self.max_samples = self.embedder.min_samples, self.embedder.max_samples
        self.vad = self.embedder.vad
        self.sha256, self.calibration = published.sha256, published.calibration
        self.tuning = published.tuning
        classifies = published.config.task == "identification"
        self.classifier = load_classifier(published.folder) if classifies else None

    def embed_window(self, wave_BS: np.ndarray) -> np.ndarray:
        """Return emb_BD of waves of `min_samples` to `max_samples`."""
        with torch.inference_mode():
            wave = torch.from_numpy(np.ascontiguousarray(wave_BS)).to(self.device)
            return self.embedder.embed_window(wave).float().cpu().numpy()


@dataclass(frozen=True)
class Classifier:
    """A training head and the classes of its rows."""

    head: Head
    classes: Sequence[str]

    def logits(self, emb_ND: np.ndarray) -> np.ndarray:
        """Return logits_NC, float32, without a margin; scale * cosine for an angular head."""
        emb = torch.from_numpy(emb_ND).to(self.head.get_parameter("weight_CD").device)
        with torch.inference_mode():
            no_label_N = emb.new_zeros(len(emb), dtype=torch.int64)
            return self.head(emb, no_label_N, 0.0)[1].float().cpu().numpy()

    def posteriors(self, emb_ND: np.ndarray) -> np.ndarray:
        """Return the softmax of the logits, (N, C), float64."""
        return softmax(self.logits(emb_ND).astype(np.float64), axis=1)


def load_classifier(path: Path) -> Classifier:
    """Load the head of a published model, on the CPU.

    Raises ValueError if the model was not trained for identification or has no head.
    """
    from speakerlab.config.build import build_head  # with the parts of training: not for others

    folder = find_model(path)
    config = load_config([folder / "config.yaml"])
    if config.task != "identification":
        raise ValueError(
            f"{folder}: must be trained with task identification, got {config.task}; "
            "use --task lid in a recipe, or compare recordings (`speakerlab verify`)"
        )
    if not (folder / "head.safetensors").exists():
        raise ValueError(f"{folder}: has no head.safetensors to classify with; train one (stage 3)")
    classes, embed_dim = read_classes(folder), read_card(folder)["embed_dim"]
    head = build_head(config, embed_dim=embed_dim, num_classes=len(classes))
    head.load_state_dict(read_tensors_of(head, folder / "head.safetensors"))
    return Classifier(head.eval(), classes)
