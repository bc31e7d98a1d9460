"""Damaged files of every format: read, or refused by a line that names the file."""

from pathlib import Path

import pytest
from cases import CASES
from fuzz import Bench, Failure, jobs_of, limits
from parsers import PARSERS

NUM_INPUTS = 2000  # `make fuzz` tries a million


def shown(failure: Failure | None) -> str:
    return (
        ""
        if failure is None
        else f"{failure.kind}: {failure.text} {failure.content[:300]!r}"
    )


@pytest.mark.parametrize(("name", "first", "last"), jobs_of(list(PARSERS), NUM_INPUTS))
def test_damaged_files_are_read_or_refused(
    tmp_path: Path, name: str, first: int, last: int
):
    bench = Bench(name, tmp_path)
    with limits(tmp_path):
        for number in range(first, last):
            assert not shown(bench.attempt(*bench.damaged(0, number))), number


@pytest.mark.parametrize("name", PARSERS)
def test_valid_files_are_read_and_written_as_they_were(tmp_path: Path, name: str):
    bench = Bench(name, tmp_path)
    with limits(tmp_path):
        read = {file: bench.parser.read(bench.folder / file) for file in bench.files}
        if bench.parser.write is None:
            return
        again = [
            bench.written_twice(bench.again / file, value)
            for file, value in read.items()
        ]
    assert set(again) & set(
        bench.valid.values()
    )  # what the package wrote is written so again


@pytest.mark.parametrize(("name", "pattern", "change"), CASES)
def test_a_stored_case(tmp_path: Path, name: str, pattern: str, change):
    bench = Bench(name, tmp_path)
    file = next(file for file in bench.valid if Path(file).match(pattern))
    with limits(tmp_path):
        content = change(bench.valid[file]) if callable(change) else change
        assert not shown(bench.attempt(file, content))
