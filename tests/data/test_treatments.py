"""What is cut from test utterances, and how they are encoded."""

import numpy as np
import pytest
from refusals import refuses
from voices import write_voices

from speakerlab.data.codecs import reencode
from speakerlab.data.manifest import Piece, read_manifest
from speakerlab.data.treatments import UNTREATED, Treatment, read_treatments

RATE = 16000


@pytest.fixture
def pieces(tmp_path):
    folder = write_voices(tmp_path / "test")
    manifest = read_manifest([folder], sample_rate=RATE)
    pieces = []
    for row, num_samples in enumerate(manifest.num_samples_N):
        pieces.append(Piece(manifest, row, 0, int(num_samples)))
    return pieces


def test_a_cut_depends_on_the_id_alone_and_holds_the_shorter_ones(pieces):
    short = Treatment(0.5).apply(pieces)
    long = Treatment(0.9).apply(pieces)
    # no stream of random numbers
    assert short == Treatment(0.5).apply(pieces)
    reversed_short = Treatment(0.5).apply(pieces[::-1])
    assert reversed_short == short[::-1]

    starts = []
    for whole, a, b in zip(pieces, short, long):
        assert a.num_samples == 8000
        assert b.num_samples == 14400
        assert b.start <= a.start
        a_end = a.start + 8000
        b_end = b.start + 14400
        assert a_end <= b_end <= whole.num_samples
        expected_S = whole.read()[a.start : a_end]
        assert np.array_equal(a.read(), expected_S)
        starts.append(a.start / (whole.num_samples - 8000))
    # of twelve utterances
    assert min(starts) < 0.3
    assert max(starts) > 0.7


def test_utterances_that_are_not_longer_stay_whole(pieces):
    treated = Treatment(1.25).apply(pieces)
    for piece, whole in zip(treated, pieces, strict=True):
        assert piece.num_samples == min(whole.num_samples, 20000)
    assert Treatment(9.0).apply(pieces) == pieces
    assert UNTREATED.apply(pieces) == pieces


def test_a_coded_utterance_is_encoded_as_a_whole(pieces):
    (treatment,) = read_treatments([], ["gsm"])
    for whole, coded in zip(pieces, treatment.apply(pieces)):
        expected_S = reencode(whole.read(), "gsm", sample_rate=RATE)
        assert np.array_equal(coded.read(), expected_S)
    (untreated,) = read_treatments([], ["none"])
    assert untreated.apply(pieces) == pieces


def test_codecs_are_read_beside_durations():
    codecs = ["none", "mp3:16k", "gsm", "gsm"]
    actual = []
    for treatment in read_treatments(["2", "full"], codecs):
        condition = treatment.condition.partition(" ")[0]
        actual.append((condition, treatment.name, treatment.value))
    assert actual == [
        ("duration", "2s", "2 s"),
        ("duration", "", "full"),
        ("codec", "", "none"),
        ("codec", "mp3-16k", "mp3:16k"),
        ("codec", "gsm", "gsm"),
    ]
    for word in ("mp3:20k", "opus", "opus:5k", "GSM", ""):
        with refuses(
            "--codecs",
            f"{word} is no codec",
            "gsm, opus:6k to opus:256k",
            "16, 24, 32,",
        ):
            read_treatments([], [word])


def test_durations_are_read_once_each():
    read = read_treatments(["2", "full", "2.0", "0.5"])
    assert read == [Treatment(2.0), UNTREATED, Treatment(0.5)]
    names = [(treatment.name, treatment.value) for treatment in read]
    assert names == [
        ("2s", "2 s"),
        ("", "full"),
        ("0.5s", "0.5 s"),
    ]
    for word in ("0", "-1", "nan", "short"):
        with refuses("--durations", word):
            read_treatments([word])
