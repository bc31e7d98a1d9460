"""The reports show each row, need no other file, and escape every name."""

import re

from result_rows import identified, row

from speakerlab.experiments.hardest import HardTrial
from speakerlab.experiments.plots import Picture
from speakerlab.experiments.report import write_identification_page, write_page

PNG = b"\x89PNG\r\n\x1a\nnot looked at"
LOW = "target trials scored low"
CLIP = "data:audio/mpeg;base64,AAAA"
GENDERS = [
    {
        "condition": "gender",
        "value": "f",
        "num_target": 1200,
        "num_nontarget": 3400,
        "eer": 0.0432,
        "eer_ci95": [0.0321, 0.0543],
        "num_speakers": 9,
        "min_dcf": {"0.01": 0.456},
    },
    {
        "condition": "gender",
        "value": "f / <m>",
        "num_target": 0,
        "num_nontarget": 77,
        "eer": None,
    },
]


def better(**changes):
    """A second back end, with all that can be known of it."""
    return row(
        backend="mean+cosine+asnorm",
        eer=0.0345,
        eer_ci95=[0.0234, 0.0456],
        eer_untrained=None,
        min_dcf={"0.01": 0.4, "0.05": 0.291},
        cllr=0.2111,
        act_dcf=0.48,
        min_cllr=0.1777,
        intervals={
            "min_dcf_0.01": (0.31, 0.49),
            "act_dcf_0.01": (0.41, 0.57),
            "cllr": (0.15, 0.3),
        },
        calibration="10 held-out speakers",
        conditions=GENDERS,
        compared={
            "with": "cosine",
            "eer_difference": -0.0222,
            "ci95": [-0.0311, 0.0013],
            "p_value": 0.0421,
        },
        **changes,
    )


def page_of(tmp_path, rows, **parts):
    path = tmp_path / "report.html"
    parts = {"facts": {}} | parts
    write_page(path, title="A & B", rows=rows, **parts)
    return path.read_text(encoding="utf-8")


def text_of(page):
    """What a reader sees, tags as single blanks."""
    body = page.partition("</style>")[2]
    # these tags are within a word
    body = re.sub("</?(wbr|bdi)>", "", body)
    text = re.sub(r"<[^>]*>", " ", body)
    return re.sub(r"\s+", " ", text)


def verdict_of(page):
    return text_of(page).partition("Results")[0]


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    picture = tmp_path / "det.png"
    picture.write_bytes(PNG)
    trial = HardTrial("a", "b", 0.12345, CLIP, None)
    facts = {
        "averaged": [],
        "speeds": [0.9, 1.1],
        "gpu": None,
        "tf32": True,
    }
    parts = {
        "pictures": {"mini": [Picture("DET", picture)]},
        "hardest": {"mini": ("cosine", {LOW: [trial]})},
        "facts": {"Model": facts},
    }
    rows = [row(), better(), row(trials="other")]
    page = page_of(tmp_path, rows, **parts)
    assert page.count('class="card"') == 2
    text = re.sub(" +", " ", text_of(page))
    assert "averaged none speeds 0.9, 1.1 gpu none tf32 yes" in text
    assert not re.search(r"https?:|<script|<link|@import|url\(|<a ", page)
    sources = re.findall(r'\bsrc="([^"]{10})', page)
    assert sources == ["data:image", "data:audio"]
    assert "Target trials scored low 0.1235 enrolment a test b" in text

    # every tag is closed
    for tag in re.findall(r"<(\w+)[ >]", page):
        if tag not in ("meta", "img", "line", "circle", "html", "br", "wbr"):
            num_opened = len(re.findall(rf"<{tag}[ >]", page))
            assert page.count(f"</{tag}>") == num_opened, tag


