"""Names are text in every page: 200 hostile ones add no element, attribute, script or request."""

import os
import random
import unicodedata
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import browser
import numpy as np
import pytest
from result_rows import identified, row
from voices import RATE, make_wave

from speakerlab.bin import diarize
from speakerlab.data import audio
from speakerlab.diarization.regions import Turn
from speakerlab.diarization.scoring import score_recordings
from speakerlab.experiments import report
from speakerlab.experiments.diarization import results_of
from speakerlab.experiments.hardest import HardTrial, data_uri
from speakerlab.experiments.linking import write_page
from speakerlab.experiments.plots import Picture
from speakerlab.experiments.timeline import worst_minutes
from speakerlab.inference.diarize import Diarization, Segment
from speakerlab.inference.known_speakers import Match
from speakerlab.inference.link import DoubtfulPair, Identity, Linked, Member

NUM = 200
LONG = 10_000
RUN = "window.ran=1"
AWAY = "http://speakerlab.invalid/x"
MARKUP = (
    f"<script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f"<svg/onload={RUN}>",
    f"<iframe srcdoc='<script>parent.{RUN}</script>'></iframe>",
    f"<a href=javascript:{RUN}>a</a>",
    f"<input autofocus onfocus={RUN}>",
    f"<details open ontoggle={RUN}>",
    f"<img src={AWAY}>",
    f"<link rel=stylesheet href={AWAY}>",
    f"<script src={AWAY}></script>",
    f"<meta http-equiv=refresh content=0;url={AWAY}>",
    f"<base href={AWAY}>",
    f"<audio autoplay src={AWAY}></audio>",
    f"<style>*{{background:url({AWAY})}}</style>",
    f"<b style=background:url({AWAY})>",
    f"&lt;script&gt;{RUN}&lt;/script&gt;",
    f"{{{{ cycler.__init__.__globals__ }}}}<script>{RUN}</script>",
    f"${{{RUN}}}`${{{RUN}}}`",
    f"javascript:{RUN}",
    f"\\x3cscript\\x3e{RUN}\\u003c/script>",
)
BEFORE = (
    *(
        '"',
        "'",
        '">',
        "'>",
        "</title>",
        "</style>",
        "</script>",
        "</pre>",
        "-->",
        "]]>",
        "`",
    ),
    *(
        "\u202e",
        "\u2066\u202d",
        "\u200f",
        "\u061c",
        "\x00",
        "\x1b[2J",
        "\x85",
        "\ufeff",
        "אב",
    ),
    *(
        f'" onmouseover="{RUN}" ',
        f"' autofocus onfocus='{RUN}' ",
        "<!--",
        "<bdi>",
        "\udcff",
    ),
)


def hostile_names(seed: int) -> list[str]:
    """Return names that all differ; each fortieth has 10,000 characters."""
    rng = random.Random(seed)
    names: list[str] = []
    for number in range(NUM):
        parts = [rng.choice(BEFORE), MARKUP[number % len(MARKUP)], rng.choice(BEFORE)]
        name = "".join(parts) + str(number)
        names.append(
            name.ljust(LONG, rng.choice("Wא<&\"'")) if number % 40 == 7 else name
        )
    return names


NAMES = hostile_names(0)
PLAIN = [f"name{number:03d}" for number in range(NUM)]


# Controls of writing direction by their class (Unicode, UAX #9), and the marks ALM, LRM and RLM.
DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
MARKS = "\u061c\u200e\u200f"


def shown(name: str) -> str:
    """Return a name with its controls, and those of writing direction, as their numbers."""

    def is_hidden(c: str) -> bool:
        is_control = unicodedata.category(c) in ("Cc", "Cs")
        return is_control or c in MARKS or unicodedata.bidirectional(c) in DIRECTIONS

    return "".join(
        c.encode("unicode_escape").decode() if is_hidden(c) else c for c in name
    )


def write_pages(folder: Path, names: list[str]) -> list[Path]:
    """Write every kind of page, with these names wherever a page has one."""
    folder.mkdir()
    paths = [
        folder / f"{kind}.html"
        for kind in ("verification", "classes", "der", "linking", "timeline")
    ]
    for path, write in zip(paths, (verification, classes, der, linking, timeline)):
        write(path, names)
    return paths


def verification(path: Path, names: list[str]) -> None:
    png = path.with_suffix(".png")
    clip = data_uri(np.zeros(800, np.int16), RATE)
    png.write_bytes(b"not looked at")
    parts = {"num_target": 1, "num_nontarget": 1, "eer": 0.1, "eer_ci95": [0.0, 0.2]}
    compared = {"eer_difference": 0.1, "ci95": [0.0, 0.2], "p_value": 0.5}
    rows = []
    for name in names:
        about = dict.fromkeys(
            ("trials", "system", "backend", "protocol", "calibration"), name
        )
        conditions = [{"condition": name, "value": name, **parts}]
        rows.append(
            row(**about, conditions=conditions, compared={"with": name, **compared})
        )
    report.write_page(
        path,
        title=names[7],
        rows=rows,
        pictures={name: [Picture(name, png)] for name in names},
        hardest={
            name: (name, {name: [HardTrial(name, name, 0.1, clip, None)]})
            for name in names
        },
        facts={name: {name: name, f"of {name}": f"{name}\n"} for name in names},
        notes=names,
    )


