"""Words get their speakers: simulated conversations, and cases by hand."""

import numpy as np
import pytest
from conversations import converse

from speakerlab.diarization.regions import Turn
from speakerlab.diarization.resegmentation import Segment
from speakerlab.diarization.transcripts import Transcript, Word
from speakerlab.diarization.words import assign_words, exclusive_turns
from speakerlab.inference.diarize import Diarization

NUM_CONVERSATIONS = 25
JITTER_SECONDS = 0.05  # standard deviation of the recognizer's times


def speak(seed: int) -> tuple[list[Turn], list[Word], list[str]]:
    """Return turns, words with inexact times, and who said each word.

    A third of the turns begin up to 1.5 s before the end of the one before. There, no word is of a
    single speaker.
    """
    talk = converse(seed, 2 + seed % 5)
    rng = np.random.default_rng(seed)
    turns: list[Turn] = []
    shift = 0.0
    for start, end, speaker in talk.turns:
        if rng.random() < 1 / 3:
            shift = min(shift + float(rng.uniform(0, 1.5)), start)
        turns.append(Turn(start - shift, end - shift, speaker))

    words: list[Word] = []
    speakers: list[str] = []
    for turn in turns:
        start = turn.start
        while turn.end - start > 0.1:
            word_end = min(start + float(rng.uniform(0.1, 0.6)), turn.end)
            others = {
                other.speaker
                for other in turns
                if other.start < word_end and other.end > start
            }
            low, high = sorted([start, word_end] + rng.normal(0, JITTER_SECONDS, 2))
            if others == {turn.speaker}:
                words.append(Word(max(low, 0.0), max(high, 0.0), "word"))
                speakers.append(turn.speaker)
            start = word_end
    return turns, words, speakers


def test_words_get_their_speaker():
    num_right = num_words = 0
    for seed in range(NUM_CONVERSATIONS):
        turns, words, speakers = speak(seed)
        result = assign_words(Transcript(words), turns)
        num_words += len(words)
        num_right += sum(
            word.speaker == speaker for word, speaker in zip(result, speakers)
        )
    assert num_words > 10_000
    share = num_right / num_words
    print(f"{share:.4f} of {num_words}")
    assert share >= 0.97


def test_true_times_are_always_right():
    turns = converse(0, 3).turns
    words = [Word(turn.start, turn.end, "word") for turn in turns]
    result = assign_words(Transcript(words), turns)
    assert [word.speaker for word in result] == [turn.speaker for turn in turns]


@pytest.mark.parametrize("seed", range(5))
def test_exclusive_turns_are_those_of_a_grid(seed):
    """The speaker of each 10 ms is that of the longest turn, which a search finds, too."""
    rng = np.random.default_rng(seed)
    turns = []
    for number in range(40):
        start, length = rng.integers(0, 3000), rng.integers(1, 600)
        turns.append(Turn(start / 100, (start + length) / 100, f"s{number % 4}"))
    free = exclusive_turns(turns)
    for first, second in zip(free, free[1:]):
        assert first.end <= second.start
    for frame in range(3700):
        now = (frame + 0.5) / 100
        there = [turn for turn in turns if turn.start < now < turn.end]
        found = [turn.speaker for turn in free if turn.start < now < turn.end]
        there.sort(key=lambda turn: (round(turn.start - turn.end, 9), turn))
        assert found == [turn.speaker for turn in there[:1]]


A, B = Turn(0, 2, "a"), Turn(4, 6, "b")


@pytest.mark.parametrize(
    ("word", "speaker"),
    [
        ((1.8, 2.1), "a"),
        ((1.9, 4.3), "b"),  # 0.1 s and 0.3 s
        ((2.5, 2.7), "a"),  # in the pause, 0.5 s away
        ((3.4, 3.6), "b"),
        ((1, 1), "a"),  # without duration
        ((6.9, 7.5), "b"),
        ((7.1, 7.5), None),
        ((900, 901), None),  # beyond the end
    ],
)
def test_cases_by_hand(word, speaker):
    (result,) = assign_words(Transcript([Word(word[0], word[1], "x")]), [A, B])
    assert result.speaker == speaker


def test_the_gap_is_a_choice():
    words = Transcript([Word(2.5, 2.7, "x")])
    assert assign_words(words, [A, B], max_gap=0.4).words[0].speaker is None
    with pytest.raises(ValueError, match="max_gap: must be seconds from 0 on, got nan"):
        assign_words(words, [A], max_gap=float("nan"))


def test_a_tie_is_decided_by_the_neighbours():
    turns = [Turn(0, 2, "a"), Turn(2, 4, "b")]
    tie = Word(1.8, 2.2, "x")
    after = assign_words(Transcript([tie, Word(2.2, 2.6, "y")]), turns)
    before = assign_words(Transcript([tie, Word(1.2, 1.8, "y")]), turns)
    assert [word.speaker for word in after] == ["b", "b"]
    # also shows that words may be in any order
    assert [word.speaker for word in before] == ["a", "a"]


def test_words_without_times_follow_their_segment():
    words = [
        Word(None, None, "1", cue=0),
        Word(0, 1, "a", cue=0),
        Word(None, None, "2", cue=0),
        Word(None, None, "3", cue=1),
    ]
    result = assign_words(Transcript(words), [A])
    assert [word.speaker for word in result] == ["a", "a", "a", None]


def test_a_diarization_assigns_words():
    segment = Segment(0.0, 2.0, "Ann Lee", confidence=1.0)
    found = Diarization("talk", seconds=3.0, segments=[segment], speakers={})
    result = found.assign_words([{"start": 0, "end": 1, "text": " hello"}])
    assert [word.speaker for word in result] == ["Ann Lee"]
    assert result.to_json()[0]["speaker"] == "Ann Lee"
    (far,) = found.assign_words([{"start": 2.5, "end": 2.9, "text": "x"}], max_gap=0.1)
    assert far.speaker is None


def test_nothing_gives_nothing():
    assert list(assign_words(Transcript([]), [A])) == []
    (word,) = assign_words(Transcript([Word(0, 1, "x")]), [])
    assert word.speaker is None
