"""Rooms and noises: the recordings of a data directory, read when they are needed.

A directory with recordings of several kinds has `utt2kind` (id noise|music|speech).
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
        num_samples = stop - first
        return audio.read(self.path, first, num_samples)


def find_recordings(folder: Path, *, sample_rate: int) -> tuple[Recording, ...]:
    """List the recordings of a directory by id, without rejected ones; none without a directory.

    Raises ValueError if a recording is missing or empty, or has another sample rate, or no kind or
    an unknown one.
    """
    wav_scp = folder / "wav.scp"
    if not wav_scp.exists():
        return ()
    wavs = read_table(wav_scp)
    rejected = read_rejected(folder)

    # Without the table, all recordings are of the first kind.
    kind_of = dict.fromkeys(wavs, KINDS[0])
    table = folder / KIND_TABLE
    if table.exists():
        kind_of = read_table(table)
    recordings: list[Recording] = []
    # Sorted: draws are indices into this list, so its order must not depend on the tables.
    accepted = wavs.keys() - rejected.keys()
    for name in sorted(accepted):
        path = wavs[name]
        kind = kind_of.get(name, "no line")
        if kind not in KINDS:
            raise ValueError(
                f"{table}: {name} must be noise, music or speech, got {kind}; correct"
                " it, or remove the table"
            )
        try:
            info = audio.read_info(path, sample_rate=sample_rate)
        except (ValueError, OSError) as error:
            raise ValueError(f"{folder}/wav.scp: {name}: {error}") from None
        recording = Recording(
            id=name,
            kind=kind,
            path=path,
            num_samples=info.num_samples,
        )
        recordings.append(recording)
    return tuple(recordings)
