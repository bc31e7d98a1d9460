"""Scoring RTTM files: what is printed and written, and what is refused."""

import json
import re
from pathlib import Path

import pytest
from refusals import refused, refuses
from tiny import read_json
from voices import RATE, make_wave

from speakerlab.bin.der import main
from speakerlab.core import done
from speakerlab.data import audio


def write_rttm(path: Path, *rows: tuple[str, float, float, str]) -> str:
    line = "SPEAKER {} 1 {} {} <NA> <NA> {} <NA> <NA>\n"
    lines = [line.format(*row) for row in rows]
    path.write_text("".join(lines))
    return str(path)


def test_names_with_blanks_are_refused_before_scoring(tmp_path):
    """Two persons with one first name must not become one speaker."""
    ref = write_rttm(
        tmp_path / "ref.rttm",
        ("call", 0, 4, "Ann Lee"),
        ("call", 4, 4, "Ann Kim"),
        ("call", 8, 4, "Bob Ray"),
    )
    hyp = write_rttm(tmp_path / "hyp.rttm", ("call", 0, 8, "a"), ("call", 8, 4, "b"))
    with pytest.raises(ValueError) as caught:
        main([ref, hyp])
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    for number, line in enumerate(lines, 1):
        assert refused(line, f"{ref}:{number}", "one word")


@pytest.fixture
def pair(tmp_path) -> tuple[str, str]:
    """Six recordings of 10 s and two speakers; in the last, one speaker is found as two."""
    truth = []
    for number in range(6):
        truth.append((f"r{number}", 0, 6, "ann"))
        truth.append((f"r{number}", 6, 4, "bob"))
    # Two turns of one speaker overlap: they are merged.
    found_as_two = [
        ("r5", 6, 1, "bob"),
        ("r5", 6.5, 0.5, "bob"),
        ("r5", 7, 3, "cid"),
    ]
    ref = write_rttm(tmp_path / "ref.rttm", *truth)
    hyp = write_rttm(tmp_path / "hyp.rttm", *truth[:-1], *found_as_two)
    return ref, hyp


def test_rates_protocol_and_counts_are_printed_and_written(
    tmp_path, capsys, caplog, pair
):
    path = tmp_path / "out/results.json"
    page = tmp_path / "out/results.html"
    main([*pair, "--json", str(path), "--report", str(page)])
    text = capsys.readouterr().out
    assert "DER 1.67 %" in text
    assert "collar 0 s, overlap scored" in text
    _, hyp = pair
    assert f"{hyp}: overlapping turns of one speaker merged: 1" in caplog.text

    # The recording with the most errors comes first.
    html = page.read_text()
    recordings = re.findall("<td>(r.)</td>", html)
    assert recordings == ["r5", "r0", "r1", "r2", "r3", "r4"]
    assert "<b>1.67 %</b>" in html
    assert "<li>collar 0 s</li>" in html

    # 1 s of 60 s: r5 has 9 of its 10 s right.
    results = read_json(path)
    total = results["total"]
    assert total["der"] == pytest.approx(1 / 60)
    assert total["der"] == total["error_seconds"] / 60
    assert total["missed"] == 0
    assert total["false_alarm"] == 0
    assert total["confusion"] == total["der"]
    assert total["jer"] == pytest.approx(0.25 / 12)
    low, high = total["der_ci95"]
    assert low == 0
    assert high > total["der"]
    assert total["count_errors"] == {"0": 5, "1": 1}
    assert results["protocol"]["collar"] == 0
    assert results["protocol"]["overlap"]
    last = results["files"]["r5"]
    assert last["der"] == pytest.approx(0.1)
    assert last["num_speakers"] == 2
    assert last["num_found"] == 3


