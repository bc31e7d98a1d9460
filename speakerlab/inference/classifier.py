"""Closed-set decisions: of which class of training an embedding is, by the head of that training.

In: emb_ND. Out: logits and posteriors of all classes. Letters: N embeddings, C classes,
D embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from speakerlab.checkpoints.model_files import find_model, read_classes
from speakerlab.checkpoints.published import read_tensors
from speakerlab.config.build import build_head
from speakerlab.config.schema import load_config
from speakerlab.losses.head import Head

MAX_VALUES = 2**24  # logits that are made at a time


@dataclass(frozen=True)
class Classifier:
    """A head and the names of its rows."""

    head: Head
    classes: Sequence[str]

    def logits(self, emb_ND: np.ndarray) -> np.ndarray:
        """logits_NC, float32, without a margin; for an angular head scale * cosine."""
        weight_CD = self.head.get_parameter("weight_CD")
        size = max(MAX_VALUES // len(weight_CD), 1)
        parts = [np.zeros((0, len(self.classes)), dtype=np.float32)]
        with torch.inference_mode():
            for first in range(0, len(emb_ND), size):
                emb_BD = torch.from_numpy(emb_ND[first : first + size]).to(weight_CD.device)
                no_label_B = torch.zeros(len(emb_BD), dtype=torch.int64, device=weight_CD.device)
                _, logits_BC = self.head(emb_BD, no_label_B, 0.0)
                parts.append(logits_BC.float().cpu().numpy())
        return np.concatenate(parts)

    def posteriors(self, emb_ND: np.ndarray) -> np.ndarray:
        """The softmax of the logits, (N, C): what the head's cross-entropy was made from."""
        logits_NC = self.logits(emb_ND).astype(np.float64)
        odds_NC = np.exp(logits_NC - logits_NC.max(axis=1, keepdims=True))
        return odds_NC / odds_NC.sum(axis=1, keepdims=True)


def load_classifier(path: Path) -> Classifier:
    """That of a published model, on the CPU.

    Raises ValueError where the model was not trained for identification or came without a head.
    """
    folder = find_model(path)
    config = load_config([folder / "config.yaml"])
    if config.task != "identification":
        raise ValueError(
            f"{folder}: must be trained with task identification, got {config.task}; "
            "use --task lid in a recipe, or compare recordings (`speakerlab verify`)"
        )
    if not (folder / "head.safetensors").exists():
        raise ValueError(
            f"{folder}: must have a head to decide by, got no head.safetensors; train one (stage 3)"
        )
    state, classes = read_tensors(folder / "head.safetensors"), read_classes(folder)
    head = build_head(config, embed_dim=state["weight_CD"].shape[-1], num_classes=len(classes))
    head.load_state_dict(state)
    return Classifier(head.eval(), classes)
