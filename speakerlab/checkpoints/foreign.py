"""Checkpoints of 3D-Speaker and WeSpeaker, imported as published models and exported again.

In: a checkpoint, or a folder or archive that holds one. Out: a model folder as `published.py`
writes it, with the front end of its toolkit; or a 3D-Speaker checkpoint of one of our models.
"""

import inspect
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speakerlab.checkpoints.foreign_files import WESPEAKER_NAME, opened, read_tensors
from speakerlab.checkpoints.published import Published, load_published, publish, refuse_other_folder
from speakerlab.checkpoints.recognise import COUNTER, Recognised, complete_args, recognise
from speakerlab.checkpoints.toolkit_config import (
    TITLES,
    ForeignConfig,
    Toolkit,
    frontend_of,
    read_config,
    read_speakers,
)
from speakerlab.config.build import build_head
from speakerlab.config.embedder import Embedder, build_embedder
from speakerlab.config.schema import Config, parse_config
from speakerlab.core.atomic import file_sha256, replacing
from speakerlab.frontend.fbank import Fbank

log = logging.getLogger(__name__)
PROJECTION = "projection."  # WeSpeaker's head, in the same checkpoint
# Attention costs the square of the length; as in conf/.
MAX_SECONDS = {"redimnet": 30.0, "redimnet2": 30.0}
MELS = "spec.torchfbank.2.melbanks_pt"  # the features in files of ReDimNet2's authors: (F, K, 1)


def import_checkpoint(
    path: Path,
    out: Path,
    *,
    config: Path | None = None,
    frontend: Toolkit | None = None,
    speakers: Path | None = None,
    about: Mapping[str, str] | None = None,
) -> Published:
    """Import a checkpoint as the model folder `out`.

    config: the toolkit's config.yaml if it is not beside the checkpoint. frontend: whose features
    the model takes, by default by the checkpoint. speakers: the list of training speakers, which
    names the rows of the head. about: facts to add to the card. Raises ValueError or
    FileNotFoundError, and writes nothing, if the checkpoint is not understood completely.
    """
    refuse_other_folder(out)
    with opened(path) as (file, own_config, classifier):
        foreign, tensors = read_config(config or own_config), read_tensors(file)
        head_CD = tensors.get(f"{PROJECTION}weight")
        backbone = {name: t for name, t in tensors.items() if not name.startswith(PROJECTION)}
        has_projection = len(backbone) < len(tensors)
        shapes = {name: tuple(tensor.shape) for name, tensor in backbone.items()}
        feat_dim = next(iter(shapes.get(MELS, ())), foreign.feat_dim)
        found = recognise(
            shapes,
            toolkits=_possible_toolkits(foreign, frontend, file, has_projection=has_projection),
            pooling=foreign.pooling,
            feat_dim=feat_dim,
            where=str(path),
        )
        if found.is_of_both and frontend is None:
            text = (
                "%s: both 3D-Speaker and WeSpeaker have this network; without a config.yaml it is "
                "imported as 3D-Speaker's. If it is WeSpeaker's, use --model-config or --frontend"
            )
            log.warning(text, path)
        toolkit, title = found.row.toolkit, found.row.title()
        features = frontend or frontend_of(toolkit, folder=file.absolute().parent)
        fbank = foreign.frontend("tfmel" if MELS in backbone else features)
        origin = {"": str(config or own_config or path)}
        ours = _our_config(found, foreign, {**fbank, "num_mel_bins": feat_dim}, origin)
        embedder = build_embedder(ours)
        state = {name: backbone[published] for name, published in found.names.items()}
        missing, unexpected = embedder.backbone.load_state_dict(state, strict=False)
        # Counters of BatchNorm may be missing and stay 0; `recognise` excludes anything else.
        assert not unexpected and all(name.endswith(COUNTER) for name in missing), missing
        if classifier is not None:
            head_CD = read_tensors(classifier).get("weight")
        head_state, classes = None, []
        if foreign.head() and head_CD is not None and speakers is not None:
            head_state, classes = _named_head(ours, embedder, head_CD, speakers)
        kept = f"head of {len(classes)} speakers" if head_state else "no head (see --speakers)"
        log.info("%s: %s, features of %s, %s", file.name, title, TITLES[features], kept)
        made_from = {
            "toolkit": toolkit,
            "file": path.name,
            "sha256": file_sha256(path if path.is_file() else file),
            "architecture": title,
            "features": features,
            **(about or {}),
        }
        facts = {"source": made_from}
        publish(out, embedder=embedder, config=ours, facts=facts, head=head_state, speakers=classes)
    return load_published(out)


