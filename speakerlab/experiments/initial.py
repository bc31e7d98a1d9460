"""Initialize a training from a published model (--init), and keep that model if it is better.

Letters: C classes, D embedding.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from speakerlab.checkpoints.model_files import find_model, read_classes
from speakerlab.checkpoints.published import INITIAL, load_initial, read_tensors, read_tensors_of
from speakerlab.config.embedder import Embedder
from speakerlab.config.schema import Config, load_config
from speakerlab.experiments.validation import Validation
from speakerlab.inference.batches import embed_pieces
from speakerlab.losses.head import Head

log = logging.getLogger(__name__)


def init_from(
    path: Path, *, embedder: Embedder, head: Head | None, classes: Sequence[str], config: Config
) -> None:
    """Load a published model's embedder, and the rows of its head with the same names.

    classes: names of the head's rows; with training.init_head "drop" no rows are loaded. Raises
    ValueError if a tensor does not fit, or the model was trained on other features.
    """
    folder = find_model(path)
    theirs = load_config([folder / "config.yaml"]).frontend
    changed = [
        f"{key}: {theirs[key]} -> {value}"
        for key, value in config.frontend.items()
        if key != "dither" and theirs[key] != value  # features stay the same without dither
    ]
    if changed:
        raise ValueError(
            f"{folder}: was trained on other features: {'; '.join(changed)}; "
            "use its frontend section"
        )
    loaded = read_tensors_of(embedder, folder / "embedder.safetensors")
    embedder.load_state_dict(loaded)
    known = read_classes(folder) if (folder / "head.safetensors").exists() else []
    is_used = known and config.training.init_head != "drop"
    rows = _copy_rows(folder, head, classes, known) if head is not None and is_used else 0
    log.info(
        "initialized from %s: %d tensors of the embedder; head: %d of %d rows loaded by name, "
        "%d new, %d rows of the initial model dropped",
        *(folder, len(loaded), rows, len(classes), len(classes) - rows, len(known) - rows),
    )


def keep_better(
    exp_dir: Path, tuned: Embedder, validation: Validation, config: Config, device: torch.device
) -> dict[str, Any]:
    """Give a fine-tuned embedder its initial weights back unless its validation EER is lower.

    Return both EERs and what was kept; nothing if the training did not begin with --init.
    """
    if not (exp_dir / INITIAL).exists():
        return {}
    initial = load_initial(exp_dir, config).to(device)
    before, after = (
        validation.measure(embed_pieces(embedder, validation.pieces, device=device))
        for embedder in (initial, tuned)
    )
    num, eers = len(set(validation.label_N)), (100 * before, 100 * after)
    if after < before:
        log.info("EER of %d validation speakers: initial model %.2f %%, now %.2f %%", num, *eers)
    else:
        text = "initial model kept: EER of %d validation speakers %.2f %%, after training %.2f %%"
        log.warning(text, num, *eers)
        tuned.load_state_dict(initial.state_dict())
    return {"valid_eer_initial": before, "valid_eer_tuned": after, "kept_initial": after >= before}


def _copy_rows(folder: Path, head: Head, classes: Sequence[str], known: Sequence[str]) -> int:
    """Copy rows of the parameters that fit, and scalars; return the number of rows."""
    loaded = read_tensors(folder / "head.safetensors")
    fits = {
        name: parameter
        for name, parameter in head.named_parameters()
        if name in loaded and parameter.shape[1:] == loaded[name].shape[1:]
    }
    row_of = {name: row for row, name in enumerate(known)}
    pairs = [(new, row_of[name]) for new, name in enumerate(classes) if name in row_of]
    if "weight_CD" not in fits or not pairs:
        return 0
    first, last = head.row_range
    own = [(new - first, old) for new, old in pairs if first <= new < last]
    new, old = torch.tensor(own, dtype=torch.long).view(-1, 2).T
    with torch.no_grad():
        for name, parameter in fits.items():
            if parameter.dim():
                parameter[new] = loaded[name][old]
            else:
                parameter.copy_(loaded[name])
    return len(pairs)
