"""Checkpoints of 3D-Speaker and WeSpeaker, imported as published models and exported again.

In: a checkpoint, or a folder or archive that holds one. Out: a model folder as `published.py`
writes it, with the front end of its toolkit; or a 3D-Speaker checkpoint of one of our models.
"""

import inspect
import io
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speakerlab.checkpoints.foreign_files import (
    WESPEAKER_NAME,
    Checkpoint,
    opened,
    read_tensors,
)
from speakerlab.checkpoints.over_pretrained import kind_of, translate
from speakerlab.checkpoints.published import (
    Published,
    PublishedSegmenter,
    load_published,
    publish,
    refuse_other_folder,
)
from speakerlab.checkpoints.recognise import (
    COUNTER,
    Recognised,
    UnknownNetworkError,
    complete_args,
    recognise,
)
from speakerlab.checkpoints.segmenters import import_segmenter, is_segmenter
from speakerlab.checkpoints.toolkit_config import (
    TITLES,
    ForeignConfig,
    Toolkit,
    frontend_of,
    read_config,
    read_speakers,
)
from speakerlab.config.build import build_embedder, build_head
from speakerlab.config.schema import Config, parse_config
from speakerlab.core.atomic import file_sha256, replacing
from speakerlab.core.counting import count_of
from speakerlab.embedder import Embedder
from speakerlab.frontend.fbank import Fbank
from speakerlab.frontend.pretrained import PretrainedFrontEnd

log = logging.getLogger(__name__)
# Prefix of the tensors of WeSpeaker's head, which is in the same checkpoint.
PROJECTION = "projection."
# Longest input of a model, as in conf/. The cost of attention grows with the squared length.
MAX_SECONDS = {"redimnet": 30.0, "redimnet2": 30.0}
# Its tensors have the same names and shapes in both toolkits.
SAME_IN_SPEECHBRAIN = "ecapa_tdnn of 3D-Speaker"
# The mel filters (F, K, 1) in files of ReDimNet2's authors.
MELS = "spec.torchfbank.2.melbanks_pt"


def import_checkpoint(
    path: Path,
    out: Path,
    *,
    config: Path | None = None,
    frontend: Toolkit | None = None,
    speakers: Path | None = None,
    pretrained: str | None = None,
    about: Mapping[str, str] | None = None,
    force: bool = False,
) -> Published | PublishedSegmenter:
    """Import a checkpoint as the model folder `out`.

    config: the toolkit's config.yaml if it is not beside the checkpoint. frontend: the toolkit
    whose features the model takes, by default inferred from the checkpoint. speakers: the list of
    training speakers, which names the rows of the head. pretrained: the folder, or `hf:owner/name`,
    of the pretrained model that is the front end of the checkpoint. about: facts to add to the
    card. force: also replace another model in `out`. Raises ValueError or FileNotFoundError, and
    writes nothing, if any part of the checkpoint is unknown.
    """
    refuse_other_folder(out)
    with opened(path) as checkpoint:
        tensors = read_tensors(checkpoint.file)
        # The config.yaml beside such a network is of pyannote.audio.
        if is_segmenter(tensors):
            if any((config, frontend, speakers, pretrained)):
                raise ValueError(
                    f"{path}: is a segmentation network, whose tensors say all; leave out"
                    " --model-config, --frontend, --speakers and --pretrained"
                )
            return import_segmenter(path, out, tensors, about=about or {}, force=force)
        return _import_embedder(
            checkpoint,
            tensors,
            path,
            out,
            config_file=config or checkpoint.config,
            frontend=frontend,
            speakers=speakers,
            pretrained=pretrained,
            about=about or {},
            force=force,
        )


