"""Extract the embeddings of audio files, in any format and at any sample rate."""

import logging
import math
import os
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from speakerlab.bin.command import model_of, parser
from speakerlab.core.atomic import check_writable
from speakerlab.core.bars import progress_bar
from speakerlab.core.counting import count_of
from speakerlab.core.reading import open_text
from speakerlab.data import audio
from speakerlab.data.convert import read_wave
from speakerlab.data.listing import is_apple_double, list_recordings
from speakerlab.data.tables import (
    SURROGATE,
    Rejection,
    one_line,
    read_recordings,
    write_rejected,
)
from speakerlab.diarization.windows import STEP_SECONDS
from speakerlab.inference.embedding_files import WRITERS, Window, remove_embeddings
from speakerlab.scoring.embeddings import EmbeddingTable

if TYPE_CHECKING:
    from speakerlab.inference.recording_embedder import Windows
    from speakerlab.inference.speaker_model import SpeakerModel

log = logging.getLogger(__name__)
MIN_STEP_SECONDS = 0.01  # of a frame; smaller steps would only repeat embeddings


class Embedded(NamedTuple):
    """Embeddings in the order of the files, and the files that have none."""

    ids: list[str]
    embeddings: list[np.ndarray]
    windows: list[Window] | None  # of each embedding; None for whole recordings
    rejected: dict[str, Rejection]
    total: int  # number of files, or of channels
    unit: str  # of `total`, for messages: "files" or "channels"


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    files = find_files(args)
    # Check before the work: an error at the end would lose the results.
    check_writable(Path(f"{args.out}.json"))
    check_writable(rejected_file(args.out))
    model = model_of(args)
    if args.window is None:
        embedded = embed_recordings(args, model, files)
    else:
        embedded = embed_windows(args, model, files)

    for _, reason in embedded.rejected.values():
        sys.stderr.write(f"{one_line(reason)}\n")
    # Embeddings of an earlier run must not lie beside a list that has their recordings.
    if embedded.rejected:
        remove_embeddings(args.out, args.format)
    rejections = rejected_file(args.out)
    write_rejected(args.out.parent, embedded.rejected, name=rejections.name)

    if embedded.ids:
        write_embeddings(args, model, embedded)
    num_rejected = len(embedded.rejected)
    max_rejected = args.allow_rejected * embedded.total
    if num_rejected > max_rejected or not embedded.ids:
        raise ValueError(
            f"{rejections}: {num_rejected} of {embedded.total} {embedded.unit} could not"
            " be embedded; correct them, or leave them out"
        )


def write_embeddings(
    args: Namespace, model: "SpeakerModel", embedded: Embedded
) -> None:
    """Write the embeddings in the format of --format, and log the written file."""
    facts: dict[str, Any] = {"precision": model.precision}
    if embedded.windows is not None:
        facts |= {"window": args.window, "step": args.step}
    table = EmbeddingTable(
        ids=embedded.ids,
        emb_ND=np.stack(embedded.embeddings),
        model_sha256=model.sha256,
        facts=facts,
    )
    write = WRITERS[args.format]
    written = write(args.out, table, embedded.windows)
    log.info(
        "%s: %s of %d dimensions",
        written,
        count_of(len(embedded.ids), "embedding"),
        model.embed_dim,
    )


def embed_recordings(
    args: Namespace, model: "SpeakerModel", files: Mapping[str, Path]
) -> Embedded:
    """Embed whole recordings, or each of their channels."""
    if args.channel == "each":
        unit = "channels"
        files, sources = split_channels(files, sample_rate=model.sample_rate)
        results = model.embed_each(sources, progress=True, check_levels=False)
    else:
        unit = "files"
        paths = list(files.values())
        results = model.embed_each(paths, progress=True, channels=args.channel)
    # Recordings of similar length are embedded together, so results are not in order.
    result_of = dict(results)
    ids: list[str] = []
    embeddings: list[np.ndarray] = []
    rejected: dict[str, Rejection] = {}
    for row, (name, path) in enumerate(files.items()):
        result = result_of[row]
        if isinstance(result, Exception):
            rejected[name] = (str(path), str(result))
        else:
            ids.append(name)
            embeddings.append(result)
    return Embedded(
        ids=ids,
        embeddings=embeddings,
        windows=None,
        rejected=rejected,
        total=len(files),
        unit=unit,
    )


