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
            info.size = len(content)
            # A mode with setuid, and a target for the member that is a link.
            info.mode = 0o4700
            info.linkname = "/etc"
            info.type = tarfile.SYMTYPE if name == "link" else tarfile.REGTYPE
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tar_of(folder: Path) -> bytes:
    """Return a tar.gz of a folder."""
    members = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(folder.parent))
            members[name] = path.read_bytes()
    return tar_bytes(members)


def md5(content: bytes) -> str:
    """Return "md5:..." of the content."""
    return f"md5:{hashlib.md5(content).hexdigest()}"


def store_parts(body: bytes, folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Write equal parts of an archive under these names; name -> "md5:..."."""
    folder.mkdir(exist_ok=True)
    size = -(-len(body) // len(names))  # rounded up
    digests = {}
    for number, name in enumerate(names):
        start = number * size
        content = body[start : start + size]
        (folder / name).write_bytes(content)
        digests[name] = md5(content)
    return digests
