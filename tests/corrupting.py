"""Corrupted corpora of `SPEAKER/*.wav`, made from a seed.

In: a folder, a count, a seed. Out: `Case`s with their kind and expected fate. Case i of a seed does
not depend on the count. Letters: S samples.
"""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from corrupted_audio import CONTENTS, MARKER, Fate, Rng, clean_wave, encoded, wav


@dataclass(frozen=True)
class Case:
    """One input: its file, how it was corrupted, and what must happen to it."""

    path: Path
    kind: str
    fate: Fate
    number: int
    seed: int
    wave_S: np.ndarray | None = None  # its samples, if known

    def __str__(self) -> str:
        return (
            f"case {self.number} of seed {self.seed}, {self.kind}: {str(self.path)!r}"
        )


def fifo(path: Path, rng: Rng) -> None:
    os.mkfifo(path)


def plugged(path: Path, rng: Rng) -> None:
    """Make a socket; its path may be longer than bind() takes."""
    handle = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(f"/proc/self/fd/{handle}/{path.name}")
    os.close(handle)


def unreadable(path: Path, rng: Rng) -> None:
    path.write_bytes(wav(rng))
    path.chmod(0)


def linked(path: Path, rng: Rng) -> None:
    target = path.parent / "elsewhere" / f"{path.name}.bin"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(wav(rng))
    path.symlink_to(target)


# What is not a regular file; "unreadable" is readable for root.
SPECIALS: dict[str, tuple[Callable[[Path, Rng], None], Fate]] = {
    "folder": (lambda path, rng: path.mkdir(), "rejected"),
    "link to nothing": (lambda path, rng: path.symlink_to("nowhere"), "rejected"),
    "link to itself": (lambda path, rng: path.symlink_to(path.name), "rejected"),
    "link to a device": (lambda path, rng: path.symlink_to("/dev/zero"), "rejected"),
    "link to a folder": (lambda path, rng: path.symlink_to("/"), "rejected"),
    "link to a recording": (linked, "kept"),
    "fifo": (fifo, "rejected"),
    "socket": (plugged, "rejected"),
    "unreadable": (unreadable, "either"),
}
RUN = f"touch {MARKER}"
# Beginnings of names; the number of the case and ".wav" follow.
NAMES: dict[str, tuple[bytes, Fate]] = {
    "blanks": (b" a  b \t c ", "kept"),
    "quotes": (b"it's \"so\" '", "kept"),
    "shell": (f"$({RUN}) `{RUN}`;{RUN};|{RUN}|&{RUN}&{{}}>{MARKER}<".encode(), "kept"),
    "dash": (b"--help -rf -", "kept"),
    "globs": (b"*?[!a]~%s%n\\n{0}$HOME#", "kept"),
    "Chinese": ("说话人的录音".encode(), "kept"),
    "emoji": ("🎤é\u0301\u200d".encode(), "kept"),
    "right to left": ("\u202eتسجيل".encode(), "kept"),
    "replacement character": ("\ufffd".encode(), "kept"),
    "other blanks": ("\u00a0\u2003\u3000\x85\u2028".encode(), "kept"),
    "terminal": (b"\x1b[2J\x07\x08\x01", "kept"),
    "newline": (b"a\nspk evil.wav\n", "rejected"),
    "carriage return": (b"a\rb", "rejected"),
    "not UTF-8": (b"\xff\xfe\xe4", "rejected"),
    "half a character": (b"\xed\xa0\x80", "rejected"),
    "pipe at the end": (f"{RUN} |".encode(), "kept"),
    # Not at the start, which hides a file.
    "dots": (b"a....", "kept"),
    # cut to the length that a file system takes
    "long": (b"n" * 255, "kept"),
    "long Chinese": ("长".encode() * 77, "kept"),
}
PLAIN = "plain"
NAME_KINDS = [f"name: {name}" for name in NAMES]
KINDS = [PLAIN, *CONTENTS, *SPECIALS, *NAME_KINDS]


def write_case(folder: Path, number: int, seed: int, *, prefix: bytes = b"") -> Case:
    """Write case `number` into a speaker's folder; its name begins with the prefix."""
    kind = KINDS[number % len(KINDS)]
    rng = np.random.default_rng([seed, number])
    name = f"{number:05d}".encode()
    fate = "kept"
    ending = b".WAV" if rng.random() < 0.1 else b".wav"
    if kind.startswith("name: "):
        start, fate = NAMES[kind.removeprefix("name: ")]
        # 255 bytes are the most of a file system
        num_others = len(prefix) + len(name) + len(ending)
        name = start[: 255 - num_others] + name
    path = folder / os.fsdecode(prefix + name + ending)
    wave_S = None
    if kind in SPECIALS:
        make, fate = SPECIALS[kind]
        make(path, rng)
    elif kind in CONTENTS:
        content, fate = CONTENTS[kind]
        path.write_bytes(content(rng))
    else:
        wave_S = clean_wave(rng)
        form = "FLAC" if rng.random() < 0.3 else "WAV"
        path.write_bytes(encoded(wave_S, form))
    return Case(path, kind, fate, number, seed, wave_S)


def write_corpus(
    folder: Path,
    speakers: Sequence[str],
    *,
    count: int,
    seed: int,
    prefix: bytes = b"",
) -> list[Case]:
    """Write `count` cases, in turn over the speakers' folders."""
    for name in speakers:
        (folder / name).mkdir(parents=True)
    cases = []
    for number in range(count):
        speaker = speakers[number % len(speakers)]
        case = write_case(folder / speaker, number, seed, prefix=prefix)
        cases.append(case)
    return cases
