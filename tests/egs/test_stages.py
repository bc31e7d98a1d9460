"""The stages of the toy recipe: their order, what they skip, how they fail."""

import shutil
import subprocess
from pathlib import Path

import pytest
from refusals import refused
from toy_recipe import Toy


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def test_all_stages_run_in_order(toy: Toy) -> None:
    done = toy.run("")
    assert (done.stderr, done.returncode) == ("", 0)
    names = [call[4] if call[2] == "-m" else Path(call[2]).name for call in toy.recorded()]
    prepare = ["prepare.py", "prepare.py", "check", "check", "pack"]
    assert names == [*prepare, "train", "extract", "extract", "score"]
    assert done.stdout.startswith("device: a toy\n")
    assert f"{toy.path}/python3 -m speakerlab verify A.wav B.wav --model " in done.stdout
    for number in range(7):
        headline, *rest = [x for x in done.stdout.splitlines() if x.startswith(f"stage {number}: ")]
        assert (len(rest), number) == ("skipped" not in headline, number)
        assert all(line.startswith(f"stage {number}: took ") for line in rest)


def test_commands_are_children_of_the_shell_that_they_watch(toy: Toy) -> None:
    toy.run("--stop-stage 2")
    toy.run("--stage 3")
    for parent, watched, *_ in toy.recorded():
        assert parent == watched


@pytest.mark.parametrize(
    ("before", "stage", "missing"),
    [
        (None, 2, "data/.stage1"),
        (None, 3, "data/.stage1"),
        (1, 3, "data/.stage2"),
        (2, 4, "exp/model"),
        (2, 5, "exp/model"),
        (3, 6, "exp/embeddings/test"),
    ],
)
def test_a_stage_names_the_missing_output_of_an_earlier_one(
    toy: Toy, before: int | None, stage: int, missing: str
) -> None:
    if before is not None:
        assert toy.run(f"--stop-stage {before}").returncode == 0
    done = toy.run(f"--stage {stage}")
    assert (done.stdout, done.returncode, done.stderr.count("\n")) == ("", 1, 1)
    assert refused(done.stderr, f"stage {stage}", f"{toy.path.parent}/my {missing}"), done.stderr
    assert toy.recorded() == []


def test_finished_stages_are_not_redone_while_inputs_are_the_same(toy: Toy) -> None:
    def run_both(options: str = "") -> list[str]:
        assert toy.run(f"--stage 1 --stop-stage 2 {options}").returncode == 0
        return [call[4] if call[2] == "-m" else "prepare" for call in toy.recorded()]

    assert run_both() == ["prepare", "check", "check", "pack"]
    assert run_both() == []
    assert refused(toy.run("--stop-stage 1").stdout, "stage 1", "skipped")
    assert run_both("--corpus /elsewhere") == ["prepare", "check", "check", "pack"]
    assert run_both("--corpus /elsewhere") == []
    (toy.recipe / "prepare.py").write_text("print(1)\n")
    assert run_both("--corpus /elsewhere") == ["prepare", "check", "check", "pack"]
    (toy.data / "train/wav.scp").write_text("a a.wav\n")
    assert run_both("--corpus /elsewhere") == ["check", "pack"]  # stage 2 alone reads it
    (toy.data / ".stage1").unlink()
    assert run_both("--corpus /elsewhere") == ["prepare", "check", "check", "pack"]
    (toy.data / "test/utt2dur").unlink()
    assert run_both("--corpus /elsewhere") == ["prepare", "check", "check", "pack"]


def test_stored_features_are_redone_when_the_configuration_changes(toy: Toy) -> None:
    assert toy.run("--stop-stage 2 --features fbank").returncode == 0
    stage_2 = "--stage 2 --stop-stage 2 --features fbank"
    (toy.root / "conf/hardware/cpu.yaml").touch()
    assert toy.run(f"{stage_2} --hardware cpu").returncode == 0  # does not change features
    assert toy.recorded() == []
    (toy.root / "conf/tiny.yaml").write_text("frontend: {num_mel_bins: 64}\n")
    assert toy.run(stage_2).returncode == 0
    assert [call[4] for call in toy.recorded()] == ["check", "pack"]
    assert toy.run(stage_2).returncode == 0
    assert toy.recorded() == []


def test_stage_4_runs_when_asked_for_by_number(toy: Toy) -> None:
    toy.run("--stop-stage 3")
    done = toy.run("--stage 4")
    assert (done.stderr, done.returncode) == ("", 0)
    train, *extract, score, score_tuned = toy.recorded()
    assert train[5:7] == ["--exp", f"{toy.exp}-lm"]
    assert len(extract) == 4
    assert (score[6], score_tuned[6]) == (str(toy.exp), f"{toy.exp}-lm")
    toy.run("--stage 6")  # both systems are published now
    assert [call[6] for call in toy.recorded()] == [str(toy.exp), f"{toy.exp}-lm"]


@pytest.mark.parametrize("code", [1, 3, 4])
def test_a_failed_command_ends_the_run_with_its_exit_code(toy: Toy, code: int) -> None:
    done = toy.run("", TRAIN_EXITS=f"{code} 0")
    assert done.returncode == code
    assert done.stderr == f"stage 3: failed with exit code {code}\n"
    assert [call[4] for call in toy.recorded()].count("train") == 1
    assert toy.recorded()[-1][4] == "train"


def test_out_of_memory_restarts_once_with_a_smaller_micro_batch(toy: Toy) -> None:
    done = toy.run("--stop-stage 3 --set training.lr=0.2", TRAIN_EXITS="5 0")
    assert (done.stderr, done.returncode) == ("", 0)
    assert refused(done.stdout, "stage 3", "out of memory", 64)
    first, second = (call[4:] for call in toy.recorded() if call[4] == "train")
    place = second.index("--below-micro-batch")
    assert second[place : place + 3] == ["--below-micro-batch", "64", "--set"]
    assert second[:place] + second[place + 2 :] == first


def test_out_of_memory_twice_ends_the_run(toy: Toy) -> None:
    done = toy.run("", TRAIN_EXITS="5 5 0")
    assert done.returncode == 5
    assert refused(done.stderr.splitlines()[0], "stage 3", "out of memory again", 64)
    assert done.stderr.splitlines()[1:] == ["stage 3: failed with exit code 5"]
    assert [call[4] for call in toy.recorded()].count("train") == 2


def test_without_python_one_line_says_what_to_do(toy: Toy) -> None:
    (toy.path / "python3").unlink()
    for name in ("bash", "dirname", "cat", "sha256sum", "rm"):
        (toy.path / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        [toy.path / "bash", toy.recipe / "run.sh", "--stage", "0"],
        env={"PATH": str(toy.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "env: Python 3.10 or newer is needed" in done.stderr


def test_an_incomplete_python_is_not_used(toy: Toy) -> None:
    """A message names the missing package; a complete .venv is used as it is."""
    venv = toy.recipe.parents[1] / ".venv/bin"
    venv.mkdir(parents=True)
    shutil.move(toy.path / "python3", venv / "python")
    (toy.path / "python3").write_text("#!/bin/sh\necho \"No module named 'torch'\" >&2\nexit 1\n")
    (toy.path / "python3").chmod(0o755)
    done = toy.run("--stage 0 --stop-stage 0")
    assert done.returncode == 0
    assert f"env: not using {toy.path}/python3 (No module named 'torch')" in done.stdout
    assert f"env: using {venv.parent}" in done.stdout
    assert len(toy.recorded()) == 1