def embed_windows(
    args: Namespace, model: "SpeakerModel", files: Mapping[str, Path]
) -> Embedded:
    """Embed the windows of recordings, one recording after the other."""
    ids: list[str] = []
    embeddings: list[np.ndarray] = []
    windows: list[Window] = []
    rejected: dict[str, Rejection] = {}
    is_single = len(files) == 1
    for name, path in progress_bar(files.items(), unit="files", shown=not is_single):
        try:
            embedded: Any = model.embed_windows(
                path,
                window=args.window,
                step=args.step,
                channels=args.channel,
                progress=is_single,
            )
        except (ValueError, OSError) as error:
            rejected[name] = (str(path), str(error))
            continue
        # Recording, or channel of it -> its windows.
        windows_of: dict[str, Windows] = {name: embedded}
        if args.channel == "each":
            windows_of = {
                f"{name}-{channel}": windows_of_channel
                for channel, windows_of_channel in enumerate(embedded, start=1)
            }
        for recording, (times_W2, emb_WD) in windows_of.items():
            # By number, because windows can begin within the same millisecond.
            for number, (start, end) in enumerate(times_W2.tolist(), start=1):
                ids.append(f"{recording}-{number:06d}")
                windows.append(Window(recording, start, end))
            embeddings += list(emb_WD)
    return Embedded(
        ids=ids,
        embeddings=embeddings,
        windows=windows,
        rejected=rejected,
        total=len(files),
        unit="files",
    )


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("embed", __doc__)
    names = (
        "recordings, or folders of them; ids are file names without endings, or relative"
        " paths if two are equal"
    )
    options.add("files FILE", names, nargs="*")
    options.add("--list FILE", "list of paths, one per line")
    options.add("--wav-scp FILE", "list of ids and paths, one pair per line")
    options.add(
        "--out STEM", "path of the files to write, without ending", required=True
    )
    options.add(
        "--format",
        "file format of the embeddings",
        choices=sorted(WRITERS),
        default="npy",
    )
    runtime = "expected runtime; fails if the model needs the other one"
    options.add("--runtime", runtime, choices=("torch", "onnx"))
    options.add(
        "--allow-rejected SHARE", "share of files that may be unreadable", default=0.0
    )
    options.add(
        "--window SECONDS",
        "embed windows of this length, which also have their times; ids are ID-000001, ...",
        value_type=float,
    )
    options.add(
        "--step SECONDS",
        f"from one window to the next (default {STEP_SECONDS:g})",
        value_type=float,
    )
    options.add_channel("one embedding per channel, with the ids ID-1, ID-2, ...")
    options.add_model_options()
    args = options.parse_args(arguments)
    check_windows(args)
    check_runtime(args)
    check_out(args)
    return args


def check_runtime(args: Namespace) -> None:
    """Raise ValueError if the model needs another runtime than --runtime."""
    runtime = "onnx" if args.model.suffix == ".onnx" else "torch"
    if args.runtime not in (None, runtime):
        fix = "make one with `speakerlab export`"
        if runtime == "onnx":
            fix = "give the model folder"
        raise ValueError(
            f"--runtime: {args.model} runs with {runtime}, not {args.runtime}; {fix}"
        )


def check_out(args: Namespace) -> None:
    """Remove the ending of --format from --out; ValueError for a path that the format refuses."""
    # The writer appends the ending of the format. Any other ending is part of the name.
    if args.out.suffix == f".{args.format}":
        args.out = args.out.with_suffix("")
    elif args.out.suffix.removeprefix(".") in WRITERS:
        raise ValueError(
            f"--out: {args.out} has another ending than --format {args.format}; change"
            " one of them"
        )
    # A .scp file has the path of its .ark file, in a line of UTF-8.
    path = as_utf8(args.out.absolute())
    if args.format == "ark" and one_line(path) != path:
        raise ValueError(
            f"--out: {one_line(path)} is not a line of UTF-8, which a .scp file needs;"
            " choose another folder, or another --format"
        )


