"""Indent the content of lists as the site's Markdown needs it.

On the repository's host, the content of a list item begins where its text does: after `- ` or
`1. `, at two or three columns. Python-Markdown, which makes the site, takes only multiples of four
columns for paragraphs, code, tables and lists within an item, and needs a blank line before an item
that comes after an item of several paragraphs.
"""

import re

from markdown_it import MarkdownIt

COLUMNS = 4
MARKER = re.compile(r" *(?:[-*+]|\d+[.)]) +")


def indent_lists(text: str) -> str:
    """Return a page with the content of list items at multiples of four columns."""
    lines = text.split("\n")
    # For each line, the columns at which the content of the items around it begins.
    offsets: list[list[int]] = [[] for _ in lines]
    first_lines: set[int] = set()
    after_blank: set[int] = set()
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for token, content in zip(tokens, tokens[1:]):
        if token.type != "list_item_open" or token.map is None:
            continue
        first, end = token.map
        outer = offsets[first][-1] if offsets[first] else 0
        marker = MARKER.match(lines[first], outer)
        # An empty item, or one in a quotation.
        if marker is None:
            continue
        first_lines.add(first)
        # The paragraphs of a list without blank lines are hidden.
        if not content.hidden:
            after_blank.add(first)
        for number in range(first, end):
            offsets[number].append(marker.end())

    indented: list[str] = []
    for number, line in enumerate(lines):
        # The first line of an item is content of the item around it.
        around = offsets[number][:-1] if number in first_lines else offsets[number]
        column = around[-1] if around else 0
        is_content = not line[:column].strip()
        if is_content and line.strip():
            line = " " * COLUMNS * len(around) + line[column:]
        if number in after_blank and indented and indented[-1]:
            indented.append("")
        indented.append(line)
    return "\n".join(indented)
