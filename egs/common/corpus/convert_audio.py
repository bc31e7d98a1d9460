"""Converting recordings of any format to mono FLAC at one sample rate.

wav and flac files at this rate are used as they are if ranges of them can be read. Converted files
are kept: an interrupted run continues. m4a and similar formats need PyAV (extra `aac`); the samples
equal those of `ffmpeg -i IN -acodec pcm_s16le OUT.wav`, in number too, up to steps of 1 between
decoder versions.
"""

import importlib.util
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from egs.common.corpus.archives import progress_bar
from speakerlab.core.atomic import replacing
from speakerlab.core.parallel import map_in_processes
from speakerlab.data import audio
from speakerlab.data.convert import read_wave
from speakerlab.data.listing import shorten
from speakerlab.data.tables import one_line

SAMPLE_RATE = 16000
MIN_FILES_FOR_POOL = 32  # below this, starting processes costs more than it saves
FILES_PER_TASK = 16


def convert_all(
    wavs: Mapping[str, Path],
    folder: Path,
    *,
    num_jobs: int,
    sample_rate: int = SAMPLE_RATE,
    channel: int | None = None,
) -> tuple[dict[str, Path], dict[Path, str]]:
    """Return (utterance -> file to train from, files that cannot be converted -> why).

    A file is converted again only if its source or the rate has changed since. channel: the only
    one that is converted, from 1, in a folder of its own; None: the first one of files that are not
    used as they are.
    """
    convert = partial(_convert, sample_rate=sample_rate, channel=channel)
    pairs = [(path, folder / f"{shorten(name)}.flac") for name, path in wavs.items()]
    made: dict[str, Path] = {}
    left_out: dict[Path, str] = {}
    workers = num_jobs if len(pairs) >= MIN_FILES_FOR_POOL else 1
    results = map_in_processes(convert, pairs, workers, chunk=FILES_PER_TASK)
    bar = progress_bar(
        results, total=len(wavs), desc=f"{folder}: convert", unit=" files"
    )
    for name, result in zip(wavs, bar):
        if isinstance(result, Path):
            made[name] = result
        else:
            left_out[wavs[name]] = result
    return made, left_out


def convert_coded(
    wavs: Mapping[str, Path], folder: Path, *, num_jobs: int
) -> tuple[dict[str, Path], dict[Path, str]]:
    """Convert the recordings that are no wav or flac files; return as `convert_all`, all of them.

    wav and flac files stay, at any sample rate.
    """
    coded: dict[str, Path] = {}
    for name, path in wavs.items():
        if path.suffix.lower() not in audio.ENDINGS:
            coded[name] = path
    if not coded:
        return dict(wavs), {}
    made, left_out = convert_all(coded, folder, num_jobs=num_jobs)
    # In the order of the ids; files that cannot be converted are left out.
    files: dict[str, Path] = {}
    for name, path in wavs.items():
        if name in made or name not in coded:
            files[name] = made.get(name, path)
    return files, left_out


def require_decoder(paths: Iterable[Path], *, where: Path) -> None:
    """Raise ValueError if there is a file that needs PyAV and PyAV is not installed."""
    first = next(
        (path for path in paths if path.suffix.lower() not in audio.ENDINGS), None
    )
    if first is not None and importlib.util.find_spec("av") is None:
        raise ValueError(
            f"{where}: {first.suffix} files need PyAV, which is not installed; pip"
            " install av"
        )


def _convert(
    pair: tuple[Path, Path], *, sample_rate: int, channel: int | None
) -> Path | str:
    """Return the file to use, converted from the first to the second, or a one-line error."""
    path, target = pair
    try:
        if channel is None and _is_usable(path, sample_rate):
            return path
        times = path.stat()
        is_made = target.exists() and target.stat().st_mtime_ns == times.st_mtime_ns
        if is_made and _is_usable(target, sample_rate):
            return target
        # Rooms and noise have levels that speech has not.
        wave_S = read_wave(
            path,
            sample_rate=sample_rate,
            channels=channel,
            check_levels=False,
        )
    except (ValueError, OSError) as error:
        return str(error).replace(str(path), one_line(path))
    with replacing(target) as fresh:
        fresh.write_bytes(audio.encode(audio.to_int16(wave_S), sample_rate, "FLAC"))
        # The time of the source, so that a changed source is detected.
        os.utime(fresh, ns=(times.st_atime_ns, times.st_mtime_ns))
    return target


def _is_usable(path: Path, sample_rate: int) -> bool:
    """Return whether ranges of this wav or flac file can be read, at this rate."""
    if path.suffix.lower() not in audio.ENDINGS:
        return False
    try:
        info = audio.read_info(path)
    except ValueError:
        return False
    return info.sample_rate == sample_rate and info.has_index
