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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speakerlab.checkpoints import published
from speakerlab.checkpoints.model_files import refuse_substitute
from speakerlab.checkpoints.toolkit_config import read_config
from speakerlab.core.leftovers import is_leftover

# Names of the checkpoints of WeSpeaker, and of both toolkits.
WESPEAKER_NAME = "avg_model.pt"
NAMES = (WESPEAKER_NAME, "embedding_model.ckpt")
ENDINGS = (".ckpt", ".bin", ".pt", ".pth", ".safetensors")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
# Keys under which a training puts the tensors of a model.
WRAPPERS = ("state_dict", "model_state_dict", "model", "modules", "spk_model")
# Put before every name by data-parallel training and torch.compile, and by the classes that
# trainers such as PyTorch Lightning put around a model.
PREFIXES = (
    "module.",
    "_orig_mod.",
    "model.",
    "net.",
    "network.",
    "encoder.",
    "speaker_encoder.",
    "embedding_model.",
)


class _LeftOut:
    """In place of an object beside the tensors that nothing is read from."""

    def __init__(self, *args: Any) -> None:
        """Take and forget what the object was made of."""


# Objects that pyannote.audio puts beside the tensors of a network: their classes are not imported.
LEFT_OUT: list[Any] = [
    (_LeftOut, name)
    for name in (
        "torch.torch_version.TorchVersion",
        "pyannote.audio.core.task.Problem",
        "pyannote.audio.core.task.Resolution",
        "pyannote.audio.core.task.Specifications",
    )
]
# Files that SpeechBrain writes beside `embedding_model.ckpt`, whose name 3D-Speaker uses too.
OF_SPEECHBRAIN = ("hyperparams.yaml", "mean_var_norm_emb.ckpt")
SHARD = re.compile(r".*-\d{5}-of-\d{5}\..*")  # one of several files of a large model
# First bytes of other formats -> their names.
OTHER_FORMATS = {
    b"\x1f\x8b": "a file compressed by gzip",
    b"7z\xbc\xaf": "an archive of 7-Zip",
    b"Rar!": "a RAR archive",
    b"\x89HDF": "an HDF5 file, such as a model of Keras",
    b"{": "JSON, such as an index or an answer of a server",
    b"[": "JSON, such as an index or an answer of a server",
}
ZIP = b"PK\x03\x04"  # the first bytes of torch's checkpoints
PICKLE = b"\x80"  # the first byte of the checkpoints of old versions of torch
# Largest size of an unpacked archive, because a small hostile archive can unpack to terabytes. The
# largest published model has a fifth of this size.
MAX_BYTES = 8 << 30


class Checkpoint(NamedTuple):
    """The files of a foreign model."""

    file: Path  # the tensors
    config: Path | None  # the toolkit's config.yaml
    classifier: Path | None  # 3D-Speaker's head
    other_config: Path | None  # without `config`: a config.yaml that names no toolkit


class RefusedError(ValueError):
    """Archive that should not be unpacked."""


@contextmanager
def opened(path: Path) -> Iterator[Checkpoint]:
    """Find the checkpoint in a file, folder or archive, and the files that belong to it.

    An archive is unpacked to a temporary folder, which is deleted when the context ends. It is
    recognised by its name, because torch's checkpoints are zip files too.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint; check the path")
    if path.is_file():
        refuse_substitute(path)
    with tempfile.TemporaryDirectory() as scratch:
        place = path
        has_archive_name = path.name.lower().endswith(ARCHIVES)
        if path.is_file() and has_archive_name:
            # The name of the folder matters: `frontend_of` looks up the converted models by it.
            stem, _, _ = path.name.partition(".")
            place = Path(scratch) / stem
            unpack(path, place)
            # An archive without files leaves no folder.
            place.mkdir(exist_ok=True)

        def naming_archive(text: str) -> str:
            """Name the archive in a message, instead of the folder that it was unpacked into."""
            return text.replace(str(place), str(path))

        try:
            file = place if place.is_file() else _find_in(place)
            _refuse_speechbrain(file)
            classifier = file.with_name("classifier.ckpt")
            config, other_config = _configs_of(file)
            if other_config is not None:
                # It is never opened, only named in a warning.
                other_config = Path(naming_archive(str(other_config)))
            yield Checkpoint(
                file=file,
                config=config,
                classifier=classifier if classifier.exists() else None,
                other_config=other_config,
            )
        except ValueError as error:
            raise ValueError(naming_archive(str(error))) from error


def _refuse_speechbrain(file: Path) -> None:
    """Raise ValueError if SpeechBrain's files lie beside a checkpoint."""
    for name in OF_SPEECHBRAIN:
        if file.with_name(name).exists():
            raise ValueError(
                f"{file}: is a model of SpeechBrain ({name} is beside it), whose"
                " features we do not compute; models of 3D-Speaker and WeSpeaker"
                " can be imported"
            )


