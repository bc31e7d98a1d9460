"""Score files, results.json, the console table and the page."""

import json
import re

import numpy as np
import pytest

from speakerlab.scoring import report
from speakerlab.scoring.trials import Trials, read_trials

KEYS = (
    "trials, system, eer, eer_untrained, eer_ci95, min_dcf, cllr, act_dcf, num_target, "
    "num_nontarget, backend, protocol, model_sha256, commit, at_threshold, bn_batch"
)


def row(**changes):
    values = {
        "trials": "mini",
        "system": "campplus_tiny",
        "eer": np.float64(0.0567),
        "eer_untrained": 0.3785,
        "eer_ci95": (0.0465, 0.0685),
        "min_dcf": {"0.01": 0.5, "0.05": 0.392},
        "num_target": 600,
        "num_nontarget": 5400,
        "backend": "cosine",
        "protocol": "all pairs of 20 unseen voices",
        "model_sha256": "ab" * 32,
        "commit": "1234567",
    }
    return report.result_row(**{**values, **changes})


def test_scores_are_written_a_trial_a_line(tmp_path):
    path = tmp_path / "scores" / "mini.txt"
    trials = Trials(
        ["a", "b"],
        ["x"],
        np.array([1, 0], dtype=np.int32),
        np.array([0, 0], dtype=np.int32),
        np.array([True, False]),
    )
    report.write_scores(path, trials, np.array([0.25, -1 / 3], dtype=np.float32))
    assert path.read_text() == "b x 0.250000 target\na x -0.333333 nontarget\n"
    assert list(path.parent.iterdir()) == [path]


def test_score_files_are_in_the_order_of_the_trials(tmp_path):
    (tmp_path / "trials").write_text("".join(f"e{i % 7} t{i} {i % 2}\n" for i in range(5000)))
    report.write_scores(tmp_path / "s", read_trials(tmp_path / "trials"), np.arange(5000.0))
    lines = [line.split() for line in (tmp_path / "s").read_text().splitlines()]
    assert [line[1] for line in lines] == [f"t{i}" for i in range(5000)]
    assert [float(line[2]) for line in lines] == list(range(5000))
    assert [line[3] for line in lines[:2]] == ["nontarget", "target"]


def test_a_row_has_exactly_the_promised_keys():
    assert list(row()) == KEYS.split(", ")
    assert row()["eer_ci95"] == [0.0465, 0.0685]
    assert row()["cllr"] is None and row()["act_dcf"] is None and row()["at_threshold"] is None
    assert json.loads(json.dumps(row())) == row()


def test_results_replace_the_same_system_and_keep_the_others(tmp_path):
    path = tmp_path / "exp" / "results.json"
    report.update_results(path, row())
    report.update_results(path, row(system="campplus_tiny-lm"))
    report.update_results(path, row(trials="other"))
    rows = report.update_results(path, row(eer=0.04))
    assert json.loads(path.read_text()) == rows
    assert [(r["trials"], r["system"], r["eer"]) for r in rows] == [
        ("mini", "campplus_tiny", 0.04),
        ("mini", "campplus_tiny-lm", 0.0567),
        ("other", "campplus_tiny", 0.0567),
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
    names = ["trials", "system", "EER %", "95 % interval", "untrained %", "minDCF(0.01)"]
    assert [name.strip() for name in re.split(r"\s{2,}", header)][:6] == names
    assert re.split(r"\s{2,}", first) == [
        *("mini", "campplus_tiny", "5.67", "4.65 - 6.85", "37.85", "0.500", "0.392", "600", "5,400")
    ]
    assert len(rule) == len(first) == len(second) == len(header)
    assert first.index("campplus_tiny") == second.index("campplus_tiny")


def test_columns_appear_when_a_row_fills_them():
    assert "Cllr" not in report.format_table([row()])
    rates = {"threshold": 0.4, "p_miss": 0.03, "p_fa": 0.08}
    calibrated = {"cllr": 0.1234, "act_dcf": 0.55, "at_threshold": rates}
    table = report.format_table([row(), row(trials="x", calibrated=calibrated, eer_untrained=None)])
    assert "None" not in table
    for header, text in (("Cllr", "0.123"), ("actDCF(0.01)", "0.550"), ("at threshold %", "5.50")):
        assert header in table and text in table.splitlines()[-1]


def test_the_page_holds_everything_and_links_nowhere(tmp_path):
    (tmp_path / "det.png").write_bytes(b"\x89PNG\r\n\x1a\nnot looked at")
    path = tmp_path / "report.html"
    facts = {"Seed": 42, "Configuration": {"training.num_epochs": 8, "data.note": "<b>&"}}
    report.write_html(path, [row()], {"DET <curve>": tmp_path / "det.png"}, facts, title="A & B")
    page = path.read_text()
    for text in ("5.67 %", "4.65 to 6.85 %", "37.85", "0.392", "5,400", "<title>A &amp; B</title>"):
        assert text in page
    for text in ("training.num_epochs: 8", "data.note: &lt;b&gt;&amp;", "DET &lt;curve&gt;"):
        assert text in page
    for text in ("mini: all pairs of 20 unseen voices", "interpolated linearly", "95 % percentile"):
        assert text in page
    assert 'src="data:image/png;base64,iVBORw0KGgpub3QgbG9va2VkIGF0"' in page
    assert not re.search(r"http|<script|<link|@import|url\(", page)
    for tag in ("main", "table", "dl", "figure", "div", "p", "h2"):
        assert len(re.findall(rf"<{tag}[ >]", page)) == page.count(f"</{tag}>") > 0
