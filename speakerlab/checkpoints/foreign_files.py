"""Files of 3D-Speaker and WeSpeaker, read without running code from them.

In: a checkpoint, or a folder or archive that holds one. Out: the files that belong together, and
tensors by name.
"""

import re
import shutil
import stat
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import Tensor

from speakerlab.checkpoints.toolkit_config import read_config

WESPEAKER_NAME = "avg_model.pt"
NAMES = (WESPEAKER_NAME, "embedding_model.ckpt")  # the toolkits' names of their checkpoints
ENDINGS = (".ckpt", ".bin", ".pt", ".pth")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
MAX_BYTES = 8 << 30  # of an unpacked archive; the largest published model has a fifth of it


class RefusedError(ValueError):
    """Archive that should not be unpacked."""


@contextmanager
def opened(path: Path) -> Iterator[tuple[Path, Path | None, Path | None]]:
    """Find the checkpoint of a file, folder or archive, its config.yaml and 3D-Speaker's head.

    An archive, known by its name as torch's checkpoints are zip files too, is unpacked meanwhile.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint; check the path")
    with tempfile.TemporaryDirectory() as scratch:
        place = path
        if path.is_file() and path.name.lower().endswith(ARCHIVES):
            place = Path(scratch) / path.name.split(".")[0]
            unpack(path, place)
            place.mkdir(exist_ok=True)  # of an archive without files
        try:
            checkpoint = place if place.is_file() else _find_in(place)
            files = [folder / "config.yaml" for folder in checkpoint.absolute().parents[:3]]
            config = next((f for f in files if f.is_file() and read_config(f).toolkit), None)
            classifier = checkpoint.with_name("classifier.ckpt")
            yield checkpoint, config, classifier if classifier.exists() else None
        except ValueError as error:  # names the archive instead of the folder it was unpacked into
            raise ValueError(str(error).replace(str(place), str(path))) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint by name, on the CPU. Runs no code from the file.

    Removes the "state_dict" or "model" that training puts around them, and the "module." of
    data-parallel training. Raises ValueError, one line, for any other content.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling may raise anything
        # Not torch's text: it recommends loading the file with its code.
        raise ValueError(
            f"{path}: is not a checkpoint of tensors only ({type(error).__name__}); nothing "
            "in it was run"
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{path}: is not a dictionary of tensors, but a {type(content).__name__}")
    odd = [name for name, value in content.items() if not _is_whole(name, value)]
    if odd:
        raise ValueError(f"{path}: {odd[0]!r} is not a tensor; save the tensors alone")
    broken = [name for name, value in content.items() if not value.isfinite().all()]
    if broken:
        raise ValueError(
            f"{path}: has NaN or infinity in {len(broken)} tensors ({', '.join(broken[:3])}); use "
            "another checkpoint"
        )
    prefix = "module." if all(name.startswith("module.") for name in content) else ""
    return {name.removeprefix(prefix): value for name, value in content.items()}


def _is_whole(name: object, value: object) -> bool:
    """Return whether this is a named tensor of as many values as the file holds for it."""
    return (
        isinstance(name, str)
        and isinstance(value, Tensor)
        and (value.layout, value.device.type) == (torch.strided, "cpu")
        and not value.is_quantized
        and value.nbytes <= value.untyped_storage().nbytes()
    )


def _find_in(folder: Path) -> Path:
    """Find a folder's checkpoint: by name, the newest of an experiment, or the only one."""
    for name in NAMES:
        for pattern in (name, f"models/{name}", f"*/{name}"):
            if files := sorted(folder.glob(pattern)):
                return files[0]
    if saved := list(folder.glob("models/CKPT*/embedding_model.ckpt")):  # CKPT-EPOCH-<number>-00
        return max(saved, key=lambda file: [int(n) for n in re.findall(r"\d+", file.parent.name)])
    files = [file for file in sorted(folder.iterdir()) if file.suffix in ENDINGS]
    if len(files) != 1:
        shown = ", ".join(file.name for file in files[:5]) or "none"
        raise ValueError(f"{folder}: checkpoints found: {shown}; name one checkpoint file")
    return files[0]


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the regular files of an archive into a folder.

    Raises ValueError, one line, and unpacks nothing if a member is a link, a device, absolute or
    outside the folder.
    """
    try:
        if archive.name.lower().endswith(".zip"):
            with zipfile.ZipFile(archive) as bundle:
                infos = bundle.infolist()
                modes = [stat.S_IFMT(info.external_attr >> 16) for info in infos]
                plain = (mode in (0, stat.S_IFREG, stat.S_IFDIR) for mode in modes)
                _check(archive, ((i.filename, i.file_size, p) for i, p in zip(infos, plain)))
                bundle.extractall(folder)
        else:
            with tarfile.open(archive) as bundle:
                members = bundle.getmembers()
                _check(archive, ((m.name, m.size, m.isfile() or m.isdir()) for m in members))
                # Without it, a member without a name would become a file in its place.
                folder.mkdir(parents=True, exist_ok=True)
                for member in members:  # not extractall, whose filter Debian 12's Python lacks
                    if file := bundle.extractfile(member):  # None for a folder
                        path = folder / member.name
                        path.parent.mkdir(parents=True, exist_ok=True)
                        with path.open("wb") as target:
                            shutil.copyfileobj(file, target)
    except RefusedError:
        raise
    except Exception as error:  # unpacking may raise anything
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{archive}: cannot be unpacked ({reason}); check the disk, or download it again"
        ) from error


def _check(archive: Path, members: Iterable[tuple[str, int, bool]]) -> None:
    """Refuse a hostile or too large archive, by (name, size, is plain) of its members."""
    total = 0
    for name, size, is_plain in members:
        path = PureWindowsPath(name)  # understands both slashes, and drives
        if path.drive or path.root or ".." in path.parts:
            raise RefusedError(
                f"{archive}: member '{name}' points outside the folder; do not use it"
            )
        if not is_plain:
            raise RefusedError(f"{archive}: member '{name}' is a link or device; do not use it")
        total += size
        if total > MAX_BYTES:
            raise RefusedError(
                f"{archive}: unpacks to more than {MAX_BYTES / 2**30:.0f} GiB; unpack it yourself"
            )
