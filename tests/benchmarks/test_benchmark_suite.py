"""The suite of benchmarks: what it makes of its cases' rows, and when its gate fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refuses

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gate
import suite

ROOT = Path(__file__).parents[2]
FACTS_OF = suite.facts_of


def row(name: str, ratio: float | None, unit: str = "utt/s", **more) -> dict:
    """A row whose peer does one a second."""
    return {"name": name, "ours": ratio or 5.0, "peer": 1.0, "ratio": ratio, "unit": unit, **more}


@pytest.mark.parametrize(
    ("found", "kept", "verdict"),
    [
        (row("a", 1.71), {"ratio": 2.0}, None),  # 2.0 less 15 % is 1.7
        (row("a", 1.69), {"ratio": 2.0}, "in doubt"),  # no quartiles are known
        (row("a", 1.69, quartiles=[1.6, 1.75]), {"ratio": 2.0}, "in doubt"),
        (row("a", 1.69, quartiles=[1.6, 1.695]), {"ratio": 2.0}, "certain"),
        (row("a", 2.5), {"ratio": 2.0}, None),
        (row("a", 0.58, "s"), {"ratio": 0.5}, None),  # seconds: 0.5 / 0.85 is 0.588
        (row("a", 0.6, "s", quartiles=[0.59, 0.7]), {"ratio": 0.5}, "certain"),
        (row("a", 0.6, "s", quartiles=[0.55, 0.7]), {"ratio": 0.5}, "in doubt"),
        (row("a", None, share=0.6), {"ratio": 2.0, "share": 0.8}, "in doubt"),  # without a peer
        (row("a", 2.0, share=0.6), {"ratio": 2.0, "share": 0.8}, None),  # the ratio is checked
        (row("a", None), {"ratio": 2.0}, None),  # nothing to compare
        ({**row("a", None, "launches"), "ours": 4001}, {"ours": 4000}, "certain"),
        ({**row("a", None, "launches"), "ours": 4000}, {"ours": 4000}, None),
    ],
)
def test_a_row_may_lose_15_percent(found, kept, verdict):
    lost = gate.losses([found], {"a": kept})
    assert [("certain" if loss.is_certain else "in doubt") for loss in lost] == (
        [verdict] if verdict else []
    )


# A case that gives the next of RATIOS each time it runs, and notes the words it got.
SCRIPT = """
import json, sys
from pathlib import Path
PEERS, QUICK = ("wespeaker",), ("--few",)
if __name__ == "__main__":
    folder = Path(__file__).parent
    with (folder / "words").open("a") as file:
        file.write(" ".join(sys.argv[2:]) + "\\n")
    turn = len((folder / "words").read_text().splitlines()) - 1
    ratio = RATIOS[turn]
    row = {"ours": ratio, "peer": 1.0, "ratio": ratio, "unit": "utt/s"}
    rows = [{"name": name, **row} for name in ("train.x", "infer.x")]
    Path(sys.argv[1].partition("=")[2]).write_text(json.dumps(rows))
    sys.exit(CODE)
