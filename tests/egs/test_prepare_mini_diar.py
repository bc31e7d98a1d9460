"""The conversations of mini: who speaks when, truth that equals the mixture, data directories."""

import filecmp
from collections import Counter
from itertools import groupby, product

import numpy as np
import pytest
import soundfile

from egs.mini.diar import conversations
from egs.mini.diar.conversations import Line, mix, place_lines, trim
from egs.mini.making import keyed_rng
from speakerlab.diarization.regions import Turn, merge_regions, read_rttm
from speakerlab.diarization.scoring import score_recordings, total

RATE = 16_000
SIZE = {"seed": 1, "num_voices": 24, "num_conversations": 25}
SPLITS = ("dev", "test")


def by_conversation(lines):
    groups = groupby(lines, key=lambda line: line.conversation)
    return {name: list(group) for name, group in groups}


def speech_regions(turns):
    return merge_regions(turn[:2] for turn in turns)


def noise(seconds: float, key: int) -> np.ndarray:
    rng = np.random.default_rng(key)
    return rng.standard_normal(round(seconds * RATE))


def power_db(wave_S, regions):
    parts = []
    for start, end in regions:
        first = round(start * RATE)
        last = round(end * RATE)
        parts.append(wave_S[first:last])
    part_S = np.concatenate(parts)
    return 10 * np.log10(np.mean(part_S**2))


def silence(turns, seconds, *, after):
    """Return the regions without speech, from `after` seconds after its end."""
    regions = []
    previous_end = -after
    for start, end in [*speech_regions(turns), (seconds, seconds)]:
        quiet_start = previous_end + after
        if start - previous_end - after > 0.01:
            regions.append((quiet_start, start))
        previous_end = end
    return regions


def assert_speech_is_where_the_truth_is(wave_S, turns):
    """The noise is at least 12 dB below the speech; rooms decay by 60 dB within 0.45 s."""
    speech_db = power_db(wave_S, speech_regions(turns))
    quiet = silence(turns, len(wave_S) / RATE, after=0.45)
    assert len(quiet) > 3
    assert power_db(wave_S, quiet) < speech_db - 11

    # The first turn begins where the power rises.
    first = min(turns).start
    before = (first - 0.1, first)
    after = (first, first + 0.1)
    before_db = power_db(wave_S, [before])
    after_db = power_db(wave_S, [after])
    assert after_db > before_db + 6


def test_what_is_planned():
    voices, lines = conversations.plan(**SIZE)
    voices, lines = conversations.plan(**SIZE)
    assert (voices, lines) == conversations.plan(**SIZE)
    other_size = SIZE | {"seed": 2}
    _, other_lines = conversations.plan(**other_size)
    assert lines != other_lines

    sexes = Counter(voice.sex for voice in voices.values())
    assert sexes == {"female": 24, "male": 24}
    talks = by_conversation(lines)
    assert len(talks) == 50
    ids = {line.id for line in lines}
    assert len(ids) == len(lines)

    counts = Counter()
    for name, talk in talks.items():
        (split,) = {line.split for line in talk}
        assert 22 <= len(talk) <= 30
        assert name.startswith(split)
        for line in talk:
            # No voice is in both splits: its name begins with the split.
            assert line.speaker[:-3] == split

        long_lines = Counter()
        for line in talk:
            if line.text not in conversations.REPLIES:
                long_lines[line.speaker] += 1
        assert min(long_lines.values()) >= 3
        counts[split, len(long_lines)] += 1

        gaps = [line.gap_seconds for line in talk]
        assert gaps[0] >= 0.2
        for gap in gaps:
            # A pause or an overlap; the pauses within a sentence are shorter.
            assert -1.5 <= gap <= 2.0
            assert abs(gap) >= 0.2
    # Five conversations of each split for every number of speakers from 2 to 6.
    for split, num_speakers in product(SPLITS, range(2, 7)):
        assert counts.pop((split, num_speakers)) == 5
    assert not counts


def test_lines_follow_each_other_with_pauses_and_overlap():
    def line(speaker, gap_seconds):
        return Line("", speaker, "test", "", "c", gap_seconds)

    lines = [
        line("a", 0.5),
        line("b", -1.0),
        line("b", -1.0),
        line("a", -1.5),
        line("c", -0.3),
    ]
    seconds = (3.0, 2.0, 1.0, 0.75, 2.0)
    waves = [np.ones(round(length * RATE)) for length in seconds]
    assert place_lines(lines, waves) == [
        Turn(0.5, 3.5, "a"),
        Turn(2.5, 4.5, "b"),
        Turn(4.7, 5.7, "b"),  # nobody interrupts themselves: the shortest pause instead
        Turn(4.2, 4.95, "a"),  # within the turns of b
        Turn(5.4, 7.4, "c"),
    ]


