"""A model's card has what its files state, and nothing else."""

import json
from pathlib import Path

from speakerlab.experiments.model_card import describe

SHA = "ab" * 32


def write(folder: Path, **facts) -> Path:
    (folder / "model").mkdir(parents=True)
    (folder / "model/embedder.safetensors").touch()
    (folder / "model/config.yaml").write_text(
        "model: {name: campplus}\nfrontend: {sample_rate: 16000, num_mel_bins: 80}\n"
    )
    card = {"sha256": SHA, "parameters": 1_800_000, "embed_dim": 192, **facts}
    (folder / "model/card.json").write_text(json.dumps(card))
    return folder


def test_what_is_unknown_is_not_stated(tmp_path):
    found = dict(describe(write(tmp_path / "exp")))
    unknown = {name for name, lines in found.items() if lines == ["not stated"]}
    assert unknown == {"licence", "training data", "languages", "speakers", "commit", "results"}
    assert found["model"] == ["campplus, 1.80 M parameters, 192 dimensions"]
    assert found["front end"] == ["sample_rate 16000, num_mel_bins 80"]
    assert found["sha256"] == [SHA]


def test_facts_of_a_training_of_a_publisher_and_results_of_this_model_only(tmp_path):
    size = {"train_utterances": 1200, "train_hours": 1.5, "train_sha256": "cd" * 32}
    exp = write(tmp_path / "exp", train_speakers=60, commit="1234", **size)
    row = {"trials": "test/trials", "backend": "cosine", "num_target": 20, "num_nontarget": 3000}
    rows = [
        {**row, "eer": 0.0126, "eer_ci95": [0.009, 0.02], "model_sha256": SHA},
        {**row, "eer": 0.5, "eer_ci95": [0.4, 0.6], "model_sha256": "ef" * 32},
        {"task": "identification", "model_sha256": SHA},
    ]
    (exp / "results.json").write_text(json.dumps(rows))
    found = dict(describe(exp))
    assert found == dict(describe(exp / "model"))
    assert found["training data"] == ["1,200 utterances, 1.5 h, sha256 cdcdcdcdcdcd"]
    assert (found["speakers"], found["commit"]) == (["60"], ["1234"])
    assert found["results"] == [
        "test/trials, cosine: EER 1.26 % (95 %: 0.90 - 2.00), 20 target and 3,000 non-target trials"
    ]
    source = {"page": "https://host/model", "training_data": "VoxCeleb2", "licence": "CC BY 4.0"}
    imported = dict(describe(write(tmp_path / "imported", source=source)))
    assert (imported["licence"], imported["training data"]) == (["CC BY 4.0"], ["VoxCeleb2"])
    assert imported["origin"] == ["https://host/model"]
