"""Workflows of the repository's host: what they run exists, and they may not change anything."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from installed import read_project

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
every_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


def steps_of(path: Path) -> list[dict[str, Any]]:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_are_workflows():
    assert [path.stem for path in WORKFLOWS] == ["checks", "oldest", "release"]


@every_workflow
def test_it_may_only_read(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 300
    for step in steps_of(path):
        # Else later steps could push with the token.
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@every_workflow
def test_actions_are_those_of_the_host_at_a_major_version(path):
    for step in steps_of(path):
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@v[0-9]+", step["uses"]), step


@every_workflow
def test_what_it_runs_exists(path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, re.M))
    lines = [
        line for step in steps_of(path) for line in step.get("run", "").split("\n")
    ]
    assert any(line.startswith("make ") for line in lines)
    for line in lines:
        # Text of a pull request must not become a command.
        assert "${{" not in line
        words = re.sub(r'[A-Z]+=("[^"]*"|\S+)', "", line).split()
        if words[:1] == ["make"]:
            assert set(words[1:]) <= targets, line
        for file in re.findall(r"tests/\S+\.py", line):
            assert (ROOT / file).exists(), file


def test_every_supported_python_is_tested():
    (path,) = [path for path in WORKFLOWS if path.stem == "checks"]
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == PYTHONS
    project = read_project()
    assert project["requires-python"] == f">={PYTHONS[0]}"
    named = re.findall(r"Python :: (3[.]\d+)", "\n".join(project["classifiers"]))
    assert named == PYTHONS


@pytest.mark.parametrize("name", ["checks", "release"])
def test_a_release_is_tried_with_the_pinned_torch(name):
    text = (GITHUB / f"workflows/{name}.yml").read_text(encoding="utf-8")
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^torch==(\S+)$", pins, re.M)
    assert re.findall(r"--torch ([0-9.]+)\+cpu", text) == [pinned]


@pytest.mark.parametrize(
    "path",
    sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")),
    ids=lambda path: path.stem,
)
def test_a_form_of_an_issue_has_what_the_host_needs(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    names = [field["id"] for field in fields]
    assert len(set(names)) == len(names)
    assert all(field["attributes"]["label"] for field in fields)


def test_a_bug_report_asks_for_the_output_of_doctor():
    text = (GITHUB / "ISSUE_TEMPLATE/bug.yml").read_text(encoding="utf-8")
    assert "speakerlab doctor" in text
