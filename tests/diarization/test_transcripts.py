"""Transcripts: what is read, what is refused, what is written with speakers."""

import json
from pathlib import Path

import pytest

from speakerlab.bin import words
from speakerlab.diarization.regions import Turn, write_rttm
from speakerlab.diarization.transcripts import read_transcript, read_transcripts
from speakerlab.diarization.words import assign_words

TURNS = [Turn(0, 2, "ann"), Turn(2, 4, "bob")]
WHISPER = {
    "text": " Hello there. Hi.",
    "language": "en",
    "segments": [
        {
            "id": 0,
            "start": 0.5,
            "end": 3.0,
            "text": " Hello there. Hi.",
            "avg_logprob": -0.2,
            "words": [
                {"word": " Hello", "start": 0.5, "end": 0.9, "probability": 0.9},
                {"word": " there.", "start": 0.9, "end": 1.3, "probability": 0.8},
                {"word": " Hi.", "start": 2.5, "end": 3.0, "probability": 0.7},
            ],
        },
        {"id": 1, "start": 3.2, "end": 3.6, "text": " [music]", "words": []},
    ],
}
WORD = {"start": 0.5, "end": 1.0}
SRT = (
    "1\r\n00:00:00,500 --> 00:00:01,300\r\nHello\r\nthere.\r\n\r\n"
    "2\r\n00:00:02.500 --> 00:00:03.000\r\nשלום עולם\r\n"
)


def test_json_keeps_everything_and_gets_speakers():
    before = json.dumps(WHISPER)
    result = assign_words(read_transcript(WHISPER), TURNS)
    document = result.to_json()
    assert json.dumps(WHISPER) == before
    first, music = document["segments"]
    speakers = [word.pop("speaker") for word in first["words"]]
    assert speakers == ["ann", "ann", "bob"]
    # 0.8 s of ann, 0.5 s of bob
    assert first.pop("speaker") == "ann"
    assert music.pop("speaker") == "bob"
    assert document == WHISPER


def test_json_becomes_srt_and_ctm(tmp_path):
    document = {**WHISPER, "segments": WHISPER["segments"][:1]}
    result = assign_words(read_transcript(document), TURNS)
    assert result.to_srt() == (
        "1\n00:00:00,500 --> 00:00:01,300\nann: Hello there.\n\n"
        "2\n00:00:02,500 --> 00:00:03,000\nbob: Hi.\n\n"
    )
    assert result.to_ctm("a b") == (
        "a_b 1 0.500 0.400 Hello NA lex ann\n"
        "a_b 1 0.900 0.400 there. NA lex ann\n"
        "a_b 1 2.500 0.500 Hi. NA lex bob\n"
    )
    path = tmp_path / "a.ctm"
    path.write_text(";; a comment\n" + result.to_ctm("talk"))
    again = read_transcripts(path)["talk"]
    assert [word[:3] for word in again] == [word[:3] for word in result]


def test_whisperx_without_blanks_and_times():
    words_of = [
        {"word": "In", "start": 0.1, "end": 0.3, "score": 0.9},
        {"word": "2014"},
    ]
    segment = {"start": 0.1, "end": 1, "text": "In 2014", "words": words_of}
    copies = [dict(word) for word in words_of]
    document = {"segments": [segment], "word_segments": copies}
    result = assign_words(read_transcript(document), TURNS)
    assert result.to_srt().splitlines()[2] == "ann: In 2014"
    assert [word["speaker"] for word in result.to_json()["word_segments"]] == [
        "ann"
    ] * 2
    # Chinese has no blanks to add.
    words_of = [dict(words_of[0], word="你"), dict(words_of[0], word="好")]
    segment = {"text": "你好", "words": words_of}
    assert read_transcript([segment]).to_srt().splitlines()[2] == "你好"


