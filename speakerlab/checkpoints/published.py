"""Published models on disk: written, found and loaded.

A published model is a folder: `embedder.safetensors` (tensors only), `config.yaml` (everything
needed to build it), `card.json` (facts) and, if known, `head.safetensors` and `speakers.txt` (to
continue training or classify), `calibration.json` (to decide by) and `diarization.json`, with
`plda.safetensors` for its method vbx.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor, nn

from speakerlab.checkpoints.model_files import (
    CALIBRATION,
    EMBEDDER,
    SEGMENTER,
    TUNING,
    find_model,
    read_calibration,
    read_card,
    read_tuning,
    refuse_substitute,
    weights_name,
    write_calibration,
)
from speakerlab.config.build import (
    build_embedder,
    build_network,
    build_projection,
    build_segmenter,
    build_trained_network,
)
from speakerlab.config.schema import Config, load_config
from speakerlab.core.atomic import (
    check_writable,
    file_sha256,
    replacing,
    replacing_folder,
    write_json,
    write_text,
)
from speakerlab.core.huggingface import origin_of
from speakerlab.core.shapes import shapes_only
from speakerlab.core.tuning import Tuning
from speakerlab.embedder import Embedder
from speakerlab.frontend.pretrained import PretrainedFrontEnd
from speakerlab.models.segmenter import Segmenter
from speakerlab.scoring.calibration import Calibration

# In an experiment that began from another model: its weights before the first step.
INITIAL = "initial.safetensors"


@dataclass(frozen=True)
class Published:
    """Published model, loaded from disk."""

    folder: Path
    config: Config
    embedder: Embedder
    sha256: str
    tuning: Tuning

    @property
    def calibration(self) -> Calibration | None:
        """Read the calibration, None if there is none; only here, as `calibrate` replaces it."""
        return read_calibration(self.folder)


def publish(
    folder: Path,
    *,
    embedder: Embedder | Segmenter,
    config: Config,
    facts: Mapping[str, Any],
    head: Mapping[str, Tensor] | None = None,
    speakers: Sequence[str] = (),
    calibration: Calibration | None = None,
    force: bool = True,
) -> str:
    """Write a model folder, replacing an older one; return the sha256 of the weights.

    embedder: or a segmentation network, whose file has another name. head: its tensors; speakers:
    the speakers of its rows. Imported models may have neither. force: also replace another model,
    instead of raising ValueError.
    """
    weights = weights_name(config.task)
    refuse_other_folder(folder)
    state = embedder.state_dict()
    frontend = embedder.frontend
    merges_adapters = False
    if isinstance(frontend, PretrainedFrontEnd) and frontend.publish == "whole":
        merges_adapters = True
        state, config = _with_whole_front_end(state, frontend, config)
    num_parameters = 0
    for name, parameter in embedder.named_parameters():
        # A merged adapter is part of the weight that it adapts.
        if merges_adapters and ".lora_" in name:
            continue
        num_parameters += parameter.numel()

    with replacing_folder(folder) as fresh:
        write_tensors(fresh / weights, state)
        config.write(fresh / "config.yaml")
        if head is not None:
            write_tensors(fresh / "head.safetensors", head)
            # Line n is the speaker of row n.
            lines = [f"{name}\n" for name in speakers]
            write_text(fresh / "speakers.txt", "".join(lines))
        digest = file_sha256(fresh / weights)
        if not force:
            refuse_loss(folder, digest, weights)
        card: dict[str, Any] = {"sha256": digest}
        if isinstance(embedder, Embedder):
            card["embed_dim"] = embedder.embed_dim
        card = {**card, "parameters": num_parameters, **facts}
        write_json(fresh / "card.json", card)
        if calibration is not None:
            write_calibration(fresh, calibration)
    return digest


def _with_whole_front_end(
    state: Mapping[str, Tensor],
    frontend: PretrainedFrontEnd,
    config: Config,
) -> tuple[dict[str, Tensor], Config]:
    """Return tensors and settings of an embedder that needs no base, with adapters merged."""
    whole_state: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not name.startswith("frontend."):
            whole_state[name] = tensor
    for name, tensor in frontend.whole().items():
        whole_state[f"frontend.{name}"] = tensor
    section = {**config.frontend, "lora": None, "weights": "whole"}
    whole_config = config.model_copy(update={"frontend": section})
    return whole_state, whole_config


def refuse_other_folder(folder: Path) -> None:
    """Raise ValueError unless a model folder can be written: new, or in place of an older one."""
    # An older model is replaced by a folder that is written beside it.
    place = folder.resolve()
    written_folder = folder
    if place.exists():
        written_folder = place.with_name(f".{place.name}")
    check_writable(written_folder)
    if not folder.exists():
        return
    is_empty_or_model = False
    # An experiment has a card.json in its folder `model`, and must never be replaced.
    is_experiment = (folder / "checkpoints").exists()
    if folder.is_dir() and not is_experiment:
        is_empty = not any(folder.iterdir())
        is_empty_or_model = is_empty or (folder / "card.json").exists()
    if not is_empty_or_model:
        raise ValueError(
            f"{folder}: already exists and is not a model folder; choose another path"
        )


def refuse_loss(folder: Path, sha256: str, name: str = EMBEDDER) -> None:
    """Raise ValueError if weights of this digest and file name would replace something else.

    Another model may be the only copy, and what `calibrate` learned is in no import.
    """
    weights = folder / name
    is_other_model = weights.exists() and file_sha256(weights) != sha256
    for kind in (EMBEDDER, SEGMENTER):
        if kind != name and (folder / kind).exists():
            is_other_model = True
    if is_other_model:
        raise ValueError(
            f"{folder}: already exists; use --force to replace its model, which is"
            " another one, or give another --out"
        )
    for learned in (CALIBRATION, TUNING):
        file = folder / learned
        if file.exists():
            raise ValueError(
                f"{file}: already exists; use --force to replace its folder without"
                " it, or give another --out"
            )


def load_published(path: Path) -> Published:
    """Load a published model in eval mode; check its weights against the digest in its card."""
    folder = find_model(path)
    weights, digest = _checked_weights(folder, EMBEDDER)
    config = load_config([folder / "config.yaml"])
    # Compare the shapes before any memory is taken: a wrong config.yaml may state huge sizes.
    with _naming(folder / "config.yaml"), shapes_only():
        frontend, backbone = build_network(config)
        # Only these parts of an embedder have weights; the names give the same prefixes.
        network = nn.ModuleDict({"frontend": frontend, "backbone": backbone})
        projection = build_projection(config, backbone)
        if projection is not None:
            network["projection"] = projection
    tensors = read_tensors_of(network, weights)
    with _naming(folder / "config.yaml"):
        embedder = build_embedder(config)
    embedder.load_state_dict(tensors)
    return Published(
        folder=folder,
        config=config,
        embedder=embedder.eval(),
        sha256=digest,
        tuning=read_tuning(folder),
    )


@dataclass(frozen=True)
class PublishedSegmenter:
    """Published segmentation network, loaded from disk."""

    folder: Path
    config: Config
    segmenter: Segmenter
    sha256: str


def load_segmenter(path: Path) -> PublishedSegmenter:
    """Load a published segmentation network in eval mode; check its weights as for others."""
    folder = find_model(path, SEGMENTER)
    weights, digest = _checked_weights(folder, SEGMENTER)
    config = load_config([folder / "config.yaml"])
    if config.task != "segmentation":
        raise ValueError(
            f"{folder}/config.yaml: is of task {config.task}, but the weights are of a"
            " segmentation network; copy the model again"
        )
    # Compare the shapes before any memory is taken, as above.
    with _naming(folder / "config.yaml"), shapes_only():
        network = build_segmenter(config)
    tensors = read_tensors_of(network, weights)
    with _naming(folder / "config.yaml"):
        segmenter = build_segmenter(config)
    segmenter.load_state_dict(tensors)
    return PublishedSegmenter(folder, config, segmenter.eval(), digest)


def _checked_weights(folder: Path, name: str) -> tuple[Path, str]:
    """Return the file with the weights, and its digest, which must be that of the card."""
    weights = folder / name
    refuse_substitute(weights)
    # A copy may be cut or damaged, or mixed from two models.
    digest = file_sha256(weights)
    wanted = read_card(folder, name)["sha256"]
    if digest != wanted:
        fix = "copy the model again"
        if origin_of(folder) is not None:
            # Else the damaged file would be used again.
            fix = f"remove {folder.parents[1]}, and download it again"
        raise ValueError(f"{weights}: sha256 is {digest} instead of {wanted}; {fix}")
    return weights, digest


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name a file in the errors of its values."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_initial(exp_dir: Path, config: Config) -> Embedder:
    """Load the embedder with its weights before training: random, or from --init."""
    embedder = load_initial_network(exp_dir, config)
    assert isinstance(embedder, Embedder)
    return embedder


def load_initial_network(exp_dir: Path, config: Config) -> Embedder | Segmenter:
    """Load the network of any task with its weights before training."""
    if config.is_pretrained:
        # A published model has all weights; the training began from those of its base.
        config = load_config([exp_dir / "config.yaml"])
    # Random weights are drawn again from the seed.
    embedder = build_trained_network(config)
    path = exp_dir / INITIAL
    if path.exists():
        tensors = read_tensors_of(embedder, path)
        embedder.load_state_dict(tensors)
    return embedder.eval()


def write_initial(exp_dir: Path, embedder: Embedder | Segmenter) -> None:
    """Write the initial weights of a training that are not drawn from the seed."""
    write_tensors(exp_dir / INITIAL, embedder.state_dict())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; ValueError with one line if it is not one."""
    try:
        return load_file(path)
    except OSError:
        raise
    # Not only safetensors' own error: a header of unknown types raises others.
    except Exception as error:
        raise ValueError(
            f"{path}: is not a safetensors file ({error}); copy it again"
        ) from error


def read_tensors_of(module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Read the weights of a module; ValueError if the names or shapes in the file differ."""
    loaded = read_tensors(path)
    unfit = unfit_names(loaded, wanted=module.state_dict())
    if unfit:
        raise ValueError(
            f"{path}: is not of the configured model: {len(unfit)} tensors are missing,"
            f" unexpected or of another shape ({', '.join(unfit[:3])}); use its model"
            " section"
        )
    return loaded


def unfit_names(
    tensors: Mapping[str, Tensor], *, wanted: Mapping[str, Tensor]
) -> list[str]:
    """Return the names of tensors that are missing, unexpected or of another shape, sorted."""
    unfit: list[str] = []
    for name in sorted(wanted.keys() | tensors.keys()):
        is_in_both = name in wanted and name in tensors
        if not is_in_both or wanted[name].shape != tensors[name].shape:
            unfit.append(name)
    return unfit


def write_tensors(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write tensors atomically, with the permissions of any other file."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        on_cpu = tensor.detach().cpu()
        # safetensors refuses tensors that are not contiguous.
        tensors[name] = on_cpu.contiguous()
    # Not `save_file`, whose error on a full disk is no OSError.
    content = save(tensors)
    with replacing(path) as partial:
        partial.write_bytes(content)
