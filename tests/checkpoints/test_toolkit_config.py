"""Configurations of other toolkits: the features that their code is built with, or a refusal."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import refuses

from speakerlab.checkpoints.toolkit_config import EXTRACTOR, read_config

MODEL = {"embedding_model": {"obj": "speakerlab.models.campplus.DTDNN.CAMPPlus"}}
EIGHT_KHZ = {"n_mels": 64, "sample_rate": 8000, "mean_nor": True}


@pytest.fixture
def frontend_of(tmp_path: Path):
    """frontend_of(values) -> the front end of a config.yaml with these values."""

    def read(values: dict[str, Any]) -> dict[str, Any]:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.dump(values), encoding="utf-8")
        config = read_config(path)
        assert config.toolkit is not None
        return config.frontend(config.toolkit)

    return read


def of_3dspeaker(args: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
    extractor: dict[str, Any] = {"obj": EXTRACTOR}
    if args is not None:
        extractor["args"] = args
    return {**MODEL, "feature_extractor": extractor, **others}


def of_wespeaker(**dataset_args: Any) -> dict[str, Any]:
    return {"model_args": {"feat_dim": 80}, "dataset_args": dataset_args}


REFERENCES = {
    "n_mels": "<fbank_dim>",
    "sample_rate": "<sample_rate>",
    "mean_nor": "<mean>",
}


@pytest.mark.parametrize(
    "values",
    [
        of_3dspeaker(EIGHT_KHZ),
        # Keys of the same meaning that the extractor is not built with.
        of_3dspeaker(EIGHT_KHZ, sample_rate=16000, fbank_dim=80),
        # References, also to other references.
        of_3dspeaker(
            REFERENCES,
            fbank_dim="<bins>",
            bins=64,
            sample_rate=8000,
            mean=True,
            wav_reader={"args": {"sample_rate": "<sample_rate>"}},
        ),
        {
            **MODEL,
            "feature_extractor": "<fbank>",
            "fbank": {"obj": EXTRACTOR, "args": EIGHT_KHZ},
        },
        of_3dspeaker("<fbank_args>", fbank_args=EIGHT_KHZ),
        # WeSpeaker resamples to `resample_rate`; a top-level key is not used.
        {
            **of_wespeaker(resample_rate=8000, fbank_args={"num_mel_bins": 64}),
            "sample_rate": 16000,
        },
    ],
)
def test_features_are_those_that_the_toolkit_computes(frontend_of, values):
    expected = {"sample_rate": 8000, "num_mel_bins": 64, "mean_norm": True}
    assert expected.items() <= frontend_of(values).items()


def test_mean_and_frames_follow_the_configuration(frontend_of):
    without_mean = dict(EIGHT_KHZ, mean_nor=False)
    assert not frontend_of(of_3dspeaker(without_mean))["mean_norm"]
    del without_mean["mean_nor"]
    assert not frontend_of(of_3dspeaker(without_mean))["mean_norm"]
    for dataset_args in ({"cmvn": False}, {"cmvn_args": {"norm_mean": False}}):
        assert not frontend_of(of_wespeaker(**dataset_args))["mean_norm"]

    # Kaldi's frames may be fractions of a millisecond; dither is for training alone.
    fbank_args = {"frame_length": 20, "frame_shift": 12.5, "dither": 1.0}
    frontend = frontend_of(of_wespeaker(fbank_args=fbank_args))
    assert frontend["frame_length_ms"] == 20.0
    assert frontend["frame_shift_ms"] == 12.5
    assert frontend["dither"] == 0.0
    assert frontend["sample_rate"] == 16000


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (of_3dspeaker(dict(EIGHT_KHZ, sample_rate="8000")), "sample_rate: '8000'"),
        (of_3dspeaker(dict(EIGHT_KHZ, n_mels="80")), "args.n_mels: '80'"),
        (of_3dspeaker(dict(EIGHT_KHZ, mean_nor="False")), "args.mean_nor: 'False'"),
        (of_3dspeaker(dict(EIGHT_KHZ, sample_rate="<rate>")), "<rate>: refers to no"),
        (
            of_3dspeaker(dict(EIGHT_KHZ, n_mels="<bins>"), bins="<bins>"),
            "<bins>: refers to itself",
        ),
        (of_3dspeaker(dict(EIGHT_KHZ, window_type="hamming")), "args.window_type"),
        (of_3dspeaker(dict(EIGHT_KHZ, low_freq=80)), "args.low_freq: 80"),
        (of_3dspeaker([8000]), "feature_extractor.args"),
        (
            {
                **MODEL,
                "feature_extractor": {"obj": "speakerlab.process.processor_para.FBank"},
            },
            "feature_extractor.obj: speakerlab.process.processor_para.FBank",
        ),
        # The extractor does not resample.
        (
            of_3dspeaker(EIGHT_KHZ, wav_reader={"args": {"sample_rate": 16000}}),
            "wav_reader.args.sample_rate 16000",
        ),
        (of_wespeaker(resample_rate="8000"), "dataset_args.resample_rate: '8000'"),
        (of_wespeaker(fbank_args={"sample_rate": 8000}), "fbank_args.sample_rate"),
        (of_wespeaker(fbank_args={"scale": 1.0}), "fbank_args.scale: 1.0"),
        (of_wespeaker(fbank_args={"num_mel_bins": 80.0}), "fbank_args.num_mel_bins"),
        (of_wespeaker(fbank_args={"frame_shift": "10"}), "fbank_args.frame_shift"),
        (of_wespeaker(cmvn="no"), "dataset_args.cmvn: 'no'"),
        (of_wespeaker(cmvn_args={"norm_var": True}), "norm_var: True"),
        (of_wespeaker(cmvn_args={"window": 300}), "cmvn_args.window: 300"),
        (of_wespeaker(frontend="s3prl"), "dataset_args.frontend: s3prl"),
        (of_wespeaker(frontend="whisper_encoder"), "frontend: whisper_encoder"),
        ({**of_wespeaker(), "data_type": "feat"}, "data_type: feat"),
    ],
)
def test_features_that_we_would_not_compute_are_refused_by_their_key(
    frontend_of, tmp_path, values, key
):
    with refuses(str(tmp_path / "config.yaml"), key):
        frontend_of(values)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({**MODEL, "fs": 8000}, "fs is 8000"),
        ({**MODEL, "dataset": [{"samplerate": "8k"}]}, "dataset.samplerate is 8k"),
        (of_3dspeaker({"n_mels": 80}, resample_rate=8000), "resample_rate is 8000"),
        (of_3dspeaker({"sample_rate": 8000}, num_mels=40), "num_mels is 40"),
        (of_wespeaker(sample_rate=8000), "dataset_args.sample_rate is 8000"),
        ({"model_args": {}, "sampling_rate": 8000}, "sampling_rate is 8000"),
        (
            {"model_args": {}, "data_args": {"resample_rate": 8000}},
            "data_args.resample_rate is 8000",
        ),
        (
            {"model_args": {}, "feature_args": {"num_mel_bins": 40}},
            "num_mel_bins is 40",
        ),
        ({"model_args": {}, "fbank_args": {"frame_length": 20}}, "frame_length is 20"),
        ({"model_args": {}, "fbank_args": {"frame_shift": 5}}, "frame_shift is 5"),
    ],
)
def test_a_setting_under_another_key_is_not_replaced_by_the_usual_value(
    frontend_of, tmp_path, values, key
):
    with refuses(str(tmp_path / "config.yaml"), key, "would be assumed"):
        frontend_of(values)


def test_the_input_size_of_the_model_is_the_number_of_mel_bins(frontend_of):
    model = {"embedding_model": {"args": {"feat_dim": 40}}}
    assert frontend_of(model)["num_mel_bins"] == 40


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (
            {"embedding_model": {"args": {"embedding_size": 512}}},
            "embedding_model.args.embedding_size is 512",
        ),
        ({"model_args": {"embed_dim": 512}}, "model_args.embed_dim is 512"),
    ],
)
def test_a_configuration_of_another_model_is_refused(tmp_path, values, key):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.dump(values))
    config = read_config(path)
    config.check_size(512)
    with refuses(str(path), key, "192"):
        config.check_size(192)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sample_rate: 8000\nmodel: !new:speechbrain.ECAPA_TDNN\n", "SpeechBrain"),
        ("out: !ref <folder>/save\n", "SpeechBrain"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "Git LFS"),
        ("<!DOCTYPE html>\n<html>", "web page"),
    ],
)
def test_other_files_in_the_place_of_a_configuration_are_named(tmp_path, text, problem):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with refuses(str(path), problem):
        read_config(path)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (MODEL, "feature_extractor.args.sample_rate; assumes 16000"),
        (of_3dspeaker(None), "feature_extractor.args.n_mels; assumes 80"),
        ({"model_args": {}}, "has no dataset_args; assumes 16000 Hz"),
    ],
)
def test_assumed_features_are_named(frontend_of, caplog, values, line):
    assert frontend_of(values)["sample_rate"] == 16000
    assert line in caplog.text


def test_a_complete_configuration_is_read_without_a_word(frontend_of, caplog):
    frontend_of(of_3dspeaker(EIGHT_KHZ))
    frontend_of(of_wespeaker(resample_rate=16000))
    assert caplog.text == ""
