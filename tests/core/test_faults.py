"""The report of several faults."""

import pytest
from refusals import refuses

from speakerlab.core.faults import Faults


@pytest.mark.parametrize(
    ("lines", "report"),
    [
        # five lines of a kind at most, then the count; the verdict is last
        (
            [("files", f"{i}.wav") for i in range(5)],
            [*(f"{i}.wav" for i in range(5)), "end"],
        ),
        (
            [*(("files", f"{i}.wav") for i in range(8)), ("ids", "u1")],
            [*(f"{i}.wav" for i in range(5)), "... and 3 more files", "u1", "end"],
        ),
        # kinds stay in the order they were met
        ([("b", "b"), ("a", "a"), ("b", "b")], ["b", "b", "a", "end"]),
    ],
)
def test_a_report(lines, report):
    faults = Faults()
    for kind, line in lines:
        faults.add(kind, line)
    assert faults.report("end").splitlines() == report


def test_of_millions_of_faults_only_the_first_become_text():
    faults = Faults()
    faults.add("trials", "0")
    numbers = iter(range(1, 8))
    faults.add_first("trials", map(str, numbers), 10**7)
    assert next(numbers) == 6
    report = faults.report().splitlines()
    assert report == [*"01234", "... and 9999996 more trials"]


def test_only_faults_raise():
    faults = Faults()
    assert not faults
    faults.raise_if_any("refused")
    faults.add("kind", "line: 3")
    with refuses("line", 3):
        faults.raise_if_any("refused")
