"""Build a release and check it in an empty environment. Nothing is uploaded.

    make release                       # the version in pyproject.toml, of a clean and tagged commit
    make release ARGS=--rehearsal      # a commit between releases: CHANGELOG and tag may be behind
    make release ARGS="--torch 2.11.0+cpu"    # with this build of PyTorch, of an index of pip

In: the commit that is checked out. Out: dist/, a wheel and a source distribution. docs/releases.md
has the steps before and after.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "bin"))
from installed import ROOT, Environment, read_project
from tiny import BARE, TINY
from voices import write_voices

from speakerlab.core.distribution import FOLDERS, NAME

BEGIN = re.compile(r"^## \[(?P<version>[^]]+)\](?: - (?P<date>\S+))?[ \t]*$", re.M)
DATE = r"\d{4}-\d\d-\d\d"
VERSION_LINES = {
    "speakerlab/__init__.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
}
# What an empty environment has besides packages that another one requires.
NOT_REQUIRED = {NAME, "pip", "setuptools"}
USE = """
import speakerlab
model = speakerlab.load("exp")
emb_D = model.embed("data/wav/spk0-0.wav")
assert emb_D.shape == (model.embed_dim,), emb_D.shape
result = model.verify("data/wav/spk0-0.wav", "data/wav/spk0-1.wav")
assert -1 <= result.score <= 1, result
"""


def main() -> None:
    """Check the commit, build, check what was built, and use it."""
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--rehearsal",
        action="store_true",
        help="report what CHANGELOG and tag lack, and go on",
    )
    parser.add_argument("--tag", help="of this commit (default: asks git)")
    parser.add_argument("--torch", metavar="VERSION", help="install this build")
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv-release", help="removed at the end"
    )
    args = parser.parse_args()
    tags = [args.tag] if args.tag else ask_git("tag", "--points-at", "HEAD")
    version = read_project()["version"]

    refuse_if_any(find_changes() + find_other_versions(ROOT, version))
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    behind = find_faults(changelog, version) + find_other_tags(tags, version)
    if args.rehearsal:
        for line in behind:
            print(f"rehearsal: {line}")
    else:
        refuse_if_any(behind)

    # The files in an archive have the time of the commit, not of the build.
    (os.environ["SOURCE_DATE_EPOCH"],) = ask_git("log", "-1", "--format=%ct")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = Environment(args.venv / "tools", folder, name="release")
        wheel, source = build(tools, folder, version)
        refuse_if_any(find_other_files(wheel))
        tools.python("-m", "twine", "check", "--strict", wheel, source)
        empty = Environment(args.venv / "empty", folder, name="release")
        use(empty, wheel, torch=args.torch)
    shutil.rmtree(args.venv)
    for path in (wheel, source):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes, sha256 {digest}")
    print("release: complete; nothing was uploaded, see docs/releases.md")


# What is released


def find_changes() -> list[str]:
    """Return a line if the working tree is not the commit."""
    changed = ask_git("status", "--porcelain")
    if not changed:
        return []
    return [f"{changed[0].strip()}: {len(changed)} changes; commit or remove them"]


def find_other_versions(root: Path, version: str) -> list[str]:
    """Return a line for each file that states another version than pyproject.toml."""
    faults: list[str] = []
    for file, pattern in VERSION_LINES.items():
        text = (root / file).read_text("utf-8")
        stated = re.findall(pattern, text, re.M)
        if stated != [version]:
            faults.append(f"{file}: has version {stated}, pyproject.toml {version}")
    return faults


def find_faults(changelog: str, version: str) -> list[str]:
    """Return what a changelog lacks: a dated section of the version, which is the newest."""
    faults: list[str] = []
    sections = list(BEGIN.finditer(changelog))
    if [match["version"] for match in sections[:2]] != ["Unreleased", version]:
        faults.append(f"CHANGELOG.md: [Unreleased] and [{version}] do not come first")
    for match, following in zip(sections, [*sections[1:], None]):
        end = following.start() if following else len(changelog)
        text = changelog[match.end() : end].strip()
        if match["version"] == "Unreleased" and text:
            faults.append(
                f"CHANGELOG.md: [Unreleased] is not empty; move it to [{version}]"
            )
        if match["version"] == version:
            if not re.fullmatch(DATE, match["date"] or ""):
                faults.append(f"CHANGELOG.md: [{version}] has no date: YYYY-MM-DD")
            if not text:
                faults.append(f"CHANGELOG.md: [{version}] is empty")
    return faults


def find_other_tags(tags: Sequence[str], version: str) -> list[str]:
    """Return a line unless the commit has the tag of the version."""
    wanted = f"v{version}"
    if wanted in tags:
        return []
    present = ", ".join(tags) or "none"
    return [f"tag: must be {wanted}, got {present}; git tag -a {wanted}"]


# Building


def build(tools: Environment, folder: Path, version: str) -> tuple[Path, Path]:
    """Build the source distribution, the wheel from it, and the wheel of the tree.

    Returns the wheel and the source distribution; exits unless both wheels are the same.
    """
    tools.make(sys.executable)
    tools.pip("install", "--quiet", "build>=1.2", "twine>=6.0")
    dist = ROOT / "dist"
    for old in dist.glob(f"{FOLDERS}-{version}*"):
        old.unlink()
    # setuptools prints a line for each file unless it is quiet.
    build = ["-m", "build", "--config-setting=--global-option=--quiet"]
    tools.python(*build, "--outdir", dist, ROOT)
    tools.python(*build, "--wheel", "--outdir", folder, ROOT)
    # Left behind by setuptools.
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    (wheel,) = dist.glob(f"{FOLDERS}-{version}-*.whl")
    (source,) = dist.glob(f"{FOLDERS}-{version}.tar.gz")
    (of_tree,) = folder.glob("*.whl")
    refuse_if_any(find_differences(digests_of(wheel), digests_of(of_tree)))
    return wheel, source


def digests_of(wheel: Path) -> dict[str, str]:
    """Return the digest of each file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}


