"""The conversations of mini: who speaks when, truth that equals the mixture, data directories."""

import filecmp
from collections import Counter
from itertools import groupby

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


def by_conversation(lines):
    groups = groupby(lines, key=lambda line: line.conversation)
    return {name: list(group) for name, group in groups}


def noise(seconds: float, key: int) -> np.ndarray:
    return np.random.default_rng(key).standard_normal(round(seconds * RATE))


def power_db(wave_S, regions):
    picked = [wave_S[round(start * RATE) : round(end * RATE)] for start, end in regions]
    return 10 * np.log10(np.mean(np.concatenate(picked) ** 2))


def silence(turns, seconds, *, after):
    """Return the regions without speech, from `after` seconds after its end."""
    bounds = [-after, *(t for region in merge_regions(t[:2] for t in turns) for t in region)]
    starts, ends = np.array(bounds[::2]), np.array([*bounds[1::2], seconds])
    return [(s + after, e) for s, e in zip(starts, ends) if e - s - after > 0.01]


def assert_speech_is_where_the_truth_is(wave_S, turns):
    """The noise is at least 12 dB below the speech; rooms decay by 60 dB within 0.45 s."""
    speech_db = power_db(wave_S, merge_regions(turn[:2] for turn in turns))
    quiet = silence(turns, len(wave_S) / RATE, after=0.45)
    assert len(quiet) > 3 and power_db(wave_S, quiet) < speech_db - 11
    first = min(turns).start
    before, after = (first - 0.1, first), (first, first + 0.1)
    assert power_db(wave_S, [after]) > power_db(wave_S, [before]) + 6


def test_what_is_planned():
    voices, lines = conversations.plan(**SIZE)
    assert (voices, lines) == conversations.plan(**SIZE)
    assert lines != conversations.plan(**{**SIZE, "seed": 2})[1]
    assert Counter(voice.sex for voice in voices.values()) == {"female": 24, "male": 24}
    talks = by_conversation(lines)
    assert len(talks) == 50 and len({line.id for line in lines}) == len(lines)
    counts = Counter()
    for name, talk in talks.items():
        (split,) = {line.split for line in talk}
        assert 22 <= len(talk) <= 30 and name.startswith(split)
        assert {line.speaker[:-3] for line in talk} == {split}  # no voice is in both splits
        said = Counter(line.speaker for line in talk if line.text not in conversations.REPLIES)
        assert min(said.values()) >= 3
        counts[split, len(said)] += 1
        assert talk[0].gap_seconds >= 0.2
        assert all(-1.5 <= line.gap_seconds <= 2.0 for line in talk)
        assert not any(-0.2 < line.gap_seconds < 0.2 for line in talk)
    assert counts == {(split, n): 5 for split in ("dev", "test") for n in range(2, 7)}


def test_lines_follow_each_other_with_pauses_and_overlap():
    def line(speaker, gap_seconds):
        return Line("", speaker, "test", "", "c", gap_seconds)

    lines = [line("a", 0.5), line("b", -1.0), line("b", -1.0), line("a", -1.5), line("c", -0.3)]
    waves = [np.ones(round(s * RATE)) for s in (3.0, 2.0, 1.0, 0.75, 2.0)]
    assert place_lines(lines, waves) == [
        Turn(0.5, 3.5, "a"),
        Turn(2.5, 4.5, "b"),
        Turn(4.7, 5.7, "b"),  # nobody interrupts themselves: the shortest pause instead
        Turn(4.2, 4.95, "a"),  # within the turns of b
        Turn(5.4, 7.4, "c"),
    ]


def test_overlap_and_pauses_are_in_the_documented_range(recipe):
    reference = {}
    for name, talk in by_conversation(conversations.plan(**SIZE)[1]).items():
        waves = [np.zeros(960 * len(line.text)) for line in talk]  # about as long as speech
        reference[name] = place_lines(talk, waves)
        own = sorted((turn.speaker, turn.start, turn.end) for turn in reference[name])
        assert all(a[2] < b[1] for a, b in zip(own, own[1:]) if a[0] == b[0])
    one_at_a_time = recipe("mini/diar").one_at_a_time
    ideal = {name: one_at_a_time(turns) for name, turns in reference.items()}
    errors = score_recordings(reference, ideal)
    shares = [one.overlap for one in errors.values()]
    assert max(shares) < 0.2 and 0.03 < total(errors.values()).overlap < 0.08
    assert all(one.false_alarm == one.confusion == 0 for one in errors.values())
    pauses = [e - s for turns in reference.values() for s, e in silence(turns, 0.0, after=0.0)]
    assert min(pauses) > 0.1 and 0.4 < np.median(pauses) < 0.8 and max(pauses) <= 2.0 + 1e-9


def test_the_ideal_with_one_speaker_at_a_time(recipe):
    diar = recipe("mini/diar")
    turns = [Turn(0.0, 5.0, "a"), Turn(4.0, 8.0, "b"), Turn(6.0, 7.0, "c")]
    assert diar.one_at_a_time(turns) == [Turn(0.0, 5.0, "a"), Turn(5.0, 8.0, "b")]
    text = diar.describe({"talk": turns})
    assert "25.00%" in text and text.endswith("DER 20.00%")  # 2 of 8 s; 2 of 10 s of speaker time


def test_the_truth_equals_the_mixture():
    turns = [Turn(s, s + 2.0, name) for s, name in ((0.5, "a"), (3.5, "b"), (5.0, "a"), (9.0, "b"))]
    waves = [noise(2.0, key) for key in range(4)]
    wave_S = mix(turns, waves, keyed_rng(1, "x"))
    assert len(wave_S) == 12 * RATE and np.abs(wave_S).max() < 1.0
    assert_speech_is_where_the_truth_is(wave_S, turns)
    shifted = [Turn(start + 0.7, end + 0.7, name) for start, end, name in turns]
    with pytest.raises(AssertionError):
        assert_speech_is_where_the_truth_is(wave_S, shifted)


def test_a_line_is_cut_to_its_sound():
    wave_S = np.concatenate([np.full(500, 1e-5), noise(0.1, 0), np.zeros(3000)])
    cut_S = trim(wave_S)
    assert len(cut_S) == 1600 and np.array_equal(cut_S, wave_S[500:2100])
    assert len(trim(wave_S[:2095])) == 1600  # whole milliseconds


@pytest.mark.slow
def test_a_small_corpus_is_synthesized_and_prepared(recipe, espeak, tmp_path):
    diar = recipe("mini/diar")
    size = diar.Size(num_voices=2, num_conversations=1)
    for num_jobs in (1, 2):
        folder = tmp_path / str(num_jobs)
        diar.prepare(folder / "corpus", folder / "data", size=size, num_jobs=num_jobs)
    names = [f"{split}/{split}-00.{kind}" for split in ("dev", "test") for kind in ("wav", "rttm")]
    same = filecmp.cmpfiles(tmp_path / "1/corpus", tmp_path / "2/corpus", names, shallow=False)
    assert same == (names, [], [])
    for split in ("dev", "test"):
        (table,) = (tmp_path / f"1/data/{split}/wav.scp").read_text().splitlines()
        name, wav = table.split()
        turns = read_rttm(tmp_path / f"1/data/{split}/ref.rttm")[name]
        wave_S, rate = soundfile.read(wav)
        assert rate == RATE and len(wave_S) == round((max(t.end for t in turns) + 1) * RATE)
        assert {turn.speaker for turn in turns} == {f"{split}000", f"{split}001"}
        assert_speech_is_where_the_truth_is(wave_S, turns)
