"""The command `clean`: what it finds in recordings, what it repeats, and refusals."""

import logging
import re
from collections import Counter

import clean_claims
import numpy as np
import pytest
from refusals import refuses
from voices import RATE, write_voices

from speakerlab.bin import clean, pack
from speakerlab.core import done
from speakerlab.core.counting import count_of
from speakerlab.data import audio, tables
from speakerlab.data.check import check_data_dirs
from speakerlab.data.manifest import read_manifest
from speakerlab.experiments.cleaning import FINDINGS, RECORD
from speakerlab.inference import extraction

WRONG = "spk2-1"
COPY = "z-copy"
SYLLABLE_SAMPLES = 1600


def make_voice(speaker: int, take: int) -> np.ndarray:
    """wave_S, int16, of syllables in the speaker's tones; takes begin at different syllables.

    So a network of random weights distinguishes speakers, and hardly distinguishes takes.
    """
    rng = np.random.default_rng(speaker)
    time_S = np.arange(SYLLABLE_SAMPLES) / RATE
    syllables = []
    for tones in rng.uniform(200, 6000, size=(6, 4)):
        syllable_S = np.sin(2 * np.pi * tones[:, None] * time_S).sum(axis=0)
        syllables.append(syllable_S)
    wave_S = 2500 * np.concatenate(syllables)
    wave_S += 100 * rng.standard_normal(len(wave_S))
    wave_S = np.roll(wave_S, take * SYLLABLE_SAMPLES)
    return wave_S.astype(np.int16)


@pytest.fixture
def wrong_data(tmp_path):
    """Ten voices with five utterances each, of which one has a wrong label, and a copy."""
    wavs = {}
    speakers = {}
    for speaker in range(10):
        for take in range(5):
            name = f"spk{speaker}-{take}"
            wavs[name] = tmp_path / f"{name}.wav"
            audio.write(wavs[name], make_voice(speaker, take), RATE)
            speakers[name] = f"spk{speaker}"
    speakers[WRONG] = "spk7"
    wavs[COPY] = tmp_path / "copy.flac"
    audio.write(wavs[COPY], make_voice(4, 0), RATE)
    speakers[COPY] = "spk5"
    train = tmp_path / "train"
    tables.write_data_dir(train, wavs=wavs, speakers=speakers)
    check_data_dirs([train])
    return train


def arguments_for(exp, data, out, *options: str) -> list[str]:
    places = ["--model", str(exp), "--data", str(data), "--out", str(out)]
    return [*places, *options]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_wrong_labels_and_copies_are_dropped(make_exp, wrong_data, tmp_path, capsys):
    out = tmp_path / "out"
    before = contents(wrong_data)
    clean.main(arguments_for(make_exp("exp"), wrong_data, out))
    assert contents(wrong_data) == before

    rows = {}
    for line in (out / FINDINGS).read_text().splitlines()[1:]:
        name, kind, speaker, suggested, match, *_, action = line.split("\t")
        rows[name, kind] = (speaker, suggested, match, action)
    assert rows[WRONG, "other-speaker"] == ("spk7", "spk2", "-", "drop")
    assert rows[COPY, "duplicate"] == ("spk5", "spk4", "spk4-0", "drop")
    source = tables.read_table(wrong_data / "utt2spk")
    left = tables.read_table(out / "utt2spk")
    dropped = source.keys() - left.keys()
    # The network is random, and the threshold of a small set may be too high for two good ones.
    assert {WRONG, COPY} <= dropped
    assert len(dropped) <= 4
    check_data_dirs([out])
    shown = capsys.readouterr().out
    assert f"{out}: {len(left)} of 51 utterances, 10 of 10 speakers" in shown
    assert f"other speaker: {count_of(len(dropped) - 1, 'utterance')} dropped" in shown
    assert "duplicates: 1 utterance dropped" in shown


def test_the_check_of_what_is_found_cleans_as_the_command_does(
    make_exp, wrong_data, tmp_path
):
    """With planted faults, of which the command gets a data directory."""
    exp = make_exp("exp")
    corpus = clean_claims.embed_corpus(str(exp), wrong_data)
    planting = clean_claims.plant(corpus, 0.05, seed=0)
    wavs = tables.read_table(wrong_data / "wav.scp")
    planted = tmp_path / "planted"
    tables.write_data_dir(
        planted,
        wavs={name: wavs[name.removesuffix("-again")] for name in planting.ids},
        speakers=dict(zip(planting.ids, planting.speakers)),
    )
    check_data_dirs([planted])
    clean.main(arguments_for(exp, planted, tmp_path / "out"))
    found = []
    for line in (tmp_path / "out" / FINDINGS).read_text().splitlines()[1:]:
        found.append(line.split("\t")[:5])
    expected = []
    for finding in planting.clean(far=0.01).findings:
        expected.append(finding.line().split("\t")[:5])
    assert found == expected
    kinds = Counter(row[1] for row in found)
    assert kinds["duplicate"] == 2  # one of the corpus, one planted
    assert kinds["other-speaker"] >= 2