def test_every_row_shows_its_numbers(tmp_path):
    page = page_of(tmp_path, [row(), better()])
    text = text_of(page)
    for shown in (
        "mini 600 target and 5,400 non-target trials · untrained network: EER 37.85 %",
        "cosine 5.67 4.65 to 6.85",
        "mean+cosine+asnorm 3.45 2.34 to 4.56 -2.22 -3.11 to +0.13 p = 0.042 to cosine",
        "0.400 0.310 to 0.490 0.291 0.480 0.410 to 0.570 0.211 0.150 to 0.300 0.178",
        "mini, cosine all pairs of 20 unseen voices",
        "all pairs of 20 unseen voices. Calibration: 10 held-out speakers",
    ):
        assert shown in text, shown


def test_the_page_of_a_fine_tuned_model_names_the_model_it_began_with(tmp_path):
    page = page_of(tmp_path, [row(fine_tuned=True)])
    assert "untrained" not in text_of(page)
    assert "before fine-tuning: EER 37.85 %" in verdict_of(page)


def test_the_verdict_is_about_the_primary_back_end_and_comes_first(tmp_path):
    primary = better(primary=True) | {"compared": None}
    page = page_of(tmp_path, [row(), primary])
    verdict = verdict_of(page)
    for shown in (
        "mini 3.45 % EER, 95 % interval 2.34 to 4.56 %",
        "mean+cosine+asnorm, the primary of 2 back ends",
        "minDCF(0.01) 0.400, minDCF(0.05) 0.291",
        "calibrated: actDCF(0.01) 0.480, 1.20 times the minimum",
        "Cllr 0.211, minCllr 0.178",
        "untrained network: EER 37.85 %",
    ):
        assert shown in verdict, shown
    assert "5.67" not in verdict

    # without a primary one, the first
    page = page_of(tmp_path, [row(), better()])
    verdict = verdict_of(page)
    assert "5.67 % EER" in verdict
    assert "cosine, the primary of 2" in verdict


def test_too_few_speakers_have_no_interval_on_the_page(tmp_path):
    few = {"eer_ci95": None, "num_speakers": 3}
    row_of_few = row(
        **few,
        intervals={"min_dcf_0.01": None},
        conditions=[GENDERS[0] | few],
    )
    text = text_of(page_of(tmp_path, [row_of_few]))
    for shown in (
        "5.67 % EER, 95 % interval n/a (3 speakers) cosine",
        "cosine 5.67 n/a (3 speakers) 0.500 n/a (3 speakers) 0.392",
        "gender f 1,200 3,400 4.32 n/a (3 speakers) 0.456",
    ):
        assert shown in text, shown
    identification = identified([0, 1], [0, 1], ["de", "fr"])
    identification |= few
    identification["accuracy_ci95"] = None
    path = tmp_path / "lid.html"
    write_identification_page(
        path,
        title="",
        rows=[identification],
        facts={},
    )
    assert "95 % interval n/a (3 speakers)" in path.read_text(encoding="utf-8")


def test_the_results_table_fits_a_page_1200_pixels_wide(tmp_path):
    """Even in a wide font (0.64 em a digit, 0.7 a bold letter), with only steps unbroken."""
    longest = "mean+lda+length+plda+asnorm+qmf,top-n=100"
    page = page_of(tmp_path, [row(), better() | {"backend": longest}])
    results = page.partition("<h2>Results</h2>")[2]
    table = results.partition("</table>")[0]
    style = page.partition("</style>")[0]
    rule = "td small{display:block;font-size:.8rem;line-height:1.4;white-space:normal}"
    assert rule in style

    rows = []
    for line in re.findall(r"<tr.*?</tr>", table, re.S):
        cells = re.findall(r"<t[hd]>(.*?)</t[hd]>", line)
        # the row of a list has one cell over all columns
        if len(cells) > 1:
            rows.append(cells)
    widths = []
    for column in zip(*rows, strict=True):
        longest_word = 0
        for cell in column:
            unbroken = cell.replace("&nbsp;", "_")
            for word in re.split(r"<[^>]*>|\s", unbroken):
                longest_word = max(longest_word, len(word))
        # letters of 14.7 pixels, and a margin of 0.55 em on both sides
        letters_width = longest_word * 0.7 * 14.7
        widths.append(letters_width + 2 * 0.55 * 16)
    assert sum(widths) < 1120 - 2 * 32, widths


