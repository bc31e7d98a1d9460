"""What a parser once failed on: (parser, file, content or function of the valid content)."""

from collections.abc import Callable

CASES: list[tuple[str, str, bytes | Callable[[bytes], bytes]]] = []
