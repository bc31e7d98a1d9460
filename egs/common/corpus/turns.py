"""Data directories of diarization: recordings, their true turns and the regions to score."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from egs.common.corpus.prepare import walk, write_set
from speakerlab.core.faults import Faults
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
