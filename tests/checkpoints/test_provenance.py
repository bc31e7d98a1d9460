"""Facts about the machine, the libraries and the source of a run."""

import re
import subprocess

import speakerlab
from speakerlab.checkpoints import provenance


def test_a_source_without_git_has_an_unknown_commit(monkeypatch, tmp_path):
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown", provenance.commit())
    assert provenance.ask_git(tmp_path, "log") == ""  # no repository
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit() == "unknown"


def test_an_installed_package_has_the_commit_that_pip_recorded(monkeypatch, tmp_path):
    package = tmp_path / "venv/speakerlab/__init__.py"  # in a repository of the user's
    monkeypatch.setattr(speakerlab, "__file__", str(package))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    assert provenance.commit() == "unknown"
    name = f"speakerlab_toolkit-{speakerlab.__version__}.dist-info"
    info = tmp_path / "venv" / name
    info.mkdir(parents=True)
    (info / "direct_url.json").write_text(
        '{"vcs_info": {"commit_id": "0123456789abcdef"}}'
    )
    assert provenance.commit() == "0123456789ab"


def test_a_copy_has_the_commit_of_its_archive_or_of_the_variable(monkeypatch, tmp_path):
    monkeypatch.delenv("SPEAKERLAB_COMMIT", raising=False)
    monkeypatch.setattr(speakerlab, "__file__", str(tmp_path / "speakerlab/x.py"))
    archived = tmp_path / ".commit"
    archived.write_text("$Format:%H$\n")  # copied, not archived
    assert provenance.commit() == "unknown"
    archived.write_text("0123456789abcdef\n")
    assert provenance.commit() == "0123456789ab"
    monkeypatch.setenv("SPEAKERLAB_COMMIT", "fedcba9876543210")
    assert provenance.commit() == "fedcba987654"


def test_the_version_of_the_driver_is_read(tmp_path):
    assert provenance.driver(tmp_path) is None
    folder = tmp_path / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release"
        " Build\n"
        "GCC version:  gcc version 12.2.0 (Debian)\n"
    )
    assert provenance.driver(tmp_path) == "550.54.15"
