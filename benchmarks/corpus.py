"""The audio of a comparison, as data directories of each kind in one folder.

In: a tree of flac or wav files, one folder per speaker, and folders of noises and room impulse
responses (--audio --noise --rirs). A folder that is not named is taken from this project's small
corpus where that exists, and synthesized otherwise. Out: data directories `flac`, `wav` and `shard`
of the same utterances, `noise`, `rirs`, and `clips`, a few crops. Only our own process imports this
file. Letters: S samples.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sides import ROOT

from speakerlab.bench import synthetic
from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.shards import Layout
from speakerlab.data.tables import write_data_dir

SHARED = ROOT.parent / "shared/data"
DEFAULTS = {
    "audio": "librispeech-mini/train-clean-100",
    "noise": "noise",
    "rirs": "rirs",
}
RATE = 16000
NUM_CLIPS = 8
Waves = Iterable[tuple[str, np.ndarray]]  # id, wave_S
Paths = dict[str, Path]  # id -> file


def name_audio() -> str:
    """Return the name of the recordings that cases read by default on this machine."""
    return (
        DEFAULTS["audio"]
        if (SHARED / DEFAULTS["audio"]).is_dir()
        else "synthetic recordings"
    )


def make(
    options: argparse.Namespace,
    *,
    crop_seconds: float,
    pack: bool = False,
    defaults: Mapping[str, str] = DEFAULTS,
) -> str:
    """Fill `options.folder`, read every file once, and return a sentence about the recordings."""
    given = {name: find_folder(options, name, defaults) for name in DEFAULTS}
    flacs, wavs = make_speech(
        options.folder / "audio", given["audio"], options.utterance_seconds
    )
    for name, source_dir, made in (
        ("noise", given["noise"], synthetic.noises),
        ("rirs", given["rirs"], synthetic.rooms),
    ):
        waves = made() if source_dir is None else read_waves(recordings(source_dir))
        paths = write_waves(options.folder / "audio" / name, waves)
        write_data_dir(options.folder / name, wavs=paths)
    clips = make_clips(options.folder / "audio/clips", wavs, round(crop_seconds * RATE))
    speech = {"flac": flacs, "wav": wavs, "shard": wavs, "clips": clips}
    for name, paths in speech.items():
        write_data_dir(options.folder / name, wavs=paths, speakers=speakers_of(paths))
    names = [*speech, "noise", "rirs"]
    check_data_dirs([options.folder / name for name in names], sample_rate=RATE)
    if pack:
        pack_data_dir(
            options.folder / "shard", layout=Layout.of_waves("pcm", sample_rate=RATE)
        )
    for path in {*flacs.values(), *wavs.values(), *options.folder.rglob("*")}:
        if path.is_file():
            path.read_bytes()  # into the system's cache
    seconds = np.mean([audio.read_info(path).seconds for path in wavs.values()])
    speakers = len(set(speakers_of(wavs).values()))
    return (
        f"{given['audio'] or 'synthetic'}: {len(wavs)} recordings of {speakers}"
        f" speakers, {seconds:.1f} s on average"
    )


def find_folder(
    options: argparse.Namespace, name: str, defaults: Mapping[str, str]
) -> Path | None:
    """Return the folder that an option names, or the default one if it exists."""
    given: Any = getattr(options, name)
    default = SHARED / defaults.get(name, DEFAULTS[name])
    if given is None:
        return default if default.is_dir() else None
    if not given.is_dir():
        raise SystemExit(f"--{name}: {given}: not a folder")
    return given


def recordings(folder: Path) -> Paths:
    """Return the flac and wav files below a folder; an id begins with the first folder's name."""
    files = sorted(
        path for path in folder.rglob("*") if path.suffix in (".flac", ".wav")
    )
    if not files:
        raise SystemExit(f"{folder}: no flac or wav files; give another folder")
    return {f"{path.relative_to(folder).parts[0]}-{path.stem}": path for path in files}


def make_speech(
    folder: Path, given: Path | None, seconds: float | None
) -> tuple[Paths, Paths]:
    """Return (flac files, wav files) of the same samples, cut to `seconds`."""
    most = None if seconds is None else round(seconds * RATE)
    sources = None if given is None else recordings(given)
    if (
        sources is not None
        and most is None
        and all(p.suffix == ".flac" for p in sources.values())
    ):
        flacs = sources
    else:
        waves = synthetic.voices() if sources is None else read_waves(sources, most)
        flacs = write_waves(folder / "flac", waves, ".flac")
    return flacs, write_waves(folder / "wav", read_waves(flacs))


def make_clips(folder: Path, wavs: Paths, num_samples: int) -> Paths:
    """Write the first crop of a few utterances, so that a crop drawn from them is all of it."""
    long_enough = [
        n
        for n, path in wavs.items()
        if audio.read_info(path).num_samples >= num_samples
    ]
    step = max(1, len(long_enough) // NUM_CLIPS)
    chosen = {name: wavs[name] for name in sorted(long_enough)[::step][:NUM_CLIPS]}
    return write_waves(folder, read_waves(chosen, num_samples))


def write_waves(folder: Path, waves: Waves, ending: str = ".wav") -> Paths:
    folder.mkdir(parents=True)
    paths = {}
    for name, wave_S in waves:
        paths[name] = folder / f"{name}{ending}"
        audio.write(paths[name], wave_S, RATE)
    return paths


def read_waves(
    paths: Paths, most: int | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (id, wave_S), of each file its first `most` samples."""
    for name, path in paths.items():
        num_samples = audio.read_info(path).num_samples
        yield name, audio.read(path, 0, min(most or num_samples, num_samples))


def speakers_of(utterances: Iterable[str]) -> dict[str, str]:
    return {name: name.split("-")[0] for name in utterances}
