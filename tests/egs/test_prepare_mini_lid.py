"""The language corpus of mini: voices, sentences and data directories."""

from collections import Counter
from itertools import product

import pytest
import soundfile

from egs.mini.lid.sentences import COLUMNS, LANGUAGES, draw_sentence
from speakerlab.data.tables import read_table

# Utterances of each language.
SIZES = {"train": 120, "test": 48}


def test_what_is_planned(recipe):
    lid = recipe("mini/lid")
    voices, utterances = lid.plan(lid.Size())
    languages = Counter(voice.language for voice in voices.values())
    assert languages == dict.fromkeys(LANGUAGES, 28)
    variants = {voice.variant for voice in voices.values()}
    assert len(variants) == 140

    sizes = Counter()
    for row in utterances:
        language = voices[row.speaker].language
        sizes[language, row.split] += 1
    for language, split in product(LANGUAGES, SIZES):
        assert sizes.pop((language, split)) == SIZES[split]
    assert not sizes

    speakers = {"train": set(), "test": set()}
    for row in utterances:
        speakers[row.split].add(row.speaker)
    assert not speakers["train"] & speakers["test"]
    for names in speakers.values():
        # The sexes are balanced in every language.
        groups = Counter()
        for name in names:
            voice = voices[name]
            groups[voice.language, voice.sex] += 1
        assert len(set(groups.values())) == 1
        assert len(groups) == 2 * len(LANGUAGES)


def test_sentences_follow_from_their_name():
    for language in LANGUAGES:
        # Each of five columns has eight words to draw from.
        columns = COLUMNS[language]
        assert len(columns) == 5
        for column in columns:
            assert column.count("|") == 8 - 1

        sentences = {draw_sentence(language, f"u{k}", seed=1) for k in range(50)}
        assert len(sentences) == 50
        assert draw_sentence(language, "u0", seed=1) in sentences
        assert draw_sentence(language, "u0", seed=2) not in sentences


@pytest.mark.slow
def test_a_small_corpus_is_synthesized_and_prepared(recipe, espeak, tmp_path):
    lid = recipe("mini/lid")
    size = lid.Size(num_train_voices=1, num_test_voices=1, num_utterances=1)
    corpus = tmp_path / "corpus"
    data = tmp_path / "data"
    lid.prepare(corpus, data, size=size)
    lines = (data / "train/utt2lang").read_text().splitlines()
    assert lines == [f"{name}000-00 {name}" for name in LANGUAGES]

    wavs = read_table(data / "test/wav.scp")
    seconds = [soundfile.info(wav).duration for wav in wavs.values()]
    assert len(seconds) == 5
    assert min(seconds) > 1.0
    assert max(seconds) < 6.0
    # A second call leaves the corpus as it is.
    made = (corpus / "corpus.json").stat().st_mtime_ns
    lid.prepare(corpus, data, size=size)
    assert (corpus / "corpus.json").stat().st_mtime_ns == made
