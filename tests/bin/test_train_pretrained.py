"""Two ranks learn over a pretrained model what one learns, and resume bit-identically."""

import os
import subprocess
import sys

import pytest
from pretrained_models import write_pretrained
from safetensors.torch import load_file
from tiny import ROOT, TINY, checkpoints, cut, losses, rows

CONFIG = """
model: {name: adapter_mfa, args: {embed_dim: 16, adapter_dim: 8}}
optimizer: {name: adamw}
frontend: {name: ssl}
training:
  global_batch: 4
  num_epochs: 1
  warmup_epochs: 0
  bn_batch: 4
  lr: 0.001
  checkpoint_every_steps: 2
"""
# The tiny experiment's settings that are not of its model.
SETTINGS = [value for value in TINY if value.startswith(("data.", "runtime."))]
STAGES = {
    "lora": "frontend.lora={rank: 4, alpha: 8.0, targets: [linear_q, linear_v]}",
    "frozen": "training.freeze=[frontend]",
    "joint": "training.layer_decay=0.9",
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_learn_what_one_does_and_resume_bit_identically(
    tmp_path, run, data, stage
):
    base = write_pretrained(tmp_path / "base", "w2v_bert")
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)

    def train(exp, **options):
        command = ["-m", "speakerlab", "train", "--exp", exp, "--config", config]
        settings = [f"data.dir={data}", f"frontend.model={base}", STAGES[stage]]
        return run(*command, "--set", *SETTINGS, *settings, **options)

    on_one_rank = tmp_path / "one"
    two = tmp_path / "two"
    train(on_one_rank)
    train(two, ranks=2)
    for ours, theirs in zip(
        rows(two, "train"), rows(on_one_rank, "train"), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-2), ours["step"]

    assert len(checkpoints(two)) > 1
    copy = cut(two, tmp_path / "cut")
    done = train(copy, ranks=2)
    assert "resuming from step" in done.stderr
    assert losses(copy) == losses(two)
    weights = load_file(two / "model/embedder.safetensors")
    for name, tensor in load_file(copy / "model/embedder.safetensors").items():
        assert tensor.equal(weights[name]), name


@pytest.mark.slow
def test_a_stage_that_runs_out_of_memory_is_started_again(tmp_path, environment, data):
    """From step 3 on there is too little memory, until the micro-batch is smaller."""
    base = write_pretrained(tmp_path / "base", "w2v_bert")
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    exp = tmp_path / "exp"
    settings = [f"data.dir={data}", f"frontend.model={base}", STAGES["lora"]]
    command = [sys.executable, "-m", "speakerlab", "train", "--exp", exp]
    folders = [ROOT / "tests/safety/harm", ROOT, ROOT / "tests"]
    variables = {
        "CHAOS_HARM": "full 0 3 1000",
        "CHAOS_TESTS": str(ROOT / "tests/bin"),
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }
    done = subprocess.run(
        [*command, "--config", config, "--set", *SETTINGS, *settings],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    log = done.stderr
    assert done.returncode == 0, log
    assert "out of memory with a micro-batch of 4; retrying with a smaller one" in log
    assert "2 accumulations (4 ran out of memory)" in log
    steps = list(losses(exp))
    assert steps == list(range(1, steps[-1] + 1))
    assert (exp / "model/embedder.safetensors").exists()