def classes(path: Path, names: list[str]) -> None:
    """Ten small sets with a table of confusions, and a large one without."""
    sets = [names[i : i + 20] for i in range(0, NUM, 20)] + [names]
    rows = []
    for classes_of_one in sets:
        number = np.arange(len(classes_of_one))
        about = dict.fromkeys(("data", "system", "protocol"), classes_of_one[0])
        rows.append(identified(number, np.roll(number, 1), classes_of_one, **about))
    report.write_identification_page(
        path, title=names[7], rows=rows, facts={names[0]: {}}
    )


def der(path: Path, names: list[str]) -> None:
    """Two hundred recordings, in the worst of which are as many speakers."""
    reference = {name: [Turn(0.0, 10.0, name)] for name in names}
    reference[names[0]] = [Turn(0.0, 10.0, name) for name in names]
    hypothesis = {
        name: [turn._replace(start=5.0) for turn in reference[name]] for name in names
    }
    protocol = {"collar": 0.0, "skip_overlap": False, "regions": None}
    errors = score_recordings(reference, hypothesis, **protocol)
    about = {"collar": 0.0, "overlap": True, "regions": names[1], "jer": names[2]}
    report.write_diarization_page(
        path,
        title=names[7],
        results=results_of(errors, about),
        minutes=worst_minutes(reference, hypothesis, **protocol),
        facts={"Files": dict.fromkeys(names[:2], Path(names[3]))},
    )


def timeline(path: Path, names: list[str]) -> None:
    """Linked to a recording beside the page with the most hostile name that a file can have."""
    segments = []
    matches = {}
    speakers = {}
    for index, name in enumerate(names):
        start = index / 2
        segments.append(Segment(start, start + 0.4, name, 0.5))
        matches[name] = Match(name, 0.7, 0.5, is_known=False)
        speakers[name] = np.ones(2)
    diarization = Diarization(names[7], 100.0, segments, speakers, matches)
    written = path.with_suffix(".flac")
    recording = path.with_name(file_name(names))
    audio.write(written, make_wave(0, 0, 1.0), RATE)
    written.rename(recording)
    diarize.write_page(path, diarization, recording, None, embedded_rate=None)


def linking(path: Path, names: list[str]) -> None:
    """People and speakers of all names; every recording has a page with a hostile name."""
    identities = []
    pairs = []
    for index, name in enumerate(names):
        members = [
            Member(recording=name, speaker=name, seconds=1.0, closeness=0.5),
            Member(recording=f"of {name}", speaker=name, seconds=1.0, closeness=None),
        ]
        identity = Identity(name, members, is_unknown=index % 2 == 0)
        identities.append(identity)
        pair = DoubtfulPair(name, names[0], closeness=0.5, is_apart=True)
        pairs.append(pair)
    linked = Linked(
        identities,
        threshold=0.5,
        far=0.01,
        doubtful=pairs[:100],
        last_numbers={},
    )
    address = f"../{link(names)}.html"
    page_of = dict.fromkeys(names, address)
    write_page(path, linked, page_of, {names[0]: names[1]})


def file_name(names: list[str]) -> str:
    text = "".join(names[:3]).replace("/", "").replace("\0", "")
    return f"{text}#?%2e.flac"


def link(names: list[str]) -> str:
    return quote(os.fsencode(file_name(names)))


class Parsed(HTMLParser):
    """The elements of a page with their attributes, its scripts, and what can be read in it."""

    READ = ("alt", "title", "aria-label")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements = Counter[object]()
        self.scripts = list[str]()
        self.texts = list[str]()
        self.tag = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tag = tag
        self.elements[tag, str([(k, v) for k, v in attrs if k not in self.READ])] += 1
        self.texts += [v for k, v in attrs if k in self.READ and v]

    def handle_endtag(self, tag: str) -> None:
        self.tag = ""

    def handle_data(self, data: str) -> None:
        (self.scripts if self.tag == "script" else self.texts).append(data)

    def handle_comment(self, data: str) -> None:
        self.elements[data] += 1

    handle_decl = handle_pi = unknown_decl = handle_comment


