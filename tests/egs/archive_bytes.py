"""Archives in memory."""

import hashlib
import io
import tarfile
from pathlib import Path


def tar_bytes(members: dict[str, bytes]) -> bytes:
    """Return a tar.gz of name -> content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tar_of(folder: Path) -> bytes:
    """Return a tar.gz of a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return tar_bytes({str(path.relative_to(folder.parent)): path.read_bytes() for path in files})


def md5(content: bytes) -> str:
    """Return "md5:..." of the content."""
    return f"md5:{hashlib.md5(content).hexdigest()}"
