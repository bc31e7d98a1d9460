"""Initialize a training from a published model (--init); compare the EER before and after.

Letters: C classes, D embedding dimensions, N copied rows of a head.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speakerlab.checkpoints.model_files import (
    EMBEDDER,
    find_model,
    read_classes,
    weights_name,
)
from speakerlab.checkpoints.published import (
    INITIAL,
    load_initial_network,
    load_published,
    read_tensors,
    read_tensors_of,
)
from speakerlab.config.schema import Config, load_config
from speakerlab.embedder import Embedder
from speakerlab.experiments.conversations import SegmentationValidation
from speakerlab.experiments.validation import PairValidation
from speakerlab.frontend.pretrained import PretrainedFrontEnd
from speakerlab.inference.batches import embed_pieces
from speakerlab.losses.head import Head
from speakerlab.models.segmenter import Segmenter

log = logging.getLogger(__name__)
# Keys of the front end that may differ from those of the model of --init. Dither is random noise
# during training. The others say how a pretrained model is trained and stored, not what it hears.
NOT_FEATURES = (
    "dither",
    "model",
    "dropout",
    "lora",
    "publish",
    "weights",
    "sha256",
)


def init_from(
    path: Path,
    *,
    embedder: Embedder | Segmenter,
    head: Head | None,
    classes: Sequence[str],
    config: Config,
) -> None:
    """Load a published model's embedder, and the rows of its head with the same names.

    classes: names of the head's rows; with training.init_head "drop" no rows are loaded. Raises
    ValueError if a tensor does not fit, or the model was trained on other features.
    """
    weights = weights_name(config.task)
    folder = find_model(path, weights)
    _refuse_other_features(folder, config)
    if isinstance(embedder, Segmenter):
        loaded = read_tensors_of(embedder, folder / weights)
        embedder.load_state_dict(loaded)
        log.info("initialized from %s: %d tensors", folder, len(loaded))
        return
    if isinstance(embedder.frontend, PretrainedFrontEnd):
        num_loaded_tensors = _load_whole(folder, embedder)
    else:
        num_loaded_tensors = _load_tensors(folder, embedder)

    # Imported models, and models trained without labels, may have no head.
    init_classes: list[str] = []
    if (folder / "head.safetensors").exists():
        init_classes = read_classes(folder)
    num_loaded = 0
    is_head_used = init_classes and config.training.init_head != "drop"
    if head is not None and is_head_used:
        num_loaded = _copy_rows(folder, head, classes, init_classes)
    log.info(
        "initialized from %s: %d tensors of the embedder; head: %d of %d rows loaded by"
        " name, %d new, %d rows of the initial model dropped",
        folder,
        num_loaded_tensors,
        num_loaded,
        len(classes),
        len(classes) - num_loaded,
        len(init_classes) - num_loaded,
    )


def _refuse_other_features(folder: Path, config: Config) -> None:
    """Raise ValueError if the model of a folder was trained on other features."""
    init_frontend = load_config([folder / "config.yaml"]).frontend
    changed: list[str] = []
    for key, value in {"name": None, **config.frontend}.items():
        init_value = init_frontend.get(key)
        if key not in NOT_FEATURES and init_value != config.frontend.get(key):
            changed.append(f"{key}: {init_value} -> {value}")
    if changed:
        raise ValueError(
            f"{folder}: was trained on other features: {'; '.join(changed)}; "
            "use its frontend section"
        )


def _load_tensors(folder: Path, embedder: Embedder) -> int:
    """Load the tensors of a published model; return their number."""
    # A student may begin with the backbone of a model without a projection.
    weights = folder / EMBEDDER
    has_projection = any(
        name.startswith("projection.") for name in read_tensors(weights)
    )
    module: nn.Module = embedder
    if embedder.projection is not None and not has_projection:
        module = nn.ModuleDict({"backbone": embedder.backbone})
    loaded = read_tensors_of(module, weights)
    module.load_state_dict(loaded)
    return len(loaded)


def _load_whole(folder: Path, embedder: Embedder) -> int:
    """Load a published model with a pretrained front end, adapters merged; return its tensors.

    New adapters keep their first values, which change nothing.
    """
    initial = load_published(folder).embedder
    assert isinstance(initial.frontend, PretrainedFrontEnd)
    initial.frontend.merge()
    state = initial.state_dict()
    shapes = {name: value.shape for name, value in state.items()}
    wanted_shapes: dict[str, torch.Size] = {}
    for name, value in embedder.state_dict().items():
        wanted_shapes[name] = value.shape
    unfitting: list[str] = []
    for name in sorted(shapes.keys() | wanted_shapes.keys()):
        is_adapter = ".lora_" in name
        if not is_adapter and shapes.get(name) != wanted_shapes.get(name):
            unfitting.append(name)
    if unfitting:
        raise ValueError(
            f"{folder}: is not of the configured model: {len(unfitting)} tensors are"
            f" missing, unexpected or of another shape ({', '.join(unfitting[:3])}); use"
            " its model section"
        )
    embedder.load_state_dict(state, strict=False)
    return len(state)


def keep_the_better(
    exp_dir: Path,
    trained: Embedder | Segmenter,
    validation: PairValidation | SegmentationValidation,
    config: Config,
    device: torch.device,
) -> dict[str, Any]:
    """Compare the validation EER, or DER, of a network with that of its initial weights.

    Return both. If training has not lowered it, restore the initial weights after --init, unless
    training.keep_better is false; after random initialization, log a warning.
    """
    initial = load_initial_network(exp_dir, config).to(device)

    def measure(network: Any) -> float:
        if isinstance(validation, SegmentationValidation):
            return validation.measure(network, device)
        emb_ND = embed_pieces(network, validation.pieces, device=device)
        return validation.measure(emb_ND)

    if isinstance(validation, SegmentationValidation):
        name = f"local DER of {len(validation.windows)} validation windows"
    else:
        name = f"EER of {len(set(validation.label_N))} validation speakers"
    # Measured again, because the trained weights may be a mean of checkpoints.
    before = measure(initial)
    after = measure(trained)
    is_better = after < before
    began_with_init = (exp_dir / INITIAL).exists()
    keeps_initial = began_with_init and not is_better and config.training.keep_better
    text = (
        f"{name}: initial weights {100 * before:.2f} %, after training"
        f" {100 * after:.2f} %"
    )
    if is_better:
        log.info("%s", text)
    elif keeps_initial:
        log.warning(
            "%s; initial model kept; to use the trained weights anyway, run the same"
            " command with --set training.keep_better=false",
            text,
        )
        # Restore in place: the caller publishes this embedder.
        trained.load_state_dict(initial.state_dict())
    elif began_with_init:
        log.warning(
            "%s; trained weights used all the same (training.keep_better: false)",
            text,
        )
    else:
        hint = "; SimCLR needs the fewest" if config.task == "ssl" else ""
        log.warning(
            "%s: no better than before training; use more recordings or epochs%s",
            text,
            hint,
        )
    return {
        f"valid_{validation.metric}_initial": before,
        f"valid_{validation.metric}_trained": after,
        "kept_initial": keeps_initial,
    }


def _copy_rows(
    folder: Path,
    head: Head,
    classes: Sequence[str],
    init_classes: Sequence[str],
) -> int:
    """Copy the scalars and the rows of matching parameters; return the number of rows."""
    loaded = read_tensors(folder / "head.safetensors")
    # Another kind of head may lack a parameter, or have rows of another length.
    fitting: dict[str, nn.Parameter] = {}
    for name, parameter in head.named_parameters():
        if name in loaded and parameter.shape[1:] == loaded[name].shape[1:]:
            fitting[name] = parameter

    old_row_of = {name: row for row, name in enumerate(init_classes)}
    pairs: list[tuple[int, int]] = []  # new row, old row
    for new_row, name in enumerate(classes):
        if name in old_row_of:
            pairs.append((new_row, old_row_of[name]))
    # The other parameters of a row are useless without its weights.
    if "weight_CD" not in fitting or not pairs:
        return 0

    # This rank may hold only some of the rows, numbered from its first row.
    first, last = head.row_range
    new_rows: list[int] = []
    old_rows: list[int] = []
    for new_row, old_row in pairs:
        if first <= new_row < last:
            new_rows.append(new_row - first)
            old_rows.append(old_row)
    to_N = torch.tensor(new_rows, dtype=torch.long)
    from_N = torch.tensor(old_rows, dtype=torch.long)
    with torch.no_grad():
        for name, parameter in fitting.items():
            if parameter.dim():
                parameter[to_N] = loaded[name][from_N]
            else:
                parameter.copy_(loaded[name])
    return len(pairs)
