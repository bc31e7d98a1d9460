"""Initialize a training from a published model (--init); compare its end with its beginning.

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


def compare_with_initial(
    exp_dir: Path, trained: Embedder, validation: Validation, config: Config, device: torch.device
) -> dict[str, Any]:
    """Compare the validation EER of an embedder with that of its initial weights; return both.

    Unless training has lowered it, an embedder that began with --init gets its initial weights
    back; for one that began with random weights there is a warning.
    """
    initial = load_initial(exp_dir, config).to(device)
    before, after = (
        validation.measure(embed_pieces(embedder, validation.pieces, device=device))
        for embedder in (initial, trained)
    )
    is_better, began_with_init = after < before, (exp_dir / INITIAL).exists()
    text = f"EER of {len(set(validation.label_N))} validation speakers: "
    text += f"initial weights {100 * before:.2f} %, after training {100 * after:.2f} %"
    if is_better:
        log.info("%s", text)
    elif began_with_init:
        log.warning("%s; initial model kept", text)
        trained.load_state_dict(initial.state_dict())
    else:
        others = "; SimCLR needs the fewest" if config.task == "ssl" else ""
        log.warning("%s: no better than random; use more recordings or epochs%s", text, others)
    kept = began_with_init and not is_better
    return {"valid_eer_initial": before, "valid_eer_trained": after, "kept_initial": kept}


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
