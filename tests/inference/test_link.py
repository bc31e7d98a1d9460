"""Identities over recordings: who is linked, what they are called, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from models_on_disk import CALIBRATION, publish_xvector
from refusals import refuses

import speakerlab
from speakerlab.core.atomic import write_json, write_text
from speakerlab.core.done import file_digest
from speakerlab.diarization.regions import Turn
from speakerlab.inference.diarize import Diarization, Segment
from speakerlab.inference.known_speakers import Match
from speakerlab.inference.link import (
    LocalSpeaker,
    choose_threshold,
    link,
    read_result,
    speakers_of,
)
from speakerlab.scoring.calibration import Calibration

DIM = 16
VOICES = np.eye(DIM)  # of different people: a cosine of 0
THREE_RATES = Calibration(
    slope=10.0,
    intercept=-5.0,
    threshold=0.3,
    threshold_at_far={"0.1": 0.2, "0.01": 0.4, "0.001": 0.5},
    eer=0.02,
    num_target=100,
    num_nontarget=100000,
    source="made up",
)


def voice(person: int, take: int = 0, *, cosine: float = 0.9) -> np.ndarray:
    """Return an embedding with this cosine to the person's direction, another one for each take."""
    other = VOICES[8 + take % 8]
    emb_D = cosine * VOICES[person] + np.sqrt(1 - cosine**2) * other
    return (3.0 * emb_D).astype(np.float32)


def speaker(
    recording: str,
    name: str,
    emb_D: np.ndarray,
    seconds: float = 10.0,
    **fields: str,
) -> LocalSpeaker:
    return LocalSpeaker(recording, name, seconds, emb_D, **fields)


# Ann (0) and Bob (1) in three recordings, under local names.
THREE = [
    speaker("a", "speaker1", voice(0, 0)),
    speaker("a", "speaker2", voice(1, 1)),
    speaker("b", "speaker1", voice(1, 2)),
    speaker("c", "speaker1", voice(2, 3)),
    speaker("c", "speaker2", voice(0, 4)),
]


def test_people_have_one_name_in_all_recordings():
    linked = link(THREE, threshold=0.5)
    assert linked.names == {
        ("a", "speaker1"): "identity1",
        ("c", "speaker2"): "identity1",
        ("a", "speaker2"): "identity2",
        ("b", "speaker1"): "identity2",
        ("c", "speaker1"): "identity3",
    }
    ann, bob, carol = linked
    assert ann.seconds == 20.0
    # Of two takes: 0.9 x 0.9.
    assert ann.members[0].closeness == pytest.approx(0.81, abs=1e-6)
    assert carol.members[0].closeness is None
    turns = [Turn(0, 1, "speaker2"), Turn(1, 2, "speaker1")]
    assert linked.rename("a", turns) == [
        Turn(0, 1, "identity2"),
        Turn(1, 2, "identity1"),
    ]


def test_closeness_is_weighted_by_seconds():
    speakers = [
        speaker("a", "s", voice(0, 0), 10),
        speaker("b", "s", voice(0, 1), 30),
        speaker("c", "s", voice(0, 0), 10),
    ]
    (identity,) = link(speakers, threshold=0.5)
    # The first is the same as the third, and has 0.81 with the second.
    expected = (30 * 0.81 + 10 * 1.0) / 40
    assert identity.members[0].closeness == pytest.approx(expected, abs=1e-6)


def test_two_speakers_of_a_recording_are_two_people_unless_allowed():
    speakers = [speaker("a", "x", voice(0, 0)), speaker("a", "y", voice(0, 1))]
    linked = link(speakers, threshold=0.5)
    assert len(linked) == 2
    # They are as similar as one person, so the user is asked to look.
    (pair,) = linked.doubtful
    assert pair.first == "identity1"
    assert pair.second == "identity2"
    assert pair.is_apart
    assert pair.closeness == pytest.approx(0.81, abs=1e-5)

    linked = link(speakers, threshold=0.5, allow_same_recording=True)
    assert len(linked) == 1


def test_a_pair_near_the_threshold_is_doubtful():
    speakers = [speaker("a", "s", voice(0, 0)), speaker("b", "s", voice(0, 1))]
    (pair,) = link(speakers, threshold=0.85).doubtful
    assert not pair.is_apart
    assert link(speakers, threshold=0.95).doubtful == []


