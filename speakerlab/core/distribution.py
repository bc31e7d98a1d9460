"""The name under which pip knows this package, and the package of that name on PyPI.

PyPI's `speakerlab` is 3D-Speaker's. Both have the import name speakerlab: in one environment, they
would install into one folder, and overwrite files of each other.
"""

from pathlib import Path

NAME = "speakerlab-toolkit"
# The names of wheels and of installed metadata begin so.
FOLDERS = NAME.replace("-", "_")
OTHER = "speakerlab"
PACKAGE = Path(__file__).resolve().parents[1]


def refuse_other(package: Path = PACKAGE) -> None:
    """Raise ValueError, one line, if another distribution has its files in this package's folder.

    Only names beside the package are read: this is done at each start.
    """
    for info in package.parent.glob(f"{OTHER}-*.dist-info"):
        _, _, version = info.name.removesuffix(".dist-info").partition("-")
        raise ValueError(
            f"{package}: holds files of two distributions, {NAME} and {OTHER} {version};"
            f" pip uninstall -y {NAME} {OTHER}, then install {NAME} again, and {OTHER}"
            " (3D-Speaker's) in another environment if you need it"
        )
