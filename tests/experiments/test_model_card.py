"""A model's card has what its files state, and nothing else."""

import json
from pathlib import Path

import pytest
from models_on_disk import CALIBRATION, publish_xvector
from refusals import refuses
from result_rows import identified, row

from speakerlab.checkpoints.published import publish
from speakerlab.config.build import build_embedder
from speakerlab.data.tables import ABOUT, write_data_dir
from speakerlab.experiments.model_card import describe, stated_of_corpora

SHA = "ab" * 32


def write(folder: Path, **facts) -> Path:
    (folder / "model").mkdir(parents=True)
    (folder / "model/embedder.safetensors").touch()
    (folder / "model/config.yaml").write_text(
        "model: {name: campplus}\nfrontend: {sample_rate: 16000, num_mel_bins: 80}\n"
        "data: {dir: data, train: [train]}\n"
    )
    card = {"sha256": SHA, "parameters": 1_800_000, "embed_dim": 192}
    card |= facts
    (folder / "model/card.json").write_text(json.dumps(card))
    return folder


def test_what_is_unknown_is_not_stated(tmp_path, make_config):
    exp = write(tmp_path / "exp")
    stated = dict(describe(exp))
    assert stated["model"] == ["campplus, 1.80 M parameters, 192 dimensions"]
    assert stated["front end"] == ["sample_rate 16000, num_mel_bins 80"]
    assert stated["sha256"] == [SHA]
    assert stated["calibration"] == ["none; `speakerlab calibrate` learns one"]
    config = make_config()
    model = tmp_path / "model"
    embedder = build_embedder(config)
    publish(model, embedder=embedder, config=config, facts={})
    # neither a card without facts nor a fresh model states these
    unknown = {
        "licence",
        "training data",
        "data licence",
        "languages",
        "speakers",
        "commit",
        "results",
    }
    for card in (stated, dict(describe(model))):
        not_stated = set()
        for name, lines in card.items():
            if lines == ["not stated"]:
                not_stated.add(name)
        assert not_stated == unknown


def test_the_data_directories_state_the_corpora(tmp_path, make_config):
    config = make_config("data.train=[public, own]", f"data.dir={tmp_path}")
    about = {
        "corpus": "VoxCeleb2",
        "licence": "CC BY 4.0",
        "page": "https://host",
    }
    write_data_dir(tmp_path / "public", wavs={"u": "u.wav"}, about=about)
    write_data_dir(tmp_path / "own", wavs={"v": "v.wav"})
    stated = stated_of_corpora(config)
    assert stated.keys() == {f"train_{key}" for key in ABOUT}
    size = {
        "train_utterances": 1200,
        "train_hours": 1.5,
        "train_sha256": "cd" * 32,
    }
    initial = {
        "page": "https://host/model",
        "licence": "CC0",
        "training_data": "theirs",
    }
    exp = write(
        tmp_path / "exp",
        train_speakers=60,
        init_source=initial,
        **size,
        **stated,
    )
    described = dict(describe(exp))
    assert described["training data"] == [
        "VoxCeleb2, https://host",
        "not stated",
        "1,200 utterances, 1.5 h, sha256 cdcdcdcdcdcd",
    ]
    assert described["data licence"] == ["CC BY 4.0", "not stated"]
    assert described["languages"] == ["not stated", "not stated"]
    assert described["speakers"] == ["60"]
    assert described["licence"] == ["not stated"]
    assert described["fine-tuned from"] == ["https://host/model"]
    (tmp_path / "own/about").write_text("license CC0\n")
    with refuses(tmp_path / "own/about", "'license'", "licence"):
        stated_of_corpora(config)


def test_a_model_trained_without_labels_says_so(tmp_path):
    exp = write(tmp_path / "exp", objective="sdpn")
    stated = dict(describe(exp))
    assert stated["speakers"] == ["trained without labels (sdpn)"]


def test_facts_of_a_publisher(tmp_path):
    source = {
        "page": "https://host/model",
        "training_data": "VoxCeleb2",
        "licence": "CC BY 4.0",
    }
    exp = write(tmp_path / "imported", source=source)
    stated = dict(describe(exp))
    assert stated["licence"] == ["CC BY 4.0"]
    assert stated["training data"] == ["VoxCeleb2"]
    assert stated["origin"] == ["https://host/model"]


@pytest.mark.parametrize("inside", ["", "model"])
def test_results_of_this_model_with_interval_cost_and_protocol(inside, tmp_path):
    exp = write(tmp_path / "exp")
    named = identified(
        [0, 0, 1, 1],
        [0, 1, 1, 1],
        ["de", "en"],
        model_sha256=SHA,
    )
    # a row of another model
    other = row(trials="other", eer=0.5, model_sha256="ef" * 32)
    rows = [row(), other, named]
    (exp / "results.json").write_text(json.dumps(rows))
    lines = dict(describe(exp / inside))["results"]
    text = "\n".join(lines)
    assert "other" not in text
    for cell in ("5.67", "4.65 to 6.85", "minDCF(0.01)", "0.500", "5,400"):
        assert cell in text
    for cell in ("accuracy %", "75.00", "25.00 to 87.50"):
        assert cell in text
    assert lines[-2:] == [
        "mini, cosine: all pairs of 20 unseen voices",
        "test: by hand",
    ]
    # On a narrow terminal, the tables are broken.
    narrow = dict(describe(exp / inside, width=60))["results"]
    tables = narrow[:-2]
    assert max(map(len, tables)) <= 60 < max(map(len, lines[:-2]))


def test_the_threshold_is_on_the_card(tmp_path):
    exp = publish_xvector(tmp_path, CALIBRATION)
    (line,) = dict(describe(exp))["calibration"]
    for value in ("0.5000", "5.00 %", "110 trials", "made up"):
        assert value in line
