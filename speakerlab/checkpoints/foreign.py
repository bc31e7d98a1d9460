"""Checkpoints of 3D-Speaker and WeSpeaker, imported as published models and written back.

In: a checkpoint file, a folder or an archive that holds one. Out: a model folder as `published.py`
writes it, the front end of its toolkit recorded; or a 3D-Speaker checkpoint of one of our models.
"""

import inspect
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn

from speakerlab.checkpoints import archives
from speakerlab.checkpoints.foreign_files import (
    WESPEAKER_NAME,
    Source,
    find_checkpoint,
    read_tensors,
)
from speakerlab.checkpoints.model_files import find_model
from speakerlab.checkpoints.names import Toolkit
from speakerlab.checkpoints.published import Published, file_sha256, load_published, publish
from speakerlab.checkpoints.recognise import (
    COUNTER,
    Recognised,
    Shape,
    complete_args,
    recognise,
)
from speakerlab.checkpoints.toolkit_config import (
    ForeignConfig,
    FrontendName,
    frontend_of,
    read_config,
    read_speakers,
)
from speakerlab.config.build import build_embedder, build_head
from speakerlab.config.embedder import Embedder
from speakerlab.config.schema import Config, parse_config
from speakerlab.core.atomic import replacing
from speakerlab.frontend.fbank import Fbank

log = logging.getLogger(__name__)
PROJECTION = "projection."  # WeSpeaker's head, in the same checkpoint
# Arguments that change how a model computes, not what.
FREE_ARGS = {"memory_efficient"}
MAX_SECONDS = {"redimnet": 30.0}  # attention costs the square of the length; as in conf/


def import_checkpoint(
    path: Path,
    out: Path,
    *,
    config: Path | None = None,
    frontend: FrontendName | None = None,
    speakers: Path | None = None,
) -> Published:
    """Import a checkpoint as the model folder `out`.

    `config` is the toolkit's config.yaml where it is not beside the checkpoint, `frontend` whose
    features the model takes where that is known better, `speakers` the list of training speakers
    that names the rows of the head. Raises ValueError or FileNotFoundError, and writes nothing,
    where the checkpoint is not wholly understood.
    """
    _refuse_to_replace(out)
    with tempfile.TemporaryDirectory() as scratch:
        folder = path
        if path.is_file() and archives.is_archive(path):
            folder = Path(scratch) / path.name.split(".")[0]
            archives.unpack(path, folder)
        source = find_checkpoint(folder)
        foreign = read_config(config or source.config)
        _convert(source, foreign, out, original=path, frontend=frontend, speakers=speakers)
    return load_published(out)


def export_3dspeaker(model: Path, out: Path) -> Path:
    """Write a model as the `embedding_model.ckpt` that 3D-Speaker would have written.

    Raises ValueError where 3D-Speaker has no such model or would not compute its features.
    """
    published = load_published(model)
    state = published.embedder.backbone.state_dict()
    names = _published_names(published.config, state, where=str(model))
    with replacing(out) as partial:
        torch.save({names[name]: value for name, value in state.items()}, partial)
    return out


def _convert(
    source: Source,
    foreign: ForeignConfig,
    out: Path,
    *,
    original: Path,
    frontend: FrontendName | None,
    speakers: Path | None,
) -> None:
    tensors = read_tensors(source.checkpoint)
    head_CD = tensors.get(f"{PROJECTION}weight")
    backbone = {name: t for name, t in tensors.items() if not name.startswith(PROJECTION)}
    shapes = {name: tuple(tensor.shape) for name, tensor in backbone.items()}
    possible = _possible_toolkits(
        foreign, frontend, source.checkpoint, has_projection=len(backbone) < len(tensors)
    )
    found = recognise(
        shapes,
        toolkits=possible,
        pooling=foreign.pooling,
        feat_dim=foreign.feat_dim,
        where=str(original),
    )
    features = frontend or frontend_of(found.toolkit, folder=source.checkpoint.absolute().parent)
    section = foreign.head()
    values = {
        "model": {
            "name": found.model,
            "args": found.args,
            **({"max_seconds": MAX_SECONDS[found.model]} if found.model in MAX_SECONDS else {}),
        },
        "frontend": foreign.frontend(features),
        **({"head": section} if section else {}),
    }
    config = parse_config(values)
    embedder = build_embedder(config)
    load_backbone(embedder.backbone, found, backbone)
    if source.classifier is not None:
        head_CD = read_tensors(source.classifier).get("weight")
    listed = speakers or foreign.speakers_file()
    head, classes = None, []
    if section and head_CD is not None:
        head, classes = _named_head(config, embedder, head_CD, listed)
    if len(possible) > 1 and frontend is None:
        _warn_if_ambiguous(shapes, foreign, original)
    toolkit = "3D-Speaker" if features == "3dspeaker" else "WeSpeaker"
    kept = f"head of {len(classes)} speakers" if head else "no head: its speakers are not known"
    named = (source.checkpoint.name, found.title, toolkit, kept)
    log.info("%s: %s, features as in %s, %s", *named)
    facts = {
        "source": {
            "toolkit": found.toolkit,
            "file": original.name,
            "sha256": file_sha256(original if original.is_file() else source.checkpoint),
            "architecture": found.title,
            "features": features,
        }
    }
    rows = None if head is None else head.state_dict()
    publish(out, embedder=embedder, config=config, facts=facts, head=rows, speakers=classes)


