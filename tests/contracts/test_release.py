"""Versions and names agree; what `make release` refuses."""

import re
from pathlib import Path

import pytest
import release
from installed import read_project

from speakerlab import __version__
from speakerlab.core import distribution

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.0] - 2026-11-25

- New.

## [1.1.0] - 2026-10-01

- Old.
"""
# Named as an address of pip, and not in a sentence on 3D-Speaker's package.
INSTALLS = re.compile(r"pip install[^\n`]*?\bspeakerlab(?!-toolkit|_toolkit)\b[^\n`]*")


def test_every_file_states_the_same_version():
    assert read_project()["version"] == __version__
    assert release.find_other_versions(ROOT, __version__) == []


def test_another_version_in_a_file_is_found(tmp_path):
    (tmp_path / "speakerlab").mkdir()
    (tmp_path / "speakerlab/__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.1.0\n")
    (fault,) = release.find_other_versions(tmp_path, "1.2.0")
    assert "CITATION.cff" in fault
    assert "1.1.0" in fault


def test_a_distribution_has_one_name():
    project = read_project()
    assert project["name"] == distribution.NAME
    assert distribution.NAME.replace("-", "_") == distribution.FOLDERS
    (to_itself,) = [
        text
        for text in project["optional-dependencies"]["dev"]
        if text.startswith("speakerlab")
    ]
    assert to_itself.startswith(f"{distribution.NAME}[")
    # The import name and the command stay.
    assert project["scripts"] == {"speakerlab": "speakerlab.__main__:main"}


def test_no_text_installs_the_package_of_another_toolkit():
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.*")]
    texts += [*(ROOT / "speakerlab").rglob("*.py"), *(ROOT / "egs").glob("*/*.py")]
    wrong: list[str] = []
    for path in texts:
        if path.is_file():
            for line in INSTALLS.findall(path.read_text(encoding="utf-8")):
                is_warning = line.startswith("pip install speakerlab")
                if not (is_warning and path.name == "install.md"):
                    wrong.append(f"{path.name}: {line}")
    assert wrong == []


def test_the_changelog_of_a_release_is_accepted():
    assert release.find_faults(CHANGELOG, "1.2.0") == []
    assert release.find_other_tags(["v1.2.0"], "1.2.0") == []


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("## [Unreleased]\n", "## [Unreleased]\n\n- Newer.\n", "not empty"),
        ("## [Unreleased]\n", "", "first"),
        ("[1.2.0] - 2026-11-25", "[1.2.0]", "date"),
        ("[1.2.0] - 2026-11-25", "[1.2.0] - soon", "date"),
        ("- New.\n", "", "is empty"),
        ("[1.2.0]", "[1.3.0]", "[1.2.0]"),
    ],
)
def test_what_a_changelog_lacks_is_named(old, new, named):
    changelog = CHANGELOG.replace(old, new, 1)
    faults = release.find_faults(changelog, "1.2.0")
    assert any(named in fault for fault in faults), faults


def test_an_older_release_cannot_be_made_again():
    assert release.find_faults(CHANGELOG, "1.1.0") != []


@pytest.mark.parametrize("tags", [[], ["v1.1.0"], ["1.2.0"]])
def test_the_tag_must_be_that_of_the_version(tags):
    (fault,) = release.find_other_tags(tags, "1.2.0")
    assert "v1.2.0" in fault


def test_wheels_are_compared_file_by_file():
    of_source = {"a.py": "1", "b.py": "2"}
    assert release.find_differences(of_source, dict(of_source)) == []
    faults = release.find_differences(of_source, {"a.py": "3", "c.py": "4"})
    assert [fault.partition(":")[0] for fault in faults] == ["a.py", "b.py", "c.py"]