def _configs_of(file: Path) -> tuple[Path | None, Path | None]:
    """Return the toolkit's config.yaml beside a checkpoint or in the two folders above.

    If there is none: the nearest config.yaml that names no toolkit, as the second value.
    """
    other_config: Path | None = None
    folders = file.absolute().parents
    for folder in folders[:3]:
        config = folder / "config.yaml"
        if not config.is_file():
            continue
        # A config.yaml of another program may lie in the folders above, but hardly beside the
        # checkpoint: that one is refused later.
        if folder == folders[0] or read_config(config).toolkit:
            return config, None
        if other_config is None:
            other_config = config
    return None, other_config


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint by name, on the CPU. Runs no code from the file.

    The file is safetensors, or what `torch.save` writes. Removes the dictionaries that training
    puts around them, such as "state_dict", and the "module." of data-parallel training. Raises
    ValueError, one line, for any other content.
    """
    refuse_substitute(path)
    if SHARD.fullmatch(path.name):
        raise ValueError(
            f"{path}: is one of several files of a model; load them all, and save the"
            " tensors in one file with safetensors.torch.save_file"
        )
    read = published.read_tensors if _is_safetensors(path) else _load_pickled
    content: Any = read(path)

    content = _unwrapped(content)
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{path}: is not a dictionary of tensors, but a {type(content).__name__}"
        )
    if not content:
        raise ValueError(
            f"{path}: has no tensors, its dictionary is empty; save the model's"
            " state_dict() again"
        )
    _check_tensors(content, path)

    tensors = dict(content)
    # Three times, because the prefixes may stand in any order.
    for prefix in PREFIXES * 3:
        # A model may also have a part that is called "module": then only some names have it.
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensors[name] for name in tensors}
    return tensors


def _unwrapped(content: Any) -> Any:
    """Return the dictionary of tensors within the dictionaries that a training puts around it."""
    for key in WRAPPERS:
        if not isinstance(content, Mapping):
            return content
        inner = content.get(key)
        if isinstance(inner, Mapping):
            content = inner
    if not isinstance(content, Mapping):
        return content
    # Under any other name, such as "net", if it is the only one: of two models, nobody knows which.
    models = [entry for entry in content.values() if _is_state_dict(entry)]
    has_tensors = any(isinstance(entry, Tensor) for entry in content.values())
    if len(models) == 1 and not has_tensors:
        return models[0]
    return content


def _is_state_dict(entry: Any) -> bool:
    """Return whether this is a dictionary of tensors alone, and not empty."""
    if not isinstance(entry, Mapping) or not entry:
        return False
    return all(isinstance(tensor, Tensor) for tensor in entry.values())


def _is_safetensors(path: Path) -> bool:
    """Return whether a file is safetensors by its content or, if broken, by its name."""
    with path.open("rb") as file:
        head = file.read(9)
    # The size of the header in 8 bytes, and the header, which is JSON.
    if head[8:] == b"{":
        return True
    is_of_torch = head.startswith((ZIP, PICKLE))
    return path.suffix == ".safetensors" and not is_of_torch


def _load_pickled(path: Path) -> Any:
    """Return the content of a file of `torch.save`, without running code from it."""
    with path.open("rb") as file:
        head = file.read(len(ZIP))
    # The list of contents is at the end of a zip archive.
    is_zip = head == ZIP
    if is_zip and not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path}: is incomplete: its end is missing; copy or download it again"
        )
    other_format = _zip_format(path) if is_zip else _other_format(path, head)
    if other_format:
        raise ValueError(
            f"{path}: is {other_format}; give a checkpoint of torch.save or safetensors"
        )
    # `weights_only`: an ordinary pickle runs code while it is loaded. The warnings are about the
    # formats of old versions of torch, which a user cannot change.
    try:
        with (
            warnings.catch_warnings(),
            torch.serialization.safe_globals(LEFT_OUT),
        ):
            warnings.simplefilter("ignore")
            return torch.load(
                path,
                map_location="cpu",
                weights_only=True,
            )
    except Exception as error:  # unpickling may raise anything
        # Torch's own text is left out: it recommends loading the file with its code.
        match = re.search(r"\b(?:GLOBAL|global|class) ([\w.]+\.\w+)", str(error))
        if match:
            raise ValueError(
                f"{path}: holds an object of {match[1]} beside its tensors; save the"
                " tensors alone, torch.save(model.state_dict(), FILE); nothing in it"
                " was run"
            ) from None
        raise ValueError(
            f"{path}: is not a checkpoint of tensors only ({type(error).__name__});"
            " nothing in it was run"
        ) from None


def _other_format(path: Path, head: bytes) -> str | None:
    """Return the name of the format of a file that `torch.save` cannot have written, or None."""
    for beginning, title in OTHER_FORMATS.items():
        if head.startswith(beginning):
            return title
    if path.suffix.lower() == ".onnx":
        return "an ONNX model, which has no names of tensors that we know"
    return None


def _zip_format(path: Path) -> str | None:
    """Return the name of the format of a zip archive that is no checkpoint, or None.

    Raises ValueError if a member is damaged, which torch does not check.
    """
    with zipfile.ZipFile(path) as bundle:
        names = bundle.namelist()
        if any("/code/" in name for name in names):
            return "TorchScript (torch.jit.save), which has no plain tensors"
        if any(name.endswith(".npy") for name in names):
            return "an archive of NumPy arrays"
        if not any(name.endswith("data.pkl") for name in names):
            return (
                "a zip archive, not a checkpoint; unpack it, or rename it to NAME.zip"
            )
        try:
            damaged = bundle.testzip()
        except Exception as error:  # a damaged archive may raise anything
            damaged = str(error)
    if damaged:
        raise ValueError(
            f"{path}: is damaged ({damaged} does not fit its checksum); copy or download"
            " it again"
        )
    return None


def _check_tensors(content: Mapping[Any, Any], path: Path) -> None:
    """Raise ValueError unless these are finite tensors by name; path: for the message."""
    for name, value in content.items():
        if not _is_whole(name, value):
            raise ValueError(
                f"{path}: {name!r} is not a tensor; save the tensors alone"
            )
        if value.is_floating_point() and value.itemsize == 1:
            raise ValueError(
                f"{path}: {name!r} has 8 bits ({value.dtype}); use a checkpoint in 32 or"
                " 16 bits"
            )
    broken: list[str] = []
    for name, tensor in content.items():
        is_finite = bool(tensor.isfinite().all())
        if not is_finite:
            broken.append(name)
    if broken:
        raise ValueError(
            f"{path}: has NaN or infinity in {len(broken)} tensors"
            f" ({', '.join(broken[:3])}); use another checkpoint"
        )


def _is_whole(name: object, value: object) -> bool:
    """Return whether this is a named tensor and the file stores all of its values."""
    if not isinstance(name, str) or not isinstance(value, Tensor):
        return False
    if value.layout != torch.strided or value.device.type != "cpu":
        return False
    if value.is_quantized:
        return False
    # With strides of 0, a small file can claim a tensor that would fill the memory when copied.
    stored_bytes = value.untyped_storage().nbytes()
    return value.nbytes <= stored_bytes


def _find_in(folder: Path) -> Path:
    """Find a folder's checkpoint: by name, the newest of an experiment, or the only one."""
    for name in NAMES:
        for pattern in (name, f"models/{name}", f"*/{name}"):
            for file in sorted(folder.glob(pattern)):
                # The user may have named a leftover folder, but not one in it.
                if file.parent == folder or not is_leftover(file.parent.name):
                    return file

    # An experiment of 3D-Speaker: models/CKPT-EPOCH-<number>-00.
    checkpoints = list(folder.glob("models/CKPT*/embedding_model.ckpt"))
    if checkpoints:
        return max(checkpoints, key=_numbers_of_folder)

    if (folder / "embedder.safetensors").exists():
        raise ValueError(
            f"{folder}: is a model folder of speakerlab already; use it as it is"
        )
    # With several files, a guess might import the wrong model without notice.
    files: list[Path] = []
    for file in sorted(folder.iterdir()):
        if file.suffix in ENDINGS and not is_leftover(file.name):
            files.append(file)
    if len(files) != 1:
        names = [file.name for file in files[:5]]
        shown = ", ".join(names) or "none"
        raise ValueError(
            f"{folder}: checkpoints found: {shown}; name one checkpoint file"
        )
    return files[0]