def _warn_if_ambiguous(shapes: Mapping[str, Shape], foreign: ForeignConfig, where: Path) -> None:
    """Say so where the network of the one toolkit is, tensor by tensor, one of the other's too."""
    try:
        for toolkit in get_args(Toolkit):
            recognise(
                shapes,
                toolkits=(toolkit,),
                pooling=foreign.pooling,
                feat_dim=foreign.feat_dim,
                where=str(where),
            )
    except ValueError:
        return
    log.warning(
        "%s: 3D-Speaker and WeSpeaker both have this network; without a config.yaml it counts as "
        "3D-Speaker's. Of WeSpeaker? Then use --model-config, or --frontend wespeaker",
        where,
    )


def _possible_toolkits(
    foreign: ForeignConfig, frontend: FrontendName | None, file: Path, *, has_projection: bool
) -> tuple[Toolkit, ...]:
    """Whose checkpoint it may be, the likelier first: some networks have the same tensors in both.

    What cannot be told apart is 3D-Speaker's, as WeSpeaker's come with a config.yaml; one that
    bears WeSpeaker's name and comes without is refused, for its features would be guessed.
    """
    if foreign.toolkit or has_projection:
        return (foreign.toolkit or "wespeaker",)
    if frontend == "wespeaker":
        return ("wespeaker", "3dspeaker")
    if frontend is None and file.name == WESPEAKER_NAME:
        raise FileNotFoundError(
            f"{file}: is named as WeSpeaker's, got no config.yaml beside it; give --model-config, "
            "or --frontend"
        )
    return ("3dspeaker", "wespeaker")


def load_backbone(backbone: nn.Module, found: Recognised, tensors: Mapping[str, Tensor]) -> None:
    """Copy recognised tensors; a counter that is not there stays at zero."""
    state = {ours: tensors[published] for ours, published in found.names.items()}
    missing, unexpected = backbone.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all(name.endswith(COUNTER) for name in missing), missing


def _named_head(
    config: Config, embedder: Embedder, weight_CD: Tensor, listed: Path | None
) -> tuple[nn.Module | None, list[str]]:
    """The head and the speakers of its rows; none where the rows cannot be named."""
    if listed is None or weight_CD.ndim != 2 or weight_CD.shape[1] != embedder.embed_dim:
        return None, []
    classes = read_speakers(listed, num_rows=len(weight_CD))
    if classes is None:
        log.warning("%s: lists other speakers than the head's %d rows", listed, len(weight_CD))
        return None, []
    head = build_head(config, embed_dim=embedder.embed_dim, num_classes=len(classes))
    with torch.no_grad():
        head.get_parameter("weight_CD").copy_(weight_CD)
    return head, classes


def _published_names(config: Config, state: Mapping[str, Tensor], *, where: str) -> dict[str, str]:
    """Our name -> 3D-Speaker's, or a ValueError that says what it does not have."""
    wanted = {name: p.default for name, p in inspect.signature(Fbank).parameters.items()}
    free = ("dither", "num_mel_bins", "sample_rate")
    odd = [
        f"{name}: {value}"
        for name, value in config.frontend.items()
        if name not in free and value != wanted[name]
    ]
    if config.frontend["sample_rate"] != 16000:
        odd.append(f"sample_rate: {config.frontend['sample_rate']}")
    if config.vad is not None:
        odd.append("vad")
    if odd:
        raise ValueError(
            f"{where}: 3D-Speaker would compute other features, got {', '.join(odd)}; export ONNX"
        )
    found = recognise(
        {name: tuple(tensor.shape) for name, tensor in state.items()},
        toolkits=("3dspeaker",),
        feat_dim=config.frontend["num_mel_bins"],
        where=where,
        outcome="3D-Speaker has no such model, so export ONNX",
    )
    own = complete_args(config.model.name, config.model.args)
    differing = [
        f"{name}: {own.get(name)}"
        for name in own.keys() | found.args.keys()
        if name not in FREE_ARGS and _plain(own.get(name)) != _plain(found.args.get(name))
    ]
    if found.model != config.model.name or differing:
        raise ValueError(
            f"{where}: 3D-Speaker has no such {config.model.name}, got "
            f"{', '.join(sorted(differing)) or found.model}; export ONNX"
        )
    return found.names


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _refuse_to_replace(out: Path) -> None:
    """Only a model folder may be replaced by one."""
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not _is_model(out)):
        raise ValueError(f"{out}: is in the way, got no model folder; name a new one")


def _is_model(folder: Path) -> bool:
    try:
        return find_model(folder) == folder
    except FileNotFoundError:
        return False