def test_scores_without_calibration_are_called_so(tmp_path):
    page = page_of(tmp_path, [row()])
    verdict = verdict_of(page)
    assert "not calibrated: scores are no log-likelihood ratios" in verdict
    assert "the primary of" not in verdict
    assert "Cllr" not in verdict


def test_conditions_stand_below_their_list(tmp_path):
    page = page_of(tmp_path, [row(), better()])
    text = text_of(page)
    assert "Conditions: mean+cosine+asnorm" in text
    assert "gender f 1,200 3,400 4.32 3.21 to 5.43 0.456" in text
    assert "f / &lt;m&gt; 0 77 no targets" in text
    # the scale ends at 5.43: the dot is at 4.32 / 5.43 of it
    assert 'cx="79.6"' in page
    assert '<line x1="59.1" y1="6" x2="100.0"' in page


def test_text_from_outside_cannot_become_html(tmp_path):
    picture = tmp_path / "x.png"
    picture.write_bytes(PNG)
    bad = '<b a="&">'
    trial = HardTrial(bad, bad, 0.0, CLIP, None)
    parts = {
        "pictures": {bad: [Picture(bad, picture)]},
        "hardest": {bad: (bad, {bad: [trial]})},
        "facts": {bad: {bad: bad, "block": f"{bad}\n"}},
        "notes": [bad],
    }
    changes = {"trials": bad, "protocol": bad}
    compared = {
        "with": bad,
        "eer_difference": 0.0,
        "ci95": [0.0, 0.0],
        "p_value": 1.0,
    }
    conditions = [GENDERS[0] | {"condition": bad, "value": bad}]
    other = row(
        **changes,
        backend=bad,
        calibration=bad,
        compared=compared,
        conditions=conditions,
        eer=0.01,
    )
    rows = [row(**changes, system=bad), other]
    page = page_of(tmp_path, rows, **parts)
    assert "<b a=" not in page
    assert page.count("&lt;b a=&#34;&amp;&#34;&gt;") > 20


def identification_page(tmp_path, *outcome):
    rows = [identified(*outcome, data="test <a>")]
    path = tmp_path / "report.html"
    model = {"sha256": "1234", "config.yaml": "a:\n  b: 7\n"}
    facts = {"Model": model}
    write_identification_page(path, title="T & U", rows=rows, facts=facts)
    return path.read_text(encoding="utf-8")


def test_identification_shows_metrics_classes_and_confusions(tmp_path):
    true = [0, 0, 0, 1]
    decided = [0, 0, 1, 1]
    page = identification_page(tmp_path, true, decided, ["de", "<th>"])
    assert "<title>T &amp; U</title>" in page
    assert "test &lt;a&gt;" in page
    assert "<b>75.00 %</b>" in page
    assert "95 % interval 25.00 to 87.50 %" in page
    assert "balanced accuracy 83.33 %" in page
    assert "<td>de</td><td>3</td><td>66.67</td>" in page
    # 2 of 3 on dark ground, the third beside it, nothing where nothing is
    assert '<td style="background:rgba(31,95,168,0.67);color:#fff">2</td>' in page
    assert '<td style="background:rgba(31,95,168,0.33)">1</td>' in page
    assert "<td>&lt;th&gt;</td><td style=" in page
    assert "<td></td></tr>" in page
    assert "<dt>sha256</dt><dd>1234</dd>" in page
    assert "<pre>a:\n  b: 7\n</pre>" in page
    assert "http:" not in page
    assert "<script" not in page


def test_many_classes_are_not_a_table_of_all_pairs(tmp_path):
    classes = [f"spk{i:03d}" for i in range(100)]
    true = list(range(100))
    decided = [*range(99), 5]
    page = identification_page(tmp_path, true, decided, classes)
    assert "The 50 worst of 100 classes." in page
    assert "<td>spk099</td><td>spk005</td><td>1</td>" in page
    assert page.count("<tr>") == 2 + 50 + 1
