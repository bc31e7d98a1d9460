"""Small experiments with stored scores of one trial list, written by hand."""

import json
from pathlib import Path

import numpy as np
import yaml
from result_rows import row

from speakerlab.experiments.trial_list import read_trial_list
from speakerlab.scoring.bootstrap import bootstrap
from speakerlab.scoring.metrics import eer
from speakerlab.scoring.score_files import write_scores

LIST = "test/trials"
SHA256 = "ab" * 32


def write_list(folder: Path, num_speakers: int = 10) -> None:
    """All pairs of three utterances of each speaker."""
    folder.mkdir(parents=True)
    ids = [f"spk{speaker}-{take}" for speaker in range(num_speakers) for take in "abc"]
    table = "".join(f"{name} {name.partition('-')[0]}\n" for name in ids)
    (folder / "utt2spk").write_text(table)
    lines = []
    for number, enrol in enumerate(ids):
        for test in ids[number + 1 :]:
            is_target = enrol.partition("-")[0] == test.partition("-")[0]
            lines.append(f"{enrol} {test} {'target' if is_target else 'nontarget'}\n")
    (folder / "trials").write_text("".join(lines))


def make_run(exp: Path, *, seed: int, lr: float, spread: float) -> None:
    """Write an experiment beside `data/test`; spread: standard deviation of a score, in units.

    A unit is the distance between the means of both kinds of trials.
    """
    for name in ("model", "scores"):
        (exp / name).mkdir(parents=True)
    args = {"embed_dim": 32, "growth": 8}
    config = {
        "seed": seed,
        "model": {"name": "campplus", "args": args},
        "training": {"lr": lr, "num_epochs": 4},
        "frontend": {"sample_rate": 16000},
        "data": {"dir": "data", "train": ["train"]},
    }
    text = yaml.dump(config, sort_keys=False)
    for path in (exp, exp / "model"):
        (path / "config.yaml").write_text(text)
    card = {"sha256": SHA256, "embed_dim": 32, "parameters": 9}
    (exp / "model/card.json").write_text(json.dumps(card))
    (exp / "model/embedder.safetensors").touch()
    facts = {"init_sha256": None, "train_sha256": "0" * 64}
    (exp / "run.json").write_text(json.dumps(facts))
    metrics = {"kind": "train", "step": 20, "loss": 1.0}
    (exp / "metrics.jsonl").write_text(f"{json.dumps(metrics)}\n")

    path = exp.parents[1] / "data/test/trials"
    listed = read_trial_list(path)
    is_target_N = listed.trials.is_target_N
    # Another seed for each run, so that no two have equal scores.
    rng = np.random.default_rng([seed, round(10 * lr)])
    scores_N = is_target_N + spread * rng.standard_normal(len(is_target_N))
    write_scores(exp / "scores/test_trials.txt", listed.trials, scores_N)
    replicates = bootstrap(
        scores_N, is_target_N, *listed.speakers, p_targets=(), num_replicates=40
    )
    result = row(
        trials=LIST,
        system=exp.name,
        eer=eer(scores_N, is_target_N),
        eer_ci95=replicates.interval("eer"),
        num_target=int(is_target_N.sum()),
        num_nontarget=int((~is_target_N).sum()),
        num_speakers=replicates.num_speakers,
        model_sha256=SHA256,
        primary=True,
    )
    (exp / "results.json").write_text(json.dumps([result]))
    record = f"trials={json.dumps({str(path): 'digest'})}\n"
    (exp / "scores/.scored").write_text(record)


def add_valid(exp: Path, **metrics: float) -> None:
    line = json.dumps({"kind": "valid", "step": 20, **metrics})
    with (exp / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
