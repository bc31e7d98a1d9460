"""Noise and rooms as options: a folder, `auto` or `none`, and where `auto` looks.

`auto` is the folder of the unpacked archive, `musan` or `RIRS_NOISES`, in the corpus or beside it.
In the default corpus folder of a recipe it need not exist yet: `--download` puts it there.
"""

import argparse
import os
from pathlib import Path

AUTO, NONE = Path("auto"), Path("none")
# Option -> folder of the archive, and its size. Sources: openslr.org/17 and openslr.org/28.
ARCHIVES = {"noise": ("musan", "11 GB"), "rirs": ("RIRS_NOISES", "1.3 GB")}


def absolute(word: str) -> Path:
    """Return a path that means the same from any folder."""
    return Path(os.path.normpath(Path(word).absolute()))


def source(word: str) -> Path:
    """Return the value of --noise or --rirs: AUTO, NONE or an absolute path."""
    return {"auto": AUTO, "none": NONE}.get(word) or absolute(word)


def resolve_sources(args: argparse.Namespace) -> None:
    """Replace `auto` in --noise and --rirs by a folder.

    Raise FileNotFoundError, one line, if there is none and the corpus folder is not the default.
    """
    corpus: Path = args.corpus
    absent: list[str] = []
    for option, (name, _) in ARCHIVES.items():
        if getattr(args, option) != AUTO:
            continue
        places = [corpus / name, corpus.parent / name]
        existing = [folder for folder in places if folder.is_dir()]
        if existing:
            setattr(args, option, existing[0])
        elif corpus == args.default_corpus:
            setattr(args, option, corpus / name)
        else:
            absent.append(option)
    if absent:
        _require_corpus(args)
        raise FileNotFoundError(_say_absent(absent, corpus))


def _say_absent(options: list[str], corpus: Path) -> str:
    """Return one line with the folders that were searched and all remedies."""
    archives = {option: ARCHIVES[option] for option in options}
    names = ", ".join(name for name, _ in archives.values())
    given = " ".join(f"--{option} auto" for option in options)
    folders = " ".join(f"--{option} FOLDER" for option in options)
    downloads = " ".join(
        f"--{o} FOLDER/{name} ({size})" for o, (name, size) in archives.items()
    )
    without = " ".join(f"--{option} none" for option in options)
    return (
        f"{given}: no {names} in {corpus} or {corpus.parent}; give folders of"
        f" recordings ({folders}), download the archives with {downloads}, or go"
        f" without: {without}"
    )


def _require_corpus(args: argparse.Namespace) -> None:
    corpus: Path = args.corpus
    if not corpus.is_dir() and not args.makes_corpus:
        raise FileNotFoundError(
            f"{corpus}: no such folder; correct --corpus, or download the corpus (stage"
            " 0 of run.sh without --corpus, or --download)"
        )


def require_folders(args: argparse.Namespace) -> None:
    """Raise FileNotFoundError, one line, if the corpus, the noise or the rooms do not exist."""
    _require_corpus(args)
    for option, (name, _) in ARCHIVES.items():
        folder: Path | None = getattr(args, option)
        if folder is None or folder == NONE or folder.is_dir():
            continue
        fix = f"end it in /{name} to download that archive with --download-noise"
        if folder.name == name:
            fix = "download it with --download-noise"
        raise FileNotFoundError(
            f"{folder}: no such folder; correct --{option}, {fix}, or use --{option}"
            " none"
        )
