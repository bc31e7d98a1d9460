"""Conditions and enrolment models of a data directory: written, read, and what is wrong."""

from pathlib import Path

import pytest

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


def refused(folder: Path, **settings) -> list[str]:
    with pytest.raises(ValueError) as error:
        check_data_dirs([folder], **settings)
    return str(error.value).splitlines()[:-1]


def test_what_is_written_is_read_and_passes(folder):
    assert (folder / "utt2dialect").read_text() == "spk0-0 Standard_Mandarin\n"
    assert read_enroll(folder / "enroll.map") == {"m": ["spk0-0", "spk0-1"]}
    assert read_enroll(folder / "none") == {}
    check_data_dirs([folder])
    (folder / "utt2info.csv").write_text("a table of another kind")
    (folder / "spk2utt").write_text("spk0 spk0-0 spk0-1\n")
    assert list_conditions(folder) == ["spk2gender", "utt2dialect"]
    check_data_dirs([folder])


def test_conditions_of_nobody_and_of_two_words(folder):
    (folder / "utt2dialect").write_text("spk0-0 Wu Dialect\nspk9-9 Wu\n")
    (folder / "spk2gender").write_text("spk0 m\nspk0-0 m\n")
    assert refused(folder) == [
        f"{folder}/spk2gender: names an unknown speaker, got spk0-0; drop the line",
        f"{folder}/utt2dialect: names an unknown utterance, got spk9-9; drop the line",
        f"{folder}/utt2dialect: a condition must be one word, got 'Wu Dialect' of spk0-0; write "
        "'Wu_Dialect'",
    ]


def test_models_of_unknown_and_repeated_utterances(folder):
    (folder / "enroll.map").write_text("m spk0-0 spk7-7\nn spk1-0 spk1-0\n")
    where = f"{folder}/enroll.map: model"
    assert refused(folder) == [
        f"{where} m names an unknown utterance, got spk7-7; add it to wav.scp or drop it",
        f"{where} n names an utterance twice, got spk1-0 spk1-0; keep one of each",
    ]


def test_models_are_for_the_side_of_enrolment(folder):
    (folder / "trials").write_text("m spk1-0 nontarget\nspk1-0 m nontarget\nx spk0-0 target\n")
    assert refused(folder) == [
        f"{folder}/trials:2: names an unknown utterance, got m; add it to wav.scp or drop the "
        "trial",
        f"{folder}/trials:3: names an unknown utterance, got x; add it to wav.scp or drop the "
        "trial",
    ]


def test_broken_audio_of_a_model_in_a_trial_is_refused(folder):
    (folder / "trials").write_text("m spk1-0 nontarget\n")
    path = Path(read_table(folder / "wav.scp")["spk0-1"])
    path.unlink()
    (line,) = refused(folder, allow_rejected=0.5)
    assert line.startswith(
        f"{folder}/trials: names an utterance whose audio is broken, got spk0-1; {path}: no such"
    )
