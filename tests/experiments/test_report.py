"""results.json and the console table."""

import json
import re

import numpy as np
import pytest
from result_rows import row

from speakerlab.experiments import report

KEYS = (
    "trials, system, eer, eer_untrained, eer_ci95, min_dcf, cllr, act_dcf, num_target, "
    "num_nontarget, backend, protocol, model_sha256, commit, at_threshold, bn_batch, min_cllr, "
    "intervals, calibration, conditions, compared"
)


def test_a_row_has_exactly_the_promised_keys():
    assert list(row()) == KEYS.split(", ")
    assert row()["eer_ci95"] == [0.0465, 0.0685]
    assert row()["cllr"] is None and row()["act_dcf"] is None and row()["at_threshold"] is None
    assert json.loads(json.dumps(row(eer=np.float64(0.5)))) == row(eer=0.5)


def test_results_replace_the_same_system_and_keep_the_others(tmp_path):
    path = tmp_path / "exp" / "results.json"
    report.update_results(path, row())
    report.update_results(path, row(system="campplus_tiny-lm"))
    report.update_results(path, row(trials="other"))
    report.update_results(path, row(backend="mean+cosine"))
    rows = report.update_results(path, row(eer=0.04))
    assert json.loads(path.read_text()) == rows
    assert [(r["trials"], r["system"], r["backend"], r["eer"]) for r in rows] == [
        ("mini", "campplus_tiny", "cosine", 0.04),
        ("mini", "campplus_tiny-lm", "cosine", 0.0567),
        ("other", "campplus_tiny", "cosine", 0.0567),
        ("mini", "campplus_tiny", "mean+cosine", 0.0567),
    ]


@pytest.mark.parametrize("text", ["", "{}", '[{"eer": 1}]', "[1]"])
def test_damaged_results_are_refused_and_kept(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"results\.json: not a list of results, got"):
        report.update_results(path, row())
    assert path.read_text() == text


def test_the_console_table_lines_up():
    table = report.format_table([row(), row(trials="a-longer-name", num_nontarget=1_234_567)])
    header, rule, first, second = table.splitlines()
    names = ["trials", "system", "back end", "EER %", "95 % interval", "untrained %"]
    assert [name.strip() for name in re.split(r"\s{2,}", header)][:6] == names
    assert re.split(r"\s{2,}", first) == [
        *("mini", "campplus_tiny", "cosine", "5.67", "4.65 - 6.85", "37.85"),
        *("0.500", "0.392", "600", "5,400"),
    ]
    assert len(rule) == len(first) == len(second) == len(header)
    assert first.index("campplus_tiny") == second.index("campplus_tiny")


def test_columns_appear_when_a_row_fills_them():
    assert "Cllr" not in report.format_table([row()])
    rates = {"threshold": 0.4, "p_miss": 0.03, "p_fa": 0.08}
    calibrated = {"cllr": 0.1234, "act_dcf": 0.55, "at_threshold": rates}
    table = report.format_table([row(), row(trials="x", calibrated=calibrated, eer_untrained=None)])
    assert "None" not in table
    for header, text in (
        ("  Cllr", "0.123"),
        ("actDCF(0.01)", "0.550"),
        ("at threshold %", "5.50"),
    ):
        assert header in table and text in table.splitlines()[-1]


def test_a_row_keeps_what_was_measured_beside_the_eer():
    part = {"condition": "gender", "value": "f", "num_target": 0, "num_nontarget": 7, "eer": None}
    compared = {"with": "cosine", "eer_difference": -0.0052, "ci95": [-0.01, 0.0], "p_value": 0.03}
    made = row(
        backend="mean+cosine",
        calibrated={"cllr": 0.2, "act_dcf": 0.6},
        min_cllr=0.1875,
        intervals={"eer": np.array([0.01, 0.02]), "cllr": (0.1, 0.3)},
        calibration="10 held-out speakers",
        conditions=[part],
        compared=compared,
    )
    assert json.loads(json.dumps(made)) == made
    assert (made["cllr"], made["act_dcf"], made["at_threshold"]) == (0.2, 0.6, None)
    assert made["intervals"] == {"eer": [0.01, 0.02], "cllr": [0.1, 0.3]}
    assert made["conditions"] == [part] and made["calibration"] == "10 held-out speakers"
    table = report.format_table([row(), made])
    assert "-0.52 to cosine, p = 0.030" in table and "0.188" in table
    assert "gender" not in table


def test_rows_from_before_there_were_back_ends_to_compare_can_be_shown():
    old = row()
    for key in ("min_cllr", "intervals", "calibration", "conditions", "compared"):
        del old[key]
    assert report.format_table([old]) == report.format_table([row()])
