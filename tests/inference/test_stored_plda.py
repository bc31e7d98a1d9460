"""PLDA of vbx that is stored with a model: learned, read, exported, published and refused."""

import base64
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusals import refused, refuses
from voices import RATE, make_wave, write_voices

import speakerlab
from speakerlab.bin import calibrate, diarize
from speakerlab.checkpoints.model_files import (
    PLDA,
    parse_plda,
    read_tuning,
    write_plda,
    write_tuning,
)
from speakerlab.checkpoints.published import load_published
from speakerlab.core.reading import read_json
from speakerlab.core.tuning import Tuning
from speakerlab.data import audio
from speakerlab.data.tables import write_data_dir
from speakerlab.diarization.clustering import build_method
from speakerlab.diarization.regions import Turn, write_rttm
from speakerlab.diarization.vbx import Vbx
from speakerlab.experiments.publishing import write_model_folder
from speakerlab.inference import tuning
from speakerlab.inference.export import facts_of
from speakerlab.inference.onnx_model import Facts
from speakerlab.inference.tuning import learn_window_plda
from speakerlab.scoring.plda import Plda
from speakerlab.scoring.transforms import Development

DIM = 16


def draw_plda(seed: int = 0, *, dim: int = DIM) -> Plda:
    rng = np.random.default_rng(seed)
    return Plda(
        mean_D=rng.normal(size=dim),
        transform_DD=rng.normal(size=(dim, dim)),
        psi_D=rng.uniform(0.5, 2.0, size=dim),
    )


def store(folder: Path, plda: Plda, **values) -> Tuning:
    """Store a PLDA and a tuning with a model folder, as `calibrate` does."""
    stored = Tuning(
        source="dev: 3 recordings",
        plda_sha256=write_plda(folder, plda),
        plda_source="train: 90 speakers",
        **values,
    )
    write_tuning(folder, stored)
    return stored


def assert_same(plda: Plda, expected: Plda) -> None:
    for name, values in vars(expected).items():
        assert np.array_equal(getattr(plda, name), values)


def test_a_model_returns_what_was_stored(publish_to):
    folder, _, _ = publish_to("model")
    plda = draw_plda()
    store(folder, plda, method="vbx", fb=4.0)
    model = speakerlab.load(folder)
    assert_same(model.read_plda(), plda)

    vbx = build_method(model.tuning, read_plda=model.read_plda)
    assert isinstance(vbx, Vbx)
    assert vbx.fb == 4.0
    assert np.array_equal(vbx.transform_DD, plda.transform_DD)


def test_a_model_without_one_is_refused_only_for_vbx(publish_to):
    folder, _, _ = publish_to("model")
    model = speakerlab.load(folder)
    with refuses(folder, "has no PLDA", "--development"):
        model.read_plda()
    wave_S = make_wave(0, 0, 6)
    assert len(model.diarize(wave_S)) > 0
    with refuses(folder, "has no PLDA"):
        model.diarize(wave_S, method="vbx")


def test_a_missing_or_damaged_one_is_refused_only_for_vbx(publish_to):
    folder, _, _ = publish_to("model")
    store(folder, draw_plda())
    path = folder / PLDA
    content = path.read_bytes()
    wave_S = make_wave(0, 0, 6)

    path.unlink()
    with refuses(path, "is missing", "diarization.json"):
        speakerlab.load(folder).diarize(wave_S, method="vbx")
    # A cut, an empty and a changed file.
    for damaged in (content[:-1], b"", content[:-1] + b"\x01"):
        path.write_bytes(damaged)
        with refuses(path, "damaged", "speakerlab calibrate"):
            speakerlab.load(folder).diarize(wave_S, method="vbx")
    assert len(speakerlab.load(folder).diarize(wave_S)) > 0


def test_the_one_of_another_model_is_refused(publish_to):
    first, _, _ = publish_to("first")
    second, _, _ = publish_to("second", "seed=1")
    store(first, draw_plda())
    store(second, draw_plda(seed=1))
    # The file alone, and with the clustering that names it.
    shutil.copy(first / PLDA, second / PLDA)
    with refuses(second / PLDA, "of another model"):
        speakerlab.load(second).read_plda()
    shutil.copy(first / "diarization.json", second / "diarization.json")
    with refuses(second / "diarization.json", "is of model"):
        speakerlab.load(second)


def test_files_that_are_no_plda_of_the_model_are_refused(publish_to):
    folder, _, _ = publish_to("model")
    store(folder, draw_plda(dim=8))
    with refuses(folder / PLDA, "mean_D", (DIM,), (8,)):
        speakerlab.load(folder).read_plda()
    not_finite = draw_plda()
    not_finite.psi_D[3] = np.nan
    store(folder, not_finite)
    with refuses(folder / PLDA, "psi_D", "finite"):
        speakerlab.load(folder).read_plda()
    with refuses("x", "no PLDA"):
        parse_plda(b"not safetensors", embed_dim=DIM, where="x")
    # Other tensors than those of a PLDA.
    weights = (folder / "embedder.safetensors").read_bytes()
    with refuses("x", "no PLDA"):
        parse_plda(weights, embed_dim=DIM, where="x")


