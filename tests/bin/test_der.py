"""Scoring RTTM files: what is printed and written, and what is refused."""

import json
import re
from pathlib import Path

import pytest
from refusals import refuses
from voices import RATE, make_wave

from speakerlab.bin.der import main
from speakerlab.data import audio


def write_rttm(path: Path, *rows: tuple[str, float, float, str]) -> str:
    line = "SPEAKER {} 1 {} {} <NA> <NA> {} <NA> <NA>\n"
    path.write_text("".join(line.format(*row) for row in rows))
    return str(path)


@pytest.fixture
def pair(tmp_path) -> tuple[str, str]:
    """Six recordings of 10 s and two speakers; in the last, one speaker is found as two."""
    truth = [(f"r{i}", *turn) for i in range(6) for turn in ((0, 6, "ann"), (6, 4, "bob"))]
    found = [*truth[:-1], ("r5", 6, 1, "bob"), ("r5", 6.5, 0.5, "bob"), ("r5", 7, 3, "cid")]
    return write_rttm(tmp_path / "ref.rttm", *truth), write_rttm(tmp_path / "hyp.rttm", *found)


def test_rates_protocol_and_counts_are_printed_and_written(tmp_path, capsys, caplog, pair):
    path = tmp_path / "out/results.json"
    page = tmp_path / "out/results.html"
    main([*pair, "--json", str(path), "--report", str(page)])
    text = capsys.readouterr().out
    assert "DER 1.67 %" in text and "collar 0 s, overlap scored" in text
    assert f"{pair[1]}: overlapping turns of one speaker merged: 1" in caplog.text
    assert re.findall("<td>(r.)</td>", page.read_text()) == ["r5", "r0", "r1", "r2", "r3", "r4"]
    assert "<b>1.67 %</b>" in page.read_text() and "<li>collar 0 s</li>" in page.read_text()
    results = json.loads(path.read_text())
    total = results["total"]
    assert total["der"] == pytest.approx(1 / 60) == total["error_seconds"] / 60
    assert (total["missed"], total["false_alarm"]) == (0, 0)
    assert total["confusion"] == total["der"]
    assert total["jer"] == pytest.approx(0.25 / 12)
    assert total["der_ci95"][0] == 0 and total["der_ci95"][1] > total["der"]
    assert total["count_errors"] == {"0": 5, "1": 1}
    assert results["protocol"]["collar"] == 0 and results["protocol"]["overlap"]
    last = results["files"]["r5"]
    assert (last["der"], last["num_speakers"], last["num_found"]) == (pytest.approx(0.1), 2, 3)


def test_the_minutes_with_the_most_errors_are_shown_and_played(tmp_path, caplog):
    ref = write_rttm(tmp_path / "ref", ("a", 10, 140, "<ann>"), ("b", 0, 60, "ann"))
    rows = [("a", 10, 40, "1"), ("a", 70, 50, "1"), ("b", 0, 60, "1"), ("b", 9, 3, "2")]
    hyp = write_rttm(tmp_path / "hyp", *rows)
    audio.write(tmp_path / "b.flac", make_wave(0, 0, 61.0), RATE)
    (tmp_path / "wav.scp").write_text(f"a {tmp_path}/none.flac\nb {tmp_path}/b.flac\n")
    words = [ref, hyp, "--report", str(tmp_path / "page.html")]
    main([*words, "--data", str(tmp_path)])
    page = (tmp_path / "page.html").read_text()
    assert re.findall("<h3><bdi>(.*s of errors)</h3>", page) == [
        "a</bdi>, 02:00.0 – 03:00.0: 30.0 s of errors",
        "a</bdi>, 00:00.0 – 01:00.0: 10.0 s of errors",
        "a</bdi>, 01:00.0 – 02:00.0: 10.0 s of errors",
        "b</bdi>, 00:00.0 – 01:00.0: 3.0 s of errors",
    ]
    assert page.count("<audio") == 1 and 'src="data:audio/mpeg' in page
    assert "none.flac" in caplog.text  # of a
    lanes = re.findall(r"<small>(\w+ \S+)</small>\n<div.*?left:([\d.]+)%;width:([\d.]+)%", page)
    assert lanes[1:3] == [("REF &lt;ann&gt;", "16.67", "83.33"), ("HYP 1", "16.67", "66.67")]
    main(words)
    assert "<audio" not in (tmp_path / "page.html").read_text()


