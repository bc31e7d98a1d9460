"""The command for a GPU: rows that fail do not stop the next, and a dry run on the CPU has all."""

import importlib.util
import json
import subprocess
import sys
import time
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from voices import RATE, make_wave

from speakerlab.data import audio

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import checks
import gpu
import gpu_steps
import sides
import suite
from gpu_steps import Step

ROOT = Path(__file__).parents[2]
# Gives a row for each name; where it is a fault, "breaks" exits and "hangs" waits for a child.
CASE = """
import json, subprocess, sys
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
        path.write_text(json.dumps(rows))
"""
FACTS = {"machine": "m", "commit": "abc", "quick": False}
NAMES = ["first", "breaks", "second", "hangs", "last"]
CALL = "--device=cpu --more --rows"


class Run(NamedTuple):
    """What a run of part 1 left and printed."""

    status: int
    rows: list[str]
    missing: dict[str, str]
    calls: list[str]  # the options of each call of the case
    printed: str


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return run("breaks", ..., seconds): a part whose case has these faults."""
    steps = [Step("a_case", NAMES, ["--more"])]
    monkeypatch.setattr(suite, "HERE", tmp_path)
    monkeypatch.setattr(gpu, "PARTS", {1: lambda _options: steps})

    def run_parts(*faults: str, seconds: float = 100.0) -> Run:
        monkeypatch.setattr(gpu, "PART_SECONDS", seconds)
        (tmp_path / "a_case.py").write_text(CASE.replace("FAULTY", repr(faults)))
        (tmp_path / "words").write_text("")
        options = gpu.parse(["--device=cpu", "--part=1", f"--out={tmp_path / 'out'}"])
        status = gpu.run_parts(options, FACTS)
        written = json.loads((tmp_path / "out/part1.json").read_text())
        (part,) = written["parts"]
        return Run(
            status=status,
            rows=[row["name"] for row in written["rows"]],
            missing=part["missing"],
            calls=(tmp_path / "words").read_text().splitlines(),
            printed=capsys.readouterr().out,
        )

    return run_parts


def test_a_row_that_fails_does_not_stop_the_next_and_is_measured_by_the_same_command(
    run,
):
    broken = run("breaks")
    assert broken.status == 1
    assert broken.calls == [
        f"{CALL} first breaks second hangs last",
        f"{CALL} second hangs last",
    ]
    assert broken.rows == ["first", "second", "hangs", "last"]
    assert list(broken.missing) == ["breaks"]
    assert broken.missing["breaks"].startswith("exited with 1")
    assert "it broke" in broken.printed
    assert "part 1: breaks is missing" in broken.printed

    whole = run()
    assert whole.status == 0
    assert whole.calls == [f"{CALL} breaks"]
    assert "4 rows kept" in whole.printed
    assert whole.missing == {}
    assert len(whole.rows) == 5
    assert run().calls == []


def is_running(process_id: str) -> bool:
    stat = Path(f"/proc/{process_id}/stat")
    try:
        text = stat.read_text()
    except OSError:
        return False
    # Killed processes are X or Z until somebody asks for their status.
    _, _, fields = text.rpartition(") ")
    return fields[0] not in "XZ"


def test_a_part_ends_in_time_and_the_next_run_leaves_its_last_row_for_the_end(
    run, tmp_path
):
    late = run("hangs", seconds=2.0)
    assert late.status == 1
    assert late.rows == ["first", "breaks", "second"]
    assert late.missing["hangs"].startswith("was not finished in 2 s")
    assert late.missing["last"].startswith("no time is left")
    child = (tmp_path / "child").read_text()
    deadline = time.monotonic() + 10
    while is_running(child):  # a busy kernel ends a killed process a moment later
        assert time.monotonic() < deadline
        time.sleep(0.05)

    again = run("hangs", seconds=2.0)
    assert again.calls == [f"{CALL} last hangs"]
    assert again.rows == ["first", "breaks", "second", "last"]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_no_row_is_measured_twice(tmp_path, on_gpu):
    options = Namespace(work=tmp_path, corpus=tmp_path, on_gpu=on_gpu, quick=False)
    names = [
        row
        for steps_of in gpu.PARTS.values()
        for step in steps_of(options)
        for row in step.rows
    ]
    assert len(set(names)) == len(names)
    assert ("train.eres2net.fp16" in names) == on_gpu
    for expected in ("check.doctor", "end_to_end.campplus", "extract.eres2net.bf16"):
        assert expected in names


def test_what_is_worth_most_comes_first_and_what_needs_no_gpu_last(tmp_path):
    options = Namespace(work=tmp_path, corpus=tmp_path, on_gpu=True, quick=False)
    first_rows = []
    for steps_of in gpu.PARTS.values():
        first_step = next(iter(steps_of(options)))
        first_rows.append(first_step.rows[0].partition(".")[0])
    assert first_rows == ["check", "end_to_end", "infer", "learning", "data"]


@pytest.mark.parametrize("missing", ["pytest", "espeakng_loader", "recordings"])
def test_what_needs_something_that_is_missing_is_left_out_with_a_line(
    monkeypatch, capsys, tmp_path, missing
):
    (tmp_path / "corpus/test-x").mkdir(parents=True)
    corpus = None if missing == "recordings" else tmp_path / "corpus"
    options = Namespace(work=tmp_path, corpus=corpus, on_gpu=True, quick=False)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == missing else find_spec(name, *rest),
    )
    has_espeak = missing != "espeakng_loader"
    monkeypatch.setattr(gpu_steps, "has_espeak", lambda: has_espeak)
    names = [
        row
        for number in (1, 4)
        for step in gpu.PARTS[number](options)
        for row in step.rows
    ]
    assert "check.doctor" in names
    assert ("check.gpu" in names) == (missing != "pytest")
    assert ("learning.mini.campplus_tiny" in names) == has_espeak
    assert ("learning.corpus.campplus_tiny" in names) == (corpus is not None)
    (line,) = capsys.readouterr().out.splitlines()
    word = {"espeakng_loader": "espeak-ng"}.get(missing, missing)
    assert "no " in line
    assert word.partition("ings")[0] in line


def test_the_results_are_few_files_of_one_folder(run, tmp_path):
    """Where results are copied from a machine, eight files may be all that is allowed."""
    run("breaks")
    names = sorted(path.name for path in (tmp_path / "out").rglob("*"))
    assert names == ["gpu.log", "part1.json"]
    assert len(gpu.PARTS) + 1 <= 8


def test_a_side_finds_the_packages_that_the_user_put_into_pythonpath(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:/opt/site:")
    assert sides.environment(Path("/peer"), None)["PYTHONPATH"] == "/peer:/opt/site"
    assert sides.environment(ROOT, None)["PYTHONPATH"] == f"{ROOT}:/opt/site"


def test_a_machine_without_a_gpu_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SystemExit):
        gpu.parse([])
    assert (
        "--device: no GPU found; for a dry run, use --device cpu --quick"
        in capsys.readouterr().err
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
    arguments = [
        "--device",
        "cpu",
        "--quick",
        "--out",
        str(out),
        "--work",
        str(tmp_path / "work"),
        "--corpus",
        str(corpus),
    ]
    done = subprocess.run(["bash", str(ROOT / "benchmarks/gpu.sh"), *arguments])
    assert done.returncode == 0
    options = gpu.parse(arguments)
    for number in gpu.PARTS:
        expected = [
            name for step in gpu_steps.PARTS[number](options) for name in step.rows
        ]
        part_file = json.loads((out / f"part{number}.json").read_text())
        assert [row["name"] for row in part_file["rows"]] == expected


def test_all_tests_that_need_a_gpu_are_run_as_checks():
    files = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "@pytest.mark.gpu\n" in path.read_text():
            files.append(str(path.relative_to(ROOT)))
    assert sorted(files) == sorted(checks.CHECKS["gpu"][2:])


@pytest.mark.parametrize(
    "name", [word for word in checks.CHECKS["harm"] if "::" in word]
)
def test_the_tests_that_are_run_as_checks_exist(name):
    path, _, function = name.partition("::")
    assert f"def {function.partition('[')[0]}(" in (ROOT / path).read_text()
