"""Options of `speakerlab train`, and what `--check` refuses or prints before hours of work."""

import os

import pytest
import torch
from refusals import refused, refuses
from tiny import CONFIG, ROOT

from speakerlab.bin import train
from speakerlab.bin.train import parse

# With _ for the blank, because options are split at blanks.
SOFTMAX = "head={name:_softmax}"
WHERE = ["--exp", "exp", "--config", CONFIG]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """machine(2, "0,1") sets the number of GPUs, at first none, and CUDA_VISIBLE_DEVICES.

    `--gpus` sets the latter, so it is set first: then the test's end restores it.
    """

    def make(num_gpus: int, visible: str = "") -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        if not visible:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    make(0)
    return make


@pytest.fixture
def check(capsys, tmp_path):
    """check(*options) -> the lines that `train --check` prints, of an experiment that is new."""

    exp = tmp_path / "exp"

    def run(*options: str) -> list[str]:
        train.main(["--exp", str(exp), "--config", CONFIG, "--check", *options])
        assert not exp.exists()
        return capsys.readouterr().out.splitlines()

    return run


# What is printed


@pytest.mark.parametrize(
    ("num_gpus", "options", "device"),
    [
        (0, "", "CPU, 1 rank (no GPU found)"),
        (0, "--gpus= --nproc 2", "CPU, 2 ranks (as requested)"),
        (0, "--set runtime.device=cpu", "CPU, 1 rank (as requested)"),
        (
            4,
            "",
            'GPU, 1 rank, 4 GPUs found (H100); to use all of them: --gpus "0 1 2 3"',
        ),
        (1, "", "GPU, 1 rank, 1 GPU found (H100)"),
        (2, "--gpus 2,3", "GPU, 2 ranks, 2 GPUs found (H100)"),
        (2, "--nproc 2", "GPU, 2 ranks, 2 GPUs found (H100)"),
    ],
)
def test_the_device_is_described(machine, check, num_gpus, options, device):
    machine(num_gpus)
    assert check(*options.split())[0] == f"device: {device}"


def test_a_device_that_the_environment_chooses_is_described(machine, check):
    machine(2, "2,3")
    first, *_ = check("--nproc", "2")
    assert first == "device: GPU, 2 ranks, 2 GPUs found (H100)"


def test_training_data_outside_the_data_folder_must_be_there(check, tmp_path):
    data = tmp_path / "data"
    other = tmp_path / "other/train"
    # The stages after the check may prepare what is in data.dir.
    setting = f'data.train=[train, data/x, {{dir: "{other}"}}, "../other/train"]'
    with refuses("data.train", other, "wav.scp", error=FileNotFoundError):
        check("--set", f"data.dir={data}", setting)
    other.mkdir(parents=True)
    (other / "wav.scp").touch()
    assert check("--set", f"data.dir={data}", setting)
    # A store is asked when the training begins.
    address = "data.train=[s3://bucket/train]"
    assert check("--set", f"data.dir={data}", address)


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            [],
            [
                "noise: used (augment.noise_prob 0.5)",
                "rirs: used (augment.room_prob 0.3)",
            ],
        ),
        (
            ["--set", "augment.noise_prob=0", "augment.room_prob=0.25"],
            [
                "noise: not used (augment.noise_prob 0)",
                "rirs: used (augment.room_prob 0.25)",
            ],
        ),
        (
            ["--config", CONFIG, "features/fbank"],
            [
                "noise: not used (augment.noise_prob 0)",
                "rirs: not used (augment.room_prob 0)",
            ],
        ),
    ],
)
def test_what_augments_is_listed(check, options, lines):
    _, *needs = check(*options)
    assert needs == lines


def test_data_that_are_not_prepared_yet_are_not_needed(check, tmp_path):
    # One line each of the device, the noise and the rooms.
    lines = check("--set", f"data.dir={tmp_path}/nothing")
    assert len(lines) == 3


# What is refused

