"""Components by name: ours, and those in the folder of `--plugins`."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

Class = TypeVar("Class")
PLUGINS_VARIABLE = "SPEAKERLAB_PLUGINS"  # the folder, for this process and those it starts


class Registry(Mapping[str, Class]):
    """Name -> class, given as "module:Class" and imported when it is first used.

    A name "module:Class" that is not listed is that of a class in the folder of `--plugins`.
    """

    def __init__(self, package: str, paths: Mapping[str, str]) -> None:
        self._package, self._paths = package, paths

    def __getitem__(self, name: str) -> Class:
        if name not in self._paths and ":" in name:
            return outside_part(name)
        module, _, attribute = self._paths[name].partition(":")
        return getattr(importlib.import_module(f"{self._package}.{module}"), attribute)

    def __contains__(self, name: object) -> bool:
        """Return whether `name` is listed or may be that of a class outside; import nothing."""
        return name in self._paths or ":" in str(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def use_plugins(folder: Path) -> None:
    """Let this process, and those it starts, import components from modules in a folder."""
    if not folder.is_dir():
        raise ValueError(f"--plugins: {folder} is not a folder; use the folder of your module")
    os.environ[PLUGINS_VARIABLE] = str(folder.resolve())


def outside_part(name: str) -> Any:
    """Import a class or function "module:name" that is defined in the folder of `--plugins`.

    Nothing else is imported, because the name may come from a model of unknown origin. Raises
    ValueError with one line.
    """
    module, _, attribute = name.partition(":")
    top, folder = module.partition(".")[0], os.environ.get(PLUGINS_VARIABLE)
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ValueError(f"{name} is not module:Class, such as my_module:MyClass; correct it")
    if not folder:
        raise ValueError(
            f"{name} is not part of speakerlab; add --plugins DIR, the folder that contains {top}, "
            "if you trust its code"
        )
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.find_spec(top)
    places = [] if spec is None else [*(spec.submodule_search_locations or [spec.origin])]
    if not places or not all(Path(str(place)).is_relative_to(folder) for place in places):
        found = f"is found at {places[0]}" if places else "does not exist"
        raise ValueError(f"{name}: {top} {found}, not in --plugins {folder}; correct or rename it")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # something else that it imports
            raise
        raise ValueError(f"{name}: {error.name} is not in --plugins {folder}; correct it") from None
    if str(getattr(found, "__module__", "")).partition(".")[0] != top:
        raise ValueError(f"{name}: {module} defines no {attribute}; correct the name")
    return found