def test_short_speakers_join_or_are_unknown():
    short_ann = speaker("d", "s", voice(0, 5), 1.0)
    short_other = speaker("e", "s", voice(3, 6), 1.0)
    linked = link([*THREE, short_ann, short_other], threshold=0.5)
    assert linked.names["d", "s"] == "identity1"
    assert linked.names["e", "s"] == "unknown1"
    unknown = [identity.name for identity in linked if identity.is_unknown]
    assert unknown == ["unknown1"]

    # Two short speakers are not linked to each other, however similar.
    first = speaker("a", "s", voice(0), 1.0)
    second = speaker("b", "s", voice(0), 1.0)
    names = link([first, second], threshold=0.5).names
    assert list(names.values()) == ["unknown1", "unknown2"]


def test_a_short_speaker_does_not_join_who_speaks_in_its_recording():
    # All three sound like Ann. In recording a, she is another speaker already.
    in_a = speaker("a", "short", voice(0, 7), seconds=1.0)
    names = link([*THREE, in_a], threshold=0.5).names
    assert names["a", "short"] == "unknown1"

    # Two speakers of recording d cannot both be her: the nearer one is.
    far = speaker("d", "far", voice(0, 5, cosine=0.7), seconds=1.0)
    near = speaker("d", "near", voice(0, 6), seconds=1.0)
    names = link([*THREE, far, near], threshold=0.5).names
    assert names["d", "near"] == "identity1"
    assert names["d", "far"] == "unknown1"


def test_names_are_kept_when_recordings_come_and_go():
    first = link(THREE, threshold=0.5)
    new = [
        speaker("0", "speaker1", voice(3, 5)),
        speaker("0", "speaker2", voice(1, 6)),
    ]
    second = link(
        [*new, *THREE[2:]],
        threshold=0.5,
        earlier=first.names,
        last_numbers=first.last_numbers,
    )
    assert second.names == {
        ("0", "speaker1"): "identity4",
        ("0", "speaker2"): "identity2",
        ("b", "speaker1"): "identity2",
        ("c", "speaker1"): "identity3",
        ("c", "speaker2"): "identity1",
    }
    # Without Bob, his number is not given to anyone else.
    third = link(
        [*THREE[3:], speaker("z", "s", voice(5))],
        threshold=0.5,
        earlier=second.names,
        last_numbers=second.last_numbers,
    )
    assert third.names["z", "s"] == "identity5"


def test_of_two_people_who_become_one_the_longer_name_remains():
    earlier = {
        ("a", "speaker1"): "identity7",
        ("c", "speaker2"): "identity3",
    }
    speakers = [*THREE[:4], speaker("c", "speaker2", voice(0, 4), 30.0)]
    linked = link(speakers, threshold=0.5, earlier=earlier)
    assert linked.names["a", "speaker1"] == "identity3"
    assert linked.names["b", "speaker1"] == "identity8"


def test_known_names_are_one_person_each():
    speakers = [
        speaker("a", "Ann", voice(0, 0), known_as="Ann"),
        speaker("b", "channel2-Ann", voice(4, 1), known_as="Ann"),
        speaker("c", "Ben", voice(0, 2), known_as="Ben"),
        speaker("d", "speaker1", voice(4, 3)),
    ]
    linked = link(speakers, threshold=0.3)
    # In b Ann sounds different, and in c Ben sounds like Ann.
    assert linked.names["a", "Ann"] == "Ann"
    assert linked.names["b", "channel2-Ann"] == "Ann"
    assert linked.names["c", "Ben"] == "Ben"
    assert linked.names["d", "speaker1"] == "Ann"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    exp = publish_xvector(tmp_path_factory.mktemp("link") / "exp", CALIBRATION)
    return speakerlab.load(exp, device="cpu")


def test_identities_are_named_after_enrolled_speakers(model):
    model.speakers = {
        "Ann B": VOICES[0].astype("f4"),
        "Zoe": VOICES[6].astype("f4"),
    }
    model.enrolled_by = model.sha256
    names = link(THREE, threshold=0.5, model=model).names
    assert names["a", "speaker1"] == "Ann_B"
    assert names["c", "speaker2"] == "Ann_B"
    assert names["b", "speaker1"] == "identity1"


