"""Trial lists in three spellings, and lines that name what is wrong."""

import numpy as np
import pytest
from refusals import refused, refuses

from speakerlab.scoring.trials import LINES_AT_ONCE, read_trials

SPELLINGS = {
    "kaldi": "a x target\nb x nontarget\na y nontarget\n",
    "label first": "1 a x\n0 b x\n0 a y\n",
    "label last": "a x 1\nb x 0\na\ty  0\n\n",
    "a table": "enrol,test,label\na,x,1\nb,x,0\na,y,0\n",
    "columns in any order": (
        "\ufefflabel;session;Test;Enroll\ntrue;1;x;a\nFalse;1;x;b\nfalse;2;y;a\n"
    ),
    "a key of NIST": (
        "modelid\tsegmentid\tside\ttargettype\n"
        "a\tx\ta\ttarget\nb\tx\ta\tnontarget\na\ty\ta\tnontarget\n"
    ),
}


def written(tmp_path, text):
    path = tmp_path / "trials"
    path.write_text(text)
    return path


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_reads_alike(tmp_path, spelling):
    path = written(tmp_path, SPELLINGS[spelling])
    trials = read_trials(path)
    assert trials.enrol_ids == ["a", "b"]
    assert trials.test_ids == ["x", "y"]
    assert trials.enrol_N.tolist() == [0, 1, 0]
    assert trials.enrol_N.dtype == np.int32
    assert trials.test_N.tolist() == [0, 0, 1]
    assert trials.test_N.dtype == np.int32
    assert trials.is_target_N.tolist() == [True, False, False]
    assert len(trials) == 3
    assert trials.ids == ["a", "b", "x", "y"]


def test_a_list_of_several_pieces(tmp_path):
    # two pieces, whose ids must get the same numbers
    num = LINES_AT_ONCE + 5
    enrol = [f"e{i % 97}" for i in range(num)]
    test = [f"t{i}" for i in range(num)]
    is_target = [i % 3 == 0 for i in range(num)]
    lines = []
    for enrol_id, test_id, same in zip(enrol, test, is_target):
        label = "target" if same else "nontarget"
        lines.append(f"{enrol_id} {test_id} {label}\n")

    path = written(tmp_path, "".join(lines))
    trials = read_trials(path)
    assert [trials.enrol_ids[row] for row in trials.enrol_N] == enrol
    assert [trials.test_ids[row] for row in trials.test_N] == test
    assert trials.is_target_N.tolist() == is_target


