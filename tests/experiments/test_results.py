"""results.json and the tables for the console."""

import json
import re

import pytest
from refusals import refuses
from result_rows import identified, row

from speakerlab.experiments import results

# true, found: a b b | b b | c a; class d does not occur
LID = identified(
    [0, 0, 0, 1, 1, 2, 2],
    [0, 1, 1, 1, 1, 2, 0],
    ["a", "b", "c", "d"],
)


def test_results_replace_the_same_system_and_keep_the_others(tmp_path):
    path = tmp_path / "exp" / "results.json"
    results.update_results(path, [row()])
    results.update_results(path, [row(system="campplus_tiny-lm")])
    results.update_results(path, [row(trials="other")])
    assert results.update_results(path, [LID]) == [LID]
    other = {**LID, "data": "other"}
    newer = {**LID, "commit": "abc"}
    results.update_results(path, [other])
    assert results.update_results(path, [newer]) == [newer, other]
    results.update_results(path, [row(backend="mean+cosine")])
    rows = results.update_results(path, [row(eer=0.04)])
    values = []
    for r in rows:
        names = (r["trials"], r["system"], r["backend"])
        values.append((*names, r["eer"]))
    assert values == [
        ("mini", "campplus_tiny", "cosine", 0.04),
        ("mini", "campplus_tiny-lm", "cosine", 0.0567),
        ("other", "campplus_tiny", "cosine", 0.0567),
        ("mini", "campplus_tiny", "mean+cosine", 0.0567),
    ]
    stored = json.loads(path.read_text())
    assert stored == [*rows[:3], newer, other, rows[3]]