def test_short_speakers_are_not_people_when_a_threshold_is_chosen():
    unknown = [
        speaker(f"short{number}", "s", voice(5, 4, cosine=0.1), 1.0)
        for number in range(40)
    ]
    linked = link([*THREE, *unknown], calibration=THREE_RATES)
    assert sum(identity.is_unknown for identity in linked) == 40
    # Of the three people, not of 43.
    assert linked.far == pytest.approx(0.05 / 2)
    assert linked.threshold == choose_threshold(THREE_RATES, 3)[1]


def test_the_number_of_people_needs_no_threshold():
    linked = link(THREE, num_people=2)
    assert len(linked) == 2
    assert linked.doubtful == []
    with refuses("speakers", "a", 2):
        link(THREE, num_people=1)
    with refuses("speakers", 0):
        link(THREE, num_people=0)


def test_no_speakers_are_no_identities():
    assert len(link([], threshold=0.5)) == 0


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ({"emb_D": np.full(DIM, np.nan, dtype="f4")}, "not finite"),
        ({"emb_D": np.zeros(DIM, dtype="f4")}, "zero"),
        ({"emb_D": np.ones(4, dtype="f4")}, "4 dimensions"),
        ({"seconds": 0.0}, "0.0 seconds"),
        ({"seconds": np.nan}, "nan seconds"),
    ],
)
def test_speakers_that_cannot_be_compared_are_refused(wrong, shown):
    fields = {"emb_D": voice(3), "seconds": 10.0, **wrong}
    with refuses("x: s", shown):
        link([*THREE, LocalSpeaker("x", "s", **fields)], threshold=0.5)


def test_other_wrong_arguments_are_refused():
    with refuses("a: speaker1", "twice"):
        link([*THREE, THREE[0]], threshold=0.5)
    with refuses("link", "threshold"):
        link(THREE)
    for threshold in (1.5, np.nan):
        with refuses("threshold", threshold):
            link(THREE, threshold=threshold)
    twins = [
        speaker("caf\u00e9", "s", voice(0)),
        speaker("cafe\u0301", "s", voice(1)),
    ]
    with refuses("link", "look alike"):
        link(twins, threshold=0.5)


def test_the_rate_falls_with_the_number_of_speakers():
    # At 0.05 / (6 - 1) and 0.05 / (51 - 1), which are stored.
    assert choose_threshold(THREE_RATES, 6) == (0.01, pytest.approx(0.4))
    assert choose_threshold(THREE_RATES, 51) == (0.001, pytest.approx(0.5))
    # Between the logarithms of two rates.
    rate, threshold = choose_threshold(THREE_RATES, 17)
    assert rate == pytest.approx(0.05 / 16)
    assert threshold == pytest.approx(0.5 - 0.1 * np.log10(rate / 0.001))
    # Beyond the stored rates.
    assert choose_threshold(THREE_RATES, 100000) == (0.001, pytest.approx(0.5))
    one_rate = replace(THREE_RATES, threshold_at_far={"0.01": 0.4})
    assert choose_threshold(one_rate, 1) == (0.01, 0.4)


def test_without_rates_no_threshold_is_chosen():
    no_rates = replace(THREE_RATES, threshold_at_far={})
    with refuses("calibration", "too few"):
        choose_threshold(no_rates, 5)
    # A given number of people needs no threshold.
    pair = [speaker(recording, "a", voice(0, 0)) for recording in "xy"]
    assert len(link(pair, calibration=no_rates, num_people=1)) == 1


def test_the_threshold_follows_the_number_of_people_that_are_found():
    # Fifty-one speakers could be as many people, who need a threshold of 0.5. Nine are found, for
    # whom 0.42 is enough: then two with a cosine of 0.45 are one person.
    speakers = [
        speaker(f"{take}", f"{person}", voice(person, take))
        for take in range(7)
        for person in range(7)
    ]
    alike = [
        speaker("x", "s", voice(7, 0, cosine=0.45**0.5)),
        speaker("y", "s", voice(7, 1, cosine=0.45**0.5)),
    ]
    linked = link([*speakers, *alike], calibration=THREE_RATES)
    assert linked.names["x", "s"] == linked.names["y", "s"]
    assert len(linked) == 8
    assert linked.far == pytest.approx(0.05 / 7)
    assert linked.threshold == choose_threshold(THREE_RATES, 8)[1]