def test_recordings_are_grouped_by_speakers_and_overlap(tmp_path, capsys):
    rows = [("a", 0, 10, "ann"), ("b", 0, 10, "ann"), ("b", 8.5, 1.5, "bob"), ("c", 0, 9, "ann")]
    ref = write_rttm(tmp_path / "ref", *rows)
    hyp = write_rttm(tmp_path / "hyp", *rows[:2], ("c", 0, 9, "ann"), ("c", 0, 9, "bob"))
    main([ref, hyp, "--json", str(tmp_path / "json")])
    groups = json.loads((tmp_path / "json").read_text())["groups"]
    assert {name: (row["der"], row["num_recordings"]) for name, row in groups.items()} == {
        "speakers: 1": (9 / 19, 2),
        "speakers: 2": (1.5 / 11.5, 1),
        "overlap: below 5 %": (9 / 19, 2),
        "overlap: 10 to 20 %": (1.5 / 11.5, 1),
    }
    assert "found minus true: -1 in 1, 0 in 1, 1 in 1" in capsys.readouterr().out


def test_a_folder_is_scored_like_one_file(tmp_path, capsys, pair):
    folders = [path.removesuffix(".rttm") for path in pair]
    for path, folder in zip(pair, folders):
        Path(folder).mkdir()
        for line in Path(path).read_text().splitlines():
            with Path(folder, f"{line.split()[1]}.rttm").open("a") as file:
                file.write(f"{line}\n")
    main(pair)
    printed = capsys.readouterr().out
    main(folders)
    assert capsys.readouterr().out == printed


def test_collar_overlap_and_regions_are_those_asked_for(tmp_path, caplog):
    ref = write_rttm(tmp_path / "ref", ("a", 2, 4, "ann"), ("a", 5, 1, "bob"), ("b", 2, 5, "ann"))
    hyp = write_rttm(tmp_path / "hyp", ("a", 0, 6, "1"))
    uem = tmp_path / "uem"
    uem.write_text("a 1 1 3\nb 1 5 6\nunused 1 0 9\n")

    def der(*more: str) -> tuple[float, str]:
        main([ref, hyp, *more, "--json", str(tmp_path / "json")])
        results = json.loads((tmp_path / "json").read_text())
        return results["total"]["der"], results["protocol"]["regions"]

    extent = "first to last turn of REF"
    assert der() == (8 / 10, f"{extent} and HYP")
    assert der("--skip-overlap") == (7 / 8, f"{extent} and HYP")
    assert der("--uem", "reference") == (6 / 10, extent)
    assert der("--uem", str(uem)) == (2 / 2, str(uem))
    assert der("--collar", "0.5")[0] == (1.5 + 4) / (2 + 4)
    assert f"{hyp}: recordings lacking, all missed: 1 (b)" in caplog.text


def test_what_cannot_be_scored_is_refused(tmp_path, pair):
    ref, hyp = pair
    with refuses(ref, "speech"):
        main([ref, hyp, "--collar", "9"])
    other = write_rttm(tmp_path / "other", ("x", 0, 1, "ann"))
    with refuses("x", "reference"):
        main([ref, other])
    with refuses(f"{write_rttm(tmp_path / 'bad', ('x', 0, -1, 'ann'))}:1", -1):
        main([ref, str(tmp_path / "bad")])
    for option in ("--json", "--report"):
        with refuses(f"{ref}/out"):
            main([ref, hyp, option, f"{ref}/out"])
