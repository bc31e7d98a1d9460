"""The page of an identification tells what the rows tell, and needs no other file."""

import numpy as np

from speakerlab.experiments.identification_page import write_page
from speakerlab.scoring.identification import confusion, result_row


def page_of(tmp_path, true_N, found_N, classes):
    row = result_row(
        data="test <a>",
        system="exp",
        count_CC=confusion(np.array(true_N), np.array(found_N), len(classes)),
        classes=classes,
        interval=(0.25, 0.875),
        protocol="by hand",
        model_sha256="0" * 64,
        commit=None,
    )
    facts = {"Model": {"sha256": "1234", "layers": {"a.b": 7}}}
    write_page(tmp_path / "report.html", title="T & U", rows=[row], facts=facts)
    return (tmp_path / "report.html").read_text()


def test_figures_classes_and_confusions(tmp_path):
    page = page_of(tmp_path, [0, 0, 0, 1], [0, 0, 1, 1], ["de", "<th>"])
    assert "<title>T &amp; U</title>" in page and "test &lt;a&gt;" in page
    assert "<b>75.00 %</b>" in page and "95 % interval 25.00 to 87.50 %" in page
    assert "balanced accuracy 83.33 %" in page
    assert "<td>de</td><td>3</td><td>66.67</td>" in page
    # 2 of 3 on dark ground, the third beside it, nothing where nothing is
    assert '<td style="background:rgba(31,95,168,0.67);color:#fff">2</td>' in page
    assert '<td style="background:rgba(31,95,168,0.33)">1</td>' in page
    assert "<td>&lt;th&gt;</td><td></td>" not in page.split("Confusion")[0]
    assert "<dt>sha256</dt><dd>1234</dd>" in page and "<pre>a.b: 7</pre>" in page
    assert "http" not in page and "<script" not in page


def test_many_classes_are_not_a_table_of_all_pairs(tmp_path):
    classes = [f"spk{i:03d}" for i in range(100)]
    page = page_of(tmp_path, list(range(100)), [*range(99), 5], classes)
    assert "The 50 worst of 100 classes." in page
    assert "<td>spk099</td><td>spk005</td><td>1</td>" in page
    assert page.count("<tr>") == 2 + 50 + 1
