"""Windows of conversations: simulated ones follow from the slot, recorded ones from the turns."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from voices import RATE, write_voices

from speakerlab.core.powerset import UNKNOWN
from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.conversations import (
    ConversationCrops,
    FrameGrid,
    LocalTurn,
    Reference,
    Style,
    keep_most_active,
)
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import write_data_dir

CROP = 2 * RATE
GRID = FrameGrid(num_frames=20, first=RATE / 20, hop=RATE // 10)
STYLE = Style(turn_seconds=0.6, pause_seconds=0.1, overlap_seconds=0.3)


def all_speech(wave_S):
    return [(0.0, len(wave_S) / RATE)]


@pytest.fixture(scope="module")
def voices(tmp_path_factory):
    folder = tmp_path_factory.mktemp("voices") / "train"
    write_voices(folder, speakers=range(5), seconds=(1.5, 0.4))
    return read_manifest([folder], sample_rate=RATE)


@pytest.fixture(scope="module")
def meetings(tmp_path_factory):
    """Recordings whose sample k is k / 10, of 5 and 1 s."""
    root = tmp_path_factory.mktemp("meetings")
    wavs = {}
    for name, seconds in (("long", 5), ("short", 1)):
        wave_S = (np.arange(seconds * RATE) // 10).astype(np.int16)
        wavs[name] = root / f"{name}.wav"
        audio.write(wavs[name], wave_S, RATE)
    write_data_dir(root / "data", wavs=wavs)
    check_data_dirs([root / "data"])
    return read_manifest([root / "data"], sample_rate=RATE)


def make_crops(
    manifest,
    references,
    *,
    style=STYLE,
    find_speech=all_speech,
    seed=3,
    attempt=0,
) -> Any:
    return ConversationCrops(
        manifest,
        {},
        crop_samples=CROP,
        grid=GRID,
        references=references,
        style=style,
        find_speech=find_speech,
        seed=seed,
        attempt=attempt,
    )


def test_a_window_is_a_function_of_seed_attempt_epoch_and_position(voices):
    crops = make_crops(voices, [None])
    slots = [
        (epoch, position, position % 10) for epoch in (0, 1) for position in range(30)
    ]
    first = [crops[slot] for slot in slots]
    # In another order, by another reader.
    again = make_crops(voices, [None])
    for slot, crop in reversed([*zip(slots, first)]):
        same = again[slot]
        assert same.turns == crop.turns
        np.testing.assert_array_equal(same.wave_S, crop.wave_S)
        np.testing.assert_array_equal(same.speech_KT, crop.speech_KT)
    assert len({crop.turns for crop in first}) == len(first)
    for seed, attempt in ((4, 0), (3, 1)):
        other = make_crops(voices, [None], seed=seed, attempt=attempt)
        assert all(other[slot].turns != crop.turns for slot, crop in zip(slots, first))


def test_turns_are_speech_of_their_speakers_and_never_overlap_themselves(voices):
    crops = make_crops(voices, [None])
    counts = set()
    num_overlapping = 0
    for position in range(60):
        crop = crops[0, position, position % 10]
        assert crop.wave_S.dtype == np.int16
        assert len(crop.wave_S) == CROP
        speaker_of = {}
        end_of = {}
        for turn in crop.turns:
            speaker = voices.speaker_N[turn.row]
            assert speaker_of.setdefault(turn.speaker, speaker) == speaker
            assert turn.first + turn.num_samples <= voices.num_samples_N[turn.row]
            assert turn.start > end_of.get(turn.speaker, -np.inf)
            end_of[turn.speaker] = turn.start + turn.num_samples
        # Different people have different numbers, and the speaker of the row may take part.
        assert len(set(speaker_of.values())) == len(speaker_of)
        counts.add(len(speaker_of))
        num_overlapping += (crop.speech_KT.sum(axis=0) > 1).any()
    assert counts == {1, 2, 3}
    assert 10 < num_overlapping < 55


def test_frames_are_labelled_where_a_speaker_speaks(voices):
    def second_half(wave_S):
        return [(len(wave_S) / RATE / 2, len(wave_S) / RATE)]

    crops = make_crops(voices, [None])
    for position in range(20):
        crop = crops[0, position, 0]
        active_KT = np.zeros((3, GRID.num_frames), dtype=int)
        for frame in range(GRID.num_frames):
            middle = GRID.first + frame * GRID.hop
            for turn in crop.turns:
                if turn.start <= middle < turn.start + turn.num_samples:
                    active_KT[turn.speaker, frame] = 1
        np.testing.assert_array_equal(np.sort(active_KT, 0), np.sort(crop.speech_KT, 0))
    # Only what is found to be speech counts, also in the middle of an utterance.
    halves = make_crops(voices, [None], find_speech=second_half)
    shares = [
        halves[0, p, 0].speech_KT.sum() / crops[0, p, 0].speech_KT.sum()
        for p in range(20)
    ]
    assert 0.3 < np.mean(shares) < 0.7


def test_levels_and_clipping(voices):
    quiet = make_crops(
        voices, [None], style=STYLE._replace(speakers=(1, 1), level_db=0.0)
    )
    for position in range(10):
        crop = quiet[0, position, 0]
        voiced_S = crop.wave_S[crop.wave_S != 0].astype(float)
        assert np.sqrt(np.square(voiced_S).mean()) == pytest.approx(1500, rel=0.25)
    loud = make_crops(voices, [None], style=STYLE._replace(level_db=60.0))
    peaks = [
        np.abs(loud[0, position, 0].wave_S.astype(int)).max() for position in range(20)
    ]
    assert max(peaks) == 30000


def test_windows_of_recordings_have_their_turns(meetings):
    turns = [
        LocalTurn(0.5 * RATE, 2.25 * RATE, "a"),
        LocalTurn(2.0 * RATE, 4.0 * RATE, "b"),
    ]
    reference = {
        "long": Reference(turns, [(0.0, 5.0 * RATE)]),
        "short": Reference([LocalTurn(0.0, 0.55 * RATE, "c")], [(0.0, RATE)]),
    }
    crops = make_crops(meetings, [reference])
    names = list(meetings.ids)
    long, short = names.index("long"), names.index("short")
    firsts = set()
    for position in range(50):
        crop = crops[0, position, long]
        # The samples say where the window begins.
        assert abs(int(crop.wave_S[0]) - crop.first // 10) <= 1
        firsts.add(crop.first)
        assert 0 <= crop.first <= 3 * RATE
        times_T = crop.first + GRID.first + GRID.hop * np.arange(GRID.num_frames)
        number_T = sum((turn.start <= times_T) & (times_T < turn.end) for turn in turns)
        np.testing.assert_array_equal(crop.speech_KT.sum(axis=0), number_T)
    assert len(firsts) > 45
    # A shorter recording is filled up with silence.
    crop = crops[0, 0, short]
    assert crop.first == 0
    assert not crop.wave_S[RATE:].any()
    assert crop.speech_KT.sum(axis=1).tolist() == [5, 0, 0]
    assert crops.starts(long) == [0, 2 * RATE]
    assert crops.starts(short) == [0]


def test_frames_outside_of_the_regions_are_unknown(meetings):
    regions = [(0.5 * RATE, 1.5 * RATE), (2.0 * RATE, 4.5 * RATE)]
    reference = {
        "long": Reference([LocalTurn(0.0, 5.0 * RATE, "a")], regions),
        "short": Reference([], [(0.0, RATE)]),
    }
    crops = make_crops(meetings, [reference])
    long_row = list(meetings.ids).index("long")
    drawn = [crops.draw((0, position, long_row)) for position in range(300)]
    firsts = np.array([crop.first for crop in drawn])
    # The first region has 1 of 3.5 s, which is less than a window.
    is_in_first = firsts == 0.5 * RATE
    assert 0.2 < is_in_first.mean() < 0.4
    in_second = firsts[~is_in_first]
    assert in_second.min() >= 2.0 * RATE
    assert in_second.max() <= 2.5 * RATE
    window = replace(drawn[0], first=round(0.5 * RATE))
    speech_KT = crops.read(window).speech_KT
    # Known from 0 to 1 s and from 1.5 s on, counted from the start of the window.
    assert speech_KT[0].tolist() == [1] * 10 + [UNKNOWN] * 5 + [1] * 5
    assert (speech_KT[1] == speech_KT[0].clip(max=0)).all()


def test_a_fourth_speaker_is_left_out_with_the_frames():
    active_KT = np.zeros((4, 6), dtype=bool)
    active_KT[0, :1] = active_KT[1, 1:4] = active_KT[2, 3:5] = active_KT[3, 4:] = True
    active_KT[0, 0] = True
    speech_KT = keep_most_active(active_KT, np.array([True] * 5 + [False]))
    assert speech_KT.tolist() == [
        [UNKNOWN, 1, 1, 1, 0, UNKNOWN],
        [UNKNOWN, 0, 0, 1, 1, UNKNOWN],
        [UNKNOWN, 0, 0, 0, 1, UNKNOWN],
    ]


def test_nobody_may_speak_in_a_simulated_window(voices):
    style = STYLE._replace(pause_seconds=20.0)
    crops = make_crops(voices, [None], style=style)
    slots = [(0, position, position % 10) for position in range(60)]
    silent = [crop for crop in map(crops.draw, slots) if not crop.turns]
    assert silent
    crop = crops.read(silent[0])
    assert crop.wave_S.shape == (CROP,) and not crop.wave_S.any()
    assert not crop.speech_KT.any()
    assert len(crops.fetch(silent[0])) == 0
