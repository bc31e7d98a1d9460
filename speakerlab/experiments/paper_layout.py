"""Layout of figures for papers: sizes, fonts, colours, lines, legends, and the files.

A figure has the size that it has in the paper, so its text has the size that it says. Fonts are
embedded. The colours differ for colour-blind readers too (M. Okabe and K. Ito, "Color universal
design", 2008), and lines differ in their dashes, so that they can be distinguished in grey.
"""

import logging
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speakerlab.core.atomic import replacing
from speakerlab.experiments.plots import GREY, PALE, default_style

log = logging.getLogger(__name__)
# Of Interspeech and Odyssey, which are narrower than those of ICASSP and IEEE.
COLUMN_CM, PAGE_CM = 8.0, 17.0
MAX_HEIGHT_CM = 24.0  # of the text on a page
WIDE_CM = 12.0  # from this width on, the legend is beside the plot
MAX_LEGEND_SHARE = 0.36  # of the width of such a figure
LEGEND_X = 1.03  # place of the legend beside a plot, in widths of the plot
LEGEND_GAP_CM = 0.2  # to the plot
HANDLE_EM = 4.0  # of an entry of the legend: its line and blanks, in sizes of its font
CM = 1 / 2.54  # in inches
POINT_CM = 2.54 / 72
PNG_DPI = 600
# Okabe and Ito, without yellow, which is too pale on white paper.
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#000000",
    "#e69f00",
    "#56b4e9",
)
# As many as colours less one, so that the pairs of both repeat late.
DASHES = (
    "-",
    (0, (5, 1.5)),
    (0, (5, 1.5, 1, 1.5)),
    (0, (1, 1.2)),
    (0, (8, 1.5, 1, 1.5, 1, 1.5)),
    (0, (2.5, 1.5)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Times is the face of most papers in two columns; the second one has more scripts.
FONTS = ("STIXGeneral", "DejaVu Sans")


@dataclass(frozen=True)
class Size:
    """Width of a figure in the paper, and the size of its text."""

    width_cm: float
    font_size: float  # of labels, in points

    @property
    def is_wide(self) -> bool:
        return self.width_cm >= WIDE_CM

    @property
    def small(self) -> float:
        """Font size of ticks and of the legend."""
        return self.font_size - 1


@contextmanager
def paper_style(size: Size) -> Iterator[None]:
    """Draw and save with the fonts, lines and text sizes of a paper."""
    with default_style() as matplotlib:
        matplotlib.rcParams.update(
            {
                "font.family": list(FONTS),
                "mathtext.fontset": "stix",
                "font.size": size.font_size,
                "axes.labelsize": size.font_size,
                "axes.titlesize": size.font_size,
                "xtick.labelsize": size.small,
                "ytick.labelsize": size.small,
                "legend.fontsize": size.small,
                "legend.title_fontsize": size.small,
                "axes.linewidth": 0.6,
                "xtick.major.width": 0.6,
                "ytick.major.width": 0.6,
                "xtick.major.size": 2.5,
                "ytick.major.size": 2.5,
                "figure.constrained_layout.h_pad": 0.04,
                "figure.constrained_layout.w_pad": 0.03,
                # TrueType: publishers refuse the default, Type 3.
                "pdf.fonttype": 42,
                # Text as outlines looks the same without the font.
                "svg.fonttype": "path",
                # Equal figures have equal bytes.
                "svg.hashsalt": "speakerlab",
            }
        )
        yield


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure in the format of the ending of `path`; equal figures give equal bytes.

    Raises ValueError for a figure that is higher than a page.
    """
    height_cm = figure.get_figheight() / CM
    if height_cm > MAX_HEIGHT_CM:
        raise ValueError(
            f"{path}: would be {height_cm:.0f} cm high, and a page has"
            f" {MAX_HEIGHT_CM:g} cm; draw fewer systems, or take --width page"
        )
    ending = path.suffix.lower()
    # It writes a dozen lines on the letters of each embedded font.
    logging.getLogger("fontTools").setLevel(logging.WARNING)
    # Neither the time nor the name of the software.
    metadata: dict[str, dict[str, Any]] = {
        ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
        ".svg": {"Date": None, "Creator": None},
        ".png": {"Software": None},
    }
    with warnings.catch_warnings(record=True) as caught, replacing(path) as partial:
        warnings.simplefilter("always")
        # The layout of square axes takes a second round.
        figure.draw_without_rendering()
        figure.savefig(
            partial,
            format=ending.removeprefix("."),
            dpi=PNG_DPI,
            metadata=metadata[ending],
        )
    missing = [
        str(warning.message)
        for warning in caught
        if "missing from" in str(warning.message)
    ]
    if missing:
        log.warning(
            "%s: a name has characters that no font here has (%s); give another name",
            path,
            missing[0].partition(" missing")[0],
        )


def new_figure(size: Size, height_cm: float) -> Any:
    from matplotlib.figure import Figure

    # Without pyplot, which keeps every figure in memory and may need a display.
    return Figure(
        figsize=(size.width_cm * CM, height_cm * CM),
        layout="constrained",
        # That of PDF and SVG, so that text measures the same.
        dpi=72,
    )


@dataclass(frozen=True)
class Legend:
    """Entries of a legend, which covers no curve: it is above a plot, or beside a wide one."""

    handles: Sequence[Any]  # lines and patches of matplotlib
    texts: Sequence[str]
    title: str = ""

    def add_above(self, figure: Any, size: Size, *, max_columns: int) -> None:
        """Add the legend above all plots; the figure becomes higher, so that they keep theirs."""
        lines, columns = _fit(
            figure, size, self.texts, size.width_cm, max_columns=max_columns
        )
        legend = self._add(
            figure,
            lines,
            _wrapped(figure, size, self.title, size.width_cm),
            ncols=columns,
            loc="outside upper left",
        )
        height_cm = _extent_cm(figure, legend)[1] + LEGEND_GAP_CM
        figure.set_figheight(figure.get_figheight() + height_cm * CM)

    def add_beside(self, figure: Any, axes: Any, size: Size) -> float:
        """Add the legend at the right of the only plot; return the width that it leaves."""
        most_cm = size.width_cm * MAX_LEGEND_SHARE
        lines, _ = _fit(figure, size, self.texts, most_cm, max_columns=1)
        title = _wrapped(figure, size, self.title, most_cm)
        text_cm = max(width_cm(figure, size, text) for text in lines)
        text_cm += HANDLE_EM * size.small * POINT_CM
        legend_cm = max(text_cm, width_cm(figure, size, title))
        self._add(
            axes,
            lines,
            title,
            loc="upper left",
            bbox_to_anchor=(LEGEND_X, 1.0),
        )
        axes.set_anchor("W")
        return size.width_cm - legend_cm - 2 * LEGEND_GAP_CM

    def _add(self, parent: Any, lines: Sequence[str], title: str, **place: Any) -> Any:
        """Add the legend to a figure or to axes; place: see matplotlib."""
        # Texts are set afterwards: matplotlib would leave out a name that begins with an
        # underscore, and take what is between two $ for a formula.
        legend = parent.legend(
            self.handles,
            [" "] * len(lines),
            title=title or None,
            frameon=False,
            alignment="left",
            borderpad=0,
            borderaxespad=0.4,
            handlelength=2.4,
            labelspacing=0.25,
            columnspacing=1.2,
            **place,
        )
        for label, text in zip(legend.get_texts(), lines):
            label.set_parse_math(False)
            label.set_text(text)
        return legend


def figure_with_legend(
    size: Size, legend: Legend, *, aspect: float
) -> tuple[Any, Any, float]:
    """Return a figure with a legend, its axes, and the height of the plot with its labels, in cm.

    aspect: height of the plot as a share of its width.
    """
    figure = new_figure(size, aspect * size.width_cm)
    axes = figure.add_subplot()
    if size.is_wide:
        height_cm = aspect * legend.add_beside(figure, axes, size)
        figure.set_figheight(height_cm * CM)
    else:
        height_cm = aspect * size.width_cm
        legend.add_above(figure, size, max_columns=len(legend.texts))
    return figure, axes, height_cm


def _fit(
    figure: Any,
    size: Size,
    texts: Sequence[str],
    most_cm: float,
    *,
    max_columns: int,
) -> tuple[list[str], int]:
    """Return the texts of a legend, broken into lines that fit, and its number of columns."""
    handle_cm = HANDLE_EM * size.small * POINT_CM
    widest_cm = max(width_cm(figure, size, text) for text in texts) + handle_cm
    most_columns = min(max_columns, len(texts), max(int(most_cm / widest_cm), 1))
    # As few columns as give so few lines.
    num_lines = -(-len(texts) // most_columns)
    columns = -(-len(texts) // num_lines)
    room_cm = most_cm / columns - handle_cm
    return [_wrapped(figure, size, text, room_cm) for text in texts], columns


def _wrapped(figure: Any, size: Size, text: str, most_cm: float) -> str:
    """Break a text into lines of at most this width."""
    width = width_cm(figure, size, text)
    if width <= most_cm:
        return text
    # By the mean width of its characters, with a reserve for lines of wide ones.
    num_characters = int(0.9 * len(text) * most_cm / width)
    return "\n".join(textwrap.wrap(text, max(num_characters, 8)))


def wrapped_title(figure: Any, size: Size, text: str, most_cm: float) -> str:
    """Break the title of a panel, which is larger than the text of a legend."""
    return _wrapped(figure, size, text, most_cm * size.small / size.font_size)


def width_cm(figure: Any, size: Size, text: str) -> float:
    artist = figure.text(0, 0, text, fontsize=size.small, parse_math=False)
    width, _ = _extent_cm(figure, artist)
    artist.remove()
    return width


def _extent_cm(figure: Any, artist: Any) -> tuple[float, float]:
    """Return the width and the height of a text or a legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    # A character without a glyph is reported when the figure is saved.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        extent = artist.get_window_extent(renderer)
    return extent.width / figure.dpi / CM, extent.height / figure.dpi / CM


def set_title(axes: Any, text: str) -> None:
    title = axes.set_title(" ", loc="left", pad=3)
    title.set_parse_math(False)
    title.set_text(text)


def finish(axes: Any) -> None:
    axes.grid(color=PALE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GREY)
    axes.tick_params(color=GREY, labelcolor="black")
    axes.xaxis.label.set_color("black")


def colour_of(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def dashes_of(place: int) -> Any:
    return DASHES[place % len(DASHES)]


def marker_of(place: int) -> str:
    return MARKERS[place % len(MARKERS)]


def system_handles(num_systems: int, *, with_markers: bool = False) -> list[Any]:
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    for place in range(num_systems):
        handle = Line2D(
            [],
            [],
            color=colour_of(place),
            linestyle=dashes_of(place),
            linewidth=1.1,
            marker=marker_of(place) if with_markers else "",
            markersize=4,
        )
        handles.append(handle)
    return handles
