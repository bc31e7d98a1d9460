"""The documentation site: it builds without a warning, and shows what it has to."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown import Markdown
from markdown_it import MarkdownIt
from pydantic import BaseModel

from speakerlab.__main__ import COMMANDS
from speakerlab.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs/site"))
from list_indents import indent_lists  # noqa: E402

PAGES = sorted(
    [
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("egs/*/README.md"),
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "benchmarks/RESULTS.md",
    ]
)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as `make docs` does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        [*command, "--config-file", str(config), "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Return the folder of the whole site."""
    site = tmp_path_factory.mktemp("site")
    built = build(ROOT / "mkdocs.yml", site)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return site


def text_of(page: Path) -> str:
    """Return the text of a page without its tags, blanks as in a sentence."""
    text = re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))
    return " ".join(text.split())


def test_files_outside_docs_are_pages_with_their_links(site):
    page = (site / "egs/mini/index.html").read_text(encoding="utf-8")
    assert 'href="../../scoring.html#codecs"' in page
    assert 'href="lid/index.html"' in page
    guide = (site / "recipes.html").read_text(encoding="utf-8")
    assert 'href="egs/mini/index.html"' in guide
    source = text_of(site / "docs/onnx/embed.py.html")
    assert "import onnxruntime" in source


def test_every_command_is_shown_with_its_help(site):
    text = text_of(site / "commands.html")
    for command in COMMANDS:
        assert f"usage: speakerlab {command} " in text
    assert "Score trial lists, write results.json and report.html." in text
    assert "EERs, significance" in text


def test_the_api_has_docstrings_and_the_comments_of_fields(site):
    text = text_of(site / "api.html")
    assert "Load an experiment, a model folder" in text
    # Behind the field, and above it.
    assert "cosine of the two embeddings" in text
    assert "Seconds of speech in each recording" in text


def test_every_setting_is_shown_with_its_default(site):
    text = text_of(site / "settings.html")
    assert "teacher_momentum 0.996 number from 0 to 1 in the first step" in text
    assert "features wave wave, fbank computed, or packed" in text
    assert "rirs rirs string or null" in text
    for section in Config.model_fields.values():
        kind = section.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys = set(re.findall(r"\w+", text))
            assert set(kind.model_fields) - keys == set()


def test_the_search_finds_guides_and_no_source_code(site):
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"diarization.html", "egs/mini/index.html", "commands.html"} <= places
    assert not any(place.endswith(".py.html") for place in places)


def test_a_page_requests_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        html = page.read_text(encoding="utf-8")
        requested = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(http[^"]+)', html
        )
        assert requested == [], page


def test_broken_links_and_forgotten_pages_end_the_build(tmp_path):
    pages = tmp_path / "docs"
    pages.mkdir()
    targets = ("absent.md", "#absent", "/index.md")
    links = " ".join(f"[a link]({target})" for target in targets)
    text = f"# Title\n\n{links} ![a picture](absent.png)\n"
    (pages / "index.md").write_text(text, encoding="utf-8")
    (pages / "forgotten.md").write_text("# Not in nav\n", encoding="utf-8")
    # The settings of the site, for these pages.
    (tmp_path / "mkdocs.yml").write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\n"
        f"docs_dir: {pages}\nnav: [index.md]\nhooks: []\nplugins: []\nwatch: []\n",
        encoding="utf-8",
    )
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode == 1
    for target in (*targets, "absent.png"):
        assert f"'{target}'" in built.stderr
    assert "forgotten.md" in built.stderr
    assert built.stderr.count("WARNING") == 5


# The same structure on the site and on the host


class Structure(HTMLParser):
    """Words of a page, and the tags that a reader sees."""

    SEEN = (
        "ul",
        "ol",
        "li",
        "pre",
        "table",
        "tr",
        "blockquote",
        "h1",
        "h2",
        "h3",
        "h4",
    )

    def __init__(self, html: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.feed(html)

    def handle_starttag(
        self, tag: str, attrs: Iterable[tuple[str, str | None]]
    ) -> None:
        if tag in self.SEEN:
            self.parts.append(f"<{tag}>")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.SEEN:
            self.parts.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        self.parts += data.split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_tables_and_code_are_those_of_the_host(page):
    text = page.read_text(encoding="utf-8")
    on_host = MarkdownIt("commonmark").enable("table").render(text)
    maker = Markdown(
        extensions=[
            "tables",
            "sane_lists",
            "pymdownx.highlight",
            "pymdownx.superfences",
        ],
        extension_configs={"pymdownx.highlight": {"use_pygments": False}},
    )
    on_site = maker.convert(indent_lists(text))
    assert Structure(on_site).parts == Structure(on_host).parts