def test_a_diarization_is_read_from_its_files_or_from_python(tmp_path, caplog):
    diarization = Diarization(
        recording="my call",
        seconds=12.0,
        segments=[Segment(0, 4, "speaker1", 1.0), Segment(5, 11, "speaker2", 1.0)],
        speakers={"speaker1": voice(0), "speaker2": voice(1)},
    )
    path = tmp_path / "my call.json"
    write_text(tmp_path / "my call.rttm", diarization.to_rttm())
    facts = {
        "model_sha256": "f" * 64,
        "rttm_sha256": file_digest(tmp_path / "my call.rttm"),
    }
    write_json(path, {**diarization.to_dict(), **facts})
    result = read_result(path)
    assert result.recording == "my call"
    assert [turn.speaker for turn in result.turns] == ["speaker1", "speaker2"]
    for read, given in zip(result.speakers, speakers_of(diarization), strict=True):
        assert (read.key, read.seconds) == (given.key, given.seconds)
        np.testing.assert_array_equal(read.emb_D, given.emb_D)

    # A listener has given all turns to one speaker.
    turns = diarization.to_rttm().replace("speaker2", "speaker1")
    write_text(tmp_path / "my call.rttm", turns)
    (only,) = read_result(path).speakers
    assert only.seconds == 10.0
    assert "was changed after the diarization" in caplog.text
    write_text(tmp_path / "my call.rttm", turns.replace("speaker1", "Ann"))
    # Advice that does not replace the corrected turns.
    with refuses(tmp_path / "my call.rttm", "Ann", "no embedding", "another --out"):
        read_result(path)


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "a.json"
    good = {
        "recording": "a",
        "model_sha256": "f" * 64,
        "speakers": {"speaker1": {"seconds": 4.0, "embedding": [1.0, 0.0]}},
    }
    turn = "SPEAKER a 1 0.000 4.000 <NA> <NA> speaker1 <NA> <NA>\n"
    write_json(path, good)
    with refuses(tmp_path / "a.rttm", "diarize", error=FileNotFoundError):
        read_result(path)
    write_text(tmp_path / "a.rttm", turn)
    assert len(read_result(path).speakers) == 1

    wrong = [
        "{",
        "[]",
        json.dumps({**good, "speakers": {"speaker1": {"seconds": 4.0}}}),
        json.dumps({**good, "speakers": {"speaker1": {"embedding": []}}}),
        json.dumps({**good, "speakers": {"speaker1": {"embedding": [0.0, np.nan]}}}),
        json.dumps({**good, "speakers": {"speaker1": {"embedding": ["1", 2.0]}}}),
        json.dumps({"recording": "a", "speakers": {}}),
    ]
    for text in wrong:
        write_text(path, text)
        with refuses(path):
            read_result(path)
    write_json(path, good)
    write_text(tmp_path / "a.rttm", turn.replace("SPEAKER a", "SPEAKER b"))
    with refuses(tmp_path / "a.rttm", "recording b", "correct", "another --out"):
        read_result(path)


def test_names_of_enrolled_speakers_are_read(tmp_path):
    matches = {
        "Ann B": Match("Ann B", 0.8, 0.5, is_known=True),
        # On another channel, or unknown.
        "channel2-Ann B": Match("Ann B", 0.7, 0.5, is_known=True),
        "speaker1": Match("Ann B", 0.2, 0.5, is_known=False),
    }
    diarization = Diarization(
        recording="call",
        seconds=9.0,
        segments=[
            Segment(3.0 * row, 3.0 * row + 2, name, 1.0)
            for row, name in enumerate(matches)
        ],
        speakers=dict.fromkeys(matches, voice(0)),
        matches=matches,
    )
    path = tmp_path / "call.json"
    write_json(path, {**diarization.to_dict(), "model_sha256": "f" * 64})
    write_text(tmp_path / "call.rttm", diarization.to_rttm())
    for speakers in (read_result(path).speakers, speakers_of(diarization)):
        assert [row.known_as for row in speakers] == ["Ann_B", "Ann_B", ""]
