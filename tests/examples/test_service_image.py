"""The image of examples/service: what can be tested of its Dockerfile without building it."""

import ast
import fnmatch
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from service_clients import free_port

from examples.service.endpoints import router
from examples.service.settings import read_settings
from speakerlab.core.torch_builds import CUDA_12_6

ROOT = Path(__file__).parents[2]
SERVICE = ROOT / "examples/service"


def read_instructions() -> list[tuple[str, str]]:
    """Return pairs such as ("WORKDIR", "/app"), with continued lines joined."""
    dockerfile = SERVICE / "Dockerfile"
    text = dockerfile.read_text(encoding="utf-8")
    without_comments = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    joined = without_comments.replace("\\\n", " ")
    instructions: list[tuple[str, str]] = []
    for line in joined.splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            instructions.append((word, rest.strip()))
    return instructions


def all_of(name: str) -> list[str]:
    """Return what follows this word, such as ENV, of each of its instructions."""
    return [rest for word, rest in read_instructions() if word == name]


def only(name: str) -> str:
    [rest] = all_of(name)
    return rest


def environment() -> dict[str, str]:
    values: dict[str, str] = {}
    for rest in all_of("ENV"):
        for pair in shlex.split(rest):
            name, _, value = pair.partition("=")
            values[name] = value
    return values


def read_guide() -> str:
    """Return the part of the guide on containers."""
    text = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    return text.partition("## In a container\n")[2].partition("\n## ")[0]


def test_torch_has_no_cuda_and_the_version_that_the_second_pip_asks_for():
    [index] = all_of("ARG")
    assert index == "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    first, second, _ = all_of("RUN")
    pinned = re.search(r"^torch==\S+$", (ROOT / "requirements.txt").read_text(), re.M)
    assert pinned is not None
    assert shlex.split(first) == [
        *["pip", "install", pinned[0], "--index-url", "$TORCH_INDEX"]
    ]
    assert "--constraint /source/requirements.txt" in second


def test_python_is_one_that_the_project_supports():
    version = re.fullmatch(r"python:(3\.\d+)-slim", only("FROM"))
    assert version is not None
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"Programming Language :: Python :: {version[1]}"' in project
    # Of the web framework.
    assert int(version[1].partition(".")[2]) >= 11


def sent_to_the_builder(path: str) -> bool:
    """Whether Dockerfile.dockerignore lets a path through; its last matching line decides."""
    is_sent = True
    text = (SERVICE / "Dockerfile.dockerignore").read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        parts = path.split("/")
        # A pattern holds for what is below; `**/` is any folder, or none.
        parents = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        name = pattern.removeprefix("**/")
        tested = parts if name != pattern else parents
        if any(fnmatch.fnmatch(part, name) for part in tested):
            is_sent = line.startswith("!")
    return is_sent


def test_all_that_is_copied_exists_and_is_sent_to_the_builder_and_nothing_else():
    copied: set[str] = set()
    for rest in all_of("COPY"):
        *sources, _ = rest.split()
        copied |= set(sources)
    for source in copied:
        assert (ROOT / source).exists()
        assert sent_to_the_builder(source), source
    # speakerlab/conf is a link to it, and the wheel has its files.
    assert {"speakerlab", "conf"} <= copied
    assert not sent_to_the_builder("speakerlab/core/__pycache__/atomic.pyc")
    top = {path.name for path in ROOT.iterdir() if sent_to_the_builder(path.name)}
    assert top == {source for source in copied if "/" not in source}


def test_the_service_writes_only_below_its_volume_and_not_as_root():
    variables = environment()
    volume = only("VOLUME")
    settings = read_settings(variables)
    assert settings.folder == Path(volume)
    assert settings.model == "/model"
    assert settings.host == "0.0.0.0"
    for name in ("TMPDIR", "HOME"):
        assert Path(variables[name]).is_relative_to(volume)
    # A number, because Kubernetes refuses names for `runAsNonRoot`.
    user = only("USER")
    assert int(user) > 0
    made = all_of("RUN")[-1]
    assert f"useradd --uid {user} " in made
    assert f"install -d -o service -m 700 {volume}" in made
    # Signals reach Python, and no shell.
    assert json.loads(only("CMD")) == ["python", "-m", "examples.service"]
    assert "ENTRYPOINT" not in dict(read_instructions())


@pytest.fixture
def answer() -> Iterator[tuple[dict[str, int], int]]:
    """Codes by path, and the port of a server that answers them."""
    codes: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(codes.get(self.path, 404))
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield codes, server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def check_health(port: int) -> int:
    """Run the command of the health check for a port; return its exit code."""
    python, flag, program = json.loads(only("HEALTHCHECK").partition("CMD ")[2])
    assert (python, flag) == ("python", "-c")
    program = program.replace(f":{only('EXPOSE')}/", f":{port}/")
    assert f":{port}/" in program
    return subprocess.run(
        [sys.executable, flag, program], capture_output=True, timeout=30
    ).returncode


def test_the_health_check_fails_unless_the_service_is_ready(answer):
    codes, port = answer
    codes["/health"] = 200
    assert check_health(port) == 0
    codes["/health"] = 503
    assert check_health(port) == 1
    assert check_health(free_port()) == 1
    assert "/health" in {route.path for route in router.routes}
    assert int(only("EXPOSE")) == read_settings({"SERVE_MODEL": "m"}).port


def test_the_guide_runs_the_image_as_it_is_made():
    guide = read_guide()
    variables = environment()
    assert "docker build -f examples/service/Dockerfile -t speaker-service ." in guide
    assert f":{variables['SERVE_MODEL']}:ro" in guide
    assert f"-v speakers:{variables['SERVE_FOLDER']} " in guide
    assert f":{only('EXPOSE')} " in guide
    assert f"user {only('USER')}" in guide
    index = only("ARG").partition("=")
    of_cuda = f"{index[2].removesuffix('cpu')}{CUDA_12_6.index}"
    assert f"--build-arg {index[0]}={of_cuda} " in guide
    assert f"`{variables['HOME']}/.cache`" in guide


def test_the_guide_stops_the_container_later_than_the_service_ends():
    seconds = re.search(r"docker stop -t (\d+)", read_guide())
    assert seconds is not None
    # Of requests, in server.py, and of a job, in jobs.py.
    found = 0.0
    for name, keyword in (
        ("server.py", "timeout_graceful_shutdown"),
        ("jobs.py", "grace_seconds"),
    ):
        text = (SERVICE / name).read_text(encoding="utf-8")
        value = re.search(rf"{keyword}(?:: float)? ?= ?([\d.]+)", text)
        assert value is not None
        found += float(ast.literal_eval(value[1]))
    assert float(seconds[1]) > found
