"""Conditions and enrolment models of a data directory: written, read and checked."""

from pathlib import Path

import pytest
from refusals import refuses

from speakerlab.data.check import check_data_dirs
from speakerlab.data.tables import list_conditions, read_enroll, read_table, write_data_dir

TRIALS = [("m", "spk1-0", False), ("spk0-0", "spk0-1", True)]


@pytest.fixture
def folder(make_data_dir) -> Path:
    """Two speakers, two utterances each, a model of two, and a condition of each kind."""
    made = make_data_dir("test", speakers=[0, 1], seconds=[0.5, 0.75], trials=TRIALS, check=False)
    write_data_dir(
        made,
        wavs=read_table(made / "wav.scp"),
        speakers=read_table(made / "utt2spk"),
        trials={"trials": TRIALS},
        columns={
            "utt2dialect": {"spk0-0": "Standard  Mandarin", "spk0-1": " "},
            "spk2gender": {"spk0": "m", "spk1": "f"},
        },
        enroll={"m": ["spk0-0", "spk0-1"]},
    )
    return made


def test_what_is_written_is_read_and_passes(folder):
    assert (folder / "utt2dialect").read_text() == "spk0-0 Standard_Mandarin\n"
    assert read_enroll(folder / "enroll.map") == {"m": ["spk0-0", "spk0-1"]}
    assert read_enroll(folder / "none") == {}
    check_data_dirs([folder])
    (folder / "utt2info.csv").write_text("a table of another kind")
    (folder / "spk2utt").write_text("spk0 spk0-0 spk0-1\n")
    assert list_conditions(folder) == ["spk2gender", "utt2dialect"]
    check_data_dirs([folder])


def test_broken_audio_of_a_model_in_a_trial_is_refused(folder):
    (folder / "trials").write_text("m spk1-0 nontarget\n")
    path = Path(read_table(folder / "wav.scp")["spk0-1"])
    path.unlink()
    with refuses(f"{folder}/trials", "spk0-1", path):
        check_data_dirs([folder], allow_rejected=0.5)


@pytest.mark.parametrize(
    ("table", "text", "where", "value"),
    [
        ("spk2gender", "spk0 m\nspk0-0 m\n", "spk2gender", "spk0-0"),
        ("utt2dialect", "spk9-9 Wu\n", "utt2dialect", "spk9-9"),
        ("utt2dialect", "spk0-0 Wu Dialect\n", "utt2dialect", "'Wu Dialect'"),
        ("enroll.map", "m spk0-0 spk7-7\n", "enroll.map", "spk7-7"),
        ("enroll.map", "m spk0-0\nn spk1-0 spk1-0\n", "enroll.map", "spk1-0 spk1-0"),
        ("trials", "m spk1-0 nontarget\nspk1-0 m nontarget\n", "trials:2", "m;"),
        ("trials", "x spk0-0 target\n", "trials:1", "x;"),
    ],
)
def test_conditions_models_and_trials_that_name_nobody_are_refused(
    folder, table, text, where, value
):
    (folder / table).write_text(text)
    with refuses(f"{folder}/{where}", value):
        check_data_dirs([folder])