def test_json_of_each_pair_is_a_line(tmp_path, capsys, pair):
    ref, hyp = pair
    perfect = write_rttm(tmp_path / "perfect.rttm", ("a", 0, 6, "ann"))
    main([ref, hyp, perfect, perfect, "--json"])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["ref"], first["hyp"]) == (ref, hyp)
    assert first["total"]["der"] == pytest.approx(1 / 60)
    assert (second["ref"], second["hyp"]) == (perfect, perfect)
    assert second["total"]["der"] == 0
    assert second["total"]["der_ci95"] is None

    # The same as in a file, whose path may follow.
    path = tmp_path / "results.json"
    main([ref, hyp, "--json", str(path)])
    of_file = read_json(path)
    assert {"ref": ref, "hyp": hyp, **of_file} == first
    assert "DER 1.67 %" in capsys.readouterr().out

    main([ref, hyp, perfect, perfect])
    lines = capsys.readouterr().out.splitlines()
    assert f"{ref} {hyp}" in lines
    assert f"{perfect} {perfect}" in lines
    assert sum(line.startswith("DER ") for line in lines) == 2


def contents_of(folder: Path) -> dict[str, bytes | None]:
    """Name -> bytes of each file; None for a folder."""
    contents = {}
    for path in folder.iterdir():
        contents[path.name] = path.read_bytes() if path.is_file() else None
    return contents


@pytest.mark.parametrize(
    "name", ["ref", "ref.rttm", "EMPTY.RTTM", "notes.txt", "folder"]
)
def test_what_follows_json_is_not_replaced_unless_it_has_results(
    tmp_path, pair, capsys, name
):
    ref, hyp = pair
    place = tmp_path / name
    if name == "folder":
        place.mkdir()
    elif name == "EMPTY.RTTM":
        place.touch()
    else:
        place.write_text(Path(ref).read_text())
    before = contents_of(tmp_path)
    taken_for_results = (
        ["--json", str(place), hyp],
        ["--json", str(place), hyp, hyp],
        ["--json", str(place), hyp, ref, hyp],
        [ref, "--json", str(place)],
        [ref, hyp, f"--json={place}"],
    )
    for arguments in taken_for_results:
        with pytest.raises(SystemExit):
            main(arguments)
        line = capsys.readouterr().err
        assert refused(line, "speakerlab der", f"--json: {place}", "after REF and HYP")
        assert len(line.splitlines()) == 1
    assert contents_of(tmp_path) == before


def test_json_replaces_earlier_results_and_empty_files(tmp_path, pair):
    ref, hyp = pair
    place = tmp_path / "results"
    place.touch()
    main([ref, hyp, "--json", str(place)])
    assert read_json(place)["protocol"]["collar"] == 0
    main([ref, hyp, "--json", str(place), "--collar", "0.25"])
    assert read_json(place)["protocol"]["collar"] == 0.25


def test_pairs_are_whole_and_files_are_of_one(tmp_path, pair, capsys):
    ref, hyp = pair
    before = Path(ref).read_bytes()
    with refuses(ref, "pairs REF HYP"):
        main([ref, hyp, ref])
    for option in ("--json", "--report"):
        with refuses("der", "single pair"):
            main([ref, hyp, ref, hyp, option, str(tmp_path / "out")])
    missing = tmp_path / "missing.rttm"
    with refuses(str(missing), "does not exist", error=FileNotFoundError):
        main([ref, hyp, ref, str(missing), "--json"])
    # Refused before the first pair is scored.
    assert not capsys.readouterr().out
    assert Path(ref).read_bytes() == before


def test_the_minutes_with_the_most_errors_are_shown_and_played(tmp_path, caplog):
    turns = [
        ("a", 10, 140, "<ann>"),
        ("b", 0, 60, "ann"),
    ]
    ref = write_rttm(tmp_path / "ref", *turns)
    turns = [
        ("a", 10, 40, "1"),
        ("a", 70, 50, "1"),
        ("b", 0, 60, "1"),
        ("b", 9, 3, "2"),
    ]
    hyp = write_rttm(tmp_path / "hyp", *turns)
    wave_S = make_wave(0, 0, 61.0)
    audio.write(tmp_path / "b.flac", wave_S, RATE)
    tables = f"a {tmp_path}/none.flac\nb {tmp_path}/b.flac\n"
    (tmp_path / "wav.scp").write_text(tables)
    path = tmp_path / "page.html"
    arguments = [ref, hyp, "--report", str(path)]
    main([*arguments, "--data", str(tmp_path)])
    page = path.read_text()
    assert re.findall("<h3><bdi>(.*s of errors)</h3>", page) == [
        "a</bdi>, 02:00.0 – 03:00.0: 30.0 s of errors",
        "a</bdi>, 00:00.0 – 01:00.0: 10.0 s of errors",
        "a</bdi>, 01:00.0 – 02:00.0: 10.0 s of errors",
        "b</bdi>, 00:00.0 – 01:00.0: 3.0 s of errors",
    ]
    # The recording of a is missing, and the page plays b.
    assert page.count("<audio") == 1
    assert 'src="data:audio/mpeg' in page
    assert "none.flac" in caplog.text

    pattern = r"<small>(\w+ \S+)</small>\n<div.*?left:([\d.]+)%;width:([\d.]+)%"
    lanes = re.findall(pattern, page)
    assert lanes[1:3] == [
        ("REF &lt;ann&gt;", "16.67", "83.33"),
        ("HYP 1", "16.67", "66.67"),
    ]
    main(arguments)
    assert "<audio" not in path.read_text()