def _numbers_of_folder(file: Path) -> list[int]:
    """Return the numbers in the name of a checkpoint's folder; the newest has the largest."""
    numbers = re.findall(r"\d+", file.parent.name)
    return [int(number) for number in numbers]


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the regular files of an archive into a folder.

    Raises ValueError, one line, and unpacks nothing if a member is a link, a device, absolute or
    outside the folder.
    """
    try:
        is_zip = archive.name.lower().endswith(".zip")
        if is_zip:
            _unpack_zip(archive, folder)
        else:
            _unpack_tar(archive, folder)
    except RefusedError:
        raise
    except Exception as error:  # unpacking may raise anything
        # The reason may have several lines, but the message has one.
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{archive}: cannot be unpacked ({reason}); check the disk, or download it"
            " again"
        ) from error


def _unpack_zip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as bundle:
        members: list[Member] = []
        for info in bundle.infolist():
            # The upper half of the attributes is the mode on Unix, 0 if made elsewhere.
            mode = info.external_attr >> 16
            kind = stat.S_IFMT(mode)
            is_plain = kind in (0, stat.S_IFREG, stat.S_IFDIR)
            member = Member(info.filename, info.file_size, is_plain)
            members.append(member)
        _check(archive, members)
        bundle.extractall(folder)


def _unpack_tar(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as bundle:
        infos = bundle.getmembers()
        members: list[Member] = []
        for info in infos:
            is_plain = info.isfile() or info.isdir()
            member = Member(info.name, info.size, is_plain)
            members.append(member)
        _check(archive, members)

        # Without the folder, a member without a name would become a file in its place.
        folder.mkdir(parents=True, exist_ok=True)
        # `extractall` is not used, because Debian 12's Python lacks its filter.
        for info in infos:
            file = bundle.extractfile(info)
            # A folder has no file.
            if file is None:
                continue
            path = folder / info.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as target:
                shutil.copyfileobj(file, target)


class Member(NamedTuple):
    """A member of an archive."""

    name: str
    size: int  # bytes
    is_plain: bool  # a regular file or a folder


def _check(archive: Path, members: Iterable[Member]) -> None:
    """Refuse a hostile or too large archive."""
    total = 0
    for name, size, is_plain in members:
        # A Windows path, because it understands both slashes, and drives.
        path = PureWindowsPath(name)
        is_absolute = bool(path.drive or path.root)
        if is_absolute or ".." in path.parts:
            raise RefusedError(
                f"{archive}: member '{name}' points outside the folder; do not use it"
            )
        if not is_plain:
            raise RefusedError(
                f"{archive}: member '{name}' is a link or device; do not use it"
            )
        total += size
        if total > MAX_BYTES:
            raise RefusedError(
                f"{archive}: unpacks to more than {MAX_BYTES / 2**30:.0f} GiB; unpack"
                " it yourself"
            )
