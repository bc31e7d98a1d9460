"""Collect the pages of the documentation site, for mkdocs.yml.

The site has the files of docs/ and every file of the repository that its pages link to: recipes'
READMEs, the changelog, a source file. All keep their path in the repository as their name, so a
link that works on the repository's host works on the site, and mkdocs checks it. Files that are not
Markdown become pages that show them.
"""

import contextlib
import importlib
import io
import os
import re
from pathlib import Path
from typing import Any

from list_indents import indent_lists  # mkdocs finds what lies beside a hook
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from settings_tables import settings_tables

from speakerlab.__main__ import COMMANDS, module_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Copied as they are.
MEDIA = {".png", ".css", ".ipynb"}
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
HELP_WIDTH = "80"


class SourcePage(File):
    """Page that shows a file of the repository."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the site, named by their path in the repository."""
    pending = sorted(DOCS.glob("*.md"))
    media = [file for file in DOCS.rglob("*") if file.suffix in MEDIA]
    pages = Files([make_media(file, config) for file in media])
    # The theme's own files have no path in the repository.
    for file in files:
        if Path(file.abs_src_path or DOCS).is_relative_to(DOCS):
            continue
        pages.append(file)

    seen = {*pending, *media}
    while pending:
        path = pending.pop()
        pages.append(make_page(path, config))
        if path.suffix != ".md":
            continue
        for target in linked_files(path):
            if target not in seen:
                seen.add(target)
                pending.append(target)
    return pages


def linked_files(page: Path) -> list[Path]:
    """Return the files of the repository that a page links to."""
    targets: list[Path] = []
    for name in LINK.findall(page.read_text(encoding="utf-8")):
        # Not `resolve`: a link is followed in the repository as it is written.
        target = Path(os.path.normpath(page.parent / name))
        if target.is_relative_to(ROOT) and target.is_file():
            targets.append(target)
    return targets


def make_media(path: Path, config: MkDocsConfig) -> File:
    """Return a file that is copied."""
    name = path.relative_to(ROOT).as_posix()
    file = File.generated(config, name, abs_src_path=str(path))
    if path.is_relative_to(DOCS):
        file.dest_uri = path.relative_to(DOCS).as_posix()
    return file


def make_page(path: Path, config: MkDocsConfig) -> File:
    """Return the page of a Markdown file, or a page that shows another file."""
    if path.suffix in MEDIA:
        return make_media(path, config)
    name = path.relative_to(ROOT).as_posix()
    if path.suffix != ".md":
        text = path.read_text(encoding="utf-8")
        language = path.suffix.removeprefix(".")
        content = (
            f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n"
            f"~~~~~~{language}\n{text}\n~~~~~~\n"
        )
        # Reached by links only.
        page = SourcePage.generated(
            config, name, content=content, inclusion=InclusionLevel.NOT_IN_NAV
        )
        page.dest_uri = f"{name}.html"
        return page
    page = File.generated(config, name, abs_src_path=str(path))
    # Guides are at the top of the site.
    if path.parent == DOCS:
        page.dest_uri = f"{path.stem}.html"
    return page


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page as the site's Markdown needs it, with what is made from the code."""
    markdown = indent_lists(markdown)
    for mark, make in MADE.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def commands_help() -> str:
    """Return a section for each command, with what `speakerlab COMMAND --help` prints."""
    sections: list[str] = []
    for command, summary in COMMANDS.items():
        text = help_of(command)
        sentence = f"{summary[0].upper()}{summary[1:]}."
        sections.append(f"## {command}\n\n{sentence}\n\n```text\n{text}```\n")
    return "\n".join(sections)


def help_of(command: str) -> str:
    """Return what `speakerlab COMMAND --help` prints.

    In this process, because each of two dozen commands would import torch again.
    """
    module = importlib.import_module(module_of(command))
    output = io.StringIO()
    # argparse reads its width from the environment.
    os.environ["COLUMNS"] = HELP_WIDTH
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        module.main(["--help"])
    return output.getvalue()


# Line of a page -> what replaces it.
MADE = {
    "<!-- The help of every command. -->": commands_help,
    "<!-- All settings. -->": settings_tables,
}