def test_hostile_names_are_text(tmp_path: Path) -> None:
    hostile = write_pages(tmp_path / "hostile", NAMES)
    plain = write_pages(tmp_path / "a", PLAIN)
    assert len({*NAMES}) == NUM
    assert max(map(len, NAMES)) == LONG
    for path, other in zip(hostile, plain):
        page = path.read_text(encoding="utf-8")
        expected = Parsed(other.read_text(encoding="utf-8"))
        assert path.stem != "timeline" or f'src="{link(NAMES)}"' in page
        parsed = Parsed(page.replace(link(NAMES), link(PLAIN)))
        assert parsed.elements - expected.elements == Counter(), path
        assert parsed.scripts == expected.scripts
        assert len(parsed.scripts) == (path.stem == "timeline")
        text = "\n".join(parsed.texts)
        missing = [name for name in NAMES if shown(name) not in text]
        assert not missing, (path, missing[0][:200])
        assert not any(c != "\n" and shown(c) != c for c in {*page}), path


# True for each pair of neighbours of ASCII in a line of text whose second is displayed first.
REORDERED = """(() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [], range = document.createRange();
  let last = null;
  for (let node; (node = walker.nextNode()); ) {
    let block = node.parentElement;
    while (getComputedStyle(block).display === "inline") block = block.parentElement;
    for (let i = 0; i < node.length; i++) {
      if (node.data.charCodeAt(i) > 126) continue;
      range.setStart(node, i);
      range.setEnd(node, i + 1);
      const box = range.getBoundingClientRect();
      if (!box.width) continue;
      if (last && last.block === block && box.left < last.box.left - 1 &&
          box.top < last.box.bottom - 3 && box.bottom > last.box.top + 3)
        found.push(node.data.slice(Math.max(i - 20, 0), i + 20));
      last = {block, box};
    }
  }
  return found;
})()"""
WIDEST = """Math.max(document.documentElement.scrollWidth / innerWidth,
  ...[...document.querySelectorAll("td,th:not([colspan])")].map((e) => e.offsetWidth / 513))"""
POINT = """for (const e of document.querySelectorAll("main *"))
  for (const kind of ["mouseover", "focus", "click", "toggle"])
    e.dispatchEvent(new Event(kind, {bubbles: true}));"""


FAULTS = f"<script>{RUN}</script><img src=x onerror={RUN}><img src={AWAY}>"


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[browser.Page]:
    if browser.FOUND is None:
        pytest.skip("needs Chromium (Debian: apt install chromium)")
    with browser.browsing(tmp_path / "profile") as page:
        yield page


@pytest.mark.slow
def test_a_browser_runs_nothing_and_fetches_nothing(
    tmp_path: Path, tab: browser.Page
) -> None:
    pages = write_pages(tmp_path / "pages", NAMES)
    recording = pages[0].with_name(file_name(NAMES)).as_uri()
    for path in pages:
        tab.open(path.as_uri())
        tab.ask(POINT)
        assert tab.ask("window.ran") is None and not tab.seen(
            "Page.javascriptDialogOpening"
        ), path
        urls = [
            sent["request"]["url"] for sent in tab.seen("Network.requestWillBeSent")
        ]
        allowed = (
            {path.as_uri(), recording} if path.stem == "timeline" else {path.as_uri()}
        )
        assert {url for url in urls if not url.startswith("data:")} == allowed
        assert [entry["entry"]["text"] for entry in tab.seen("Log.entryAdded")] == [], (
            path
        )
        assert tab.ask("location.href") == path.as_uri()
        assert tab.ask(WIDEST) <= 1, path
    assert tab.ask("audio.play().then(() => audio.duration)") == 1.0


@pytest.mark.slow
def test_a_browser_shows_the_text_beside_a_name_in_its_order(
    tmp_path: Path, tab: browser.Page
) -> None:
    names = [f"{BEFORE[number % len(BEFORE)]}{number}" for number in range(NUM)]
    for path in write_pages(tmp_path / "pages", names):
        tab.open(path.as_uri())
        assert tab.ask(REORDERED) == [], path


@pytest.mark.slow
def test_the_policy_of_a_page_stops_what_is_not_escaped(
    tmp_path: Path, tab: browser.Page
) -> None:
    for path in write_pages(tmp_path / "pages", PLAIN):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("<main>", f"<main>{FAULTS}"), encoding="utf-8")
        tab.open(path.as_uri())
        assert tab.ask("document.querySelectorAll('main > img').length") == 2
        assert tab.ask("window.ran") is None, path
        failed = [
            failure.get("blockedReason")
            for failure in tab.seen("Network.loadingFailed")
        ]
        assert failed.count("csp") == 2, path


@pytest.mark.slow
def test_the_browser_would_report_each_fault(tmp_path: Path, tab: browser.Page) -> None:
    path = tmp_path / "page.html"
    text = "<meta charset=utf-8><p>\u202eabc<p>אב, 1: 2: 3"
    path.write_text(text + FAULTS, encoding="utf-8")
    tab.open(path.as_uri())
    assert tab.ask("window.ran") == 1
    assert len(tab.ask(REORDERED)) > 2
    assert AWAY in {
        sent["request"]["url"] for sent in tab.seen("Network.requestWillBeSent")
    }