"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """run(words, ratios, code) -> (exit status, what was printed, words the case got)."""
    script = tmp_path / "a_case.py"
    monkeypatch.setattr(suite, "CASES", ("a_case",))
    monkeypatch.setattr(suite, "HERE", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_case", raising=False)
    given = [f"--baseline={tmp_path / 'baseline.json'}", f"--results={tmp_path / 'RESULTS.md'}"]
    given += ["--device=cpu", "--threads=1"]
    (tmp_path / "RESULTS.md").write_text("# Results\n")

    def run_suite(*words, ratios=(2.0,), code=0, fresh=True) -> tuple[int, str, list[str]]:
        script.write_text(SCRIPT.replace("RATIOS", str(ratios)).replace("CODE", str(code)))
        if fresh:
            (tmp_path / "words").unlink(missing_ok=True)
        status = suite.main([*given, *words])
        return status, capsys.readouterr().out, (tmp_path / "words").read_text().splitlines()

    return run_suite


def test_rows_facts_and_table(run, tmp_path):
    for name in ("wespeaker/models/speaker_model.py", "speechbrain/lobes/models/ECAPA_TDNN.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    words = ["--quick", "--peers", f"wespeaker={tmp_path}", f"speechbrain={tmp_path}"]
    files = [f"--json={tmp_path / 'out.json'}", f"--markdown={tmp_path / 'out.md'}"]
    status, printed, got = run(*words, *files)
    assert status == 0
    assert got == [f"--few --device=cpu --threads=1 --peer {tmp_path}"]  # its own peer only
    out = json.loads((tmp_path / "out.json").read_text())
    assert [found["name"] for found in out["rows"]] == ["train.x", "infer.x"]
    assert [(part["part"], part["exit"]) for part in out["parts"]] == [("a_case", 0)]
    assert {"date", "commit", "machine", "threads", "torch", "settings"} < set(out["facts"])
    markdown = (tmp_path / "out.md").read_text()
    assert markdown in printed
    assert "| train.x | 2 | 1 | utt/s | **2.00** |" in markdown


def test_rows_of_a_case_that_fails_are_kept(run, tmp_path):
    status, printed, _ = run(f"--json={tmp_path / 'out.json'}", code=3)
    assert status == 1
    assert "suite: a_case: exited with 3 and 2 rows" in printed
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 2


def test_rows_of_other_recordings_are_not_compared(run, tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "ON_AUDIO", ("train.",))
    monkeypatch.setattr(suite, "facts_of", lambda *a, **k: {**FACTS_OF(*a, **k), "audio": "first"})
    assert run("--store", ratios=(2.0,))[0] == 0
    monkeypatch.setattr(suite, "facts_of", lambda *a, **k: {**FACTS_OF(*a, **k), "audio": "other"})
    status, printed, _ = run("--gate", ratios=(1.0, 1.9))
    assert status == 0 and "gate: train. not compared: from other, not first" in printed
    assert "1 rows compared" in printed
    monkeypatch.setattr(suite, "ON_AUDIO", ("data.",))  # a run without them leaves the fact alone
    assert run("--store", ratios=(2.0,))[0] == 0
    assert "Recordings: first" in (tmp_path / "RESULTS.md").read_text()


def test_gate_measures_again_what_is_in_doubt(run):
    assert run("--store", ratios=(2.0,))[0] == 0
    status, printed, got = run("--gate", ratios=(1.5, 1.9))
    assert status == 0 and "0 worse" in printed
    own = "--device=cpu --threads=1"
    assert got == [own, f"{own} --rows train.x infer.x"]
    status, printed, got = run("--gate", ratios=(1.5, 1.6))
    assert status == 1 and len(got) == 2
    for name in ("train.x", "infer.x"):
        assert f"gate: {name}: ratio 1.6, stored 2 (-20%)" in printed


def test_a_loss_is_not_stored(run):
    assert run("--store", ratios=(2.0,))[0] == 0
    assert run("--gate", "--store", ratios=(1.5,))[0] == 1
    assert run("--gate", ratios=(1.5,))[0] == 1


def test_rows_measured_before_are_joined(run, tmp_path):
    """The gate reports a part that ran alone and a slower suite, without running anything."""
    assert run("--store", ratios=(2.0,))[0] == 0
    run(f"--json={tmp_path / 'suite.json'}", ratios=(1.5,))
    measured = row("score.x", 7.0, date="2026-01-02", commit="abc")
    (tmp_path / "alone.json").write_text(json.dumps([measured]))
    files = [str(tmp_path / name) for name in ("alone.json", "suite.json")]
    (tmp_path / "words").write_text("untouched")
    status, printed, got = run("--gate", "--read", *files, fresh=False)
    assert status == 1 and got == ["untouched"]
    assert "| score.x | 7 | 1 | utt/s |" in printed and "gate: train.x" in printed
    assert "2 rows compared" in printed


def test_launches_are_compared_on_any_machine(run, tmp_path, monkeypatch):
    """One more is a loss, which is not measured again."""
    path = tmp_path / "launches.json"

    def gate_of(count: int, *words: str, machine: str) -> tuple[int, str]:
        own = {"machine": machine, "torch": "2.0"}
        monkeypatch.setattr(suite, "facts_of", lambda *a, **k: {**FACTS_OF(*a, **k), **own})
        counted = {**row("launches.x.all", None, "launches"), "ours": count, "date": "d"}
        path.write_text(json.dumps([{**counted, "commit": "abc"}]))
        (tmp_path / "words").touch()
        return run(*words, f"--read={path}", fresh=False)[:2]

    assert gate_of(4000, "--store", machine="a")[0] == 0
    assert "stored for any, torch 2.0" in (tmp_path / "RESULTS.md").read_text()
    status, printed = gate_of(4001, "--gate", machine="b")
    assert status == 1 and "launches.x.all: ours 4001, stored 4000" in printed
    assert gate_of(4000, "--gate", machine="b")[0] == 0


def test_later_rows_replace_earlier_ones_and_facts_are_joined(tmp_path):
    first = {"settings": {"OMP_X": "1"}, "peers": {"wespeaker": "1"}, "machine": "m"}
    first |= {"date": "d", "commit": "123"}
    second = {"settings": None, "peers": {"speechbrain": "2"}, "torch": "3"}
    second |= {"date": "d", "commit": "abc"}
    pieces = [
        {"facts": first, "rows": [row("a", 1.0), row("b", 2.0)]},
        {"facts": second, "rows": [row("a", 3.0)]},
        [row("c", 4.0, date="d", commit="def")],
    ]
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    for path, piece in zip(paths, pieces):
        path.write_text(json.dumps(piece))
    results, facts = suite.read(paths, kind="m")
    found = [(r["name"], r["ratio"], r.get("commit")) for r in suite.rows_of(results)]
    assert found == [("b", 2.0, "123"), ("a", 3.0, "abc"), ("c", 4.0, "def")]
    assert facts["settings"] == {"OMP_X": "1"} and facts["torch"] == "3"
    assert facts["peers"] == {"wespeaker": "1", "speechbrain": "2"}
    assert facts["machine"] == "m" and not facts["quick"]
    assert suite.read(paths[:1], kind="n")[1]["machine"] == "m"  # measured on another machine
    with refuses(str(paths[1]), "'n'", "'m'"):  # which does not say where
        suite.read(paths, kind="n")
    for text, fault in (("{}", "facts"), (json.dumps([row("a", 1.0)]), "date")):
        paths[1].write_text(text)
        with refuses(str(paths[1]), f"KeyError '{fault}'"):
            suite.read(paths, kind="m")


def test_a_dry_run_is_not_stored(run, tmp_path):
    path = tmp_path / "quick.json"
    run("--quick", f"--json={path}")
    for words in (["--quick"], [f"--read={path}"], ["--read", str(path), str(path)]):
        with refuses("--store", "--quick"):
            run("--store", *words)
    assert not (tmp_path / "baseline.json").exists()


def test_gate_without_anything_stored_is_refused_before_it_measures(run, tmp_path):
    with refuses(str(tmp_path / "baseline.json"), "--store"):
        run("--gate")
    assert not (tmp_path / "words").exists()


@pytest.mark.parametrize("peer", ["kaldi=.", "wespeaker", "wespeaker=/nowhere"])
def test_a_peer_that_is_none_is_refused(peer, capsys):
    with pytest.raises(SystemExit):
        suite.main([f"--peers={peer}"])
    assert f"--peers: {peer.removeprefix('wespeaker=')}: not" in capsys.readouterr().err


@pytest.mark.parametrize("case", suite.CASES)
def test_every_case_takes_the_words_of_the_suite(case):
    """`--help`, which follows them, is reached: none of them is refused."""
    options = suite.parse(["--quick", "--device=cpu", "--threads=1"])
    words = ["--json=rows.json", *suite.words_of(case, options), "--help"]
    command = [sys.executable, str(suite.HERE / f"{case}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
