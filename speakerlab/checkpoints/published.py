"""Published models on disk: written, found and loaded.

A published model is a folder: `embedder.safetensors` (tensors only), `config.yaml` (everything
needed to build it), `card.json` (facts) and, if known, `head.safetensors` and `speakers.txt` (to
continue training or classify), `calibration.json` (to decide by) and `diarization.json`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor, nn

from speakerlab.checkpoints.model_files import (
    CALIBRATION,
    find_model,
    read_calibration,
    read_card,
    read_tuning,
)
from speakerlab.config.embedder import Embedder, build_backbone, build_embedder
from speakerlab.config.schema import Config, load_config
from speakerlab.core.atomic import (
    check_writable,
    file_sha256,
    replacing,
    replacing_folder,
    write_json,
    write_text,
)
from speakerlab.core.shapes import shapes_only
from speakerlab.diarization.clustering import Tuning
from speakerlab.scoring.calibration import Calibration

INITIAL = "initial.safetensors"


@dataclass(frozen=True)
class Published:
    """A published model, loaded from disk."""

    folder: Path
    config: Config
    embedder: Embedder
    sha256: str
    calibration: Calibration | None
    tuning: Tuning


def publish(
    folder: Path,
    *,
    embedder: Embedder,
    config: Config,
    facts: Mapping[str, Any],
    head: Mapping[str, Tensor] | None = None,
    speakers: Sequence[str] = (),
    calibration: Calibration | None = None,
) -> str:
    """Write a model folder, replacing an older one; return the sha256 of the weights.

    head: its tensors; speakers: those of its rows. Imported models may have neither.
    """
    refuse_other_folder(folder)
    parameters = sum(p.numel() for p in embedder.parameters())
    with replacing_folder(folder) as fresh:
        write_tensors(fresh / "embedder.safetensors", embedder.state_dict())
        config.write(fresh / "config.yaml")
        if head is not None:
            write_tensors(fresh / "head.safetensors", head)
            write_text(fresh / "speakers.txt", "".join(f"{name}\n" for name in speakers))
        if calibration is not None:
            write_json(fresh / CALIBRATION, asdict(calibration))
        digest = file_sha256(fresh / "embedder.safetensors")
        card = {"sha256": digest, "embed_dim": embedder.embed_dim, "parameters": parameters}
        write_json(fresh / "card.json", {**card, **facts})
    return digest


def refuse_other_folder(folder: Path) -> None:
    """Raise ValueError unless a model folder can be written: new, or in place of an older one."""
    place = folder.resolve()
    check_writable(place.with_name(f".{place.name}") if place.exists() else folder)
    is_ours = folder.is_dir() and not (folder / "checkpoints").exists()
    if is_ours and (not any(folder.iterdir()) or (folder / "card.json").exists()):
        return
    if folder.exists():
        raise ValueError(f"{folder}: already exists and is not a model folder; choose another path")


def load_published(path: Path) -> Published:
    """Load the model of a folder or experiment, in eval mode, its weights checked by its card."""
    folder = find_model(path)
    weights = folder / "embedder.safetensors"
    digest = file_sha256(weights)
    wanted = read_card(folder)["sha256"]
    if digest != wanted:
        raise ValueError(f"{weights}: sha256 is {digest} instead of {wanted}; copy the model again")
    config = load_config([folder / "config.yaml"])
    with _naming(folder / "config.yaml"), shapes_only():  # no memory for sizes of other weights
        network = nn.ModuleDict({"backbone": build_backbone(config)})
    tensors = read_tensors_of(network, weights)
    with _naming(folder / "config.yaml"):
        embedder = build_embedder(config)
    embedder.load_state_dict(tensors)
    stored = read_calibration(folder), read_tuning(folder)
    return Published(folder, config, embedder.eval(), digest, *stored)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name a file in the errors of its values."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_initial(exp_dir: Path, config: Config) -> Embedder:
    """Load the embedder as its training began: random, or from --init."""
    embedder = build_embedder(config)
    if (exp_dir / INITIAL).exists():
        embedder.load_state_dict(read_tensors_of(embedder, exp_dir / INITIAL))
    return embedder.eval()


def write_initial(exp_dir: Path, embedder: Embedder) -> None:
    """Keep the weights that a training begins with if they are not drawn from the seed."""
    write_tensors(exp_dir / INITIAL, embedder.state_dict())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; ValueError with one line if it is not one."""
    try:
        return load_file(path)
    except OSError:
        raise
    except Exception as error:  # a header of unknown types may raise others than its own
        raise ValueError(f"{path}: is not a safetensors file ({error}); copy it again") from error


def read_tensors_of(module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Read the weights of a module; ValueError if the file has others, or of other shapes."""
    own, loaded = module.state_dict(), read_tensors(path)
    odd = [
        name
        for name in sorted(own.keys() | loaded.keys())
        if name not in own or name not in loaded or own[name].shape != loaded[name].shape
    ]
    if odd:
        raise ValueError(
            f"{path}: is not of the configured model: {len(odd)} tensors are missing, unexpected "
            f"or of another shape ({', '.join(odd[:3])}); use its model section"
        )
    return loaded


def write_tensors(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write tensors atomically, with the permissions of any other file."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.items()}
    with replacing(path) as partial:
        partial.write_bytes(save(tensors))
