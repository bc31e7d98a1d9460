"""The language corpus of mini: voices, sentences and data directories."""

from collections import Counter
from pathlib import Path

import pytest
import soundfile

from egs.mini.lid.sentences import COLUMNS, LANGUAGES, draw_sentence


def test_what_is_planned(recipe):
    lid = recipe("mini/lid")
    voices, utterances = lid.plan(lid.Size())
    assert Counter(voice.language for voice in voices.values()) == dict.fromkeys(LANGUAGES, 28)
    kinds = Counter((voices[row.speaker].language, row.split) for row in utterances)
    assert kinds == {(name, split): n for name in LANGUAGES for split, n in SIZES}
    speakers = [{row.speaker for row in utterances if row.split == split} for split, _ in SIZES]
    assert not speakers[0] & speakers[1]
    for split in speakers:  # the sexes are balanced in every language
        sexes = Counter((voices[name].language, voices[name].sex) for name in split)
        assert len(set(sexes.values())) == 1 and len(sexes) == 2 * len(LANGUAGES)
    assert len({voice.variant for voice in voices.values()}) == 140


SIZES = (("train", 120), ("test", 48))


def test_sentences_follow_from_their_name():
    for language in LANGUAGES:
        assert [len(column.split("|")) for column in COLUMNS[language]] == [8] * 5
        sentences = {draw_sentence(language, f"u{k}", seed=1) for k in range(50)}
        assert len(sentences) == 50
        assert draw_sentence(language, "u0", seed=1) in sentences
        assert draw_sentence(language, "u0", seed=2) not in sentences


@pytest.mark.slow
def test_a_small_corpus_is_synthesized_and_prepared(recipe, espeak, tmp_path):
    lid = recipe("mini/lid")
    size = lid.Size(num_train_voices=1, num_test_voices=1, num_utterances=1)
    corpus, data = tmp_path / "corpus", tmp_path / "data"
    lid.prepare(corpus, data, size=size)
    table = [line.split() for line in (data / "train/utt2lang").read_text().splitlines()]
    assert table == [[f"{name}000-00", name] for name in LANGUAGES]
    wavs = [Path(line.split(maxsplit=1)[1]) for line in (data / "test/wav.scp").open()]
    seconds = [soundfile.info(str(path).strip()).duration for path in wavs]
    assert len(seconds) == 5 and min(seconds) > 1.0 and max(seconds) < 6.0
    made = (corpus / "corpus.json").stat().st_mtime_ns
    lid.prepare(corpus, data, size=size)
    assert (corpus / "corpus.json").stat().st_mtime_ns == made