def check_windows(args: Namespace) -> None:
    """Raise ValueError for windows that no recording could have; set the default step."""
    if args.window is None:
        if args.step is not None:
            raise ValueError("--step: is of windows; give --window SECONDS, too")
        return
    if args.step is None:
        args.step = STEP_SECONDS
    for option, seconds in (("--window", args.window), ("--step", args.step)):
        # The comparison is also false for nan.
        if not MIN_STEP_SECONDS <= seconds < math.inf:
            raise ValueError(
                f"{option}: must be at least {MIN_STEP_SECONDS:g} s, got {seconds:g};"
                " correct it"
            )
    if args.step > args.window:
        raise ValueError(
            f"--step: windows of {args.window:g} s every {args.step:g} s leave gaps;"
            " give a step of at most the window"
        )


def rejected_file(out: Path) -> Path:
    """Return the file of the recordings that could not be embedded."""
    return Path(f"{out}.rejected.tsv")


def find_files(args: Namespace) -> dict[str, Path]:
    """Return id -> path of the recordings given by the options."""
    has_files = bool(args.files)
    has_list = args.list is not None
    has_wav_scp = args.wav_scp is not None
    num_sources = has_files + has_list + has_wav_scp
    if num_sources != 1:
        raise ValueError(
            f"embed: {num_sources} of FILE..., --list and --wav-scp given; give one"
        )
    if has_wav_scp:
        path_of = read_recordings(args.wav_scp)
        segments = args.wav_scp.with_name("segments")
        if segments.exists():
            log.warning(
                "%s: is not read here, so whole recordings are embedded; `speakerlab"
                " extract --data %s` embeds its utterances",
                segments,
                segments.parent,
            )
        return {name: as_path(path) for name, path in path_of.items()}
    given: list[Path] = args.files
    if has_list:
        given = read_list(args.list)
    paths = find_recordings(given, where=args.list or "embed")
    files: dict[str, Path] = {}
    for path, name in zip(paths, name_files(paths)):
        if name in files:
            raise ValueError(
                f"{path}: has the same id '{name}' as {files[name]}; give each file once,"
                " or ids with --wav-scp"
            )
        files[name] = path
    return files


