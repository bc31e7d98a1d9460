"""The tutorial, as a page and as a notebook, and the script of the first hour: all run as they are.

They run in a copy of the repository, so that `egs/mini` of the clone stays as it is.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs/site"))
from notebook import NOTEBOOK, PAGE, Cell, cells_of, notebook_of  # noqa: E402

BASH_MAGIC = "%%bash\n"
RUN_BASH = """\
def run_bash(text):
    subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)
"""


def cells_of_notebook() -> list[Cell]:
    """Return the code cells of the notebook in the repository."""
    cells: list[Cell] = []
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        if source.startswith(BASH_MAGIC):
            cells.append(Cell("bash", source.removeprefix(BASH_MAGIC)))
        else:
            cells.append(Cell("python", source))
    return cells


def script_of(cells: list[Cell]) -> str:
    """Return a Python script that runs the cells in order, in one namespace."""
    parts = ["import subprocess\n", RUN_BASH]
    for cell in cells:
        if cell.kind == "bash":
            parts.append(f"run_bash({cell.source!r})\n")
        elif cell.kind == "python":
            parts.append(f"{cell.source}\n")
    return "\n".join(parts)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Return a copy of the repository without what runs of recipes have made."""
    clone = tmp_path_factory.mktemp("parent") / "speakerlab"
    hidden = shutil.ignore_patterns("__pycache__")
    for name in ("conf", "docs", "speakerlab", "examples", "egs/common", "egs/mini"):
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=hidden)
    for name in ("corpus", "data", "exp"):
        shutil.rmtree(clone / "egs/mini" / name, ignore_errors=True)
    for name in ("pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, clone)
    return clone


def run_script(cells: list[Cell], clone: Path, *, folder: Path) -> str:
    """Run cells in a folder of the clone; return what they print and log."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    finished = subprocess.run(
        [sys.executable, "-u", "-c", script_of(cells)],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(clone)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


def check_output(output: str) -> None:
    """Check what the page says of its results; a training on another machine differs a little."""
    decisions = re.findall("^decision: (.*)$", output, re.MULTILINE)
    assert decisions == ["same speaker", "different speakers"]
    assert "same speaker: True" in output
    assert "same speaker: False" in output
    assert "(3, 128)" in output

    assert re.search(r"spk083-07\.wav: spk083 ", output)
    assert re.search(r"spk090-03\.wav: unknown speaker ", output)
    assert "spk083 [('spk083', " in output

    # A row of `der`: recording, seconds, and the error rates in per cent.
    row = re.search(r"^conversation( +[\d.]+){5} ", output, re.MULTILINE)
    assert row is not None
    assert float(row[1]) < 8

    # From the scores, and from results.json.
    from_scores, from_results = re.findall(r"^EER ([\d.]+)%", output, re.MULTILINE)
    assert from_scores == from_results
    assert float(from_scores) < 3
    (untrained,) = re.findall(r"^untrained network: EER ([\d.]+)%", output, re.M)
    assert float(untrained) > 20


def test_the_notebook_is_made_from_the_page():
    expected = notebook_of(PAGE.read_text(encoding="utf-8"))
    assert NOTEBOOK.read_text(encoding="utf-8") == expected, (
        "run python docs/site/notebook.py"
    )


def test_every_fenced_block_is_run():
    text = PAGE.read_text(encoding="utf-8")
    cells = cells_of(text)
    code = [cell for cell in cells if cell.kind != "markdown"]
    assert len(code) == text.count("\n```") // 2 >= 10
    assert [cell for cell in cells if "```" in cell.source] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)  # on a busy machine; four minutes of two cores
def test_the_page_and_then_the_notebook_run(clone):
    """The second run also shows that the recipe keeps what it has finished."""
    cells = cells_of(PAGE.read_text(encoding="utf-8"))
    page = run_script(cells, clone, folder=clone)
    check_output(page)
    # Jupyter starts a notebook in its own folder.
    notebook = run_script(cells_of_notebook(), clone, folder=clone / "docs")
    check_output(notebook)
    assert "already trained to the end" in notebook


def test_a_taken_port_is_refused_before_the_first_job(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        finished = subprocess.run(
            ["bash", "examples/first_hour.sh", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "SERVE_PORT": port},
            capture_output=True,
            text=True,
        )
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert refused(finished.stderr, "SERVE_PORT", port)


@pytest.mark.slow
@pytest.mark.timeout(
    3600
)  # trains two models, if the tutorial has not trained the first
def test_the_ten_jobs_of_the_first_hour(clone, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    finished = subprocess.run(
        ["bash", "examples/first_hour.sh", str(tmp_path)],
        cwd=clone,
        env={
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(clone),
            "SERVE_PORT": f"{port}",
        },
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr

    # A window each 0.75 s of both channels.
    emb_WD = np.load(tmp_path / "windows.npy")
    assert emb_WD.shape[0] > 20
    assert emb_WD.shape[1] == 128
    identified = re.findall(r'"name": "(spk\d+)", "known": true', finished.stdout)
    assert identified.count("spk081") >= 11  # of 12
    assert (tmp_path / "det.pdf").read_bytes().startswith(b"%PDF")
    assert r"\textbf" in (tmp_path / "table.tex").read_text(encoding="utf-8")
    assert re.search(r"^recommended: .*campplus_tiny_s0", finished.stdout, re.MULTILINE)
    answer = json.loads((tmp_path / "identified.json").read_text(encoding="utf-8"))
    assert (answer["name"], answer["known"]) == ("ann", True)
    assert finished.stdout.rstrip().endswith("decision: same speaker")
