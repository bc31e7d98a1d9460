"""Data directories of diarization: recordings, their true turns and the regions to score."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from egs.common.corpus.convert_audio import convert_all
from egs.common.corpus.prepare import walk, write_set
from speakerlab.core.faults import Faults
from speakerlab.data.audio import read_info
from speakerlab.diarization.regions import Region, Turn, write_rttm, write_uem


def find_recordings(
    folder: Path, names: Iterable[str], *, ending: str = ".wav"
) -> dict[str, Path]:
    """Return recording -> file `<recording><ending>` anywhere below a folder.

    Raises ValueError with a line for each that is missing.
    """
    paths = {path.name: path for path in walk(folder)[0]}
    faults = Faults()
    for name in names:
        if name + ending not in paths:
            text = (
                f"{folder}: no recording {name}{ending}; run stage 0, or complete the"
                " corpus"
            )
            faults.add("missing recordings", text)
    faults.raise_if_any(f"{folder}: incomplete corpus")
    return {name: paths[name + ending] for name in names}


def take_channel(
    wavs: Mapping[str, Path], folder: Path, *, channel: int, num_jobs: int
) -> dict[str, Path]:
    """Return recording -> file of one channel of it, from 1, in a folder of that channel.

    A microphone array records all channels in one file, of which every command would decode all.
    Raises ValueError with a line for each recording that cannot be read or has no such channel.
    """
    made, left_out = convert_all(
        wavs,
        folder / f"channel{channel}",
        num_jobs=num_jobs,
        channel=channel,
    )
    faults = Faults()
    for text in left_out.values():
        faults.add("unusable recordings", text)
    faults.raise_if_any(f"{folder}: channel {channel} cannot be taken")
    return made


def whole_recordings(wavs: Mapping[str, Path]) -> dict[str, list[Region]]:
    """Return the regions to score of recordings without a UEM: all of each."""
    return {name: [(0.0, read_info(path).seconds)] for name, path in wavs.items()}


def write_turns(
    folder: Path,
    *,
    wavs: Mapping[str, Path],
    turns: Mapping[str, Iterable[Turn]],
    regions: Mapping[str, Iterable[Region]],
) -> None:
    """Write a data directory with `ref.rttm` and `ref.uem`."""
    write_set(folder, wavs=wavs)
    write_rttm(folder / "ref.rttm", turns)
    write_uem(folder / "ref.uem", regions)
