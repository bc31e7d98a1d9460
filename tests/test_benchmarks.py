"""The benchmark of the models, on inputs so small that its figures mean nothing.

SPEAKERLAB_3DSPEAKER=DIR gives a checkout of 3D-Speaker to compare with.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PEER = os.environ.get("SPEAKERLAB_3DSPEAKER", "")
QUICK = ["--device=cpu", "--threads=1", "--micro-batch=2", "--frames=40", "--seconds=0.1"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/models.py", *QUICK, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def read_rows(done: subprocess.CompletedProcess[str], path: Path) -> dict[str, dict]:
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert all(list(row) == ["name", "ours", "peer", "ratio", "unit"] for row in rows)
    assert all(row["ours"] > 0 and row["unit"] == "utt/s" for row in rows)
    assert all(row["name"] in done.stdout for row in rows)
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("model", ["campplus", pytest.param("eres2net", marks=pytest.mark.slow)])
def test_ours_alone(tmp_path, model):
    path = tmp_path / "rows.json"
    rows = read_rows(run("--models", model, "--json", str(path)), path)
    assert list(rows) == [f"train.{model}.fp32", f"infer.{model}.fp32"]
    assert all(row["peer"] is None and row["ratio"] is None for row in rows.values())


def test_a_peer_that_is_none_is_refused(tmp_path):
    done = run("--peer", str(tmp_path))
    assert done.returncode != 0
    assert f"must be a checkout of 3D-Speaker, got {tmp_path}" in done.stderr


# A package of the peer's layout whose model is ours, its embeddings multiplied by FACTOR.
APPENDED = "__path__.append({path!r})\n"
IMITATION = """
import importlib.util
spec = importlib.util.spec_from_file_location("ours", {path!r})
ours = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ours)

class CAMPPlus(ours.CAMPPlus):
    def __init__(self, feat_dim, embedding_size):
        super().__init__(feat_dim=feat_dim, embed_dim=embedding_size)

    def forward(self, feats_BTF):
        return {factor} * super().forward(feats_BTF)
"""


@pytest.mark.parametrize("factor", [1, 1.00001])
def test_only_sides_that_are_equal_are_timed(tmp_path, factor):
    package = ROOT / "speakerlab"
    models = tmp_path / "speakerlab/models"
    (models / "campplus").mkdir(parents=True)
    (tmp_path / "speakerlab/__init__.py").write_text(APPENDED.format(path=str(package)))
    (models / "__init__.py").write_text(APPENDED.format(path=str(package / "models")))
    source = IMITATION.format(path=str(package / "models/campplus.py"), factor=factor)
    (models / "campplus/__init__.py").touch()
    (models / "campplus/DTDNN.py").write_text(source)
    path = tmp_path / "rows.json"
    words = ["--models", "campplus", "--work", "infer", "--json", str(path)]
    done = run("--peer", str(tmp_path), *words)
    if factor == 1:
        (row,) = read_rows(done, path).values()
        assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])
    else:
        assert done.returncode != 0 and not path.exists()
        assert "embeddings are not equal; nothing was timed" in done.stderr


@pytest.mark.skipif(not PEER, reason="SPEAKERLAB_3DSPEAKER is not set")
def test_beside_3dspeaker(tmp_path):
    path = tmp_path / "rows.json"
    rows = read_rows(run("--peer", PEER, "--json", str(path)), path)
    assert "train.campplus.fp32.peer_stores" in rows
    assert len(rows) == 5
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])