def test_a_segment_whose_words_have_no_times_has_its_own(caplog, tmp_path):
    untimed = {"text": "2014 15", "words": [{"word": "2014"}, {"word": "15"}]}
    segments = [
        {"start": 0.5, "end": 1.5, "text": "Hi", "words": [dict(WORD, word="Hi")]},
        {"start": 2.5, "end": 3.5, **untimed},
        untimed,
        {"start": 3.5, "end": 4.0, "text": "Bye", "words": []},
    ]
    result = assign_words(read_transcript(segments), TURNS)
    assert [word.speaker for word in result] == [
        "ann",
        *["bob"] * 2,
        *[None] * 2,
        "bob",
    ]
    assert result.to_srt().splitlines()[4:7] == [
        "2",
        "00:00:02,500 --> 00:00:03,500",
        "bob: 2014 15",
    ]
    assert "bob: Bye" in result.to_srt()
    assert result.num_not_in_srt == 2
    # One segment without words does not cost the words of the others.
    assert result.to_ctm("a") == "a 1 0.500 0.500 Hi NA lex ann\n"
    assert result.num_not_in_ctm == 5
    segments_of_json = result.to_json()
    assert [segment["speaker"] for segment in segments_of_json] == [
        "ann",
        "bob",
        None,
        "bob",
    ]

    turns = tmp_path / "turns.rttm"
    write_rttm(turns, {"a": TURNS})
    for name, content in (("some", segments), ("none", segments[1:])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"segments": content}))
        caplog.clear()
        run(tmp_path / f"{name}.json", "--turns", turns, "--out", tmp_path / name)
        assert "a: 2 words left out of the SRT" in caplog.text
        assert ("a: 5 entries" in caplog.text) == (name == "some")
        assert ("a: no CTM is written" in caplog.text) == (name == "none")
        assert (tmp_path / name / "a.words.ctm").exists() == (name == "some")
    segments[1]["end"] = "3"
    with pytest.raises(ValueError, match=r"segments\[1\]: `end` must be seconds"):
        read_transcript(segments)


def test_srt_of_windows_and_of_right_to_left_text(tmp_path):
    path = tmp_path / "talk.srt"
    for content in (
        SRT.encode(),
        SRT.encode("utf-8-sig"),
        SRT.encode("utf-16"),
        SRT.replace("\r\n", "\n").encode(),
    ):
        path.write_bytes(content)
        result = assign_words(read_transcript(path), TURNS)
        assert [word.text for word in result] == ["Hello\nthere.", "שלום עולם"]
        assert result.to_srt().endswith("bob: שלום עולם\n\n")
    with pytest.raises(ValueError, match="has no times of words, which CTM needs"):
        result.to_ctm("talk")


def test_srt_of_more_than_99_hours_is_read_as_it_is_written(tmp_path):
    path = tmp_path / "a.srt"
    text = "1\n123:00:00,001 --> 123:00:02,000\nx\n\n"
    path.write_text(text)
    result = read_transcript(path)
    assert result.words[0].start == 123 * 3600 + 0.001
    assert result.to_srt() == text


def test_an_arrow_in_a_word_is_no_line_of_times(tmp_path):
    text = "1:00 --> 2:00"
    result = read_transcript([{"start": 0, "end": 1, "text": text}])
    path = tmp_path / "a.srt"
    path.write_text(result.to_srt(), encoding="utf-8")
    assert read_transcript(path).words[0].text == "1:00 → 2:00"


