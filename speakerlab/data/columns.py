"""The utterances of one data directory as arrays, which forked workers share without a copy.

In: checked tables. Out: `Columns`, rows in the order of a hash of the utterance id.
Letters: N utterances.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from speakerlab.data.arrays import Strings, stable_hash
from speakerlab.data.shards import Packed
from speakerlab.data.tables import read_durations, read_rejected, read_segments, read_table


@dataclass(frozen=True, eq=False)
class Columns:
    """One data directory; rows are ordered by a hash of their id, so order has no meaning."""

    ids: Strings
    hash_N: np.ndarray  # uint64, rising
    paths: Strings  # of the recording that each utterance is (a part of)
    start_N: np.ndarray  # int64, first sample within the recording
    num_samples_N: np.ndarray  # int64
    speaker_N: np.ndarray  # int32, index into `speakers`
    speakers: Strings  # sorted
    sha256: str = ""  # of everything but the paths, which may differ between hosts
    waves: Packed | None = None  # where it is packed
    features: Packed | None = None

    def __len__(self) -> int:
        return len(self.ids)


def read_columns(folder: Path, *, sample_rate: int) -> Columns:
    """Read the tables of a checked data directory.

    Raises FileNotFoundError where it was not checked, ValueError where it has changed since.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: does not exist; check the path, or run stage 1")
    if not (folder / "utt2dur").exists():
        raise FileNotFoundError(
            f"{folder}: has not been checked (no utt2dur); run stage 1, or `speakerlab check`"
        )
    wavs, seconds = read_table(folder / "wav.scp"), read_durations(folder)
    segments, rejected = read_segments(folder / "segments"), read_rejected(folder)
    utterances, kept = (segments or wavs).keys(), seconds.keys() - rejected.keys()
    changed = (utterances - seconds.keys() - rejected.keys()) | (seconds.keys() - utterances)
    if changed:
        raise ValueError(
            f"{folder}: has changed since it was checked, e.g. {min(changed)}; run stage 1, or "
            "`speakerlab check`"
        )
    speakers = {utterance: utterance for utterance in kept}
    if (folder / "utt2spk").exists():
        speakers = read_table(folder / "utt2spk")
    if unknown := kept - speakers.keys():
        raise ValueError(f"{folder}/utt2spk: {min(unknown)} has no speaker; add its line")
    order = sorted(sorted(kept), key=stable_hash)
    parts = [segments.get(utterance, (utterance, 0.0, 0.0)) for utterance in order]
    if lacking := {recording for recording, _, _ in parts} - wavs.keys():
        raise ValueError(f"{folder}/wav.scp: lacks the recording {min(lacking)}; add its line")
    names = sorted({speakers[utterance] for utterance in order})
    index = {speaker: i for i, speaker in enumerate(names)}
    lengths = [round(seconds[utterance] * sample_rate) for utterance in order]
    columns = Columns(
        ids=(ids := Strings.of(order)),
        hash_N=np.array(list(map(stable_hash, order)), dtype=np.uint64),
        paths=Strings.of(wavs[recording] for recording, _, _ in parts),
        start_N=np.array([round(start * sample_rate) for _, start, _ in parts], dtype=np.int64),
        num_samples_N=np.array(lengths, dtype=np.int64),
        speaker_N=np.array([index[speakers[utterance]] for utterance in order], dtype=np.int32),
        speakers=Strings.of(names),
    )
    digest = hashlib.sha256("\n".join(names).encode())
    for column in (ids.blob, ids.ends, columns.start_N, columns.num_samples_N, columns.speaker_N):
        digest.update(column.data)
    return replace(columns, sha256=digest.hexdigest())