def read_list(path: Path) -> list[Path]:
    """Read a list of paths, one per line; raise ValueError if its encoding is wrong."""
    paths: list[Path] = []
    # A file may have a name that is not UTF-8, so such lines are not refused at once.
    with open_text(path, errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            whole_line = line.rstrip("\n")
            name = line.strip()
            if not name:
                continue
            # Blanks around a path are rarely part of the name.
            if os.path.exists(as_path(whole_line)):  # noqa: PTH110
                name = whole_line
            listed = as_path(name)
            if SURROGATE.search(name) and not os.path.exists(listed):  # noqa: PTH110
                text = one_line(name)
                raise ValueError(
                    f"{path}:{number}: is not UTF-8, got '{text}'; save it as UTF-8"
                )
            paths.append(listed)
    return paths


def split_channels(
    files: Mapping[str, Path], *, sample_rate: int
) -> tuple[dict[str, Path], list[Callable[[], np.ndarray]]]:
    """Return id-N -> path of each channel N of the files, and functions that read wave_S."""
    channels: dict[str, Path] = {}
    sources: list[Callable[[], np.ndarray]] = []
    items = progress_bar(files.items(), unit="files", text="counting channels")
    for name, path in items:
        for number in range(1, count_channels(path) + 1):
            channels[f"{name}-{number}"] = path
            source = partial(read_wave, path, sample_rate=sample_rate, channels=number)
            sources.append(source)
    return channels, sources


def count_channels(path: Path) -> int:
    """Return the number of channels; 1 for a file whose error is found when it is read."""
    try:
        with audio.stream(path, all_channels=True) as (_, blocks):
            _, num_channels = next(blocks).shape
            return num_channels
    except (ValueError, OSError, StopIteration):
        return 1


def find_recordings(given: Sequence[Path], *, where: Path | str) -> list[Path]:
    """Return the given files and the recordings below given folders; log what is skipped.

    where: source of the paths, for the error if there are no recordings.
    """
    recordings: list[Path] = []
    attributes: list[Path] = []
    for path in given:
        # Not `Path.is_dir`, which raises an error for a name that is too long.
        if os.path.isdir(path):  # noqa: PTH112
            recordings += recordings_of(path)
        elif is_apple_double(path):
            attributes.append(path)
        else:
            recordings.append(path)
    if attributes:
        log.info(
            "skipped %s of macOS beside recordings, as %s",
            count_of(len(attributes), "file"),
            one_line(attributes[0]),
        )
    if not recordings:
        raise ValueError(f"{where}: no recordings are given; give at least one")
    return recordings


def recordings_of(folder: Path) -> list[Path]:
    """Return the recordings below a folder; log how many other files there are."""
    listing = list_recordings(folder)
    skipped = listing.skipped()
    where = one_line(folder)
    if not listing.recordings:
        content = "is empty"
        if skipped:
            content = f"has no recordings, got {skipped}"
        fix = "give a folder with wav, flac, mp3 or other audio files"
        raise ValueError(f"{where}: {content}; {fix}")
    if skipped:
        number = count_of(len(listing.recordings), "recording")
        log.info("%s: %s; skipped %s", where, number, skipped)
    return listing.recordings


def name_files(paths: Sequence[Path]) -> list[str]:
    """Return the id of each file: its name without the ending, or its path if names are equal.

    Paths are relative to the common folder of all files. Files that differ only in their endings
    keep them. An id is one word of UTF-8: blanks become "_", or an escape if two ids would be
    equal; other bytes become an escape such as \\udce9.
    """
    names = [Path(path.name) for path in paths]
    distinct_names = {path.stem for path in paths}
    distinct_paths = {path.with_suffix("") for path in paths}
    # Files of equal names in one folder differ in their endings, which are added below.
    if len(distinct_names) < len(distinct_paths):
        # normpath instead of resolve: links to one recording have different names.
        full_paths: list[Path] = []
        for path in paths:
            full_path = os.path.normpath(path.absolute())
            full_paths.append(Path(full_path))
        folders = [path.parent for path in full_paths]
        common = os.path.commonpath(folders)
        names = [path.relative_to(common) for path in full_paths]

    forms_of_names: list[list[str]] = []
    for name in names:
        without_ending = make_id(name.with_suffix(""))
        with_ending = make_id(name)
        with_escapes = make_id(name, escapes_blanks=True)
        forms_of_names.append([without_ending, with_ending, with_escapes])
    return make_distinct(forms_of_names)


def make_distinct(forms_of_names: Sequence[Sequence[str]]) -> list[str]:
    """Return a form of each name: the first that no other name has, or the last.

    forms_of_names: the forms of each name, shortest first.
    """
    chosen = [0] * len(forms_of_names)  # the number of each form
    # A longer form may be equal to the form of another name, hence the loop.
    while True:
        ids = [forms[number] for forms, number in zip(forms_of_names, chosen)]
        counts = Counter(ids)
        is_done = True
        for row, forms in enumerate(forms_of_names):
            has_longer_form = chosen[row] < len(forms) - 1
            if counts[ids[row]] > 1 and has_longer_form:
                chosen[row] += 1
                is_done = False
        if is_done:
            return ids


def make_id(name: Path, *, escapes_blanks: bool = False) -> str:
    """Return a path as one word of UTF-8: a blank becomes "_", or an escape such as \\x20."""
    # White space separates the columns of Kaldi's tables.
    blank = _escape if escapes_blanks else "_"
    word = re.sub(r"\s", blank, as_utf8(name))
    return one_line(word)


def _escape(match: re.Match[str]) -> str:
    """Return the escape of a character."""
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def as_path(name: str) -> Path:
    """Return a path given as UTF-8, whatever the locale; surrogates are other bytes."""
    return Path(os.fsdecode(name.encode("utf-8", "surrogateescape")))


def as_utf8(path: Path) -> str:
    """Return a path decoded as UTF-8, whatever the locale; other bytes are surrogates."""
    return os.fsencode(path.as_posix()).decode("utf-8", "surrogateescape")
