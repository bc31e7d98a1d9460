"""The audio that data.py measures with, as data directories of each kind, in one folder.

In: a tree of flac files, one folder per speaker, and folders of noises and rooms; where there are
none, synthetic ones. Out: below --folder, data directories `flac`, `wav` and `shard` of the same
utterances, `noise`, `rirs` and `clips`, which is a few crops; a line of JSON with what is in them.

Everything is copied to 16-bit wav, but for flac files that are taken whole: those stay in place.
Runs in a process of its own with our `speakerlab`. Letters: S samples.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.shards import Layout
from speakerlab.data.tables import write_data_dir

RATE = 16000
NUM_CLIPS = 8
SYNTHETIC_SPEAKERS, SYNTHETIC_TAKES, SYNTHETIC_SECONDS = 10, 4, 8.0


def voices() -> Iterator[tuple[str, np.ndarray]]:
    """(id, wave_S) of harmonics whose loudness goes up and down, and a little noise."""
    rng = np.random.default_rng(0)
    time_S = np.arange(round(SYNTHETIC_SECONDS * RATE)) / RATE
    for speaker in range(SYNTHETIC_SPEAKERS):
        for take in range(SYNTHETIC_TAKES):
            pitch = 90 + 12 * speaker + take
            wave_S = sum(np.sin(2 * np.pi * pitch * k * time_S) / k for k in range(1, 20))
            wave_S = 0.1 * wave_S * np.sin(2 * np.pi * 1.5 * time_S) ** 2
            wave_S = wave_S + 0.003 * rng.standard_normal(len(time_S))
            yield f"voice{speaker:02d}-{take}", audio.to_int16(wave_S)


def noises() -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    for seconds in (5, 10, 20, 30):
        yield f"noise{seconds}", audio.to_int16(0.05 * rng.standard_normal(seconds * RATE))


def rooms() -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(2)
    for seconds in (0.5, 1.0, 1.5):
        decay_S = np.exp(-7 * np.arange(round(seconds * RATE)) / (seconds * RATE))
        wave_S = 0.1 * rng.standard_normal(len(decay_S)) * decay_S
        wave_S[0] = 0.9
        yield f"room{seconds}", audio.to_int16(wave_S)


def recordings(folder: Path) -> dict[str, Path]:
    """id -> flac or wav file below a folder; an id begins with the first folder's name."""
    found = sorted(path for path in folder.rglob("*") if path.suffix in (".flac", ".wav"))
    if not found:
        raise SystemExit(f"{folder}: must hold flac or wav files, got none; give another folder")
    return {f"{path.relative_to(folder).parts[0]}-{path.stem}": path for path in found}


def write_waves(
    folder: Path, waves: Iterable[tuple[str, np.ndarray]], suffix: str = ".wav"
) -> dict[str, Path]:
    folder.mkdir(parents=True)
    paths = {}
    for name, wave_S in waves:
        paths[name] = folder / f"{name}{suffix}"
        audio.write(paths[name], wave_S, RATE)
    return paths


def read_waves(paths: dict[str, Path], most: int = -1) -> Iterator[tuple[str, np.ndarray]]:
    """(id, wave_S), of each file its first `most` samples."""
    for name, path in paths.items():
        num_samples = audio.read_info(path).num_samples
        yield name, audio.read(path, 0, num_samples if most < 0 else min(most, num_samples))


def make_speech(options: argparse.Namespace) -> tuple[dict[str, Path], dict[str, Path]]:
    """(flac files, wav files) of the same samples, by id."""
    audio_dir = options.folder / "audio"
    most = -1 if options.utterance_seconds is None else round(options.utterance_seconds * RATE)
    given = None if options.audio is None else recordings(options.audio)
    if given is not None and most < 0 and all(path.suffix == ".flac" for path in given.values()):
        flacs = given
    else:
        waves = voices() if given is None else read_waves(given, most)
        flacs = write_waves(audio_dir / "flac", waves, ".flac")
    return flacs, write_waves(audio_dir / "wav", read_waves(flacs))


def make_banks(options: argparse.Namespace) -> None:
    """Data directories `noise` and `rirs`."""
    for name, given, made in (("noise", options.noise, noises), ("rirs", options.rirs, rooms)):
        waves = made() if given is None else read_waves(recordings(given))
        paths = write_waves(options.folder / "audio" / name, waves)
        write_data_dir(options.folder / name, wavs=paths)


def make_clips(options: argparse.Namespace, wavs: dict[str, Path]) -> None:
    """A data directory of crops, so that whoever draws one from it must take it whole."""
    wanted = round(options.crop_seconds * RATE)
    long_enough = {
        name: path for name, path in wavs.items() if audio.read_info(path).num_samples >= wanted
    }
    step = max(1, len(long_enough) // NUM_CLIPS)
    chosen = dict(sorted(long_enough.items())[::step][:NUM_CLIPS])
    clips = write_waves(options.folder / "audio/clips", read_waves(chosen, wanted))
    write_data_dir(options.folder / "clips", wavs=clips, speakers=owners(clips))


def owners(utterances: Iterable[str]) -> dict[str, str]:
    return {name: name.split("-")[0] for name in utterances}


def pack(folder: Path) -> None:
    """Stage 2 on a checked data directory."""
    layout = Layout.of_waves("pcm", sample_rate=RATE)
    pack_data_dir(folder, layout=layout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("audio", "noise", "rirs"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--crop-seconds", type=float, required=True)
    parser.add_argument("--utterance-seconds", type=float)
    parser.add_argument("--pack", action="store_true")
    options = parser.parse_args()
    flacs, wavs = make_speech(options)
    make_banks(options)
    make_clips(options, wavs)
    for name, paths in (("flac", flacs), ("wav", wavs), ("shard", wavs)):
        write_data_dir(options.folder / name, wavs=paths, speakers=owners(paths))
    names = ("flac", "wav", "shard", "clips", "noise", "rirs")
    check_data_dirs([options.folder / name for name in names], sample_rate=RATE)
    if options.pack:
        pack(options.folder / "shard")
    seconds = [audio.read_info(path).seconds for path in wavs.values()]
    facts = {"utterances": len(wavs), "seconds": sum(seconds) / len(seconds)}
    facts["speakers"] = len(set(owners(wavs).values()))
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