def test_recordings_are_grouped_by_speakers_and_overlap(tmp_path, capsys):
    rows = [
        ("a", 0, 10, "ann"),
        ("b", 0, 10, "ann"),
        ("b", 8.5, 1.5, "bob"),
        ("c", 0, 9, "ann"),
    ]
    ref = write_rttm(tmp_path / "ref", *rows)
    turns = [
        ("a", 0, 10, "ann"),
        ("b", 0, 10, "ann"),
        ("c", 0, 9, "ann"),
        ("c", 0, 9, "bob"),
    ]
    hyp = write_rttm(tmp_path / "hyp", *turns)
    path = tmp_path / "json"
    main([ref, hyp, "--json", str(path)])
    groups = read_json(path)["groups"]
    # Group -> DER, number of recordings: a and c have one speaker each, b has two who overlap.
    expected = {
        "speakers: 1": (9 / 19, 2),
        "speakers: 2": (1.5 / 11.5, 1),
        "overlap: below 5 %": (9 / 19, 2),
        "overlap: 10 to 20 %": (1.5 / 11.5, 1),
    }
    assert groups.keys() == expected.keys()
    for name, (rate, num_recordings) in expected.items():
        assert groups[name]["der"] == rate
        assert groups[name]["num_recordings"] == num_recordings
    assert "found minus true: -1 in 1, 0 in 1, 1 in 1" in capsys.readouterr().out


def test_a_folder_is_scored_like_one_file(tmp_path, capsys, pair):
    folders = [path.removesuffix(".rttm") for path in pair]
    for path, folder in zip(pair, folders):
        Path(folder).mkdir()
        for line in Path(path).read_text().splitlines():
            recording = line.split()[1]
            with Path(folder, f"{recording}.rttm").open("a") as file:
                file.write(f"{line}\n")
    main(pair)
    printed = capsys.readouterr().out
    main(folders)
    assert capsys.readouterr().out == printed


def test_collar_overlap_and_regions_are_those_asked_for(tmp_path, caplog):
    turns = [
        ("a", 2, 4, "ann"),
        ("a", 5, 1, "bob"),
        ("b", 2, 5, "ann"),
    ]
    ref = write_rttm(tmp_path / "ref", *turns)
    hyp = write_rttm(tmp_path / "hyp", ("a", 0, 6, "1"))
    uem = tmp_path / "uem"
    uem.write_text("a 1 1 3\nb 1 5 6\nunused 1 0 9\n")
    path = tmp_path / "json"

    def der(*options: str) -> tuple[float, str]:
        main([ref, hyp, *options, "--json", str(path)])
        results = read_json(path)
        return results["total"]["der"], results["protocol"]["regions"]

    extent = "first to last turn of REF"
    assert der() == (8 / 10, f"{extent} and HYP")
    assert der("--skip-overlap") == (7 / 8, f"{extent} and HYP")
    assert der("--uem", "reference") == (6 / 10, extent)
    assert der("--uem", str(uem)) == (2 / 2, str(uem))
    rate, _ = der("--collar", "0.5")
    assert rate == (1.5 + 4) / (2 + 4)
    assert f"{hyp}: recordings lacking, all missed: 1 (b)" in caplog.text


