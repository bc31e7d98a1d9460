"""What a run was made with is told on every machine."""

import re

from speakerlab.checkpoints import provenance


def test_a_source_without_git_has_an_unknown_commit(monkeypatch, tmp_path):
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown", provenance.commit())
    assert provenance.ask_git(tmp_path, "log") == ""  # no repository
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit() == "unknown"
