"""What run.sh checks before its first stage: GPUs, configuration, noise and rooms."""

import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused
from test_recipes import dry_run, run, values_of
from toy_recipe import Toy

from egs.common.check_run import main
from speakerlab.data import audio
from speakerlab.data.tables import write_data_dir

ROOT = Path(__file__).parents[2]
TINY = ["--config", f"{ROOT}/conf/campplus_tiny.yaml"]
SOFTMAX = "head={name: softmax}"
BARE = ["augment.noise_prob=0", "augment.room_prob=0"]
EVERYTHING_MISSING = ["--missing", "noise", "rirs"]


def check(*words: str, stage: int = 0, nproc: int = 1) -> int:
    """Run check_run.py on the tiny model with more options."""
    return main([*TINY, "--stage", str(stage), "--nproc", str(nproc), *words])


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """machine(2, "0,1") sets the number of GPUs, at first none, and CUDA_VISIBLE_DEVICES."""

    def make(num_gpus: int, visible: str = "") -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    make(0)
    return make


REFUSED: dict[str, tuple[list[str], tuple[object, ...]]] = {
    "unknown key": (["--set", "training.lrr=1"], ("--set training.lrr=1", "did you mean lr?")),
    "wrong type": (["--set", "training.num_epochs=x"], ("--set training.num_epochs=x", "'x'")),
    "no noise": (
        EVERYTHING_MISSING,
        ("--noise --rirs", "noise_prob 0.5", "room_prob 0.3", "11 GB", "--noise none --rirs none"),
    ),
    "no rooms": (["--missing", "rirs"], ("--rirs", "room_prob 0.3", "--rirs none")),
    "noise for nothing": (
        ["--given", "noise", "--set", *BARE],
        ("--noise", "augment.noise_prob 0"),
    ),
    "no model": (["--init", "/nowhere"], ("/nowhere", "does not exist")),
    "large margin": (["--set", SOFTMAX], ("training.margin", "softmax")),
    "bf16 without a GPU": (
        ["--set", "runtime.precision=bf16"],
        ("runtime.precision", "bf16", "no GPU found", '--gpus ""'),
    ),
    "GPU preset": (
        ["--config", f"{ROOT}/conf/campplus_tiny.yaml", f"{ROOT}/conf/hardware/gpu_24g.yaml"],
        ("runtime.device", "cuda", "no GPU found"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_later_stage_would_refuse_is_refused_first(capsys, name):
    words, expected = REFUSED[name]
    assert check(*words) == 1
    written = capsys.readouterr()
    assert refused(written.err, *map(str, expected)), written.err
    assert written.out == ""


def test_gpus_that_are_not_there_are_refused(machine, capsys):
    machine(0, "0,1")
    assert check(nproc=2) == 1
    assert refused(capsys.readouterr().err, "--gpus", "2 requested", "0,1", "no GPU found")
    machine(2)
    assert check(nproc=3) == 1
    assert refused(capsys.readouterr().err, "--nproc", "3 ranks", "2 GPUs found (H100)")


@pytest.mark.parametrize(
    ("num_gpus", "visible", "nproc", "device"),
    [
        (0, "", 1, "CPU, 1 rank (no GPU found)"),
        (0, "-1", 2, "CPU, 2 ranks (as requested)"),
        (4, "", 1, 'GPU, 1 rank, 4 GPUs found (H100); --gpus "0 1 2 3"'),
        (2, "2,3", 2, "GPU, 2 ranks, 2 GPUs found (H100)"),
    ],
)
def test_the_device_is_described(machine, capsys, num_gpus, visible, nproc, device):
    machine(num_gpus, visible)
    assert check(nproc=nproc) == 0
    found = dict(word.split("=", 1) for word in shlex.split(capsys.readouterr().out)[:1])
    assert found == {"device": device}


def test_noise_is_used_if_one_training_uses_it(capsys):
    assert check("--given", "noise", "rirs") == 0
    assert capsys.readouterr().out.endswith("used=(noise rirs)\n")
    assert check("--set", "augment.noise_prob=0", "--missing", "noise") == 0
    assert capsys.readouterr().out.endswith("used=(rirs)\n")
    overlay = [*TINY, f"{ROOT}/conf/features/fbank.yaml"]
    assert main([*overlay, "--stage", "0", "--nproc", "1", *EVERYTHING_MISSING]) == 0
    assert capsys.readouterr().out.endswith("used=()\n")


def test_later_stages_need_the_prepared_noise(tmp_path, capsys):
    settings = ["--set", f"data.dir={tmp_path}", "augment.room_prob=0"]
    assert check(*settings, stage=3) == 1
    assert refused(capsys.readouterr().err, "augment.noise_prob", 0.5, tmp_path, "--noise none")
    audio.write(tmp_path / "hum.wav", np.ones(100, dtype=np.int16), 16000)
    write_data_dir(tmp_path / "noise", wavs={"hum": tmp_path / "hum.wav"})
    assert check(*settings, stage=3) == 0
    assert check(*settings, "augment.noise_prob=0", stage=5) == 0


def test_a_local_corpus_without_noise_is_refused_before_any_work(tmp_path):
    (tmp_path / "corpus").mkdir()
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    options = ("--corpus", tmp_path / "corpus", "--data", tmp_path / "data")
    done = run("3dspeaker", *options, "--exp", tmp_path / "exp", PATH=path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    searched = f"no musan, RIRS_NOISES in {tmp_path}/corpus or {tmp_path}"
    assert refused(done.stderr, "--noise --rirs", searched, "0.53", "--noise none --rirs none")
    assert "stage" not in done.stdout and not (tmp_path / "data").exists()


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """Return a recipe whose stage 0 downloads noise."""
    return Toy(tmp_path)


def prepared_with(toy: Toy, option: str) -> list[list[str]]:
    """Return the values of an option of each prepare.py."""
    calls = [call for call in toy.recorded() if call[2].endswith("prepare.py")]
    return [values_of(option, call) if option in call else [] for call in calls]


def test_noise_is_downloaded_to_the_corpus_if_it_is_used(toy):
    done = toy.run("--stop-stage 1", USED="noise")
    musan = str(toy.recipe / "corpus/musan")
    assert prepared_with(toy, "--noise") == [[musan], [musan]]
    assert prepared_with(toy, "--rirs") == [[], []]
    assert done.stdout.splitlines()[1:3] == [f"--noise: {musan}", "--rirs: none"]


@pytest.mark.parametrize("musan", ["corpus/musan", "musan"])
def test_noise_in_or_beside_a_local_corpus_is_found(toy, tmp_path, musan):
    (tmp_path / musan).mkdir(parents=True)
    (tmp_path / "corpus").mkdir(exist_ok=True)
    done = toy.run(f"--stop-stage 1 --corpus {tmp_path}/corpus/", USED="noise")
    assert prepared_with(toy, "--noise") == [[f"{tmp_path}/{musan}"]]
    checked = Path(f"{toy.calls}.check").read_text().split("\t")[:-1]
    assert values_of("--missing", checked) == ["rirs"]
    assert "stage 0: skipped" in done.stdout


def test_a_failed_check_ends_the_run(toy):
    done = toy.run("", CHECK_EXITS="1")
    assert (done.stdout, done.returncode, toy.recorded()) == ("", 1, [])


def test_without_noise_the_probabilities_are_zero():
    for recipe, options in (("3dspeaker", ("--noise", "none", "--rirs", "none")), ("own", ())):
        (train,) = dry_run(recipe, *options, "--stage", "3", "--stop-stage", "3")
        assert values_of("--set", train)[2:] == BARE
    (train,) = dry_run("own", "--noise", "x", "--rirs", "none", "--stage", "3", "--stop-stage", "3")
    assert values_of("--set", train)[2:] == BARE[1:]


def test_prepared_noise_is_used_by_later_stages(tmp_path):
    (tmp_path / "noise").mkdir()
    options = ("--data", tmp_path, "--stage", "3", "--stop-stage", "3")
    (train,) = dry_run("librispeech", *options)
    assert values_of("--set", train)[2:] == BARE[1:]  # there are no rooms


@pytest.mark.parametrize("option", [("--gpus", ""), ("--hardware", "cpu")])
def test_the_cpu_can_be_chosen(option):
    done = run("mini", "--dry-run", *option)
    assert "export CUDA_VISIBLE_DEVICES=-1\n" in done.stdout