@pytest.mark.parametrize("text", ["", "{", "{}", '[{"eer": 1}]', "[1]"])
def test_damaged_results_are_refused_and_kept(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    with refuses(str(path)):
        results.update_results(path, [row()])
    assert path.read_text() == text


def test_the_console_table_lines_up():
    longer = row(trials="a-longer-name", num_nontarget=1_234_567)
    table = results.format_table([row(), longer])
    header, rule, first, second = table.splitlines()
    names = [
        "trials",
        "system",
        "back end",
        "EER %",
        "minDCF(0.01)",
        "minDCF(0.05)",
        "untrained %",
    ]
    headers = [name.strip() for name in re.split(r"\s{2,}", header)]
    assert headers[:7] == names
    assert re.split(r"\s{2,}", first) == [
        "mini",
        "campplus_tiny",
        "cosine",
        "5.67 (4.65 to 6.85)",
        "0.500",
        "0.392",
        "37.85",
        "600",
        "5,400",
    ]

    assert len(rule) == len(header)
    assert len(first) == len(header)
    assert len(second) == len(header)
    column = first.index("campplus_tiny")
    assert second.index("campplus_tiny") == column


COMPARED = {
    "with": "cosine",
    "eer_difference": -0.0052,
    "ci95": [-0.01, 0.0],
    "p_value": 0.03,
}


def long_rows() -> list[results.Row]:
    """Rows of three lists and back ends with every metric, as 3dspeaker has them."""
    rows = []
    for name in ("device", "distance", "dialect"):
        for back_end in ("cosine", "mean+cosine", "mean+cosine+asnorm"):
            changes = {
                "trials": f"test/trials_cross_{name}",
                "system": "campplus_simclr_fbank_s0",
                "backend": back_end,
                "cllr": 0.1234,
                "act_dcf": 0.55,
                "min_cllr": 0.1875,
                "at_threshold": {"threshold": 0.4, "p_miss": 0.03, "p_fa": 0.08},
                "compared": None if back_end == "cosine" else COMPARED,
                "conditions": [
                    {
                        "condition": "test side",
                        "value": "2 s, mp3:16k",
                        "eer": 0.1,
                        "eer_ci95": [0.05, 0.15],
                    }
                ],
            }
            rows.append(row(**changes))
    return rows


@pytest.mark.parametrize("width", [80, 100, 132])
@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_a_table_fits_a_terminal_and_keeps_every_value(width, num_rows):
    rows = long_rows()[-num_rows:]
    whole = results.format_table(rows)
    table = results.format_table(rows, width)
    assert max(map(len, table.splitlines())) <= width
    # In a file or a pipe, a row is a line.
    assert len(whole.splitlines()) == num_rows + 2
    values = set(re.split(r"\s{2,}|\n", whole)) - {""}
    for value in values:
        if set(value) == {"-"}:
            continue
        # The interval of an EER may stand in a column of its own.
        for part in re.split(r" \(|\)$", value):
            assert part in table, part

    conditions = results.format_conditions(rows, ["test side"], width)
    assert max(map(len, conditions.splitlines())) <= width
    assert conditions.count("5.00 to 15.00") == num_rows


def test_a_table_that_fits_is_the_same_on_a_terminal():
    rows = [row(), row(backend="mean+cosine")]
    whole = results.format_table(rows)
    assert results.format_table(rows, len(whole.splitlines()[0])) == whole


def test_the_initial_weights_are_named():
    tuned = row(fine_tuned=True, backend="tuned", eer_untrained=0.02)
    table = results.format_table([tuned])
    assert "before fine-tuning %" in table
    assert "untrained" not in table
    header, _, first, second = results.format_table([row(), tuned]).splitlines()
    assert "untrained %  before fine-tuning %" in header
    assert "37.85" in first
    assert "2.00" in second


def test_too_few_speakers_have_no_interval():
    few = row(eer_ci95=None, num_speakers=3)
    few["compared"] = {
        "with": "cosine",
        "eer_difference": 0.01,
        "ci95": None,
        "p_value": None,
    }
    line = results.format_table([few]).splitlines()[-1]
    eer, difference = re.split(r"\s{2,}", line)[3:5]
    assert eer == "5.67 (n/a (3 speakers))"
    assert difference == "+1.00 (n/a (3 speakers), p n/a, to cosine)"

    identification = LID | {"accuracy_ci95": None, "num_speakers": 3}
    table = results.format_identification([identification])
    assert "n/a (3 speakers)" in table
    identification["num_speakers"] = None
    table = results.format_identification([identification])
    assert "n/a (7 utterances)" in table


def test_a_list_has_one_primary_row(tmp_path):
    path = tmp_path / "results.json"
    results.update_results(path, [row(primary=True)])
    results.update_results(path, [row(primary=True, trials="other")])
    later = row(primary=True, backend="mean+cosine")
    results.update_results(path, [later])
    secondary = row(primary=False, backend="plda")
    rows = results.update_results(path, [secondary])
    assert [r["primary"] for r in rows] == [False, True, True, False]


def test_old_rows_of_skipped_back_ends_go(tmp_path):
    path = tmp_path / "results.json"
    names = ["cosine", "plda", "mean+cosine", "snorm,top-n=2"]
    for name in names:
        old = [row(backend=name), row(backend=name, trials="other")]
        results.update_results(path, old)
    new = [
        row(backend="cosine", eer=0.04),
        row(backend="plda,lda-dim=5"),
    ]
    asked = ["cosine", "plda", "snorm"]
    rows = results.update_results(path, new, asked=asked)
    back_ends = {"mini": [], "other": []}
    for r in rows:
        back_ends[r["trials"]].append(r["backend"])
    expected = ["cosine", "plda", "mean+cosine", "plda,lda-dim=5"]
    assert back_ends["mini"] == expected
    assert back_ends["other"] == names


def test_columns_appear_when_a_row_fills_them():
    assert "Cllr" not in results.format_table([row()])
    rates = {"threshold": 0.4, "p_miss": 0.03, "p_fa": 0.08}
    calibrated = {
        "cllr": 0.1234,
        "act_dcf": 0.55,
        "at_threshold": rates,
        "min_cllr": 0.1875,
    }
    other = row(
        trials="x",
        **calibrated,
        eer_untrained=None,
        compared=COMPARED,
    )
    table = results.format_table([row(), other])
    assert "None" not in table
    for header, text in (
        ("  Cllr", "0.123"),
        ("actDCF(0.01)", "0.550"),
        ("at threshold %", "5.50"),
        ("minCllr", "0.188"),
        ("EER difference", "-0.52 (-1.00 to +0.00, p = 0.030, to cosine)"),
    ):
        assert header in table
        assert text in table.splitlines()[-1]


def test_a_row_of_identification_holds_only_classes_that_occur():
    assert LID["confusion"] == {
        "a": {"a": 1, "b": 2},
        "b": {"b": 2},
        "c": {"a": 1, "c": 1},
    }
    assert LID["num"] == 7
    assert LID["num_classes"] == 4
    assert LID["task"] == "identification"
    assert LID["error"] == pytest.approx(3 / 7)
    assert LID["accuracy_ci95"] == [0.25, 0.875]
    stored = json.dumps(LID)
    assert json.loads(stored) == LID


def test_tables_of_identification():
    assert results.format_confusion(LID).splitlines() == [
        "true \\ found  a  b  c",
        "------------  -  -  -",
        "a             1  2  0",
        "b             0  2  0",
        "c             1  0  1",
    ]
    header, _, line = results.format_identification([LID]).splitlines()
    assert line.split() == [
        "test",
        "exp",
        "57.14",
        "25.00",
        "to",
        "87.50",
        "61.11",
        "4",
        "7",
    ]
    assert header.startswith("data  system  accuracy %")