def _import_embedder(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor],
    path: Path,
    out: Path,
    *,
    config_file: Path | None,
    frontend: Toolkit | None,
    speakers: Path | None,
    pretrained: str | None,
    about: Mapping[str, str],
    force: bool,
) -> Published:
    """Import the tensors of an embedder; the arguments are those of `import_checkpoint`."""
    file = checkpoint.file
    foreign = _read_toolkit_config(config_file)
    kind = kind_of(tensors, foreign)
    if kind is not None:
        return _import_over_pretrained(
            kind,
            path,
            out,
            tensors,
            foreign,
            pretrained=pretrained,
            about=about,
            force=force,
        )

    # Recognise the architecture by the tensors of the backbone alone.
    backbone: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(PROJECTION):
            backbone[name] = tensor
    recognised, feat_dim = _recognise(
        backbone,
        foreign,
        frontend=frontend,
        file=file,
        where=str(path),
        has_projection=len(backbone) < len(tensors),
    )
    if frontend is None and foreign.toolkit is None:
        _warn_of_doubt(recognised, path, checkpoint.other_config)

    # No tensor shows the features, except in files of ReDimNet2's authors.
    toolkit = recognised.row.toolkit
    folder = file.absolute().parent
    features = frontend or frontend_of(toolkit, folder=folder)
    fbank_name = "tfmel" if MELS in backbone else features
    fbank = foreign.frontend(fbank_name)
    our_config = _our_config(
        recognised,
        foreign,
        frontend={**fbank, "num_mel_bins": feat_dim},
        origin={"": str(config_file or path)},
    )
    embedder = build_embedder(our_config)
    foreign.check_size(embedder.embed_dim)
    _load_backbone(embedder, backbone, recognised.names)

    head_state, classes = _head_of(
        checkpoint,
        tensors,
        config=our_config,
        embedder=embedder,
        foreign=foreign,
        speakers=speakers,
    )
    head = "no head (see --speakers)"
    if head_state:
        head = f"head of {count_of(len(classes), 'speaker')}"
    title = recognised.row.title()
    log.info(
        "%s: %s, features of %s, %s",
        file.name,
        title,
        TITLES[features],
        head,
    )

    # The digest identifies the user's file: the archive, not a file in it.
    source_file = path if path.is_file() else file
    source = {
        "toolkit": toolkit,
        "file": path.name,
        "sha256": file_sha256(source_file),
        "architecture": title,
        "features": features,
        **about,
    }
    publish(
        out,
        embedder=embedder,
        config=our_config,
        facts={"source": source},
        head=head_state,
        speakers=classes,
        force=force,
    )
    return load_published(out)


def _recognise(
    backbone: Mapping[str, Tensor],
    foreign: ForeignConfig,
    *,
    frontend: Toolkit | None,
    file: Path,
    where: str,
    has_projection: bool,
) -> tuple[Recognised, int]:
    """Return the network that has these tensors, and how many features it takes."""
    shapes = _shapes_of(backbone)
    feat_dim = foreign.feat_dim
    mel_shape = shapes.get(MELS)
    if mel_shape:
        feat_dim = mel_shape[0]
    recognised = recognise(
        shapes,
        toolkits=_possible_toolkits(
            foreign,
            frontend,
            file,
            has_projection=has_projection,
        ),
        pooling=foreign.pooling,
        feat_dim=feat_dim,
        where=where,
    )
    return recognised, feat_dim


def _load_backbone(
    embedder: Embedder, backbone: Mapping[str, Tensor], names: Mapping[str, str]
) -> None:
    """Load a recognised backbone; names: our name of a tensor -> the published one.

    Tensors of the checkpoint that have no part in the embedding are left out.
    """
    state: dict[str, Tensor] = {}
    for name, published_name in names.items():
        state[name] = backbone[published_name]
    # Counters of BatchNorm may be missing and stay 0; `recognise` excludes anything else.
    missing, unexpected = embedder.backbone.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    for name in missing:
        assert name.endswith(COUNTER), missing


def _head_of(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor],
    *,
    config: Config,
    embedder: Embedder,
    foreign: ForeignConfig,
    speakers: Path | None,
) -> tuple[Mapping[str, Tensor] | None, list[str]]:
    """Return the tensors of the head and the names of its rows; (None, []) without a head.

    tensors: of the checkpoint. config: ours. speakers: the list of training speakers.
    """
    # WeSpeaker stores the head in the checkpoint, 3D-Speaker in a separate file.
    head_CD = tensors.get(f"{PROJECTION}weight")
    if checkpoint.classifier is not None:
        head_CD = read_tensors(checkpoint.classifier).get("weight")
    # Without the list of speakers, a row of the head has a number but no name.
    has_our_kind = foreign.head() is not None
    if not has_our_kind or head_CD is None or speakers is None:
        return None, []
    return _named_head(config, embedder, head_CD, speakers)


