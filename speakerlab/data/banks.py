"""Rooms and noises: the recordings of a data directory, read where they are needed.

The directory may have `utt2kind` (id noise|music|speech), where they are of several kinds.
Letters: S samples.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakerlab.data import audio
from speakerlab.data.tables import read_rejected, read_table

KINDS = ("noise", "music", "speech")  # the folders of MUSAN
KIND_TABLE = "utt2kind"


@dataclass(frozen=True)
class Recording:
    """int16 samples of an audio file; a slice of it reads them."""

    id: str
    kind: str
    path: str
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, part: slice) -> np.ndarray:
        first, stop, _ = part.indices(self.num_samples)
        return audio.read(self.path, first, stop - first)


def find_recordings(folder: Path, *, sample_rate: int) -> tuple[Recording, ...]:
    """List the recordings of a directory by id, without rejected ones; none without a directory.

    Raises ValueError where a recording is missing, empty or has another rate, no kind or an
    unknown one.
    """
    if not (folder / "wav.scp").exists():
        return ()
    wavs, rejected = read_table(folder / "wav.scp"), read_rejected(folder)
    table = folder / KIND_TABLE
    kind_of = read_table(table) if table.exists() else dict.fromkeys(wavs, KINDS[0])
    found: list[Recording] = []
    for name in sorted(wavs.keys() - rejected.keys()):
        kind = kind_of.get(name, "no line")
        if kind not in KINDS:
            raise ValueError(
                f"{table}: {name} must be noise, music or speech, got {kind}; correct it, or "
                "remove the table"
            )
        try:
            info = audio.read_info(wavs[name], sample_rate=sample_rate)
        except (ValueError, OSError) as error:
            raise ValueError(f"{folder}/wav.scp: {name}: {error}") from None
        found.append(Recording(name, kind, wavs[name], info.num_samples))
    return tuple(found)
