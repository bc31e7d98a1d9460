"""Words get their speakers: simulated conversations, and cases by hand."""

import numpy as np
import pytest
from conversations import converse

from speakerlab.diarization.regions import Turn
from speakerlab.diarization.resegmentation import Segment
from speakerlab.diarization.timed_words import Transcript, Word
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
            duration = float(rng.uniform(0.1, 0.6))
            word_end = min(start + duration, turn.end)
            present_speakers = {
                other.speaker
                for other in turns
                if other.start < word_end and other.end > start
            }
            exact_times = np.array([start, word_end])
            jitter = rng.normal(0, JITTER_SECONDS, size=2)
            inexact_times = np.sort(exact_times + jitter).clip(min=0.0)
            if present_speakers == {turn.speaker}:
                low, high = inexact_times.tolist()
                words.append(Word(low, high, "word"))
                speakers.append(turn.speaker)
            start = word_end
    return turns, words, speakers


def test_words_get_their_speaker():
    num_right = 0
    num_words = 0
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
    speakers = [turn.speaker for turn in turns]
    result = assign_words(Transcript(words), turns)
    assert [word.speaker for word in result] == speakers


@pytest.mark.parametrize("seed", range(5))
def test_exclusive_turns_are_those_of_a_grid(seed):
    """The speaker of each 10 ms is that of the longest turn, which a search finds, too."""
    rng = np.random.default_rng(seed)
    turns = []
    for number in range(40):
        start_frame = rng.integers(0, 3000)
        end_frame = start_frame + rng.integers(1, 600)
        turns.append(Turn(start_frame / 100, end_frame / 100, f"s{number % 4}"))
    exclusive = exclusive_turns(turns)
    for first, second in zip(exclusive, exclusive[1:]):
        assert first.end <= second.start

    def longest_first(turn: Turn) -> tuple[float, Turn]:
        # Rounded, so that turns of as many frames are equally long.
        return -round(turn.end - turn.start, 9), turn

    for frame in range(3700):
        middle = (frame + 0.5) / 100
        present = [turn for turn in turns if turn.start < middle < turn.end]
        present.sort(key=longest_first)
        expected = [turn.speaker for turn in present[:1]]
        found = [turn.speaker for turn in exclusive if turn.start < middle < turn.end]
        assert found == expected


A = Turn(0, 2, "a")
B = Turn(4, 6, "b")


@pytest.mark.parametrize(
    ("start", "end", "speaker"),
    [
        (1.8, 2.1, "a"),
        (1.9, 4.3, "b"),  # 0.1 s of A and 0.3 s of B
        (2.5, 2.7, "a"),  # in the pause, 0.5 s after A
        (3.4, 3.6, "b"),  # in the pause, 0.4 s before B
        (1, 1, "a"),  # without duration
        (6.9, 7.5, "b"),  # 0.9 s after B
        (7.1, 7.5, None),  # 1.1 s after B, more than MAX_GAP_SECONDS
        (900, 901, None),  # beyond the end
    ],
)
def test_cases_by_hand(start, end, speaker):
    transcript = Transcript([Word(start, end, "x")])
    (result,) = assign_words(transcript, [A, B])
    assert result.speaker == speaker


def test_the_gap_is_a_choice():
    # 0.5 s after A.
    words = Transcript([Word(2.5, 2.7, "x")])
    (word,) = assign_words(words, [A, B], max_gap=0.4)
    assert word.speaker is None
    with pytest.raises(ValueError, match="max_gap: must be seconds from 0 on, got nan"):
        assign_words(words, [A], max_gap=float("nan"))


def test_a_tie_is_decided_by_the_neighbours():
    turns = [Turn(0, 2, "a"), Turn(2, 4, "b")]
    # 0.2 s of each speaker.
    tie = Word(1.8, 2.2, "x")
    word_of_b = Word(2.2, 2.6, "y")
    result = assign_words(Transcript([tie, word_of_b]), turns)
    assert [word.speaker for word in result] == ["b", "b"]
    # Words may be in any order: this one is before the tie.
    word_of_a = Word(1.2, 1.8, "y")
    result = assign_words(Transcript([tie, word_of_a]), turns)
    assert [word.speaker for word in result] == ["a", "a"]


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
    diarization = Diarization("talk", seconds=3.0, segments=[segment], speakers={})
    segments = [{"start": 0, "end": 1, "text": " hello"}]
    result = diarization.assign_words(segments)
    assert [word.speaker for word in result] == ["Ann Lee"]
    assert result.to_json()[0]["speaker"] == "Ann Lee"
    # 0.5 s after the turn.
    segments = [{"start": 2.5, "end": 2.9, "text": "x"}]
    (word,) = diarization.assign_words(segments, max_gap=0.1)
    assert word.speaker is None


def test_nothing_gives_nothing():
    assert list(assign_words(Transcript([]), [A])) == []
    (word,) = assign_words(Transcript([Word(0, 1, "x")]), [])
    assert word.speaker is None
