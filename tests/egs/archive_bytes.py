"""Archives in memory."""

import hashlib
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path


def tar_bytes(members: dict[str, bytes]) -> bytes:
    """Return a tar.gz of name -> content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.linkname = len(content), 0o4700, "/etc"
            info.type = tarfile.SYMTYPE if name == "link" else tarfile.REGTYPE
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tar_of(folder: Path) -> bytes:
    """Return a tar.gz of a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return tar_bytes({str(path.relative_to(folder.parent)): path.read_bytes() for path in files})


def md5(content: bytes) -> str:
    """Return "md5:..." of the content."""
    return f"md5:{hashlib.md5(content).hexdigest()}"


def store_parts(body: bytes, folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Write equal parts of an archive under these names; name -> "md5:..."."""
    folder.mkdir(exist_ok=True)
    size = -(-len(body) // len(names))
    parts = {name: body[i * size : (i + 1) * size] for i, name in enumerate(names)}
    for name, content in parts.items():
        (folder / name).write_bytes(content)
    return {name: md5(content) for name, content in parts.items()}
