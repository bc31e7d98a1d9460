"""A hub on loopback that speaks as much of huggingface.co's protocol as its client uses."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from loopback import LoopbackHandler, LoopbackServer, running

TOKEN = "hf_of_the_test"
Files = dict[str, bytes]


class Repository:
    """Commits and branches; a commit is a table of files."""

    def __init__(self, *, private: bool = False) -> None:
        self.private = private
        self.commits: dict[str, Files] = {}
        self.branches: dict[str, str] = {}
        self.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})

    def commit(self, branch: str, files: Mapping[str, bytes]) -> str:
        """Make these the files of a branch; return the commit."""
        text = f"{len(self.commits)} {sorted(files)}"
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha

    def find(self, revision: str) -> str | None:
        sha = self.branches.get(revision, revision)
        return sha if sha in self.commits else None


class HubServer(LoopbackServer):
    """Repositories by name.

    fault: what to do with requests for files: "401", "403", "404", "500", "gated", "cut" (the
    connection ends early), "flip" (a wrong bit) or "". requests: "GET /path" of each.
    """

    def __init__(self) -> None:
        super().__init__(Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: Files = {}  # uploaded large files, by their sha256
        self.fault = ""
        self.requests: list[str] = []

    def add(self, name: str, folder: Path, **other_files: bytes) -> str:
        """Make a repository of the files of a folder; return its commit."""
        files = dict(other_files)
        for path in folder.iterdir():
            if path.is_file():
                files[path.name] = path.read_bytes()
        repository = self.repositories.setdefault(name, Repository())
        return repository.commit("main", files)


class Handler(LoopbackHandler):
    server: HubServer

    def do_GET(self) -> None:
        path = self.note()
        if path.startswith("/api/models/"):
            self.answer_about(path.removeprefix("/api/models/"))
            return
        name, _, rest = path.strip("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        commit = self.look_up(name, unquote(revision))
        if commit is None:
            return
        sha, files = commit
        if file not in files:
            self.refuse(404, "EntryNotFound")
            return
        self.send_file(files[file], sha, is_large=file.endswith(".safetensors"))

    def note(self) -> str:
        path = self.path.partition("?")[0]
        with self.server.lock:
            self.server.requests.append(f"{self.command} {path}")
        return path

    def look_up(self, name: str, revision: str) -> tuple[str, Files] | None:
        """Return a commit and its files, or send the refusal."""
        fault = self.server.fault
        if fault == "gated":
            self.refuse(403, "GatedRepo")
            return None
        if fault.isdigit():
            codes = {"404": "RepoNotFound"}
            self.refuse(int(fault), codes.get(fault, ""))
            return None
        repository = self.server.repositories.get(name)
        is_seen = repository is not None and (
            not repository.private or self.is_logged_in()
        )
        if repository is None or not is_seen:
            self.refuse(404, "RepoNotFound")
            return None
        sha = repository.find(revision)
        if sha is None:
            self.refuse(404, "RevisionNotFound")
            return None
        return sha, repository.commits[sha]

    def is_logged_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def answer_about(self, path: str) -> None:
        """Answer about a revision, or the list of its files."""
        owner, name, *rest = path.split("/", 3)
        kind, _, revision = "/".join(rest).partition("/")
        commit = self.look_up(f"{owner}/{name}", unquote(revision) or "main")
        if commit is None:
            return
        sha, files = commit
        if kind == "tree":
            self.send_json([describe(file, content) for file, content in files.items()])
            return
        siblings = [{"rfilename": file} for file in files]
        private = self.server.repositories[f"{owner}/{name}"].private
        facts = {"id": f"{owner}/{name}", "sha": sha, "private": private}
        self.send_json({**facts, "siblings": siblings})

    def send_file(self, content: bytes, sha: str, *, is_large: bool) -> None:
        digest = hashlib.sha256(content) if is_large else hashlib.sha1(content)
        headers = {"ETag": f'"{digest.hexdigest()}"', "X-Repo-Commit": sha}
        fault = self.server.fault
        if fault == "flip" and is_large:
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.send(200, content, headers, is_cut=fault == "cut" and is_large)

    def do_PUT(self) -> None:
        path = self.note()
        self.server.objects[path.rpartition("/")[2]] = self.body()
        self.send(200, b"")

    def do_POST(self) -> None:
        path = self.note()
        body = self.body()
        if path == "/api/validate-yaml":
            self.send_json({"errors": [], "warnings": []})
            return
        if not self.is_logged_in() or self.server.fault == "403":
            self.refuse(403 if self.is_logged_in() else 401, "")
            return
        if path == "/api/repos/create":
            self.create(json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            self.offer_uploads(json.loads(body))
        elif "/branch/" in path:
            name, _, branch = path.removeprefix("/api/models/").partition("/branch/")
            repository = self.server.repositories[name]
            head = repository.branches["main"]
            repository.branches.setdefault(unquote(branch), head)
            self.send_json({})
        elif "/preupload/" in path:
            files = []
            for file in json.loads(body)["files"]:
                is_large = file["path"].endswith(".safetensors")
                mode = "lfs" if is_large else "regular"
                facts = {"uploadMode": mode, "shouldIgnore": False}
                files.append({"path": file["path"], **facts})
            self.send_json({"files": files})
        else:
            name, _, branch = path.removeprefix("/api/models/").partition("/commit/")
            self.commit(name, unquote(branch), body)

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.server.url}/{name}"
        if name in self.server.repositories:
            self.send_json({"url": url, "id": name}, status=409)
            return
        private = asked.get("private") or asked.get("visibility") == "private"
        self.server.repositories[name] = Repository(private=bool(private))
        self.send_json({"url": url, "id": name})

    def offer_uploads(self, asked: dict[str, Any]) -> None:
        objects = []
        for wanted in asked["objects"]:
            href = f"{self.server.url}/upload/{wanted['oid']}"
            objects.append({**wanted, "actions": {"upload": {"href": href}}})
        self.send_json({"transfer": "basic", "objects": objects})

    def commit(self, name: str, branch: str, body: bytes) -> None:
        """Take a commit: lines of JSON, with the content of small files in them."""
        repository = self.server.repositories[name]
        files = dict(repository.commits[repository.branches[branch]])
        for line in body.decode().splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "header":
                parent = value.get("parentCommit")
                if parent not in (None, repository.branches[branch]):
                    self.refuse(412, "")
                    return
            elif row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif row["key"] == "deletedFile":
                del files[value["path"]]
        sha = repository.commit(branch, files)
        url = f"{self.server.url}/{name}/commit/{sha}"
        self.send_json({"success": True, "commitOid": sha, "commitUrl": url})

    def body(self) -> bytes:
        """Return the body of a request, also of one that comes in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def refuse(self, status: int, code: str) -> None:
        self.send(status, b"{}", {"X-Error-Code": code} if code else {})

    def send_json(self, values: Any, *, status: int = 200) -> None:
        content = json.dumps(values).encode()
        self.send(status, content, {"Content-Type": "application/json"})


def describe(file: str, content: bytes) -> dict[str, Any]:
    """Return what the list of a repository says about a file."""
    # Of an object of git.
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {
        "type": "file",
        "path": file,
        "size": len(content),
        "oid": blob,
    }
    if file.endswith(".safetensors"):
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry


@contextmanager
def served() -> Iterator[HubServer]:
    """Serve an empty hub until the end of the block."""
    with running(HubServer()) as server:
        yield server


def use_hub(
    patch: pytest.MonkeyPatch, url: str, cache: Path, *, token: str | None = None
) -> None:
    """Have `huggingface_hub` use a hub and a cache; it has read its variables at its import."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    address = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Xet has a protocol of its own, between its own servers; a hub may also offer that of Git LFS.
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    patch.delenv("HF_TOKEN", raising=False)
    if token:
        patch.setenv("HF_TOKEN", token)
