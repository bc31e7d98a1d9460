"""Make docs/tutorial.ipynb from docs/tutorial.md: `python docs/site/notebook.py`.

Fenced blocks of the page become code cells, everything else text. Indented blocks are text too:
they are output, or commands that a reader runs once, such as the installation.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parents[1]
PAGE = DOCS / "tutorial.md"
NOTEBOOK = DOCS / "tutorial.ipynb"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Commands run as in a terminal at the top of the clone, with the environment of this Python.
SETUP = """\
import os
import sys
from pathlib import Path

if not Path("egs").is_dir():
    os.chdir("..")
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""


class Cell(NamedTuple):
    """Part of the page."""

    kind: str  # markdown, bash or python
    source: str


def cells_of(text: str) -> list[Cell]:
    """Return the parts of a page in order."""
    cells: list[Cell] = []
    end = 0
    for block in BLOCK.finditer(text):
        cells.append(Cell("markdown", text[end : block.start()].strip()))
        cells.append(Cell(block[1], block[2].rstrip()))
        end = block.end()
    cells.append(Cell("markdown", text[end:].strip()))
    return [cell for cell in cells if cell.source]


def notebook_of(text: str) -> str:
    """Return the notebook of a page, in Jupyter's format 4.5."""
    title, *others = cells_of(text)
    cells = [title, Cell("python", SETUP.rstrip()), *others]
    notebook = {
        "cells": [to_json(cell, number) for number, cell in enumerate(cells)],
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return f"{json.dumps(notebook, indent=1, ensure_ascii=False)}\n"


def to_json(cell: Cell, number: int) -> dict[str, Any]:
    """Return a cell of a notebook."""
    source = cell.source
    if cell.kind == "bash":
        # Jupyter gives the lines below to bash.
        source = f"%%bash\n{source}"
    common = {
        "id": f"cell-{number}",
        "metadata": {},
        "source": source.splitlines(keepends=True),
    }
    if cell.kind == "markdown":
        return {"cell_type": "markdown", **common}
    return {"cell_type": "code", "execution_count": None, "outputs": [], **common}


def main() -> None:
    """Write the notebook."""
    text = PAGE.read_text(encoding="utf-8")
    NOTEBOOK.write_text(notebook_of(text), encoding="utf-8")


if __name__ == "__main__":
    main()
