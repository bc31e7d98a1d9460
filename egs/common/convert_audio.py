"""Audio in any format, as files that training can read parts of: 16 kHz mono FLAC.

In: utterance -> file. Out: utterance -> the file itself where it is fit to be trained from, else
its conversion in a folder that mirrors the ids; and what could not be converted. What was
converted before is not converted again, so a run that was cut off goes on. m4a and the like take
PyAV (extra `aac`); the samples are those that `ffmpeg -i IN -acodec pcm_s16le OUT.wav` gives, none
more or fewer at either end, but for steps of 1 where the two decoders are of other versions.
"""

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from egs.common.corpus import LeftOut
from egs.common.progress import Progress
from speakerlab.core.atomic import replacing
from speakerlab.core.process import die_with_parent
from speakerlab.data import audio
from speakerlab.data.columns import stable_hash
from speakerlab.data.convert import read_wave
from speakerlab.data.files import one_line

SAMPLE_RATE = 16000
READ_AS_THEY_ARE = {".wav", ".flac"}
MAX_NAME_BYTES = 200
MIN_FILES_FOR_POOL = 32  # below this, starting processes costs more than it saves
FILES_AT_ONCE = 16  # that a process is handed


def convert_all(
    wavs: Mapping[str, Path], folder: Path, *, num_jobs: int
) -> tuple[dict[str, Path], LeftOut]:
    """(utterance -> a file that training can read parts of, what cannot be made one).

    A file that was converted before is not made anew, unless its source has changed since.
    """
    targets = [folder / f"{_short(name)}.flac" for name in wavs]
    progress = Progress(f"{folder}: converted", total=len(wavs), unit="files")
    made: dict[str, Path] = {}
    left_out: LeftOut = {}
    results = _convert_each(list(wavs.values()), targets, num_jobs=num_jobs)
    for done, (name, result) in enumerate(zip(wavs, results), 1):
        progress.at(done)
        if isinstance(result, Path):
            made[name] = result
        else:
            left_out[wavs[name]] = result
    return made, left_out


def require_decoder(paths: Iterable[Path], *, where: Path) -> None:
    """Raise ValueError, once instead of for each file, where m4a is to be read without PyAV."""
    first = next((path for path in paths if path.suffix.lower() not in READ_AS_THEY_ARE), None)
    if first is not None and importlib.util.find_spec("av") is None:
        raise ValueError(
            f"{where}: holds {first.suffix} files, which take PyAV, got an environment without it; "
            "install the extra: pip install 'speakerlab[aac]' (or pip install av)"
        )


def _convert_each(
    paths: Sequence[Path], targets: Sequence[Path], *, num_jobs: int
) -> Iterator[Path | str]:
    if num_jobs < 2 or len(paths) < MIN_FILES_FOR_POOL:
        yield from map(_converted, paths, targets)
        return
    with ProcessPoolExecutor(num_jobs, initializer=die_with_parent) as pool:
        yield from pool.map(_converted, paths, targets, chunksize=FILES_AT_ONCE)


def _short(name: str) -> str:
    """The id as a path whose parts leave room for an ending."""
    parts = name.split("/")
    fits = [len(part.encode()) <= MAX_NAME_BYTES for part in parts]
    return "/".join(
        part if fit else f"{part[:40]}~{stable_hash(part):016x}" for part, fit in zip(parts, fits)
    )


def _converted(path: Path, target: Path) -> Path | str:
    """The file to use, or one line that says why there is none."""
    try:
        if _is_ready(path):
            return path
        times = path.stat()
        if target.exists() and target.stat().st_mtime_ns == times.st_mtime_ns:
            return target
        wave_S = read_wave(path, sample_rate=SAMPLE_RATE)
    except (ValueError, OSError) as error:
        return str(error).replace(str(path), one_line(path))
    with replacing(target) as fresh:
        fresh.write_bytes(audio.to_flac(audio.to_int16(wave_S), SAMPLE_RATE))
        os.utime(fresh, ns=(times.st_atime_ns, times.st_mtime_ns))  # by which a change shows
    return target


def _is_ready(path: Path) -> bool:
    """Whether it is wav or flac at the right rate, as far as its header tells."""
    if path.suffix.lower() not in READ_AS_THEY_ARE:
        return False
    try:
        return audio.read_info(path).sample_rate == SAMPLE_RATE
    except ValueError:
        return False