def test_overlap_and_pauses_are_in_the_documented_range(recipe):
    reference = {}
    _, lines = conversations.plan(**SIZE)
    for name, talk in by_conversation(lines).items():
        # 60 ms for each letter are about as long as speech.
        waves = [np.zeros(960 * len(line.text)) for line in talk]
        reference[name] = place_lines(talk, waves)

    # No speaker interrupts themselves.
    for turns in reference.values():
        ends = {}
        for turn in sorted(turns):
            assert ends.get(turn.speaker, -1.0) < turn.start
            ends[turn.speaker] = turn.end

    one_at_a_time = recipe("mini/diar").one_at_a_time
    ideal = {name: one_at_a_time(turns) for name, turns in reference.items()}
    errors = score_recordings(reference, ideal)
    shares = [error_times.overlap for error_times in errors.values()]
    assert max(shares) < 0.2
    assert 0.03 < total(errors.values()).overlap < 0.08
    for error_times in errors.values():
        assert error_times.false_alarm == 0
        assert error_times.confusion == 0

    pauses = []
    for turns in reference.values():
        quiet = silence(turns, 0.0, after=0.0)
        pauses.extend(end - start for start, end in quiet)
    assert min(pauses) > 0.1
    assert 0.4 < np.median(pauses) < 0.8
    assert max(pauses) <= 2.0 + 1e-9


def test_the_ideal_with_one_speaker_at_a_time(recipe):
    diar = recipe("mini/diar")
    turns = [
        Turn(0.0, 5.0, "a"),
        Turn(4.0, 8.0, "b"),
        Turn(6.0, 7.0, "c"),
    ]
    ideal = [
        Turn(0.0, 5.0, "a"),
        Turn(5.0, 8.0, "b"),
    ]
    assert diar.one_at_a_time(turns) == ideal
    text = diar.describe({"talk": turns})
    assert "25.00%" in text
    assert text.endswith("DER 20.00%")  # 2 of 8 s; 2 of 10 s of speaker time


def test_the_truth_equals_the_mixture():
    turns = [
        Turn(0.5, 2.5, "a"),
        Turn(3.5, 5.5, "b"),
        Turn(5.0, 7.0, "a"),
        Turn(9.0, 11.0, "b"),
    ]
    waves = [noise(2.0, key) for key in range(4)]
    wave_S = mix(turns, waves, keyed_rng(1, "x"))
    assert len(wave_S) == 12 * RATE
    assert np.abs(wave_S).max() < 1.0
    assert_speech_is_where_the_truth_is(wave_S, turns)
    # The check itself notices turns that are 0.7 s late.
    shifted = [Turn(start + 0.7, end + 0.7, name) for start, end, name in turns]
    with pytest.raises(AssertionError):
        assert_speech_is_where_the_truth_is(wave_S, shifted)


def test_a_line_is_cut_to_its_sound():
    # 500 samples of hiss, 1600 of sound, 3000 of silence.
    hiss_S = np.full(500, 1e-5)
    sound_S = noise(0.1, 0)
    silence_S = np.zeros(3000)
    wave_S = np.concatenate([hiss_S, sound_S, silence_S])
    cut_S = trim(wave_S)
    assert len(cut_S) == 1600
    assert np.array_equal(cut_S, wave_S[500:2100])
    assert len(trim(wave_S[:2095])) == 1600  # whole milliseconds


@pytest.mark.slow
def test_a_small_corpus_is_synthesized_and_prepared(recipe, espeak, tmp_path):
    diar = recipe("mini/diar")
    size = diar.Size(num_voices=2, num_conversations=1)
    for num_jobs in (1, 2):
        folder = tmp_path / str(num_jobs)
        corpus = folder / "corpus"
        diar.prepare(corpus, folder / "data", size=size, num_jobs=num_jobs)
    files = product(SPLITS, ("wav", "rttm"))
    names = [f"{split}/{split}-00.{kind}" for split, kind in files]
    folders = (tmp_path / "1/corpus", tmp_path / "2/corpus")
    match, mismatch, errors = filecmp.cmpfiles(*folders, names, shallow=False)
    assert match == names
    assert mismatch == []
    assert errors == []
    for split in SPLITS:
        folder = tmp_path / "1/data" / split
        (line,) = (folder / "wav.scp").read_text().splitlines()
        name, wav = line.split()
        turns = read_rttm(folder / "ref.rttm")[name]
        wave_S, rate = soundfile.read(wav)
        assert rate == RATE
        last_end = max(turn.end for turn in turns)
        expected = round((last_end + 1) * RATE)
        assert len(wave_S) == expected
        expected = {f"{split}000", f"{split}001"}
        assert {turn.speaker for turn in turns} == expected
        assert_speech_is_where_the_truth_is(wave_S, turns)