def _import_over_pretrained(
    kind: str,
    path: Path,
    out: Path,
    tensors: Mapping[str, Tensor],
    foreign: ForeignConfig,
    *,
    pretrained: str | None,
    about: Mapping[str, str],
    force: bool,
) -> Published:
    """Import a checkpoint over a pretrained model, without its head."""
    translated = translate(
        kind, tensors, foreign, pretrained=pretrained, where=str(path)
    )
    values = {"model": translated.model, "frontend": translated.frontend}
    our_config = parse_config(values, origin={"": str(foreign.path or path)})
    embedder = build_embedder(our_config)
    assert isinstance(embedder.frontend, PretrainedFrontEnd)
    missing, unexpected = embedder.load_state_dict(translated.state, strict=False)
    # Some code has no part that would normalise the last layer, where a lower one is the last used.
    may_be_missing = f"frontend.encoder.{embedder.frontend.final_norm}."
    unfit: list[str] = []
    for name in missing:
        if not (name.startswith(may_be_missing) or name.endswith(COUNTER)):
            unfit.append(name)
    unfit += unexpected
    if unfit:
        raise ValueError(
            f"{path}: does not fit {pretrained}: {len(unfit)} tensors are missing or"
            f" unexpected ({', '.join(unfit[:3])}); give the model that it was trained"
            " with (--pretrained)"
        )
    source = {
        "toolkit": "wespeaker" if foreign.toolkit else kind,
        "file": path.name,
        "sha256": file_sha256(path) if path.is_file() else None,
        "architecture": f"{our_config.model.name} over {pretrained}",
        "features": kind,
        **about,
    }
    publish(
        out, embedder=embedder, config=our_config, facts={"source": source}, force=force
    )
    return load_published(out)


def export_3dspeaker(model: Path, out: Path) -> Path:
    """Write a model in the format of 3D-Speaker's `embedding_model.ckpt`.

    Raises ValueError if 3D-Speaker has no such model or would compute other features.
    """
    published = load_published(model)
    if published.embedder.projection is not None:
        raise ValueError(
            f"{model}: 3D-Speaker has no place for the projection to its teacher's space;"
            " train with distil.projection=drop, or export to ONNX"
        )
    state = published.embedder.backbone.state_dict()
    names = _published_names(published.config, state, where=str(model))
    renamed_state: dict[str, Tensor] = {}
    for name, tensor in state.items():
        renamed_state[names[name]] = tensor
    # In memory first: on a full disk, torch's error is no OSError.
    buffer = io.BytesIO()
    torch.save(renamed_state, buffer)
    with replacing(out) as partial_file:
        partial_file.write_bytes(buffer.getbuffer())
    return out


def _read_toolkit_config(path: Path | None) -> ForeignConfig:
    """Read a config.yaml; ValueError if it is of another program."""
    foreign = read_config(path)
    if path is not None and foreign.toolkit is None:
        raise ValueError(
            f"{path}: is no configuration of 3D-Speaker (embedding_model) or WeSpeaker"
            " (model_args); give the config.yaml of the training (--model-config)"
        )
    return foreign


def _warn_of_doubt(
    recognised: Recognised, path: Path, other_config: Path | None = None
) -> None:
    """Warn about a network of several toolkits, without a configuration that names one.

    With the features of another toolkit, the embeddings would be bad without any error.
    other_config: a config.yaml that lies there but names no toolkit.
    """
    doubt = "without a config.yaml"
    if other_config is not None:
        doubt = f"{other_config} does not tell whose it is, so"
    if recognised.is_of_both:
        log.warning(
            "%s: both 3D-Speaker and WeSpeaker have this network; %s it is imported as"
            " 3D-Speaker's. If it is WeSpeaker's, use --model-config or --frontend",
            path,
            doubt,
        )
    if recognised.row.title() == SAME_IN_SPEECHBRAIN:
        log.warning(
            "%s: both 3D-Speaker and SpeechBrain have this network; %s it is imported as"
            " 3D-Speaker's. Do not use it if it is SpeechBrain's, which has other"
            " features",
            path,
            doubt,
        )


def _shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _our_config(
    recognised: Recognised,
    foreign: ForeignConfig,
    *,
    frontend: dict[str, Any],
    origin: Mapping[str, str],
) -> Config:
    """Return the configuration of an imported model; origin: the file to name in errors."""
    name = recognised.row.model
    model: dict[str, Any] = {
        "name": name,
        "args": recognised.args,
    }
    if name in MAX_SECONDS:
        model["max_seconds"] = MAX_SECONDS[name]
    values = {"model": model, "frontend": frontend}
    head = foreign.head()
    if head:
        values["head"] = head
    return parse_config(values, origin=origin)


def _possible_toolkits(
    foreign: ForeignConfig,
    frontend: Toolkit | None,
    file: Path,
    *,
    has_projection: bool,
) -> tuple[Toolkit, ...]:
    """Return the toolkits that may have written a checkpoint, the likelier first.

    Some networks have the same tensors in both toolkits; they count as 3D-Speaker's, because
    WeSpeaker's checkpoints come with a config.yaml. A file with WeSpeaker's name but without
    config.yaml is refused, because its features would be a guess.
    """
    # Certain signs: the toolkit's config.yaml, or a head in the same file (WeSpeaker only).
    if foreign.toolkit:
        return (foreign.toolkit,)
    if has_projection:
        return ("wespeaker",)
    # A user who names WeSpeaker's features most likely has a model of WeSpeaker.
    if frontend == "wespeaker":
        return ("wespeaker", "3dspeaker")
    if frontend is None and file.name == WESPEAKER_NAME:
        raise FileNotFoundError(
            f"{file}: has WeSpeaker's file name, but no config.yaml is beside it; give "
            "--model-config or --frontend"
        )
    return ("3dspeaker", "wespeaker")


