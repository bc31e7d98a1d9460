"""Progress bars: on a terminal and in notebooks, and not a byte in a log."""

import io
import sys
import warnings
from types import ModuleType

import pytest

from speakerlab.core import bars
from speakerlab.core.bars import NOTEBOOK_KERNEL, progress_bar


class Output(io.StringIO):
    """Standard error, which is a terminal or not."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "in_notebook", "shown", "has_bar"),
    [
        (True, False, True, True),
        (True, False, False, False),
        (False, False, True, False),
        (False, True, True, True),
        (False, True, False, False),
    ],
)
def test_where_a_bar_is_shown(monkeypatch, is_terminal, in_notebook, shown, has_bar):
    output = Output(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", output)
    if in_notebook:
        kernel = ModuleType(NOTEBOOK_KERNEL)
        monkeypatch.setitem(sys.modules, NOTEBOOK_KERNEL, kernel)
    bar = progress_bar(range(3), unit="files", text="reading", shown=shown)
    assert list(bar) == [0, 1, 2]
    text = output.getvalue()
    if has_bar:
        assert "reading: 100%" in text
        assert "3/3" in text
        assert "files/s" in text
    else:
        assert text == ""


def test_a_notebook_without_widgets_gets_a_bar_of_text_and_no_warning(monkeypatch):
    output = Output(is_terminal=False)
    monkeypatch.setattr(sys, "stderr", output)
    monkeypatch.setitem(sys.modules, NOTEBOOK_KERNEL, ModuleType(NOTEBOOK_KERNEL))
    notebook = ModuleType("IPython")
    notebook.get_ipython = object
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setattr(bars, "find_spec", lambda _name: None)
    # tqdm chooses and warns when it is imported.
    for name in ("tqdm.auto", "tqdm.autonotebook", "tqdm.notebook"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bar = progress_bar(range(3), unit="files")
    assert caught == []
    assert list(bar) == [0, 1, 2]
    assert "3/3" in output.getvalue()
