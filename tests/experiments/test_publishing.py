"""A published folder has the model and its page, and nothing about host and speakers."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from models_on_disk import CALIBRATION, XVECTOR, publish_segmenter
from refusals import refuses
from result_rows import identified, row
from voices import make_wave

import speakerlab
from speakerlab.checkpoints.model_files import SEGMENTER, read_card
from speakerlab.checkpoints.published import load_published, load_segmenter, publish
from speakerlab.config.build import build_embedder, build_head
from speakerlab.config.schema import Config, load_config
from speakerlab.core.tuning import Tuning
from speakerlab.experiments import publishing
from speakerlab.experiments.model_card import describe
from speakerlab.experiments.model_page import identifier, terms_of
from speakerlab.experiments.publishing import (
    public_config,
    without_paths,
    write_model_folder,
)

SPEAKERS = ["Müller_Anna", "Okafor_Chidi", "id10042"]
HOST = "gpu17.lab.example"
# What a training on a machine of the laboratory writes into its settings.
SETTINGS = [
    XVECTOR,
    "task=distil",
    "distil.teachers=[/home/anna/exp/big teacher, hub:campplus-zh-en]",
    "distil.targets=crop",
    "distil.label_weight=1.0",
    "data.dir=/home/anna/corpora",
    "data.train=[{dir: /mnt/secret/calls, share: 0.5}, train]",
    "data.noise=/mnt/secret/musan",
    "runtime.cache_dir=/scratch/anna",
]
FACTS: dict[str, Any] = {
    "commit": "0123456789ab",
    "host": HOST,
    "gpu": "NVIDIA H100",
    "driver": "580.1",
    "train_corpus": ["VoxCeleb2"],
    "train_licence": ["CC BY 4.0"],
    "train_page": ["https://host/vox2"],
    "train_languages": ["English"],
    "train_utterances": 1200,
    "train_hours": 1.5,
    "train_sha256": "cd" * 32,
    "train_speakers": 3,
    "init_sha256": None,
    "init_source": None,
    "teachers": [
        {
            "name": "/home/anna/exp/big teacher",
            "sha256": "12" * 32,
            "space": "12" * 32,
            "page": None,
            "licence": None,
        },
        {
            "name": "hub:campplus-zh-en",
            "sha256": "34" * 32,
            "space": "34" * 32,
            "page": "https://host/campplus",
            "licence": "CC BY-NC-SA 4.0",
        },
    ],
}


def write_experiment(
    exp: Path,
    settings: list[str] = SETTINGS,
    *,
    classes: list[str] = SPEAKERS,
    rows: list[dict[str, Any]] | None = None,
    **facts: Any,
) -> Path:
    """Write an experiment with a small model, a head, a calibration and results."""
    config = load_config([], settings)
    embedder = build_embedder(config)
    head = build_head(config, embed_dim=16, num_classes=len(classes))
    digest = publish(
        exp / "model",
        embedder=embedder,
        config=config,
        facts={**FACTS, **facts},
        head=head.state_dict(),
        speakers=classes,
        calibration=CALIBRATION,
    )
    if rows is None:
        rows = [row(protocol="pairs of /home/anna/lists/trials"), row(backend="plda")]
    theirs = [{**result, "model_sha256": digest} for result in rows]
    others = [row(trials="of another model", eer=0.5)]
    (exp / "results.json").write_text(json.dumps([*theirs, *others]))
    config.write(exp / "config.yaml")
    return exp


def metadata_of(folder: Path) -> dict[str, Any]:
    _, block, _ = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(block)


def publish_to(folder: Path, exp: Path, **options: Any) -> Path:
    settings = {"name": "hf:ann/model", "licence": None, "force": False, **options}
    return write_model_folder(exp, folder, **settings)


def texts_of(folder: Path) -> dict[str, str]:
    return {
        path.name: path.read_text(encoding="utf-8")
        for path in folder.iterdir()
        if path.suffix != ".safetensors"
    }


def test_nothing_of_the_machine_and_its_speakers_goes_out(tmp_path):
    exp = write_experiment(tmp_path / "exp")
    tuning = Tuning(source="calls of /home/anna/calls", method="ahc", threshold=0.5)
    (exp / "model/diarization.json").write_text(json.dumps(vars(tuning)))
    (exp / "model/.tuning").write_text("/home/anna")
    folder = publish_to(tmp_path / "out", exp)

    names = {path.name for path in folder.iterdir()}
    assert names == {
        "README.md",
        "config.yaml",
        "card.json",
        "calibration.json",
        "diarization.json",
        "embedder.safetensors",
    }
    for name, text in texts_of(folder).items():
        private = (*SPEAKERS, HOST, "anna", "secret", "/home", "H100", "580.1")
        for word in private:
            assert word not in text, f"{name}: {word}"
    assert "big teacher" in texts_of(folder)["card.json"]


def test_the_published_model_is_the_model(tmp_path):
    exp = write_experiment(tmp_path / "exp")
    folder = publish_to(tmp_path / "out", exp)
    wave_S = make_wave(0, 0, 1.0)
    ours = speakerlab.load(exp)
    theirs = speakerlab.load(folder)
    assert (theirs.embed(wave_S) == ours.embed(wave_S)).all()
    assert theirs.sha256 == ours.sha256
    assert theirs.calibration == ours.calibration
    assert theirs.space == ours.space

    # What was learned, and how, is stated; only places of the machine are not.
    config = load_published(folder).config
    before = load_published(exp).config
    same = set(Config.model_fields) - {"data", "runtime", "distil"}
    for name in same:
        assert getattr(config, name) == getattr(before, name), name
    assert config.distil.teachers == ("big teacher", "hub:campplus-zh-en")
    assert config.data.crop_seconds == before.data.crop_seconds


def test_the_page_has_results_licence_and_use(tmp_path, caplog):
    exp = write_experiment(tmp_path / "exp")
    folder = publish_to(tmp_path / "out", exp)
    metadata = metadata_of(folder)
    # One teacher without a licence: nobody knows whether the student may be used.
    assert metadata["license"] == "unknown"
    assert metadata["library_name"] == "speakerlab"
    assert metadata["pipeline_tag"] == "feature-extraction"
    assert metadata["datasets"] == ["voxceleb2"]
    assert {"speaker-verification", "xvector"} <= set(metadata["tags"])

    (model,) = metadata["model-index"]
    first, second = model["results"]
    assert first["dataset"]["name"] == "mini"
    assert second["dataset"]["name"] == "mini, plda"
    values = {metric["name"]: metric["value"] for metric in first["metrics"]}
    assert values == {
        "EER (%)": 5.67,
        "minDCF (p_target=0.01)": 0.5,
        "minDCF (p_target=0.05)": 0.392,
    }
    text = texts_of(folder)["README.md"]
    assert 'speakerlab.load("hf:ann/model")' in text
    assert "5.67 (4.65 to 6.85)" in text
    assert "of another model" not in text
    assert "No licence is stated" in text
    assert (
        "hub:campplus-zh-en (https://host/campplus), whose licence is CC BY-NC" in text
    )
    assert "no commercial use" in text
    assert "big teacher, whose licence is not stated" in text
    warnings = [record.getMessage() for record in caplog.records]
    assert len([line for line in warnings if "its page will state" in line]) == 2


def test_the_client_of_the_hub_reads_the_page(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    folder = publish_to(tmp_path / "out", write_experiment(tmp_path / "exp"))
    card = hub.ModelCard.load(folder / "README.md")
    assert card.data.license == "unknown"
    assert card.data.library_name == "speakerlab"
    eers = [
        result.metric_value
        for result in card.data.eval_results
        if result.metric_type == "eer"
    ]
    assert eers == [5.67, 5.67]


@pytest.mark.parametrize(
    ("card", "given", "licence", "notes"),
    [
        ({}, None, "unknown", []),
        ({}, "CC BY 4.0", "cc-by-4.0", []),
        (
            {"source": {"page": "p", "licence": "MIT"}},
            None,
            "mit",
            ["converted", "MIT"],
        ),
        ({"init_source": {"page": "p"}}, None, "unknown", ["fine-tuned", "not stated"]),
        (
            {"source": {"page": "p", "licence": "that of CN-Celeb"}},
            None,
            "that of CN-Celeb",
            ["CN-Celeb"],
        ),
        (
            {"source": {"page": "p", "licence": "CC BY-NC-SA 4.0 and CC BY 4.0"}},
            "mit",
            "mit",
            ["no commercial use"],
        ),
    ],
)
def test_the_licence_is_the_given_one_or_that_of_the_origin(
    card, given, licence, notes
):
    terms = terms_of(card, given)
    assert terms.licence == licence
    for word in notes:
        assert word in " ".join(terms.notes)


def test_licences_have_the_names_of_the_hub():
    assert identifier("CC BY-NC-SA 4.0") == "cc-by-nc-sa-4.0"
    assert identifier("Apache 2.0") == "apache-2.0"
    assert identifier("CC0") == "cc0-1.0"
    assert identifier("not stated") == "unknown"
    assert identifier("of my own") == "of my own"


def test_a_licence_of_ones_own_has_a_name(tmp_path):
    exp = write_experiment(tmp_path / "exp", teachers=[])
    folder = publish_to(tmp_path / "out", exp, licence="Lab Licence 2")
    metadata = metadata_of(folder)
    assert metadata["license"] == "other"
    assert metadata["license_name"] == "lab-licence-2"
    assert read_card(folder)["licence"] == "Lab Licence 2"


def test_classes_that_are_no_persons_stay(tmp_path):
    settings = [XVECTOR, "task=identification", "data.labels=utt2lang"]
    named = identified([0, 0, 1, 1], [0, 1, 1, 1], ["de", "en"])
    exp = write_experiment(
        tmp_path / "exp", settings, classes=["de", "en"], rows=[named], teachers=[]
    )
    folder = publish_to(tmp_path / "out", exp)
    assert (folder / "speakers.txt").read_text() == "de\nen\n"
    ranking = speakerlab.load(folder).classify(make_wave(0, 0, 1.0))
    assert ranking == speakerlab.load(exp).classify(make_wave(0, 0, 1.0))
    metadata = metadata_of(folder)
    assert metadata["pipeline_tag"] == "audio-classification"
    (result,) = metadata["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == 75.0


def test_classes_that_are_persons_are_left_out_with_a_warning(tmp_path, caplog):
    settings = [XVECTOR, "task=identification"]
    exp = write_experiment(tmp_path / "exp", settings, teachers=[])
    folder = publish_to(tmp_path / "out", exp)
    assert not (folder / "speakers.txt").exists()
    assert not (folder / "head.safetensors").exists()
    assert "names are not published" in caplog.text


VALIDATION = {
    "valid_der_initial": 1.25,
    "valid_der_trained": 0.3689,
    "kept_initial": False,
}


def test_a_segmentation_network_has_a_page_of_its_own(tmp_path):
    exp = publish_segmenter(
        tmp_path / "exp",
        "data.dir=/home/anna/corpora",
        "data.train=[/mnt/secret/calls]",
        **{**FACTS, "teachers": []},
        **VALIDATION,
    )
    folder = publish_to(tmp_path / "out", exp, licence="CC BY 4.0")
    names = {path.name for path in folder.iterdir()}
    assert names == {"README.md", "config.yaml", "card.json", SEGMENTER}
    for name, text in texts_of(folder).items():
        for word in (HOST, "anna", "secret", "/home", "H100", "580.1"):
            assert word not in text, f"{name}: {word}"

    metadata = metadata_of(folder)
    assert metadata["license"] == "cc-by-4.0"
    assert metadata["pipeline_tag"] == "voice-activity-detection"
    assert metadata["datasets"] == ["voxceleb2"]
    assert {"speaker-diarization", "pyannet"} <= set(metadata["tags"])
    assert "speaker-verification" not in metadata["tags"]
    # The local DER of the training is no result on a list that others could repeat.
    assert "model-index" not in metadata
    page = texts_of(folder)["README.md"]
    assert "36.89 %, before the training 125.00 %" in page
    assert "--segmentation hf:ann/model --out" in page
    assert "speakerlab.load" not in page.partition("In Python")[0]
    assert "calibrat" not in page
    assert "1,200 utterances" in page

    ours = load_segmenter(exp)
    theirs = load_segmenter(folder)
    assert theirs.sha256 == ours.sha256
    wave_BS = torch.randn(1, 16000)
    with torch.no_grad():
        assert theirs.segmenter(wave_BS).equal(ours.segmenter(wave_BS))
    before = texts_of(folder)
    publish_to(folder, exp, licence="CC BY 4.0")
    assert texts_of(folder) == before


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        ({**VALIDATION, "kept_initial": True}, "125.00 %"),
        ({**VALIDATION, "valid_der_trained": 1.5, "kept_initial": True}, "125.00 %"),
        (VALIDATION, "36.89 %"),
        ({}, None),
    ],
)
def test_the_card_of_a_segmentation_network_has_its_local_der(tmp_path, facts, shown):
    exp = publish_segmenter(tmp_path / "exp", **facts)
    stated = dict(describe(exp))
    assert stated["model"][0].endswith("M parameters, segmentation")
    assert "calibration" not in stated
    if shown is None:
        assert stated["results"] == ["not stated"]
    else:
        (line,) = stated["results"]
        assert f"conversations {shown}, before the training 125.00 %" in line
    did_not_help = facts.get("valid_der_trained") == 1.5
    assert ("training" in stated) == did_not_help


def test_models_of_different_kinds_replace_each_other_only_by_force(tmp_path):
    out = publish_to(tmp_path / "out", write_experiment(tmp_path / "exp"))
    segmenter = publish_segmenter(tmp_path / "segmenter")
    with refuses("--to", out, "another model", "--force"):
        publish_to(out, segmenter)
    publish_to(out, segmenter, force=True)
    assert not (out / "embedder.safetensors").exists()
    assert load_segmenter(out).sha256 == load_segmenter(segmenter).sha256


def test_only_a_published_folder_is_replaced(tmp_path):
    exp = write_experiment(tmp_path / "exp")
    out = tmp_path / "out"
    publish_to(out, exp)
    before = texts_of(out)
    publish_to(out, exp)
    assert texts_of(out) == before

    other = write_experiment(tmp_path / "other", [*SETTINGS, "seed=1"])
    with refuses("--to", out, "--force"):
        publish_to(out, other)
    assert texts_of(out) == before
    publish_to(out, other, force=True)
    assert read_card(out)["sha256"] == read_card(other)["sha256"]

    # A clone of a repository, the model of an experiment, the experiment, any folder, a file.
    (out / ".git").mkdir()
    file = tmp_path / "file"
    file.touch()
    for place in (out, exp / "model", exp, tmp_path, file):
        with refuses("--to", place, "not a folder that"):
            publish_to(place, exp, force=True)
    assert (exp / "model/head.safetensors").exists()
    (tmp_path / "empty").mkdir()
    publish_to(tmp_path / "empty", exp)


def test_a_user_or_host_that_is_named_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing.getpass, "getuser", lambda: "anna")
    exp = write_experiment(tmp_path / "exp", train_corpus=["calls of anna"])
    with refuses(exp / "model", "'anna'", "calls of anna"):
        publish_to(tmp_path / "out", exp)
    assert not (tmp_path / "out").exists()
    # A part of a word is no name.
    exp = write_experiment(tmp_path / "b", train_corpus=["Hannah's"], teachers=[])
    publish_to(tmp_path / "out", exp)


@pytest.mark.parametrize("file", ["config.yaml", "diarization.json", "speakers.txt"])
def test_every_file_is_searched_for_the_user(tmp_path, monkeypatch, file):
    # With an escape in JSON.
    monkeypatch.setattr(publishing.getpass, "getuser", lambda: "jörg")
    settings = [XVECTOR, "task=identification", "data.labels=utt2lang"]
    classes = ["de", "en"]
    tuning = Tuning(source="calls", method="ahc", threshold=0.5)
    if file == "config.yaml":
        settings = [*SETTINGS, "distil.teachers=[exp/jörg]"]
    elif file == "speakers.txt":
        classes = ["de", "jörg"]
    else:
        tuning = replace(
            tuning, method="vbx", plda_sha256="ab" * 32, plda_source="calls of jörg"
        )
        monkeypatch.setattr(publishing, "read_plda_bytes", lambda *_: b"")
    exp = write_experiment(
        tmp_path / "exp", settings, classes=classes, teachers=[], rows=[]
    )
    (exp / "model/diarization.json").write_text(json.dumps(vars(tuning)))
    with refuses(exp / "model", "'jörg'"):
        publish_to(tmp_path / "out", exp)
    assert not (tmp_path / "out").exists()


def test_names_on_the_hub_and_words_of_the_page_are_no_secret(tmp_path, monkeypatch):
    teacher = {"sha256": "12" * 32, "space": "12" * 32, "page": None, "licence": None}
    names = ["hf:ann/teacher", "downloads/ann/student"]
    exp = write_experiment(
        tmp_path / "exp",
        [*SETTINGS, f"distil.teachers=[{', '.join(names)}]"],
        teachers=[{"name": name, **teacher} for name in names],
        rows=[],
    )
    # The second is a word of any page.
    for user in ("ann", "embedding"):
        monkeypatch.setattr(publishing.getpass, "getuser", lambda user=user: user)
        folder = publish_to(tmp_path / user, exp)
        assert user in texts_of(folder)["README.md"]
        published = load_published(folder).config
        assert published.distil.teachers == ("hf:ann/teacher", "student")


def test_of_a_pretrained_model_only_the_last_part_of_a_relative_path_is_left():
    for model, public in (
        ("downloads/ann/wavlm", "wavlm"),
        ("ann/my wavlm", "my wavlm"),
        (r"ann\wavlm", "wavlm"),
        ("hf:ann/wavlm", "hf:ann/wavlm"),
    ):
        config = load_config([], [XVECTOR, f"frontend={{name: ssl, model: '{model}'}}"])
        assert public_config(config).frontend["model"] == public
        assert config.frontend["model"] == model


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/home/anna/exp/a b", "a b"),
        ("mhfa over /data/wavlm-base", "mhfa over wavlm-base"),
        ("~/exp/a", "a"),
        ("../exp/a", "a"),
        (r"C:\Users\anna\exp\a", "a"),
        ("file:///home/anna/a", "a"),
        ("https://host/a/b", "https://host/a/b"),
        ("hf:owner/name and hub:iic/x", "hf:owner/name and hub:iic/x"),
        ("a 3 / 4 share", "a 3 / 4 share"),
        ("test/trials", "test/trials"),
    ],
)
def test_of_a_path_only_its_last_part_is_left(text, public):
    assert without_paths(text) == public


def test_a_full_disk_leaves_the_folder_of_before(tmp_path, monkeypatch):
    exp = write_experiment(tmp_path / "exp")
    out = publish_to(tmp_path / "out", exp)
    before = texts_of(out)

    def fail(*_arguments: object, **_options: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publishing, "page_of", fail)
    with pytest.raises(OSError, match="No space"):
        publish_to(out, exp)
    assert texts_of(out) == before
    assert {path.name for path in tmp_path.iterdir()} == {"exp", "out"}


@pytest.mark.slow
def test_a_model_that_needs_a_folder_of_this_machine_is_refused(tmp_path):
    pytest.importorskip("transformers")
    from pretrained_models import write_pretrained

    base = write_pretrained(tmp_path / "base", "wavlm")
    settings = [
        "model={name: xvector, args: {embed_dim: 16, hidden_channels: 16,"
        " stats_channels: 24}}",
        f"frontend={{name: ssl, model: {base}, publish: adapter}}",
    ]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = load_config([], settings)
    embedder = build_embedder(config)
    publish(tmp_path / "model", embedder=embedder, config=config, facts={})
    with refuses(tmp_path / "model", "frontend.publish=whole"):
        publish_to(tmp_path / "out", tmp_path / "model")
