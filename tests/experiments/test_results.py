"""results.json and the tables for the console."""

import json
import re

import pytest
from refusals import refuses
from result_rows import identified, row

from speakerlab.experiments import results

# true, found: a b b | b b | c a; class d does not occur
LID = identified([0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 2, 0], ["a", "b", "c", "d"])


def test_results_replace_the_same_system_and_keep_the_others(tmp_path):
    path = tmp_path / "exp" / "results.json"
    results.update_results(path, [row()])
    results.update_results(path, [row(system="campplus_tiny-lm")])
    results.update_results(path, [row(trials="other")])
    assert results.update_results(path, [LID]) == [LID]
    other, newer = {**LID, "data": "other"}, {**LID, "commit": "abc"}
    results.update_results(path, [other])
    assert results.update_results(path, [newer]) == [newer, other]
    results.update_results(path, [row(backend="mean+cosine")])
    rows = results.update_results(path, [row(eer=0.04)])
    assert [(r["trials"], r["system"], r["backend"], r["eer"]) for r in rows] == [
        ("mini", "campplus_tiny", "cosine", 0.04),
        ("mini", "campplus_tiny-lm", "cosine", 0.0567),
        ("other", "campplus_tiny", "cosine", 0.0567),
        ("mini", "campplus_tiny", "mean+cosine", 0.0567),
    ]
    assert json.loads(path.read_text()) == [*rows[:3], newer, other, rows[3]]


@pytest.mark.parametrize("text", ["", "{", "{}", '[{"eer": 1}]', "[1]"])
def test_damaged_results_are_refused_and_kept(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    with refuses(str(path)):
        results.update_results(path, [row()])
    assert path.read_text() == text


def test_the_console_table_lines_up():
    table = results.format_table([row(), row(trials="a-longer-name", num_nontarget=1_234_567)])
    header, rule, first, second = table.splitlines()
    names = ["trials", "system", "back end", "EER %", "minDCF(0.01)", "minDCF(0.05)", "untrained %"]
    assert [name.strip() for name in re.split(r"\s{2,}", header)][:7] == names
    assert re.split(r"\s{2,}", first) == [
        *("mini", "campplus_tiny", "cosine", "5.67 (4.65 to 6.85)"),
        *("0.500", "0.392", "37.85", "600", "5,400"),
    ]
    assert len(rule) == len(first) == len(second) == len(header)
    assert first.index("campplus_tiny") == second.index("campplus_tiny")


def test_too_few_speakers_have_no_interval():
    few = row(eer_ci95=None, num_speakers=3)
    few["compared"] = {"with": "cosine", "eer_difference": 0.01, "ci95": None, "p_value": None}
    assert re.split(r"\s{2,}", results.format_table([few]).splitlines()[-1])[3:5] == [
        *("5.67 (n/a (3 speakers))", "+1.00 (n/a (3 speakers), p n/a, to cosine)")
    ]
    for num_speakers, shown in ((3, "n/a (3 speakers)"), (None, "n/a (7 utterances)")):
        table = results.format_identification(
            [{**LID, "accuracy_ci95": None, "num_speakers": num_speakers}]
        )
        assert shown in table


def test_a_list_has_one_primary_row(tmp_path):
    path = tmp_path / "results.json"
    results.update_results(path, [row(primary=True)])
    results.update_results(path, [row(primary=True, trials="other")])
    results.update_results(path, [row(primary=True, backend="mean+cosine")])
    rows = results.update_results(path, [row(primary=False, backend="plda")])
    assert [r["primary"] for r in rows] == [False, True, True, False]


def test_old_rows_of_skipped_back_ends_go(tmp_path):
    path, names = tmp_path / "results.json", ["cosine", "plda", "mean+cosine", "snorm,top-n=2"]
    for name in names:
        results.update_results(path, [row(backend=name), row(backend=name, trials="other")])
    new = [row(backend="cosine", eer=0.04), row(backend="plda,lda-dim=5")]
    rows = results.update_results(path, new, asked=["cosine", "plda", "snorm"])
    found = [r["backend"] for r in rows if r["trials"] == "mini"]
    assert found == ["cosine", "plda", "mean+cosine", "plda,lda-dim=5"]
    assert [r["backend"] for r in rows if r["trials"] == "other"] == names


def test_columns_appear_when_a_row_fills_them():
    assert "Cllr" not in results.format_table([row()])
    compared = {"with": "cosine", "eer_difference": -0.0052, "ci95": [-0.01, 0.0], "p_value": 0.03}
    rates = {"threshold": 0.4, "p_miss": 0.03, "p_fa": 0.08}
    calibrated = {"cllr": 0.1234, "act_dcf": 0.55, "at_threshold": rates, "min_cllr": 0.1875}
    other = row(trials="x", **calibrated, eer_untrained=None, compared=compared)
    table = results.format_table([row(), other])
    assert "None" not in table
    for header, text in (
        ("  Cllr", "0.123"),
        ("actDCF(0.01)", "0.550"),
        ("at threshold %", "5.50"),
        ("minCllr", "0.188"),
        ("EER difference", "-0.52 (-1.00 to +0.00, p = 0.030, to cosine)"),
    ):
        assert header in table and text in table.splitlines()[-1]


def test_a_row_of_identification_holds_only_classes_that_occur():
    assert LID["confusion"] == {"a": {"a": 1, "b": 2}, "b": {"b": 2}, "c": {"a": 1, "c": 1}}
    assert (LID["num"], LID["num_classes"], LID["task"]) == (7, 4, "identification")
    assert LID["error"] == pytest.approx(3 / 7) and LID["accuracy_ci95"] == [0.25, 0.875]
    assert json.loads(json.dumps(LID)) == LID


def test_tables_of_identification():
    assert results.format_confusion(LID).splitlines() == [
        "true \\ found  a  b  c",
        "------------  -  -  -",
        "a             1  2  0",
        "b             0  2  0",
        "c             1  0  1",
    ]
    header, _, line = results.format_identification([LID]).splitlines()
    assert line.split() == ["test", "exp", "57.14", "25.00", "to", "87.50", "61.11", "4", "7"]
    assert header.startswith("data  system  accuracy %")