def find_differences(of_source: dict[str, str], of_tree: dict[str, str]) -> list[str]:
    """Return a line for each file in which two wheels differ."""
    names = sorted(set(of_source) | set(of_tree))
    return [
        f"{name}: differs between the wheels of the source distribution and of the tree"
        for name in names
        if of_source.get(name) != of_tree.get(name)
    ]


def find_other_files(wheel: Path) -> list[str]:
    """Return a line for each file that only the repository or only the wheel has."""
    tracked = ask_git("ls-files", "speakerlab", "conf")
    expected: set[str] = set()
    for name in tracked:
        if name == "speakerlab/conf":  # a link to conf/
            continue
        expected.add(f"speakerlab/{name}" if name.startswith("conf/") else name)
    packed = {
        name for name in digests_of(wheel) if not re.match(r"[^/]+\.dist-info/", name)
    }
    missing = [f"{name}: is not in the wheel" for name in sorted(expected - packed)]
    extra = [f"{name}: is not in the repository" for name in sorted(packed - expected)]
    return missing + extra


# Using it


def use(empty: Environment, wheel: Path, *, torch: str | None) -> None:
    """Install the wheel with the packages that it requires, and no other, and use it."""
    empty.make(sys.executable)
    requirements = [str(wheel)]
    if torch is not None:
        requirements.append(f"torch=={torch}")
    empty.pip("install", "--quiet", *requirements)
    empty.pip("check")
    refuse_if_any(find_others(empty))
    empty.use("--version")
    empty.use("--help")
    empty.use("plan --model campplus --gpu-mem 11")
    empty.use("import --list")
    write_voices(empty.folder / "data/train", speakers=range(6))
    train = "train --config campplus_tiny --exp exp --set data.dir=data"
    empty.use(train, *TINY, *BARE)
    empty.use("embed data/wav/spk0-0.wav --model exp --out embeddings")
    empty.python("-c", USE, cwd=empty.folder)


def find_others(empty: Environment) -> list[str]:
    """Return a line for each package that neither this one nor its requirements require."""
    command = [str(empty.bin / "python"), "-m", "pip", "list", "--not-required"]
    command += ["--format=freeze", "--disable-pip-version-check"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    names = {line.partition("==")[0] for line in done.stdout.splitlines()}
    faults: list[str] = []
    for name in sorted(names - NOT_REQUIRED):
        # torch for CUDA requires them as extras of cuda-toolkit, which pip does not count.
        if not name.startswith("nvidia-"):
            faults.append(f"{name}: is in the empty environment")
    return faults


def ask_git(*arguments: str) -> list[str]:
    """Return the lines of git's output for the repository."""
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def refuse_if_any(faults: Sequence[str]) -> None:
    """Exit with all faults, one per line, if there are any."""
    if faults:
        sys.exit("\n".join(["release: refused", *faults]))


if __name__ == "__main__":
    main()
