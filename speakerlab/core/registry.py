"""Components by name: built-in ones, and plugins in the folder of `--plugins`."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

Class = TypeVar("Class")
# Holds the folder of `--plugins`, for this process and its children.
PLUGINS_VARIABLE = "SPEAKERLAB_PLUGINS"


class Registry(Mapping[str, Class]):
    """Name -> class, given as "module:Class" and imported when it is first used.

    An unlisted name "module:Class" refers to a class in the folder of `--plugins`.
    """

    def __init__(self, package: str, paths: Mapping[str, str]) -> None:
        self._package = package
        self._paths = paths

    def __getitem__(self, name: str) -> Class:
        if name not in self._paths and ":" in name:
            return import_plugin(name)
        path = self._paths[name]
        module_name, _, attribute = path.partition(":")
        module = importlib.import_module(f"{self._package}.{module_name}")
        return getattr(module, attribute)

    def __contains__(self, name: object) -> bool:
        """Return whether `name` is listed or may refer to a plugin, without importing it."""
        return name in self._paths or ":" in str(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def use_plugins(folder: Path) -> None:
    """Let this process and its children import components from modules in a folder."""
    if not folder.is_dir():
        raise ValueError(
            f"--plugins: {folder} is not a folder; use the folder of your module"
        )
    os.environ[PLUGINS_VARIABLE] = str(folder.resolve())


def import_plugin(name: str) -> Any:
    """Import a class or function "module:name" that is defined in the folder of `--plugins`.

    Nothing else is imported, because the name may come from a model of unknown origin. Raises
    ValueError with one line.
    """
    module, _, attribute = name.partition(":")
    top = module.partition(".")[0]
    folder = os.environ.get(PLUGINS_VARIABLE)
    identifiers = [*module.split("."), attribute]
    is_well_formed = all(part.isidentifier() for part in identifiers)
    if not is_well_formed:
        raise ValueError(
            f"{name} is not module:Class, such as my_module:MyClass; correct it"
        )
    if not folder:
        raise ValueError(
            f"{name} is not part of speakerlab; add --plugins DIR, the folder that"
            f" contains {top}, if you trust its code"
        )
    if folder not in sys.path:
        sys.path.append(folder)

    # Find the module without running it: another module of this name may come first in sys.path.
    places: list[str | None] = []
    spec = importlib.util.find_spec(top)
    if spec is not None:
        # A package has search locations, a single file has an origin.
        locations = spec.submodule_search_locations
        places = list(locations) if locations else [spec.origin]
    paths = [Path(str(place)) for place in places]
    is_inside = all(path.is_relative_to(folder) for path in paths)
    if not places or not is_inside:
        problem = f"is found at {places[0]}" if places else "does not exist"
        raise ValueError(
            f"{name}: {top} {problem}, not in --plugins {folder}; correct or rename it"
        )

    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Another module, which this one imports, is missing.
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{name}: {error.name} is not in --plugins {folder}; correct it"
        ) from None

    # Reject a name that the module has imported from elsewhere.
    part = getattr(imported, attribute, None)
    origin = str(getattr(part, "__module__", ""))
    if origin.partition(".")[0] != top:
        raise ValueError(f"{name}: {module} defines no {attribute}; correct the name")
    return part