def _named_head(
    config: Config,
    embedder: Embedder,
    weight_CD: Tensor,
    speakers: Path,
) -> tuple[Mapping[str, Tensor] | None, list[str]]:
    """Return the head and the speakers of its rows; (None, []) if the rows cannot be named."""
    # A head of another shape, for example after another layer, does not take embeddings.
    embed_dim = embedder.embed_dim
    if weight_CD.ndim != 2 or weight_CD.shape[1] != embed_dim:
        return None, []
    classes = read_speakers(speakers, num_rows=len(weight_CD))
    if classes is None:
        log.warning(
            "%s: does not list the speakers of the head's %d rows",
            speakers,
            len(weight_CD),
        )
        return None, []
    head = build_head(config, embed_dim=embed_dim, num_classes=len(classes))
    with torch.no_grad():
        weight = head.get_parameter("weight_CD")
        weight.copy_(weight_CD)
    return head.state_dict(), classes


def _published_names(
    config: Config,
    state: Mapping[str, Tensor],
    *,
    where: str,
) -> dict[str, str]:
    """Return our name -> 3D-Speaker's name; ValueError names the settings 3D-Speaker lacks."""
    _refuse_other_features(config, where)
    # Importing our tensors as a 3D-Speaker checkpoint gives the map between the names.
    our_model = config.model.name
    try:
        recognised = recognise(
            _shapes_of(state),
            toolkits=("3dspeaker",),
            feat_dim=config.frontend["num_mel_bins"],
            where=where,
        )
    except UnknownNetworkError as error:
        nearest = error.nearest
        # The settings of another model tell nothing about ours.
        differing: list[str] = []
        if nearest is not None and nearest.row.model == our_model:
            differing = _differing_args(config, nearest)
        missing = f"such {our_model}"
        if differing:
            missing = f"{our_model} with {', '.join(differing)}"
        # Without the error of the import: its lines about tensors do not help here.
        raise ValueError(
            f"{where}: 3D-Speaker has no {missing}; use --format onnx"
        ) from None
    # Arguments without a tensor, such as a small constant, may still differ.
    differing = _differing_args(config, recognised)
    their_model = recognised.row.model
    if their_model != our_model or differing:
        difference = ", ".join(differing) or their_model
        raise ValueError(
            f"{where}: 3D-Speaker has no {our_model} with {difference}; use"
            " --format onnx"
        )
    return recognised.names


def _refuse_other_features(config: Config, where: str) -> None:
    """Raise ValueError if 3D-Speaker cannot compute the features of a model."""
    # 3D-Speaker's features are the defaults of our Fbank, at 16 kHz, with any number of bins.
    # Dither is used in training only.
    theirs: dict[str, Any] = {}
    parameters = inspect.signature(Fbank).parameters
    for name, parameter in parameters.items():
        theirs[name] = parameter.default
    theirs["sample_rate"] = 16000
    for name in ("dither", "num_mel_bins"):
        theirs[name] = config.frontend[name]
    differing: list[str] = []
    for name, value in config.frontend.items():
        if value != theirs[name]:
            differing.append(f"{name}: {value}")
    if config.vad is not None:
        differing.append("vad")
    if differing:
        raise ValueError(
            f"{where}: 3D-Speaker cannot compute features with {', '.join(differing)}; use"
            " --format onnx"
        )


def _differing_args(config: Config, theirs: Recognised) -> list[str]:
    """Return our arguments of a model that differ from a recognised one, as texts."""
    all_args = complete_args(config.model.name, config.model.args)
    our_args = _as_json(all_args)
    their_args = _as_json(theirs.args)
    differing: list[str] = []
    for name in our_args.keys() | their_args.keys():
        our_value = our_args.get(name)
        if our_value != their_args.get(name):
            differing.append(f"{name}: {our_value}")
    # A set has no order: the message must be the same in every run.
    return sorted(differing)


def _as_json(args: Mapping[str, object]) -> dict[str, Any]:
    """Return arguments as JSON stores them: tuples become lists, so that both compare equal."""
    text = json.dumps(args)
    return json.loads(text)
