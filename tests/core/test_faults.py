"""The report of several faults."""

import pytest

from speakerlab.core.faults import Faults


def test_five_lines_of_a_kind_then_the_count_and_the_verdict_last():
    faults = Faults()
    for number in range(8):
        faults.add("missing files", f"{number}.wav: no such file")
    faults.add("duplicate ids", "wav.scp:3: duplicate id")
    assert faults.report("refused").splitlines() == [
        "0.wav: no such file",
        "1.wav: no such file",
        "2.wav: no such file",
        "3.wav: no such file",
        "4.wav: no such file",
        "... and 3 more missing files",
        "wav.scp:3: duplicate id",
        "refused",
    ]


def test_exactly_five_are_all_shown():
    faults = Faults()
    for number in range(5):
        faults.add("missing files", f"{number}.wav")
    assert faults.report("refused").splitlines()[-2:] == ["4.wav", "refused"]


def test_kinds_stay_in_the_order_they_were_met():
    faults = Faults()
    for kind in ("b", "a", "b"):
        faults.add(kind, kind)
    assert faults.report("end") == "b\nb\na\nend"


def test_only_faults_raise():
    faults = Faults()
    assert not faults
    faults.raise_if_any("refused")
    faults.add("kind", "line")
    assert faults
    with pytest.raises(ValueError, match="^line\nrefused$"):
        faults.raise_if_any("refused")