def timed(**changes) -> str:
    word = {"word": "a", "start": 0, "end": 1, **changes}
    return json.dumps({"segments": [{"text": "a", "words": [word]}]})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "", ":1: is not JSON"),
        ("a.json", "[" * 100_000, "is not a transcript"),
        ("a.json", '{"a": 1}', "has no list `segments`"),
        ("a.json", "3", "has no list `segments`"),
        ("a.json", '{"transcription": []}', "is of whisper.cpp"),
        ("a.json", '{"chunks": []}', "is of a pipeline of transformers"),
        ("a.json", '{"model_sha256": "", "segments": []}', "is a diarization"),
        ("a.json", '{"segments": [3]}', r"segments\[0\] is not an object"),
        ("a.json", '{"segments": [{"start": 1}]}', r"segments\[0\] has no text and"),
        ("a.json", '[{"words": [{}]}]', r"segments\[0\].words\[0\] has no `word`"),
        ("a.json", '[{"words": 3}]', r"segments\[0\].words is not a list"),
        (
            "a.json",
            timed(start=float("nan")),
            r"words\[0\]: `start` must be .* got nan",
        ),
        ("a.json", timed(start=-1), r"words\[0\]: `start` must be seconds from 0"),
        ("a.json", timed(end=True), r"words\[0\]: `end` must be seconds"),
        ("a.json", timed(end="1"), r"words\[0\]: `end` must be seconds"),
        ("a.json", timed(end=10**400), r"words\[0\]: `end` must be seconds"),
        ("a.json", timed(start=2), r"words\[0\]: ends at 1 s, before its start at 2 s"),
        ("a.srt", "hello\n", ":1: text before the times"),
        ("a.srt", "WEBVTT\n", "is WebVTT"),
        ("a.srt", "1\n00:00:02,000 --> 00:00:01,000\n", ":2: ends at 1 s, before"),
        ("a.srt", "1\n-00:00:02,000 --> 00:00:01,000\n", ":2: is not `00:00:01,000"),
        ("a.srt", "1\n00:00:02,000 -> 00:00:03,000\n", ":2: is not `00:00:01,000"),
        ("a.srt", f"1\n{'9' * 99}:00:02,000 --> 00:00:03,000\n", "times must be below"),
        ("a.srt", "caf\xe9".encode("latin-1"), ":1: is not UTF-8 text"),
        ("a.ctm", "a 1 0 1\n", ":1: is not 'recording channel start"),
        ("a.ctm", "\na 1 nan 1 x\n", ":2: the start must be seconds .* got nan"),
        ("a.ctm", "a 1 0 -1 x\n", ":1: the duration must be seconds"),
        ("a.ctm", "a 1 0 1 x\na 2 0 1 x\n", ":2: a has channels 1 and 2"),
        ("a.txt", "", "is not a transcript by its ending"),
    ],
)
def test_hostile_transcripts_are_refused_in_a_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as error:
        read_transcripts(path)
    # The second line, if any, only counts.
    assert str(path) in str(error.value).splitlines()[0]


@pytest.mark.parametrize("name", ["a.srt", "a.ctm"])
def test_an_empty_transcript_has_no_words(tmp_path, name):
    path = tmp_path / name
    path.write_text("")
    assert len(read_transcript(path)) == 0


def run(*arguments: object) -> None:
    words.main([str(argument) for argument in arguments])


def test_command_on_a_folder(tmp_path, caplog):
    caplog.set_level("INFO")
    texts = tmp_path / "texts"
    texts.mkdir()
    texts.joinpath("one.json").write_text(json.dumps(WHISPER))
    texts.joinpath("one.srt").write_text("not read")
    texts.joinpath("two.srt").write_text(SRT)
    texts.joinpath("three.srt").write_text(SRT)
    turns = tmp_path / "turns.rttm"
    write_rttm(turns, {"one": TURNS, "two": TURNS})
    run(texts, "--turns", turns, "--out", tmp_path / "out")
    files = sorted(path.name for path in Path(tmp_path / "out").iterdir())
    assert files == [
        "one.words.ctm",
        "one.words.json",
        "one.words.srt",
        "two.words.srt",
    ]
    assert "one: 1 entry (words or segments) left out of the CTM" in caplog.text
    assert "1 transcript without a recording, as three" in caplog.text
    assert "two: 2 cues, 0 without a speaker" in caplog.text
    text = tmp_path.joinpath("out/two.words.srt").read_text(encoding="utf-8")
    assert "ann: Hello\nthere." in text


def test_command_on_one_file_of_another_name(tmp_path, caplog):
    path = tmp_path / "asr.json"
    path.write_text(json.dumps(WHISPER))
    turns = tmp_path / "turns.rttm"
    write_rttm(turns, {"meeting": [Turn(100, 101, "ann")]})
    run(path, "--turns", turns, "--out", tmp_path / "out")
    assert tmp_path.joinpath("out/meeting.words.srt").is_file()
    assert "most of the transcript is outside of all turns" in caplog.text
    write_rttm(turns, {"meeting": TURNS, "other": TURNS})
    with pytest.raises(ValueError, match="no transcript has the name of a recording"):
        run(path, "--turns", turns, "--out", tmp_path / "out")
