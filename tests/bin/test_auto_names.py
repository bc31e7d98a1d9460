"""`speakerlab train --exp auto`: the experiment is named after its settings, for every rank."""

from pathlib import Path

import pytest
from tiny import CONFIG

from speakerlab.bin import train

COMMAND = ["--config", CONFIG, "--set", "training.lr=0.05", "seed=3"]
NAME = "campplus_tiny_s3_lr0.05"


@pytest.fixture(autouse=True)
def no_group(monkeypatch, tmp_path):
    """Each test is in a folder of its own, and no rank of a launcher."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ("auto", "exp"),
        ("sweep/auto", "sweep"),
        ("/sweep/auto", "/sweep"),
    ],
)
def test_auto_is_a_name_in_a_folder(given, folder):
    args = train.parse(["--exp", given, *COMMAND])
    assert args.exp == Path(folder) / NAME
    # The ranks get the path, and do not name it themselves.
    assert train.rank_options(args)[:2] == ["--exp", str(args.exp)]


def test_other_names_are_kept(tmp_path):
    for given in ("automatic", "auto/a"):
        assert train.parse(["--exp", given, *COMMAND]).exp == Path(given)
    # An experiment of an earlier version may have this name.
    (tmp_path / "exp/auto").mkdir(parents=True)
    (tmp_path / "exp/auto/config.yaml").touch()
    assert train.parse(["--exp", "exp/auto", *COMMAND]).exp == Path("exp/auto")


def test_a_teacher_is_part_of_the_name(tmp_path):
    names = set()
    for teacher in ("a/model", "b/model"):
        options = ["--exp", "auto", *COMMAND, "--teacher", teacher]
        options += ["--config", CONFIG, "distil"]
        names.add(train.parse(options).exp.name)
    assert len(names) == 2
    assert all("_teachers=" in name for name in names)


def test_check_prints_the_experiment(capsys, caplog, tmp_path):
    with caplog.at_level("INFO"):
        train.main(["--exp", "auto", *COMMAND, "--check"])
    assert capsys.readouterr().out.splitlines()[0] == f"experiment: exp/{NAME}"
    assert f"--exp auto: exp/{NAME}" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_command_resumes_the_same_experiment(ranks, train, data, tmp_path):
    settings = ["training.num_epochs=1", "runtime.micro_batch=4"]
    done = train(tmp_path / "auto", *settings, ranks=ranks)
    (exp,) = tmp_path.glob("campplus_tiny_s0_*")
    assert (exp / "model").exists()
    assert f": {exp}" in done.stderr
    # The order of settings, and settings of the machine, make no difference.
    reordered = [*settings[::-1], "runtime.log_every_steps=3"]
    done = train(tmp_path / "auto", *reordered, ranks=ranks)
    assert "nothing changed" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [exp.name]
