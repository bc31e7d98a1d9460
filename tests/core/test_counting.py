"""Numbers agree with their nouns."""

import pytest

from speakerlab.core.counting import count_of


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "speaker", "0 speakers"),
        (1, "speaker", "1 speaker"),
        (2, "speaker", "2 speakers"),
        (1, "class", "1 class"),
        (5, "class", "5 classes"),
        (2, "batch", "2 batches"),
        (2, "epoch", "2 epochs"),
        (2, "index", "2 indexes"),
        (2, "data directory", "2 data directories"),
        (2, "day", "2 days"),
        (1, "test utterance", "1 test utterance"),
    ],
)
def test_a_noun_is_plural_unless_there_is_one(number, noun, text):
    assert count_of(number, noun) == text