# Options -> subject of the message, values that it names.
REFUSED = {
    "--set training.lrr=1": ("--set training.lrr=1", "did you mean training.lr?"),
    "--set training.num_epochs=x": ("--set training.num_epochs=x", "'x'"),
    "--config eres2nett": ("eres2nett", "did you mean eres2net?"),
    "--config ERes2Net": ("ERes2Net", "did you mean eres2net?"),
    "--config campplus hardware/gpuu": ("hardware/gpuu", "hardware/gpu"),
    "--config no.yaml": ("no.yaml", "no such configuration"),
    "--init /nowhere": ("--init", "/nowhere", "does not exist"),
    "--init hub:nothing": ("hub:nothing", "import --list"),
    f"--set {SOFTMAX}": ("training.margin", "softmax"),
    "--set training.freeze_epochs=1": ("training.freeze_epochs", "--init", "missing"),
    "--set runtime.precision=bf16": (
        "runtime.precision",
        "bf16",
        "no GPU found",
        '--gpus ""',
    ),
    "--config campplus_tiny hardware/gpu": ("runtime.device", "cuda", "no GPU found"),
    "--config campplus_tiny hardware/gpu_24g": (
        "runtime.device",
        "cuda",
        "no GPU found",
    ),
    "--set runtime.num_workers=1000000": (
        "runtime.num_workers",
        "1000000 for each of 1 ranks do not fit in /dev/shm",
        "--shm-size=",
    ),
    "--gpus 0,1": ("--gpus", "2 requested", "0,1", "no GPU found"),
    "--gpus 0 --set runtime.device=cpu": ("--gpus", 0, "runtime.device is cpu"),
    "--gpus 0 --config campplus_tiny hardware/cpu": (
        "--gpus",
        0,
        "runtime.device is cpu",
    ),
    "--gpus 0,x": ("--gpus", "'0,x'"),
    "--gpus 1,1": ("--gpus", "'1,1'"),
    "--gpus=-1": ("--gpus", "'-1'"),
    "--gpus 0,1 --nproc 3": ("--nproc", "3 ranks for 2 GPUs", 2),
    "--nnodes 2 --rdzv a:1": ("--node-rank", "missing", "0 to 1"),
    "--nnodes 2 --node-rank 2 --rdzv a:1": ("--node-rank", 2, "0 to 1"),
    "--nnodes 2 --node-rank 1": ("--rdzv", "missing", "HOST:PORT"),
    "--nnodes 2 --node-rank 1 --rdzv a": ("--rdzv", "'a'", "HOST:PORT"),
    "--nnodes 2 --node-rank 1 --rdzv :1": ("--rdzv", "':1'", "HOST:PORT"),
    "--nnodes 2 --node-rank 1 --rdzv a:b": ("--rdzv", "'a:b'", "HOST:PORT"),
    "--rdzv a:1": ("--node-rank, --rdzv", "--nnodes"),
    "--node-rank 0": ("--node-rank, --rdzv", "--nnodes"),
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_the_training_would_refuse_is_refused_first(check, options):
    arguments = options.split()
    if SOFTMAX in options:
        arguments = ["--set", SOFTMAX.replace("_", " ")]
    values = [str(value) for value in REFUSED[options]]
    with refuses(*values, error=Exception) as caught:
        check(*arguments)
    assert isinstance(caught.value, (ValueError, OSError))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ("--nproc 0", ["--nproc", "0"]),
        ("--nproc two", ["--nproc", "two"]),
        ("--nnodes 0", ["--nnodes", "0"]),
        ("--node-rank -1", ["--node-rank", "-1"]),
        ("--nodes 2", ["--nodes", "--nnodes"]),
        ("--rdvz a:1", ["--rdvz", "--rdzv"]),
        ("--gpu 0", ["--gpu", "--gpus"]),
    ],
)
def test_wrong_options_are_one_line_that_names_them(capsys, options, values):
    with pytest.raises(SystemExit) as caught:
        parse([*WHERE, *options.split()])
    text = capsys.readouterr().err
    assert caught.value.code == 1
    assert text.count("\n") == 1
    assert refused(text, "speakerlab train", *values), text


def test_gpus_that_are_not_there_are_refused(machine, check):
    machine(0, "0,1")
    with refuses("--gpus", "2 requested", "0,1", "no GPU found"):
        check("--nproc", "2")
    machine(2)
    with refuses("--nproc", "3 ranks", "2 GPUs found (H100)"):
        check("--nproc", "3")
    machine(1)
    with refuses("--gpus", "2 requested", "0,5", "1 GPU found (H100)"):
        check("--gpus", "0 5")


def test_a_model_that_is_not_one_is_refused(check, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with refuses("--init", empty, error=OSError):
        check("--init", str(empty))


# What the options mean


def test_each_of_the_gpus_has_a_rank():
    assert parse([*WHERE, "--gpus", "0 1 3"]).nproc == 3
    assert parse([*WHERE, "--gpus", "0 1 3", "--nproc", "2"]).nproc == 2
    assert parse([*WHERE, "--gpus", ""]).nproc == 1
    assert parse([*WHERE, "--gpus", "", "--nproc", "4"]).nproc == 4
    assert parse(WHERE).nproc == 1


def test_the_gpus_are_the_only_ones_that_torch_sees():
    visible = {"3 1": "3,1", "3,1": "3,1", "": "-1", "GPU-8a,MIG-9": "GPU-8a,MIG-9"}
    for numbers, expected in visible.items():
        parse([*WHERE, "--gpus", numbers])
        assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_the_place_of_an_older_rank_is_forgotten(monkeypatch, caplog):
    """LOCAL_RANK alone, as a shell on a cluster may leave it, would choose another GPU."""
    places: list[dict[str, str]] = []

    def note(*_: object, **__: object) -> None:
        names = [name for name in train.PLACE if name in os.environ]
        places.append({name: os.environ[name] for name in names})

    monkeypatch.setattr(train, "train_as_rank", note)
    monkeypatch.setattr(train.ctrl_c, "leave_on_ctrl_c", lambda: None)
    for name in train.PLACE:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    train.main(WHERE)
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "host0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with caplog.at_level("INFO"):
        train.main(WHERE)
    assert "this is rank 1 of 2 and waits for the others at host0:29500" in caplog.text
    assert places == [{}, place]


def test_the_recipe_of_mini_passes_its_own_check(check):
    lines = check("--config", CONFIG, str(ROOT / "egs/mini/conf.yaml"))
    assert len(lines) == 3