def test_the_check_of_what_is_found_prints_a_table(make_exp, wrong_data, capsys):
    exp = make_exp("exp")
    places = ["--model", str(exp), "--data", str(wrong_data)]
    exit_code = clean_claims.main([*places, "--plantings", "2", "--wrong", "0.1"])
    shown, failures = capsys.readouterr()
    assert "51 utterances of 10 speakers; findings in the corpus as it is: " in shown
    assert f"duplicate: {COPY} spk4-0" in shown
    assert "10.0 % wrong labels, 2 plantings" in shown
    assert re.search(r"^\| wrong labels \| \d+ of 10, ", shown, re.M)
    assert re.search(r"^\| copies \| 2 of 2, 100.0 % \|", shown, re.M)
    assert re.search(r"^\| speakers divided into two \| \d+ of 10, ", shown, re.M)
    assert exit_code == bool(failures)


def test_a_repeated_cleaning_does_nothing(
    make_exp, wrong_data, tmp_path, monkeypatch, caplog
):
    exp = make_exp("exp")
    out = tmp_path / "out"
    arguments = arguments_for(exp, wrong_data, out)
    clean.main(arguments)
    stamps = done.stamps(sorted(out.iterdir()))
    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        patch.setattr(clean.cleaning, "find_copies", None)
        clean.main(arguments)
    assert f"{out}: already cleaned with these inputs, kept" in caplog.text
    assert done.stamps(sorted(out.iterdir())) == stamps

    # Other options, and other tables, are other inputs.
    clean.main([*arguments, "--join-speakers"])
    assert done.read_record(out / RECORD)["join_speakers"] == "true"
    speakers = tables.read_table(wrong_data / "utt2spk")
    tables.write_table(wrong_data / "utt2spk", speakers | {WRONG: "spk2"})
    clean.main(arguments)
    assert WRONG in tables.read_table(out / "utt2spk")


def test_shards_are_read_like_recordings(make_exp, wrong_data, tmp_path):
    exp = make_exp("exp")
    clean.main(arguments_for(exp, wrong_data, tmp_path / "of_files"))
    pack.main([str(wrong_data), "--num-workers", "0"])
    for path in tables.read_table(wrong_data / "wav.scp").values():
        audio.write(path, np.zeros(0, dtype=np.int16), RATE)
    clean.main(arguments_for(exp, wrong_data, tmp_path / "of_shards"))
    findings = (tmp_path / "of_shards" / FINDINGS).read_text()
    assert findings == (tmp_path / "of_files" / FINDINGS).read_text()


def test_trial_lists_are_left_out_with_a_warning(make_exp, tmp_path, caplog):
    test = write_voices(tmp_path / "test", seconds=(0.5, 0.6), trials="all")
    out = tmp_path / "out"
    clean.main(arguments_for(make_exp("exp"), test, out))
    assert "trials of" in caplog.text
    assert tables.list_trials(out) == []


def test_an_interrupted_write_leaves_nothing(
    make_exp, wrong_data, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    arguments = arguments_for(make_exp("exp"), wrong_data, out)

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        # The last file of a directory.
        patch.setattr(clean.cleaning.done, "record", full)
        with pytest.raises(OSError, match="No space"):
            clean.main(arguments)
    assert not out.exists()
    clean.main(arguments)
    assert len(read_manifest([out], sample_rate=RATE)) < 50


def test_refusals_come_before_the_work(make_exp, wrong_data, tmp_path, monkeypatch):
    exp = make_exp("exp")
    out = tmp_path / "out"
    monkeypatch.setattr(extraction, "plan_extraction", None)
    with refuses("--out", wrong_data, "never changed"):
        clean.main(arguments_for(exp, wrong_data, wrong_data))
    inner = wrong_data / "cleaned"
    with refuses("--out", inner, "lies in"):
        clean.main(arguments_for(exp, wrong_data, inner))
    with refuses("--out", tmp_path, "holds --data"):
        clean.main(arguments_for(exp, wrong_data, tmp_path))
    other = write_voices(tmp_path / "other")
    with refuses("--out", other, "was not written by `speakerlab clean`"):
        clean.main(arguments_for(exp, wrong_data, other))

    missing = tmp_path / "missing"
    with refuses(missing, "does not exist", error=FileNotFoundError):
        clean.main(arguments_for(exp, missing, out))
    with refuses(missing, error=FileNotFoundError):
        clean.main(arguments_for(missing, wrong_data, out))
    one = write_voices(tmp_path / "one", speakers=[0], check=False)
    tables.write_table(one / "utt2dur", {"spk0-0": "1", "spk0-1": "1", "spk0-2": "1"})
    with refuses(one, "has 1 speaker"):
        clean.main(arguments_for(exp, one, out))
    (other / "utt2spk").unlink()
    with refuses(other / "utt2spk", "needs speaker labels", error=FileNotFoundError):
        clean.main(arguments_for(exp, other, out))
    (other / "utt2dur").unlink()
    with refuses(other, "has not been checked", error=FileNotFoundError):
        clean.main(arguments_for(exp, other, out))
    assert not out.exists()
