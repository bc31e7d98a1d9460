"""A head whose rows are split over ranks: trained, cut, resumed, published, begun from."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from speakerlab.training.checkpoint import list_checkpoints

SPLIT = ["runtime.split_head=on", "training.num_epochs=1", "training.global_batch=12"]
SPLIT += ["runtime.micro_batch=2", "training.sampled_share=0.7"]


def losses(exp):
    rows = [json.loads(line) for line in (exp / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row.get("loss")) for row in rows]


def cut(exp, copy):
    """The experiment as if killed after its oldest checkpoint."""
    shutil.copytree(exp, copy)
    shutil.rmtree(copy / "model")
    for folder in list_checkpoints(copy / "checkpoints")[1:]:
        shutil.rmtree(folder)
    return copy


def weights(exp):
    return [
        (exp / "model" / name).read_bytes()
        for name in ("embedder.safetensors", "head.safetensors", "speakers.txt")
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, run, train_command):
    exp = tmp_path_factory.mktemp("split") / "whole"
    done = run(*train_command(exp, 2, *SPLIT))
    assert done.returncode == 0, done.stderr
    return exp


def test_it_resumes_with_the_same_bits_and_is_published_whole(whole, tmp_path, run, train_command):
    copy = cut(whole, tmp_path / "cut")
    (folder,) = list_checkpoints(copy / "checkpoints")
    assert len(list(folder.glob("rows_*.pt"))) == 2
    done = run(*train_command(copy, 2, *SPLIT))
    assert done.returncode == 0, done.stderr
    assert "resuming from step 2 of 4" in done.stderr
    assert weights(copy) == weights(whole) and losses(copy) == losses(whole)
    head = load_file(whole / "model" / "head.safetensors")
    assert head["weight_CD"].shape == (18, 32)


@pytest.mark.slow
def test_its_checkpoint_goes_on_at_one_rank_and_its_model_can_be_begun_from(
    whole, tmp_path, run, train_command
):
    """The same rows, momentum and order, and micro-batches: losses agree to rounding."""
    copy = cut(whole, tmp_path / "cut")
    done = run(*train_command(copy, 1, *SPLIT))
    assert done.returncode == 0, done.stderr
    assert "resuming from step 2 of 4" in done.stderr
    one, two = dict(losses(copy)), dict(losses(whole))
    assert one.keys() == two.keys()
    init = ["--init", str(whole / "model")]
    done = run(*train_command(tmp_path / "next", 1, *SPLIT, *init))
    assert done.returncode == 0, done.stderr
    assert "head: 18 of 18 rows by name, 0 made new" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("on", "off"), ("off", "on")])
def test_a_run_goes_on_though_the_head_is_split_now_or_no_longer(
    ways, tmp_path, run, train_command
):
    """Losses after the cut are those of the run whose head stayed as it was, to rounding."""
    settings = [value for value in SPLIT if "split_head" not in value and "sampled" not in value]
    settings.append("training.num_epochs=2")
    whole, copy = tmp_path / "whole", tmp_path / "cut"
    done = run(*train_command(whole, 2, *settings, f"runtime.split_head={ways[0]}"))
    assert done.returncode == 0, done.stderr
    cut(whole, copy)
    done = run(*train_command(copy, 2, *settings, f"runtime.split_head={ways[1]}"))
    assert done.returncode == 0, done.stderr
    for (step, loss), (other_step, other) in zip(losses(whole), losses(copy), strict=True):
        assert step == other_step and (loss is None or abs(loss - other) < 1e-3 * loss), step


@pytest.mark.slow
def test_it_goes_on_at_three_ranks(whole, tmp_path, run, train_command):
    copy = cut(whole, tmp_path / "cut")
    done = run(*train_command(copy, 3, *SPLIT))
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in losses(copy)] == [step for step, _ in losses(whole)]
    newest = list_checkpoints(copy / "checkpoints")[-1]
    assert len(list(newest.glob("rows_*.pt"))) == 3


def test_a_head_that_cannot_be_split_says_so(tmp_path, run, train_command):
    more = ["runtime.split_head=on", "head={name: circle, args: {}}", "training.margin.final=0"]
    done = run(*train_command(tmp_path / "exp", 1, *more))
    assert done.returncode == 1
    assert "runtime.split_head: rows of circle cannot be split over ranks" in done.stderr