@pytest.fixture
def voices(tmp_path) -> Path:
    seconds = (3.2, 6.1, 1.0)
    return write_voices(tmp_path / "voices", speakers=range(8), seconds=seconds)


@pytest.fixture
def talks(tmp_path) -> Path:
    """A data directory with a conversation of two and its turns."""
    folder = tmp_path / "dev"
    first_S = make_wave(0, 0, 6)
    quiet_S = np.zeros(2 * RATE, dtype=np.int16)
    second_S = make_wave(4, 0, 6)
    path = tmp_path / "talk.flac"
    audio.write(path, np.concatenate([first_S, quiet_S, second_S]), RATE)
    write_data_dir(folder, wavs={"talk": path})
    turns = [Turn(0.0, 6.0, "ann"), Turn(8.0, 14.0, "bob")]
    write_rttm(folder / "ref.rttm", {"talk": turns})
    return folder


def learn_of_means(development: Development) -> Plda:
    """Stand in for EM, which the windows of an untrained model are too similar for."""
    mean_D = development.table.emb_ND.mean(axis=0, dtype=np.float64)
    return replace(draw_plda(), mean_D=mean_D)


def test_calibrate_compares_three_methods_and_stores_what_vbx_needs(
    publish_to, voices, talks, monkeypatch, caplog, capsys
):
    monkeypatch.setattr(tuning, "learn_plda", learn_of_means)
    folder, _, _ = publish_to("model")
    options = ["--for", "diarization", "--data", str(talks), "--model", str(folder)]
    learning = [*options, "--development", str(voices)]
    calibrate.main(learning)
    stored = read_tuning(folder)
    assert [*stored.der] == ["spectral", "ahc", "vbx"]
    assert stored.der[stored.method] == min(stored.der.values())
    der = 100 * stored.der["vbx"]
    assert f"vbx, Fb {stored.fb:g}: DER {der:.2f} %" in capsys.readouterr().out
    assert stored.plda_source == "voices: 8 speakers, 48 windows"
    # 8 speakers are few.
    assert refused("\n".join(caplog.messages), voices, "8 speakers", "80")

    model = speakerlab.load(folder)
    expected = learn_window_plda(model, voices).plda
    assert_same(model.read_plda(), expected)

    # The same inputs are kept; without --development, the PLDA is used again.
    caplog.set_level("INFO")
    before = (folder / PLDA).stat().st_mtime_ns
    calibrate.main([*learning, "--force"])
    assert "already calibrated" in caplog.text
    assert (folder / PLDA).stat().st_mtime_ns == before
    calibrate.main([*options, "--force"])
    assert read_tuning(folder) == stored
    assert_same(speakerlab.load(folder).read_plda(), expected)
    # A file that is gone is learned again.
    (folder / PLDA).unlink()
    calibrate.main([*learning, "--force"])
    assert_same(speakerlab.load(folder).read_plda(), expected)


def test_diarize_needs_no_development_then(publish_to, talks, caplog, capsys):
    folder, _, _ = publish_to("model")
    store(folder, draw_plda(), fb=2.0)
    talk = str(talks.parent / "talk.flac")
    caplog.set_level(logging.INFO)
    arguments = [talk, "--model", str(folder), "--device", "cpu"]
    diarize.main([*arguments, "--method", "vbx"])
    assert "clustering: vbx, Fb 2, PLDA of train: 90 speakers" in caplog.text
    assert capsys.readouterr().out.startswith("SPEAKER talk")

    # As the calibrated method, it needs no option.
    store(folder, draw_plda(), method="vbx", fb=2.0)
    caplog.clear()
    diarize.main(arguments)
    assert "clustering: vbx, Fb 2" in caplog.text


def test_export_and_publish_take_it_along(publish_to, tmp_path):
    folder, _, _ = publish_to("model")
    plda = draw_plda()
    source = "train of /home/anna/corpora: 90 speakers"
    digest = write_plda(folder, plda)
    stored = Tuning(source="dev", plda_sha256=digest, plda_source=source, method="vbx")
    write_tuning(folder, stored)

    public = write_model_folder(
        folder, tmp_path / "public", name="hf:ann/model", licence=None, force=False
    )
    assert_same(speakerlab.load(public).read_plda(), plda)
    assert "anna" not in read_json(public / "diarization.json")["plda_source"]

    # Metadata of a file that `export` writes.
    facts = facts_of(load_published(folder))
    again = Facts.from_texts(facts.to_texts(), where="file")
    assert again.diarization == load_published(folder).tuning
    assert again.plda is not None
    assert base64.b64decode(again.plda) == (folder / PLDA).read_bytes()
    # What cannot be used is not exported.
    (folder / PLDA).unlink()
    with refuses(folder / PLDA, "is missing"):
        facts_of(load_published(folder))


def test_a_plda_is_of_diarization_only(publish_to, talks, capsys):
    folder, _, _ = publish_to("model")
    options = ["--model", str(folder), "--data", str(talks), "--development", "x"]
    with pytest.raises(SystemExit):
        calibrate.main(options)
    assert "--development: needs --for diarization" in capsys.readouterr().err