def test_other_units_and_columns_of_the_hypothesis_are_warned_of(tmp_path, caplog):
    turns = [("a", 0, 6, "ann"), ("a", 6, 4, "bob"), ("b", 1, 2, "ann")]
    ref = write_rttm(tmp_path / "ref", *turns)

    def warnings(*rows: tuple[str, float, float, str]) -> list[str]:
        caplog.clear()
        main([ref, write_rttm(tmp_path / "hyp", *rows)])
        return [text for text in caplog.messages if "start and duration" in text]

    milliseconds, ends = [], []
    for recording, start, seconds, speaker in turns:
        milliseconds.append((recording, 1000 * start, 1000 * seconds, speaker))
        ends.append((recording, start, start + seconds, speaker))
    (line,) = warnings(*milliseconds)
    assert refused(line, str(tmp_path / "hyp"), "12000 s of speech", "12 s", "seconds")
    (line,) = warnings(*ends)
    assert refused(line, str(tmp_path / "hyp"), "20 s of time", "13 s")
    assert warnings(*turns) == []
    # Speech that is found twice, and false alarms after the end.
    assert warnings(*turns, ("a", 0, 10, "cid"), ("a", 10, 4, "ann")) == []


def test_what_cannot_be_scored_is_refused(tmp_path, pair, capsys):
    ref, hyp = pair
    with refuses(ref, "speech"):
        main([ref, hyp, "--collar", "9"])
    other = write_rttm(tmp_path / "other", ("x", 0, 1, "ann"))
    with refuses("x", "reference"):
        main([ref, other])
    bad = write_rttm(tmp_path / "bad", ("x", 0, -1, "ann"))
    with refuses(f"{bad}:1", -1):
        main([ref, bad])
    with refuses(f"{tmp_path}/wav.scp", "no such file", error=FileNotFoundError):
        main([ref, hyp, "--report", str(tmp_path / "page"), "--data", str(tmp_path)])
    assert capsys.readouterr().out == ""  # nothing was scored
    # A file is where the folder of the results would be.
    for option in ("--json", "--report"):
        with refuses(f"{ref}/out"):
            main([ref, hyp, option, f"{ref}/out"])


def test_results_of_the_same_inputs_are_kept(
    tmp_path, capsys, caplog, pair, monkeypatch
):
    ref, hyp = pair
    path = tmp_path / "out/results.json"
    page = tmp_path / "out/page.html"
    uem = tmp_path / "uem"
    uem.write_text("".join(f"r{number} 1 0 9\n" for number in range(6)))
    outputs = ["--json", str(path), "--report", str(page)]
    arguments = [*pair, *outputs, "--uem", str(uem)]
    other_truth = [(f"r{number}", 0, 5, "x") for number in range(6)]
    caplog.set_level("INFO")

    def is_kept(*options: str) -> bool:
        caplog.clear()
        main([*arguments, *options])
        line = f"{path}: already scored with these inputs, kept (--force scores again)"
        return line in caplog.text

    assert not is_kept()
    printed = capsys.readouterr().out
    before = path.stat().st_mtime_ns
    assert is_kept()
    assert path.stat().st_mtime_ns == before
    assert f"{hyp}: overlapping turns of one speaker merged: 1" in caplog.text
    assert capsys.readouterr().out == printed
    # Other options, other inputs, missing or damaged results, another version.
    assert not is_kept("--force")
    assert path.stat().st_mtime_ns != before
    assert not is_kept("--collar", "0.1")
    assert not is_kept("--skip-overlap")
    for change in (
        lambda: uem.write_text(uem.read_text().replace(" 9", " 8")),
        lambda: write_rttm(Path(hyp), ("r0", 0, 6, "x")),
        lambda: write_rttm(Path(ref), *other_truth),
        page.unlink,
        path.unlink,
        lambda: path.write_text("{}"),
        lambda: monkeypatch.setattr(done, "code_digest", lambda: "of another version"),
    ):
        change()
        assert not is_kept()
        assert is_kept()


def test_missing_turns_name_what_writes_them(tmp_path, pair):
    ref, hyp = pair
    missing_ref = f"{ref}x"
    with refuses(missing_ref, "does not exist", "prepare.py", error=FileNotFoundError):
        main([missing_ref, hyp])
    missing_hyp = f"{hyp}x"
    advice = ("speakerlab diarize", f"--out {missing_hyp}")
    with refuses(missing_hyp, *advice, error=FileNotFoundError):
        main([ref, missing_hyp])
