"""The suite of benchmarks: the options and rows of its cases, and a case that fails."""

import json
import runpy
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import sides
import suite

# A case with two rows, which notes the options that it gets.
SCRIPT = """
import json, sys
from pathlib import Path
PEERS, QUICK = ("wespeaker",), ("--few",)
if __name__ == "__main__":
    folder = Path(__file__).parent
    (folder / "options").write_text(" ".join(sys.argv[2:]))
    row = {"ours": 2.0, "peer": 1.0, "ratio": 2.0, "unit": "utt/s"}
    rows = [{"name": name, **row} for name in ("train.x", "infer.x")]
    Path(sys.argv[1].partition("=")[2]).write_text(json.dumps(rows))
    sys.exit(CODE)
"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Return run(options, code) -> (exit status, what was printed, options of the case)."""
    monkeypatch.setattr(suite, "CASES", ("a_case",))
    monkeypatch.setattr(suite, "HERE", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_case", raising=False)

    def run_suite(*options: str, code: int = 0) -> tuple[int, str, str]:
        (tmp_path / "a_case.py").write_text(SCRIPT.replace("CODE", str(code)))
        status = suite.main(["--device=cpu", "--threads=1", *options])
        return status, capsys.readouterr().out, (tmp_path / "options").read_text()

    return run_suite


def make_checkout(folder: Path, toolkit: str) -> Path:
    """Make a folder that looks like a checkout of the toolkit."""
    mark = folder / sides.MARKS[toolkit]
    mark.parent.mkdir(parents=True)
    mark.touch()
    return folder


def test_rows_facts_and_table(run, tmp_path):
    wespeaker = make_checkout(tmp_path / "w", "wespeaker")
    speechbrain = make_checkout(tmp_path / "s", "speechbrain")
    status, printed, options = run(
        "--quick",
        "--peers",
        f"wespeaker={wespeaker}",
        f"speechbrain={speechbrain}",
        f"--json={tmp_path / 'out.json'}",
    )
    assert status == 0
    # Only the peer that the case compares with.
    assert options == f"--few --device=cpu --threads=1 --peer {wespeaker}"
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["name"] for row in result["rows"]] == ["train.x", "infer.x"]
    names = {"date", "commit", "machine", "threads", "torch", "settings", "peers"}
    assert names < set(result["facts"])
    assert result["facts"]["peers"].keys() == {"wespeaker", "speechbrain"}
    assert "| train.x | 2.000 | 1.000 | utt/s | **2.00** |" in printed


def test_rows_of_a_case_that_fails_are_kept(run, tmp_path):
    status, printed, _ = run(f"--json={tmp_path / 'out.json'}", code=3)
    assert status == 1
    assert "suite: a_case: exited with 3, with 2 rows" in printed
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 2


@pytest.mark.parametrize("peer", ["kaldi=.", "wespeaker", "wespeaker=/nowhere"])
def test_a_folder_that_is_not_a_checkout_is_refused(peer, capsys):
    with pytest.raises(SystemExit):
        suite.main([f"--peers={peer}"])
    folder = peer.rpartition("=")[2]
    assert f"--peers: {folder}: not a checkout of 3D-Speaker" in capsys.readouterr().err


def test_a_checkout_under_another_name_is_refused(tmp_path, capsys):
    wespeaker = make_checkout(tmp_path, "wespeaker")
    with pytest.raises(SystemExit):
        suite.main([f"--peers=speechbrain={wespeaker}"])
    assert "not the folder of a toolkit of this name" in capsys.readouterr().err


@pytest.mark.parametrize("case", suite.CASES)
def test_every_case_takes_the_options_of_the_suite(case, monkeypatch, capsys):
    """`--help` follows them and is reached, so the case refuses none of them."""
    options = suite.parse(["--quick", "--device=cpu", "--threads=1"])
    script = suite.HERE / f"{case}.py"
    arguments = ["--json=rows.json", *suite.case_arguments(case, options), "--help"]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    assert stopped.value.code == 0
    assert "usage:" in capsys.readouterr().out