def export_3dspeaker(model: Path, out: Path) -> Path:
    """Write a model as the `embedding_model.ckpt` that 3D-Speaker would have written.

    Raises ValueError if 3D-Speaker has no such model or would compute other features.
    """
    published = load_published(model)
    state = published.embedder.backbone.state_dict()
    names = _published_names(published.config, state, where=str(model))
    with replacing(out) as partial_file:
        torch.save({names[name]: value for name, value in state.items()}, partial_file)
    return out


def _our_config(
    found: Recognised, foreign: ForeignConfig, frontend: dict[str, Any], origin: Mapping[str, str]
) -> Config:
    model: dict[str, Any] = {"name": found.row.model, "args": found.args}
    if found.row.model in MAX_SECONDS:
        model["max_seconds"] = MAX_SECONDS[found.row.model]
    values = {"model": model, "frontend": frontend}
    if head := foreign.head():
        values["head"] = head
    return parse_config(values, origin=origin)


def _possible_toolkits(
    foreign: ForeignConfig, frontend: Toolkit | None, file: Path, *, has_projection: bool
) -> tuple[Toolkit, ...]:
    """Return the toolkits that a checkpoint may be from, the likelier first.

    Some networks have the same tensors in both; those count as 3D-Speaker's, as WeSpeaker's come
    with a config.yaml. A file with WeSpeaker's name but without config.yaml is refused, because its
    features would be guessed.
    """
    if foreign.toolkit or has_projection:
        return (foreign.toolkit or "wespeaker",)
    if frontend == "wespeaker":
        return ("wespeaker", "3dspeaker")
    if frontend is None and file.name == WESPEAKER_NAME:
        raise FileNotFoundError(
            f"{file}: has WeSpeaker's file name, but no config.yaml is beside it; give "
            "--model-config or --frontend"
        )
    return ("3dspeaker", "wespeaker")


def _named_head(
    config: Config, embedder: Embedder, weight_CD: Tensor, listed: Path
) -> tuple[Mapping[str, Tensor] | None, list[str]]:
    """Return the head and the speakers of its rows; none if the rows cannot be named."""
    if weight_CD.ndim != 2 or weight_CD.shape[1] != embedder.embed_dim:
        return None, []
    classes = read_speakers(listed, num_rows=len(weight_CD))
    if classes is None:
        text = "%s: does not list the speakers of the head's %d rows"
        log.warning(text, listed, len(weight_CD))
        return None, []
    head = build_head(config, embed_dim=embedder.embed_dim, num_classes=len(classes))
    with torch.no_grad():
        head.get_parameter("weight_CD").copy_(weight_CD)
    return head.state_dict(), classes


def _published_names(config: Config, state: Mapping[str, Tensor], *, where: str) -> dict[str, str]:
    """Return our name -> 3D-Speaker's; ValueError naming what 3D-Speaker does not have."""
    free = ("dither", "num_mel_bins")
    wanted = {name: p.default for name, p in inspect.signature(Fbank).parameters.items()}
    wanted |= {"sample_rate": 16000, **{key: config.frontend[key] for key in free}}
    odd = [f"{key}: {value}" for key, value in config.frontend.items() if value != wanted[key]]
    if odd := odd + ["vad"] * (config.vad is not None):
        raise ValueError(
            f"{where}: 3D-Speaker cannot compute features with {', '.join(odd)}; use --format onnx"
        )
    found = recognise(
        {name: tuple(tensor.shape) for name, tensor in state.items()},
        toolkits=("3dspeaker",),
        feat_dim=config.frontend["num_mel_bins"],
        where=where,
        outcome="3D-Speaker has no such model; use --format onnx",
    )
    both = (complete_args(config.model.name, config.model.args), found.args)
    own, theirs = (json.loads(json.dumps(args)) for args in both)  # tuples as lists
    names = own.keys() | theirs.keys()
    differing = [f"{name}: {own.get(name)}" for name in names if own.get(name) != theirs.get(name)]
    if found.row.model != config.model.name or differing:
        raise ValueError(
            f"{where}: 3D-Speaker has no {config.model.name} with "
            f"{', '.join(sorted(differing)) or found.row.model}; use --format onnx"
        )
    return found.names
