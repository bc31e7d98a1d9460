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
    manifest = read_manifest([write_voices(tmp_path / "test")], sample_rate=RATE)
    return [Piece(manifest, row, 0, int(n)) for row, n in enumerate(manifest.num_samples_N)]


def test_a_cut_depends_on_the_id_alone_and_holds_the_shorter_ones(pieces):
    short, long = (Treatment(seconds).apply(pieces) for seconds in (0.5, 0.9))
    assert short == Treatment(0.5).apply(pieces)  # no stream of random numbers
    assert short[::-1] == Treatment(0.5).apply(pieces[::-1])
    for whole, a, b in zip(pieces, short, long):
        assert (a.num_samples, b.num_samples) == (8000, 14400)
        assert b.start <= a.start and a.start + 8000 <= b.start + 14400 <= whole.num_samples
        assert np.array_equal(a.read(), whole.read()[a.start : a.start + 8000])
    starts = [piece.start / (whole.num_samples - 8000) for piece, whole in zip(short, pieces)]
    assert min(starts) < 0.3 and max(starts) > 0.7  # of twelve utterances


def test_utterances_that_are_not_longer_stay_whole(pieces):
    assert [piece.num_samples for piece in Treatment(1.25).apply(pieces)] == [
        min(piece.num_samples, 20000) for piece in pieces
    ]
    assert Treatment(9.0).apply(pieces) == pieces == UNTREATED.apply(pieces)


def test_a_coded_utterance_is_encoded_as_a_whole(pieces):
    (treatment,) = read_treatments([], ["gsm"])
    for whole, coded in zip(pieces, treatment.apply(pieces)):
        assert np.array_equal(coded.read(), reencode(whole.read(), "gsm", sample_rate=RATE))
    (untreated,) = read_treatments([], ["none"])
    assert untreated.apply(pieces) == pieces


def test_codecs_are_read_beside_durations():
    read = read_treatments(["2", "full"], ["none", "mp3:16k", "gsm", "gsm"])
    assert [(one.condition.partition(" ")[0], one.name, one.value) for one in read] == [
        ("duration", "2s", "2 s"),
        ("duration", "", "full"),
        ("codec", "", "none"),
        ("codec", "mp3-16k", "mp3:16k"),
        ("codec", "gsm", "gsm"),
    ]
    for word in ("mp3:20k", "opus", "opus:5k", "GSM", ""):
        with refuses("--codecs", f"{word} is no codec", "gsm, opus:6k to opus:256k", "16, 24, 32,"):
            read_treatments([], [word])


def test_durations_are_read_once_each():
    read = read_treatments(["2", "full", "2.0", "0.5"])
    assert read == [Treatment(2.0), UNTREATED, Treatment(0.5)]
    assert [(one.name, one.value) for one in read] == [
        ("2s", "2 s"),
        ("", "full"),
        ("0.5s", "0.5 s"),
    ]
    for word in ("0", "-1", "nan", "short"):
        with refuses("--durations", word):
            read_treatments([word])
