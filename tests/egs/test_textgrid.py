"""TextGrid files of Praat: both formats, encodings, and files that are refused in one line."""

import codecs
from pathlib import Path

import pytest
from refusals import refuses

from egs.common.corpus.textgrid import Interval, read_textgrid, turns_of_tiers
from speakerlab.diarization.regions import Turn

LONG = """File type = "ooTextFile"
Object class = "TextGrid"

xmin = 0
xmax = 9.5
tiers? <exists>
size = 3
item []:
    item [1]:
        class = "IntervalTier"
        name = "R0015_M0151_F_SPK0093"
        xmin = 0
        xmax = 9.5
        intervals: size = 3
        intervals [1]:
            xmin = 0
            xmax = 1.25
            text = ""
        intervals [2]:
            xmin = 1.25
            xmax = 4
            text = "他说 ""好"" 1 <ok> ! yes"
        intervals [3]:
            xmin = 4
            xmax = 9.5
            text = "  "
    item [2]:
        class = "TextTier"
        name = "noises"
        xmin = 0
        xmax = 9.5
        points: size = 1
        points [1]:
            number = 3.5
            mark = "cough"
    item [3]:
        class = "IntervalTier"
        name = "001-M"
        xmin = 0
        xmax = 9.5
        intervals: size = 2
        intervals [1]:
            xmin = 0.5
            xmax = 1.5e0
            text = "a
b"
        intervals [2]:
            xmin = 9.5
            xmax = 9.5
            text = "of no length"
"""
SHORT = """"ooTextFile"
"TextGrid"
0 9.5 <exists> 3
"IntervalTier" "R0015_M0151_F_SPK0093" 0 9.5 3
0
1.25
""
1.25
4
"他说 ""好"" 1 <ok> ! yes"
4 9.5 "  "
"TextTier" "noises" 0 9.5 1
3.5
"cough" ! a comment with 7 and "quotes"
"IntervalTier" "001-M" 0 9.5 2
.5 1.5 "a
b"
9.5 9.5 "of no length"
"""
TURNS = [Turn(0.5, 1.5, "001-M"), Turn(1.25, 4.0, "SPK0093")]
ENCODINGS = {
    "utf-8": b"",
    "utf-8-sig": b"",
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", [LONG, SHORT], ids=["long", "short"])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_both_formats_are_read_in_each_encoding(tmp_path, text, encoding, end):
    path = tmp_path / "a.TextGrid"
    coded = text.replace("\n", end).encode(encoding)
    path.write_bytes(ENCODINGS[encoding] + coded)
    tiers = read_textgrid(path)
    assert [tier.name for tier in tiers] == ["R0015_M0151_F_SPK0093", "001-M"]
    assert tiers[0].intervals[1] == Interval(1.25, 4.0, '他说 "好" 1 <ok> ! yes')
    # Intervals of blanks and of no length are no turns.
    assert turns_of_tiers(tiers) == TURNS


def test_a_file_without_tiers_has_no_turns(tmp_path):
    text = '"ooTextFile" "TextGrid" 0 2.5 <absent>\n'
    assert read_textgrid(write(tmp_path / "a.TextGrid", text)) == []


# What is replaced in LONG -> what the message says, with the line.
WRONG = {
    "a number is a word": ("xmax = 1.25", "xmax = x", ":18:", "the end of an interval"),
    "a mark is not doubled": ('""好""', '"好"', ":22:", "in the place of"),
    "backwards": ("xmax = 4\n", "xmax = 1\n", ":21:", "from 1.25 to 1 s"),
    "before the start": ("xmin = 0.5", "xmin = -0.5", ":", "from -0.5 to 1.5 s"),
    "too few intervals": ("size = 2", "size = 1", ":", "more than the number"),
    "too many intervals": ("size = 2", "size = 4", ":", "ends before"),
    "half an interval": ("size = 2", "size = 2.5", ":", "2.5 as the number"),
    "no name": ('"001-M"', '""', ":", 'tier ""', "one word"),
    "two names": ('"001-M"', '"001 M"', ":", 'tier "001 M"', "one word"),
    "another tier": ('"TextTier"', '"PitchTier"', ":", '"PitchTier"'),
    "another class": ('"TextGrid"', '"Pitch"', ":2:", '"Pitch"', "no TextGrid"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_is_one_line_with_its_place(tmp_path, fault):
    old, new, *message = WRONG[fault]
    assert old in LONG
    path = write(tmp_path / "a.TextGrid", LONG.replace(old, new))
    with refuses(path, *message):
        read_textgrid(path)


@pytest.mark.parametrize("num_chars", [0, 30, 60, 300, len(LONG) - 10])
def test_a_file_that_was_cut_is_refused(tmp_path, num_chars):
    path = write(tmp_path / "a.TextGrid", LONG[:num_chars])
    with refuses(path):
        read_textgrid(path)


def test_other_encodings_and_the_binary_format_are_refused(tmp_path):
    path = tmp_path / "a.TextGrid"
    # UTF-16 without a mark could be of either byte order.
    for data in (LONG.encode("gb18030"), LONG.encode("utf-16-le"), b"ooBinaryFile\x08"):
        path.write_bytes(data)
        with refuses(path):
            read_textgrid(path)
