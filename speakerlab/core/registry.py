"""Components by name."""

import importlib
from collections.abc import Iterator, Mapping
from typing import TypeVar

Class = TypeVar("Class")


class Registry(Mapping[str, Class]):
    """Name -> class, given as "module:Class" and imported when it is first used."""

    def __init__(self, package: str, paths: Mapping[str, str]) -> None:
        self._package, self._paths = package, paths

    def __getitem__(self, name: str) -> Class:
        module, _, attribute = self._paths[name].partition(":")
        return getattr(importlib.import_module(f"{self._package}.{module}"), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)
