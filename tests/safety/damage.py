"""Damage to the content of valid files: of bytes, words, trees of values, headers, members.

Each function takes the content and a random generator, and returns other content.
"""

import io
import json
import math
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Damage = Callable[[bytes, Random], bytes]
EDGES = [
    0,
    1,
    2,
    7,
    127,
    128,
    255,
    2**15,
    2**16 - 1,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63,
]
DEEP = "@deep"  # stands for more nested lists than Python's stack holds
NUMBERS = [
    0,
    -1,
    1,
    0.5,
    2**31,
    10**12,
    10**400,
    1e308,
    -1e-308,
    math.nan,
    math.inf,
    -math.inf,
]
TEXTS = [
    "",
    "x",
    "1",
    "nan",
    "a b",
    "new\nline",
    "\0",
    "\ud800",
    "é\u202e\u2028",
    "../x",
    "/dev/null",
]
VALUES: list[Any] = [
    *NUMBERS,
    *TEXTS,
    DEEP,
    None,
    True,
    False,
    [],
    {},
    [[]],
    {"": 0},
    "9" * 5000,
]
WORDS = [
    *(text.encode("utf-8", "surrogatepass") for text in TEXTS),
    *(
        b'-1 0 1e400 -inf NaN 1_000 0x10 1,5 \xff \xef\xbb\xbf \x1b[31m | " , ; \t # .'
    ).split(),
    *b"*a &a &a[*a] {a:*a} !!int !!bool !!float !!binary !!set !!timestamp !x <<:".split(),
    *b"? - [ ] { } null true target nontarget 1e-3 2001-99-99 0b1 name: args:"
    b" _target_:".split(),
    *(
        b"9" * 5000,
        b"a" * 200_000,
        b"[" * 3000,
        b"- " * 3000,
        b"\r\n",
        b"\r",
        b"\n\n",
        b"\x85",
        b"\x1c",
    ),
]


def raw(data: bytes, rng: Random) -> bytes:
    """Flip a bit, cut, take bytes out, put some in, or write an edge over an integer."""
    kind = rng.randrange(6)
    at = (
        rng.randrange(min(len(data), 200) if rng.random() < 0.5 else len(data))
        if data
        else 0
    )
    size = rng.choice([1, 2, 4, 8]) if rng.random() < 0.8 else rng.randrange(1000)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[at + size :]
    if kind == 2:
        return (
            data[:at]
            + (rng.randbytes(size) if rng.random() < 0.5 else data[:size])
            + data[at:]
        )
    if kind == 3 and data:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    size = min(size, 8)
    value = (rng.choice(EDGES) % 256**size).to_bytes(
        size, rng.choice(["little", "big"])
    )
    return data[:at] + value + data[at + size :]


def words(data: bytes, rng: Random) -> bytes:
    """Take out, repeat or swap lines or words of a text, or write an odd word."""
    lines = data.split(b"\n")
    row = rng.randrange(len(lines))
    other = rng.randrange(len(lines))
    kind = rng.randrange(8)
    if kind == 0:
        del lines[row]
    elif kind == 1:
        lines.insert(other, lines[row])
    else:
        cells = re.split(rb"([\s,;:=]+)", lines[row])
        place = rng.randrange(len(cells))
        source = re.split(rb"([\s,;:=]+)", lines[other])
        new = [
            rng.choice(source),
            b"",
            cells[place] * 2,
            cells[place] + rng.choice(WORDS),
        ]
        cells[place] = rng.choice(new) if kind < 5 else rng.choice(WORDS)
        lines[row] = b"".join(cells)
    return b"\n".join(lines)


def tree(data: bytes, rng: Random) -> bytes:
    """Change a value or a key of JSON, also of JSON in a text of it."""
    values = json.loads(data)
    text = json.dumps(_changed(values, rng))
    return text.replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000).encode()


