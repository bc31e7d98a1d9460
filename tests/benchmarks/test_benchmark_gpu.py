"""The command for a GPU: rows that fail do not stop the next, and a dry run on the CPU has all."""

import json
import subprocess
import sys
from argparse import Namespace
from itertools import product
from pathlib import Path

import pytest
from voices import RATE, make_wave

from speakerlab.data import audio

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu
import gpu_steps
import sides
from gpu_steps import Step

ROOT = Path(__file__).parents[2]
# Gives a row for each name; where it is a fault, "breaks" exits and "hangs" waits for a child.
CASE = """
import json, subprocess, sys, time
from pathlib import Path
PEERS, FAULTS = ("wespeaker",), FAULTY
if __name__ == "__main__":
    folder, words = Path(__file__).parent, sys.argv[1:]
    with (folder / "words").open("a") as file:
        file.write(" ".join(words[1:]) + "\\n")
    path, rows = Path(words[0].partition("=")[2]), []
    for name in words[words.index("--rows") + 1:]:
        if name in FAULTS and name == "breaks":
            raise SystemExit("it broke")
        if name in FAULTS and name == "hangs":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
            (folder / "child").write_text(str(child.pid))
            child.wait()
        rows.append({"name": name, "ours": 1.5, "peer": None, "ratio": None, "unit": "utt/s"})
        rows[-1] |= {"date": "2026-01-02", "commit": "abc"}
        path.write_text(json.dumps(rows))
"""
FACTS = {"machine": "m", "commit": "abc", "quick": False}
NAMES = ["first", "breaks", "second", "hangs", "last"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run("breaks", ...) -> (exit status, the file, words of each call, what was printed)."""
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    monkeypatch.setattr(gpu, "PARTS", {1: lambda _options: [Step("a_case", NAMES, ["--more"])]})

    def run_parts(*faults: str, limits=(5.0, 100.0)):
        monkeypatch.setattr(gpu, "LIMITS", limits)
        (tmp_path / "a_case.py").write_text(CASE.replace("FAULTY", repr(faults)))
        (tmp_path / "words").write_text("")
        options = gpu.parse(["--device=cpu", "--part=1", f"--out={tmp_path / 'out'}"])
        status = gpu.run_parts(options, FACTS)
        found = json.loads((tmp_path / "out/part1.json").read_text())
        return status, found, (tmp_path / "words").read_text().splitlines(), capsys.readouterr().out

    return run_parts


def test_rows_that_fail_do_not_stop_the_next_and_are_measured_by_the_same_command(run, tmp_path):
    status, found, words, printed = run("breaks", "hangs")
    own = "--device=cpu --more --rows"
    assert status == 1
    assert words == [
        f"{own} first breaks second hangs last",
        f"{own} second hangs last",
        f"{own} last",
    ]
    assert [row["name"] for row in found["rows"]] == ["first", "second", "last"]
    (part,) = found["parts"]
    assert list(part["missing"]) == ["breaks", "hangs"]
    assert part["missing"]["breaks"].startswith("exited with 1") and "it broke" in printed
    assert part["missing"]["hangs"] == "took longer than 5 s"
    stat = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(") ")[2][0] in "XZ"  # killed
    for name in ("breaks", "hangs"):
        assert f"part 1: {name} is missing" in printed

    status, found, words, printed = run()
    assert (status, words) == (0, [f"{own} breaks hangs"]) and "3 rows kept" in printed
    assert found["parts"][0]["missing"] == {} and len(found["rows"]) == 5
    assert run()[2] == []


def test_a_part_ends_in_time(run):
    status, found, words, _ = run("hangs", limits=(100.0, 3.0))
    assert status == 1 and len(words) == 1
    missing = found["parts"][0]["missing"]
    assert missing["hangs"].startswith("not finished in the 3 s")
    assert missing["last"].startswith("no time is left of 3 s")


@pytest.mark.parametrize("on_gpu", [True, False])
def test_no_row_is_measured_twice_but_beside_a_peer(tmp_path, on_gpu):
    """Of rows with one name those beside a peer come last: they are the ones that are stored."""
    given = {"out": tmp_path, "corpus": tmp_path, "on_gpu": on_gpu, "quick": False}
    options = Namespace(**given, device="cuda", checkouts=dict.fromkeys(sides.TOOLKITS, tmp_path))
    steps = {number: list(part(options)) for number, part in gpu.PARTS.items()}
    names = {number: [row for step in part for row in step.rows] for number, part in steps.items()}
    alone = sum((names[number] for number in (1, 2, 3, 4)), [])
    assert len(set(alone)) == len(alone) and len(set(names[5])) == len(names[5])
    assert ("train.eres2net.fp16" in alone) == on_gpu
    assert {"check.doctor", "machine.copy", "end_to_end.campplus", "extract.eres2net.bf16"} < {
        *alone
    }
    crops = 64 if on_gpu else 8
    assert f"memory.eres2net.bf16.{crops}" in alone
    assert {"frontend.fbank.wespeaker", "train.resnet34.bf16.wespeaker.peer_bf16"} < {*names[5]}
    for number, part in steps.items():
        for step in part:
            words = gpu.words_of(step, step.rows, tmp_path / "rows.json", options)
            assert ("--peer" in words) == (number == 5), words


def test_a_machine_without_a_gpu_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SystemExit):
        gpu.parse([])
    assert (
        "--device: no GPU found; for a dry run, use --device cpu --quick" in capsys.readouterr().err
    )


def write_flac(stem: Path, speaker: int, take: int) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    audio.write(stem.with_suffix(".flac"), make_wave(speaker, take, 1.5), RATE)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # on a busy machine; six minutes on two idle cores
def test_a_dry_run_has_every_row(tmp_path):
    out, corpus = tmp_path / "out", tmp_path / "corpus"
    for speaker, take in product(range(12), range(3)):
        subset = "train-x" if speaker < 8 else "test-x"
        name = f"corpus/{subset}/{speaker}/7/{speaker}-7-{take:04d}"
        write_flac(tmp_path / name, speaker, take)
    write_flac(tmp_path / "noise/hiss", 12, 0)
    write_flac(tmp_path / "rirs/hall", 13, 0)
    words = ["--device", "cpu", "--quick", "--out", str(out), "--corpus", str(corpus)]
    done = subprocess.run(["bash", str(ROOT / "benchmarks/gpu.sh"), *words])
    assert done.returncode == 0
    options = gpu.parse(words)
    for number in (1, 2, 3, 4):
        expected = [name for step in gpu_steps.PARTS[number](options) for name in step.rows]
        found = json.loads((out / f"part{number}.json").read_text())
        assert [row["name"] for row in found["rows"]] == expected
