"""Figures for papers: they show the numbers of `score`, and nothing is clipped or covered."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from paper_systems import make_list, score
from refusals import refuses
from result_rows import identified
from scipy.special import ndtr

from speakerlab.experiments import paper_figures, paper_layout, plots
from speakerlab.experiments.paper_confusion import (
    MAX_CLASSES,
    OTHER,
    confusion_figure,
    confusion_shares,
)
from speakerlab.experiments.paper_figures import (
    det_figure,
    duration_figure,
    roc_figure,
    scores_figure,
)
from speakerlab.experiments.paper_layout import Size, paper_style, save_figure
from speakerlab.experiments.plots import DetCurve, default_style, draw_det
from speakerlab.experiments.trial_list import read_trial_list
from speakerlab.scoring import conditions
from speakerlab.scoring.conditions import condition_rows
from speakerlab.scoring.metrics import eer, error_rates, min_dcf, operating_points

image = pytest.importorskip("matplotlib.image")
P_TARGETS = (0.01, 0.05)
COLUMN = Size(8.0, 8.0)
PAGE = Size(17.0, 8.0)
# More than one line of a column, a formula of TeX, what matplotlib leaves out, another script.
NAMES = (
    r"we$ird \{name$_1$ % & #",
    "_hidden",
    "a long name of a system with large margins, score normalisation and quality measures",
    "Größe",
    "e",
    "f",
)


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    return make_list(tmp_path_factory.mktemp("data") / "test")


@pytest.fixture(autouse=True)
def style():
    with paper_style(COLUMN):
        yield


def lines_of(axes, colour):
    """The curves of a colour, as (x, y), without markers and the diagonal."""
    return [
        line.get_data()
        for line in axes.lines
        if line.get_color() == colour and len(line.get_xdata()) > 2
    ]


def crossing(x_K, y_K):
    """Where a curve crosses the diagonal upwards: linear between its two points beside it."""
    gap_K = np.asarray(y_K) - np.asarray(x_K)
    is_below = gap_K[:-1] < 0
    is_above_next = gap_K[1:] >= 0
    (before,) = np.flatnonzero(is_below & is_above_next)
    after = before + 1
    share = gap_K[before] / (gap_K[before] - gap_K[after])
    return x_K[before] + share * (x_K[after] - x_K[before])


def det(scored, size=COLUMN, **options):
    return det_figure(scored, size, p_targets=P_TARGETS, **options)


def test_a_det_curve_crosses_the_diagonal_at_the_eer(listed):
    scored = score(listed, [0.3, 0.5, 0.8])
    (axes,) = det(scored).axes
    for result, colour in zip(scored, paper_layout.COLOURS):
        ((x_K, y_K),) = lines_of(axes, colour)
        expected = eer(result.scores_N, result.is_target_N)
        assert ndtr(crossing(x_K, y_K)) == pytest.approx(expected, abs=1e-9)
        assert 0 < expected < 0.5


def test_the_points_of_minimum_cost_are_marked(listed):
    (result,) = score(listed, [0.5])
    (axes,) = det([result]).axes
    places = {
        line.get_marker(): ndtr([line.get_xdata()[0], line.get_ydata()[0]])
        for line in axes.lines
        if len(line.get_xdata()) == 1
    }
    assert places.keys() == {"o", "s", "^"}
    for marker, p_target in (("s", 0.01), ("^", 0.05)):
        p_fa, p_miss = places[marker]
        low = ndtr(axes.get_xlim()[0])
        # A point without false alarms is drawn at the end of the axis.
        p_fa = 0 if p_fa == pytest.approx(low) else p_fa
        cost = (p_target * p_miss + (1 - p_target) * p_fa) / p_target
        expected = min_dcf(result.scores_N, result.is_target_N, p_target=p_target)
        assert cost == pytest.approx(expected, abs=1e-6)


def height_at(curve, x):
    """The heights of a curve (x, y) of steps at a place: those of its points, or of its line."""
    x_K, y_K = curve
    return np.append(y_K[np.isclose(x_K, x)], np.interp(x, x_K[::-1], y_K[::-1]))


@pytest.mark.parametrize("num_nontarget", [2_000, 150_000])
def test_marked_points_are_on_their_curves(num_nontarget):
    """Also that of no false alarms, where a list has many non-targets."""
    rng = np.random.default_rng(3)
    is_target_N = np.arange(300 + num_nontarget) < 300
    # The highest targets are above all non-targets.
    scores_N = rng.standard_normal(len(is_target_N)).clip(max=3.2) + 3.0 * is_target_N
    p_miss_K, p_fa_K, _ = operating_points(scores_N, is_target_N)
    marked = paper_figures._min_dcf_points(p_miss_K, p_fa_K, [0.0001, 0.01])
    assert marked[0][2] == 0 < marked[1][1]
    curve = DetCurve(p_miss_K, p_fa_K, label="", colour="red", marked=marked)
    with default_style():
        figure = paper_layout.new_figure(COLUMN, 8.0)
        axes = figure.add_subplot()
        draw_det(axes, [curve], linewidth=1, markersize=4, character=0.02)
    (line,) = lines_of(axes, "red")
    points = [part.get_data() for part in axes.lines if len(part.get_xdata()) == 1]
    assert len(points) == 3
    low, _ = axes.get_xlim()
    for (x,), (y,) in points:
        assert abs(height_at(line, x) - y).min() < 1e-6
    # Of no false alarms: at the end of the axis.
    assert points[1][0][0] == low


def test_labels_of_both_axes_are_alike_and_apart(listed):
    for scored in (score(listed, [0.3, 0.9]), score(listed, [0.1])):
        (axes,) = det(scored).axes
        labels = [text.get_text() for text in axes.get_xticklabels()]
        assert labels == [text.get_text() for text in axes.get_yticklabels()]
        assert "10" in labels
    labels = ["0.05", "0.1", "0.2", "0.5", "1"]
    places = [0.0, 0.06, 0.12, 0.3, 0.4]
    is_decade = [False, True, False, False, True]
    shown = plots._apart(labels, places, is_decade, 0.02)
    assert shown == ["", "0.1", "", "0.5", "1"]


def test_a_wide_figure_has_no_blank_beside_its_legend(listed):
    scored = score(listed, [0.3, 0.5], names=["a", "b"])
    figure = det(scored, PAGE)
    for _ in range(2):
        figure.draw_without_rendering()
    (axes,) = figure.axes
    plot = axes.get_window_extent()
    legend = axes.legend_.get_window_extent()
    width = figure.bbox.width
    assert plot.width > 0.57 * width
    assert legend.x0 - plot.x1 < 0.05 * width
    assert 0 <= width - legend.x1 < 0.05 * width


def test_the_legend_has_the_metrics_of_the_results(listed):
    (result,) = score(listed, [0.4])
    figure = det([result])
    (text,) = figure.legends[0].get_texts()
    name, _, metrics = text.get_text().partition(": ")
    eer_text, cost_1, cost_5 = metrics.replace(" %", "").split(", ")
    assert name == "system 0"
    assert float(eer_text) == pytest.approx(100 * result.metric("eer"), abs=0.005)
    assert float(cost_1) == pytest.approx(result.metric("min_dcf_0.01"), abs=0.0005)
    assert float(cost_5) == pytest.approx(result.metric("min_dcf_0.05"), abs=0.0005)


def test_bands_are_about_their_curves_and_need_speakers(listed, tmp_path, caplog):
    def band_of(result):
        figure = det([result], with_bands=True)
        return figure.axes[0].collections

    (band,) = band_of(*score(listed, [0.5]))
    x_K, y_K = band.get_paths()[0].vertices.T
    assert np.isfinite(x_K).all() and np.ptp(y_K) > 0.5
    small = make_list(tmp_path / "small", num_speakers=4)
    assert not band_of(*score(small, [0.5]))
    assert "too few speakers" in caplog.text


def test_a_roc_curve_passes_through_the_eer(listed):
    scored = score(listed, [0.4, 0.8])
    figure = roc_figure(scored, COLUMN, p_targets=P_TARGETS)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    for result, colour in zip(scored, paper_layout.COLOURS):
        ((x_K, y_K),) = lines_of(axes, colour)
        rate = 100 * eer(result.scores_N, result.is_target_N)
        point = np.argmin(abs(x_K - rate) + abs(y_K - (100 - rate)))
        assert x_K[point] == pytest.approx(rate)
        assert y_K[point] == pytest.approx(100 - rate)


def test_thresholds_of_scores_have_their_error_rates(listed):
    (result,) = score(listed, [0.4])
    (axes,) = scores_figure([result], COLUMN, p_targets=[0.01]).axes
    at_eer, at_cost = [line.get_xdata()[0] for line in axes.lines]
    p_miss, p_fa = error_rates(result.scores_N, result.is_target_N, threshold=at_eer)
    assert p_miss == pytest.approx(result.metric("eer"), abs=1 / 30)
    assert p_fa == pytest.approx(result.metric("eer"), abs=1 / 30)
    p_miss, p_fa = error_rates(result.scores_N, result.is_target_N, threshold=at_cost)
    assert p_miss + 99 * p_fa == pytest.approx(result.metric("min_dcf_0.01"))


def as_experiment(result, **row):
    return replace(result, row={"eer": result.metric("eer"), "min_dcf": {}, **row})


def test_scores_of_one_kind_have_one_axis(listed):
    first, second = score(listed, [0.2, 0.8])
    cosines = [as_experiment(result, backend="cosine") for result in (first, second)]
    other = as_experiment(second, backend="plda")
    small = [
        replace(result, known_scores=result.scores_N / 10) for result in (first, second)
    ]
    for systems, is_shared in [
        (cosines, True),
        ([cosines[0], other], False),
        # Score files: of cosines, or of any scale.
        (small, True),
        ([first, second], False),
        ([cosines[0], small[0]], True),
    ]:
        figure = scores_figure(systems, COLUMN, p_targets=[0.01])
        upper, lower = (axes.get_xlim() for axes in figure.axes)
        assert (upper == lower) == is_shared
        figure.draw_without_rendering()
        # Each panel has its numbers.
        for axes in figure.axes:
            assert any(label.get_text() for label in axes.get_xticklabels())
            assert all(label.get_visible() for label in axes.get_xticklabels())


@pytest.mark.parametrize("threshold", ["at the EER", 9.0])
def test_the_threshold_of_the_model_is_seen(listed, threshold):
    """Where another threshold would cover it, and outside the scores."""
    (result,) = score(listed, [0.4])
    at_eer = paper_figures._thresholds(result, [])["EER"]
    value = at_eer if threshold == "at the EER" else threshold
    system = as_experiment(result, backend="cosine", at_threshold={"threshold": value})
    figure = scores_figure([system], COLUMN, p_targets=[])
    (axes,) = figure.axes
    figure.draw_without_rendering()
    (marker,) = [line for line in axes.lines if line.get_marker() == "v"]
    assert marker.get_xdata()[0] == value
    assert axes.get_xlim()[0] < value < axes.get_xlim()[1]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts[-1] == "threshold, model's own"


def test_histograms_have_the_area_of_all_scores(listed):
    (result,) = score(listed, [0.4])
    (axes,) = scores_figure([result], COLUMN, p_targets=[]).axes
    for patch in axes.patches:
        values, edges, _ = patch.get_data()
        assert np.sum(values * np.diff(edges)) == pytest.approx(1)


@pytest.mark.parametrize("sign", [1, -1], ids=["perfect", "worst"])
@pytest.mark.parametrize("is_finite", [True, False], ids=["finite", "infinite"])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_extreme_systems_can_be_drawn(listed, sign, is_finite):
    (result,) = score(listed, [0.0])
    scores_N = sign * (result.scores_N - 0.5)
    if not is_finite:
        scores_N = scores_N * np.inf
    extreme = replace(result, known_scores=scores_N)
    rate = 0 if sign == 1 else 1
    assert extreme.metric("eer") == rate
    figures = [det([extreme]), duration_figure([extreme], COLUMN)]
    for draw in (roc_figure, scores_figure):
        figures.append(draw([extreme], COLUMN, p_targets=P_TARGETS))
    for figure in figures:
        figure.draw_without_rendering()
    assert f": {100 * rate}.00 %" in figures[0].legends[0].get_texts()[0].get_text()


def test_durations_are_those_of_the_conditions(listed):
    scored = score(listed, [0.4, 0.6])
    figure = duration_figure(scored, COLUMN)
    (axes,) = figure.axes
    rows: list[dict[str, Any]] = []
    for place, result in enumerate(scored):
        rows = condition_rows(
            result.scores_N, listed.trials, listed.speakers, {}, listed.seconds
        )
        line = axes.lines[place]
        assert line.get_color() == paper_layout.COLOURS[place]
        assert list(line.get_ydata()) == [100 * row["eer"] for row in rows]
        bars = axes.collections[2 * place : 2 * place + 2]
        for row, bar in zip(rows, bars):
            ((_, low), (_, high)) = bar.get_segments()[0]
            assert [low, high] == [100 * rate for rate in row["eer_ci95"]]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    counts = [f"{row['num_target']:,}" for row in rows]
    assert labels == [f"2–4\n({counts[0]})", f"4–8\n({counts[1]})"]


def test_a_point_without_an_interval_is_hollow(listed):
    (result,) = score(listed, [0.0])
    figure = duration_figure([result], COLUMN)
    hollow = [
        line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"
    ]
    # No errors at all.
    assert [line.get_ydata()[0] for line in hollow] == [0, 0]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["system 0", "hollow: no interval"]
    figure = duration_figure(score(listed, [0.5]), COLUMN)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["system 0"]


def test_short_names_are_in_one_line(listed):
    figure = duration_figure(
        score(listed, [0.5, 0.6, 0.7], names=["Baseline", "Ours", "Mix"]), COLUMN
    )
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    assert len({round(box.y0) for box in boxes}) == 1
    assert boxes[-1].x1 < figure.bbox.width


def test_a_bin_without_both_kinds_is_left_out(tmp_path):
    folder = tmp_path / "test"
    make_list(folder)
    # One utterance is much longer than the others: its trials have a bin, but no target.
    lines = (folder / "utt2dur").read_text().splitlines()
    names = [line.split()[0] for line in lines]
    seconds = dict.fromkeys(names, 3.0) | {names[0]: 20.0, names[3]: 20.0}
    seconds |= {name: 5.0 for name in names[10:]}
    (folder / "utt2dur").write_text(
        "".join(f"{name} {length}\n" for name, length in seconds.items())
    )
    figure = duration_figure(score(read_trial_list(folder / "trials"), [0.5]), COLUMN)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert [label.partition("\n")[0] for label in labels] == ["2–4", "4–8"]


def test_durations_must_be_known_and_differ(tmp_path):
    folder = tmp_path / "test"
    # All are in one bin.
    scored = score(make_list(folder, seconds=20.0), [0.4])
    with refuses("test/trials", "differ"):
        duration_figure(scored, COLUMN)
    other = make_list(tmp_path / "other")
    (tmp_path / "other/utt2dur").unlink()
    scored = score(type(other)(**{**vars(other), "seconds": {}}), [0.4])
    with refuses(str(tmp_path / "other"), "utt2dur"):
        duration_figure(scored, COLUMN)


def test_confusions_are_shares_of_the_true_class():
    row = identified([0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 0], ["x", "y", "z"])
    true_names, found_names, share = confusion_shares(row)
    assert true_names == found_names == ["x", "y", "z"]
    assert share.tolist() == [[2 / 3, 1 / 3, 0], [0, 1, 0], [1, 0, 0]]
    figure = confusion_figure({"a": row}, COLUMN)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["67", "33", "100", "100"]


@pytest.mark.parametrize("size", [COLUMN, PAGE], ids=["column", "page"])
def test_titles_beside_long_class_names_are_whole(size):
    classes = ["a long name of a language", "another name"]
    row = identified([0, 0, 1, 1], [0, 1, 1, 1], classes)
    name = "a system with large margins, score normalisation and quality measures"
    with paper_style(size):
        figure = confusion_figure({name: row, "b": row}, size)
        for _ in range(2):
            figure.draw_without_rendering()
        for axes in figure.axes:
            # The one on the left is shown.
            assert axes._left_title.get_window_extent().x1 < figure.bbox.width
            text = axes._left_title.get_text().replace("\n", " ")
            assert text in (f"{name}: accuracy 75.00 %", "b: accuracy 75.00 %")
            # It covers no other panel.
            for other in figure.axes:
                box = other.get_window_extent()
                title = axes._left_title.get_window_extent()
                assert other is axes or not title.overlaps(box)


def test_of_many_classes_the_most_confused_are_shown(caplog):
    num_classes = 30
    names = [f"c{number:02}" for number in range(num_classes)]
    # Only the last ones are confused, each with the one before it.
    true = [number for number in range(num_classes) for _ in range(4)]
    found = [
        number - (number > 12 and take == 0)
        for number in range(num_classes)
        for take in range(4)
    ]
    row = identified(true, found, names)
    true_names, found_names, share = confusion_shares(row)
    assert len(true_names) == MAX_CLASSES
    assert set(names[13:]) <= set(true_names)
    assert found_names == [*true_names, OTHER]
    assert share.sum(axis=1) == pytest.approx(np.ones(len(true_names)))
    confusion_figure({"a": row}, COLUMN)
    assert "20 of 30 classes" in caplog.text


def test_classes_of_the_head_that_no_recording_has_are_not_missed(caplog):
    names = [f"c{number}" for number in range(10)]
    # Two classes of the head are not in the test, one of them is found.
    row = identified(list(range(8)), [0, 1, 2, 3, 4, 5, 6, 8], names)
    assert row["num_classes"] == 10
    true_names, found_names, _ = confusion_shares(row)
    assert true_names == names[:8]
    assert found_names == [*names[:9]]
    confusion_figure({"a": row}, COLUMN)
    assert caplog.text == ""


# How it looks


def figures_of(listed, num_systems, size):
    scored = score(
        listed, np.linspace(0.3, 0.9, num_systems).tolist(), names=NAMES[:num_systems]
    )
    row = identified([0, 0, 1, 1], [0, 1, 1, 1], list(NAMES[:2]))
    # Two rows fit on a page.
    num_panels = min(num_systems, 4 if size.is_wide else 2)
    rows: dict[str, Any] = dict.fromkeys(NAMES[:num_panels], row)
    return {
        "det": det(scored, size),
        "roc": roc_figure(scored, size, p_targets=P_TARGETS),
        "scores": scores_figure(scored, size, p_targets=P_TARGETS),
        "duration": duration_figure(scored, size),
        "confusion": confusion_figure(rows, size),
    }


@pytest.mark.parametrize(
    ("num_systems", "size"),
    [(1, COLUMN), (6, COLUMN), (6, PAGE)],
    ids=["one", "six", "six wide"],
)
def test_nothing_is_clipped_or_covered(
    listed, tmp_path, monkeypatch, num_systems, size
):
    # Text is as large as in a PDF.
    monkeypatch.setattr(paper_layout, "PNG_DPI", 72)
    monkeypatch.setattr(conditions, "NUM_REPLICATES", 20)
    for kind, figure in figures_of(listed, num_systems, size).items():
        path = tmp_path / f"{kind}.png"
        save_figure(figure, path)
        pixels = image.imread(path)[..., :3]
        assert pixels.shape[1] == pytest.approx(size.width_cm / 2.54 * 72, abs=1)
        for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
            # Lines of the axes are grey.
            assert edge.min() > 0.5, f"{kind}: text reaches the edge"
        axes_boxes = [axes.get_window_extent() for axes in figure.axes]
        legends = list(figure.legends)
        legends += [axes.legend_ for axes in figure.axes if axes.legend_]
        for legend in legends:
            for box in axes_boxes:
                assert not legend.get_window_extent().overlaps(box), kind


def test_a_figure_is_not_higher_than_a_page(tmp_path):
    row = identified([0, 0, 1, 1], [0, 1, 1, 1], ["x", "y"])
    figure = confusion_figure(dict.fromkeys("abcd", row), COLUMN)
    with refuses(str(tmp_path / "a.pdf"), "24 cm", "--width page"):
        save_figure(figure, tmp_path / "a.pdf")
    assert not list(tmp_path.iterdir())


def test_names_are_shown_as_they_are(listed):
    (first, second, third) = score(listed, [0.3, 0.4, 0.5], names=NAMES[:3])
    figure = duration_figure([first, second, third], COLUMN)
    labels = figure.legends[0].get_texts()
    assert [label.get_text().replace("\n", " ") for label in labels] == list(NAMES[:3])
    assert not any(label.get_parse_math() for label in labels)


def test_every_system_has_another_line():
    looks = {
        (paper_layout.colour_of(place), str(paper_layout.dashes_of(place)))
        for place in range(12)
    }
    assert len(looks) == 12
    # The dashes alone tell six systems apart in grey.
    assert len({str(paper_layout.dashes_of(place)) for place in range(6)}) == 6


def test_fonts_are_embedded_and_files_are_equal(listed, tmp_path, monkeypatch):
    monkeypatch.setattr(paper_layout, "PNG_DPI", 72)
    for ending in (".pdf", ".svg", ".png"):
        for name in "ab":
            save_figure(det(score(listed, [0.4])), tmp_path / f"{name}{ending}")
        data = (tmp_path / f"a{ending}").read_bytes()
        assert data == (tmp_path / f"b{ending}").read_bytes()
    pdf = (tmp_path / "a.pdf").read_bytes()
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf
    # 8 cm in points
    assert b"/MediaBox [ 0 0 226.7" in pdf
    svg = (tmp_path / "a.svg").read_text()
    assert "<text" not in svg and 'width="226.7' in svg


def test_a_name_without_letters_in_the_fonts_is_reported(listed, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    figure = det(score(listed, [0.4], names=["说话人"]))
    save_figure(figure, tmp_path / "a.pdf")
    (record,) = caplog.records
    assert "no font here has" in record.getMessage()