def test_another_order_of_the_columns_is_no_matter_of_blanks(tmp_path):
    path = written(tmp_path, "target a b\n")
    with refuses(f"{path}:1", "'target a b'", "enrol test target|nontarget") as caught:
        read_trials(path)
    assert "blanks" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "value"),
    [
        ("a b target\nc d 1\n", ":2", "'c d 1'"),
        ("a b target\nc d\n", ":2", "'c d'"),
        ("a b target\n\nc d target\n", ":2", "blank"),
        ("a b target extra\n", ":1", "'a b target extra'"),
        ("a b yes\n", ":1", "'a b yes'"),
        ("my a.wav my b.wav target\n", ":1", "wav.scp"),
        ("my a.wav b.wav\n", ":1", "wav.scp"),
        ("1 a 0\n", ":1", "'1 a 0' can be read in two ways"),
        ("a b 1\nb c 0\na b 0\n", ":3", "a b repeats line 1"),
        ("", "", "no trials"),
        ("enrol,test,label\na,b,1\na,b,2\n", ":3", "'2'"),
        ("enrol,test,label\na,b,1\nc,,0\n", ":3", "'c' and ''"),
        ("enrol,test,label\nmy a.wav,b,1\n", ":2", "'my a.wav' and 'b'"),
        ("enrol,test,label\na,b,1\nc,d,0\na,b,0\n", ":4", "a b repeats line 2"),
        ("enrol,test,label\n", "", "no trials"),
        ("enrol,test\na,b\n", ":1", "'enrol,test'"),
        ("enrol,test,label,sex\na,b,1,f\nLee, Ann,x,1,f\n", ":3", "Lee"),
        ("sex,enrol,test,label\nf,a,b,1\na,b,1\n", ":3", "a, b, 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, line, value):
    path = written(tmp_path, text)
    with refuses(f"{path}{line}", value):
        read_trials(path)


@pytest.mark.parametrize("label", ["yes", "no", "same", "-1", ""])
def test_a_label_of_a_table_that_is_not_understood(tmp_path, label):
    path = written(tmp_path, f"enrol,test,label\na,b,1\nc,d,{label}\n")
    understood = "target, nontarget, 1, 0, true, false, tgt, imp"
    with refuses(f"{path}:3", "label", understood, f"got '{label}'"):
        read_trials(path)


def test_repeats_are_named_in_the_order_of_their_lines(tmp_path):
    text = "".join(f"{name} x target\n" for name in "abcdefgh")
    path = written(tmp_path, text + "".join(reversed(text.splitlines(keepends=True))))
    with pytest.raises(ValueError) as error:
        read_trials(path)
    *lines, rest, _ = str(error.value).splitlines()
    assert len(lines) == 5
    for number, (line, name) in enumerate(zip(lines, "hgfed"), 9):
        assert refused(line, f"{path}:{number}", f"{name} x repeats line {17 - number}")
    assert rest == "... and 3 more duplicate trials"


def test_lines_are_counted_across_blocks(tmp_path):
    lines = [f"a b{i} target\n" for i in range(LINES_AT_ONCE)]
    good = "".join(lines)
    blank = good.replace(f"a b{LINES_AT_ONCE - 1} target", "")
    incomplete_line = good + "a c target\na d\n"
    blank_line = blank + "a c 1"
    for text, number in ((incomplete_line, 2), (blank_line, 0)):
        path = written(tmp_path, text)
        with refuses(f"{path}:{LINES_AT_ONCE + number}"):
            read_trials(path)


def test_a_missing_list_is_one_line(tmp_path):
    with refuses(f"{tmp_path}/trials", error=FileNotFoundError):
        read_trials(tmp_path / "trials")
    with refuses(tmp_path, "folder"):
        read_trials(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_lists_of_windows_are_read(tmp_path, spelling, encoding):
    text = SPELLINGS[spelling].removeprefix("\ufeff").replace("\n", "\r\n")
    path = tmp_path / "trials"
    path.write_bytes(text.encode(encoding))
    assert read_trials(path).ids == ["a", "b", "x", "y"]


def test_unknown_utterances_are_named(tmp_path):
    path = written(tmp_path, SPELLINGS["kaldi"])
    trials = read_trials(path)
    trials.check_known(["a", "b", "x", "y", "z"])
    for name in "by":
        with refuses("data/test/trials", name):
            trials.check_known({"a", "x"}, where="data/test/trials")


def test_an_invisible_character_of_an_unknown_utterance_is_shown(tmp_path):
    trials = read_trials(written(tmp_path, "a\u200b 语音 target\n"))
    with refuses("trials", r"a\u200b"):
        trials.check_known({"a", "语音"})
    with refuses("trials", "语音"):
        trials.check_known({"a\u200b"})


def test_speakers_have_equal_numbers_on_both_sides(tmp_path):
    path = written(tmp_path, SPELLINGS["kaldi"])
    trials = read_trials(path)
    speaker_of = {"a": "anna", "b": "bob", "x": "anna", "y": "carl"}
    # anna is enrolled and tested under different ids
    enrol_N, test_N = trials.speakers(speaker_of)
    assert enrol_N.tolist() == [0, 1, 0]
    assert test_N.tolist() == [0, 0, 2]
    is_same_N = enrol_N == test_N
    assert (is_same_N == trials.is_target_N).all()
