"""How ranks and memory divide the global batch, as runs tell and as their losses show."""

import json

import pytest
import torch


def losses(exp):
    rows = [json.loads(line) for line in (exp / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
def test_two_ranks_that_share_batchnorm_learn_what_one_does(run, train_command, tmp_path):
    one, two, apart = (tmp_path / name for name in ("one", "two", "apart"))
    common = ("training.bn_batch=4", "training.num_epochs=1")
    for exp, ranks, more in (
        (one, 1, ("runtime.micro_batch=4",)),
        (two, 2, ("runtime.micro_batch=2",)),
        (apart, 2, ("runtime.micro_batch=2", "runtime.sync_bn=off")),
    ):
        done = run(*train_command(exp, ranks, *common, *more))
        assert done.returncode == 0, done.stderr
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert losses(apart) != pytest.approx(losses(one), rel=1e-3)
    facts = [json.loads((exp / "run.json").read_text()) for exp in (one, two, apart)]
    assert [known["bn_batch"] for known in facts] == [4, 4, 2]
    assert [known["bn_joined_ranks"] for known in facts] == [1, 2, 1]
    assert "BatchNorm sees 4 crops of 2 ranks at once" in (two / "train.log").read_text()
    for known in facts:
        assert known["autocast_dtype"] is None and known["loss_scaling"] is False
        assert {"torch", "cuda", "cudnn", "driver", "gpu", "capability"} <= set(known)
        assert known["torch"] == torch.__version__ and known["matmul_precision"] == "highest"


@pytest.mark.slow
def test_a_micro_batch_that_is_tried(run, train_command, tmp_path):
    words = ("runtime.micro_batch=probe", "training.num_epochs=1")
    done = run(*train_command(tmp_path / "exp", 1, *words))
    assert done.returncode == 0, done.stderr
    text = "global batch 8 = 8 a micro-batch x 1 ranks x 1 accumulations (probe: memory allows 8)"
    assert text in (tmp_path / "exp/train.log").read_text()