def _changed(values: Any, rng: Random) -> Any:
    if isinstance(values, str) and values[:1] in ("{", "[") and rng.random() < 0.8:
        return tree(values.encode(), rng).decode()
    if not isinstance(values, dict | list) or not values or rng.random() < 0.1:
        return rng.choice(VALUES)
    keys: Sequence[Any] = (
        list(values) if isinstance(values, dict) else range(len(values))
    )
    key = rng.choice(keys)
    if rng.random() < 0.2:
        value = values.pop(key)
        if isinstance(values, dict) and rng.random() < 0.5:
            values[rng.choice(TEXTS)] = value
    elif rng.random() < 0.2:
        values[key] = values[rng.choice(keys)]
    else:
        values[key] = _changed(values[key], rng)
    return values


def either(*kinds: Damage) -> Damage:
    return lambda data, rng: rng.choice(kinds)(data, rng)


def text(data: bytes, rng: Random) -> bytes:
    return (raw if rng.random() < 0.3 else words)(data, rng)


def plain(data: bytes, rng: Random) -> bytes:
    """JSON, or YAML of a form that is JSON."""
    return (tree if rng.random() < 0.7 else text)(data, rng)


def header(data: bytes, rng: Random) -> bytes:
    """Change the JSON header of a safetensors file."""
    if rng.random() < 0.3:
        return raw(data, rng)
    end = 8 + int.from_bytes(data[:8], "little")
    changed = plain(data[8:end], rng)
    return len(changed).to_bytes(8, "little") + changed + data[end:]


def rezipped(member: str, damage: Damage) -> Damage:
    """Change a member of a zip file, whose checksum then fits, or the zip file itself."""

    def change(data: bytes, rng: Random) -> bytes:
        if rng.random() < 0.2:
            return raw(data, rng)
        target = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(data)) as old,
            zipfile.ZipFile(target, "w") as new,
        ):
            for info in old.infolist():
                content = old.read(info)
                new.writestr(
                    info, damage(content, rng) if member in info.filename else content
                )
        return target.getvalue()

    return change


def tarred(data: bytes, rng: Random) -> bytes:
    """Change a field of the header of a member, whose checksum then fits."""
    if rng.random() < 0.2:
        return raw(data, rng)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        at = rng.choice([member.offset for member in tar])
    first, size = rng.choice(
        [(0, 100), (100, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 6)]
    )
    odd = [
        b"7" * size,
        b"\xff" * size,
        b"\x80" + bytes(size - 1),
        b"-1",
        b"/x",
        b"../x",
        b"a" * size,
    ]
    odd += [
        bytes([rng.randrange(256)]),
        rng.choice(b"0123456xgLKSD\0".hex(" ").split()).encode(),
    ]
    value = rng.choice(odd)[:size].ljust(size, b"\0")
    block = bytearray(data[at : at + 512])
    block[first : first + size] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return data[:at] + bytes(block) + data[at + 512 :]


def of_another_version(data: bytes, rng: Random) -> bytes:
    """Take out or rename an array or a fact of a file of `write_arrays`; its checksum then fits."""
    end = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end])
    metadata = entries.pop("__metadata__")
    if metadata["crc32"] != _crc_of(metadata["facts"], entries, data[end:]):
        return data  # damaged before
    facts = json.loads(metadata["facts"])
    places = [
        entries,
        facts,
        *(
            section
            for section in facts.values()
            if isinstance(section, dict) and section
        ),
    ]
    place = rng.choice(places)
    value = place.pop(rng.choice(list(place)))
    if rng.random() < 0.5:
        place["x"] = value
    metadata["facts"] = json.dumps(facts)
    metadata["crc32"] = _crc_of(metadata["facts"], entries, data[end:])
    changed = json.dumps({"__metadata__": metadata, **entries}).encode()
    return len(changed).to_bytes(8, "little") + changed + data[end:]


def _crc_of(facts: str, entries: dict[str, Any], data: bytes) -> str:
    """Return the checksum of a file of `write_arrays`."""
    crc = zlib.crc32(facts.encode())
    dtypes = {"U8": "|u1", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8"}
    for name, entry in sorted(entries.items()):
        kind = f"{name} {dtypes[entry['dtype']]} {tuple(entry['shape'])}"
        first, last = entry["data_offsets"]
        crc = zlib.crc32(data[first:last], zlib.crc32(kind.encode(), crc))
    return str(crc)
