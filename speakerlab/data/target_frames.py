"""Stored frames of a teacher: what it computes at each time of an utterance, for crops of it.

A second of CAM++ has 25 frames of 512 channels, which take 26 kB as float16. So frames stay on
disk, in files of some utterances each, and a data worker reads only those of its crop.

Letters: U utterances of a file, F frames of all of them, T frames of a crop, C channels,
D dimensions of an embedding, N utterances.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from speakerlab.core.atomic import replacing

FACTS = "facts"  # in the header of a file: what its frames were made of


def write_frames(
    path: Path,
    frames_of_each: Sequence[np.ndarray],
    emb_UD: np.ndarray,
    facts: Mapping[str, Any],
) -> None:
    """Write a file of some utterances; frames_of_each: (C, frames) of every utterance, float16.

    Raises ValueError if a frame is not finite.
    """
    # Time first, so that the frames of a crop lie side by side.
    frames_FC = np.concatenate(
        [np.ascontiguousarray(frames_CT.T) for frames_CT in frames_of_each]
    )
    if not np.isfinite(frames_FC).all():
        raise ValueError(
            f"{path}: the teacher's frames are not finite, or too large for float16; set"
            " distil.frame_weight=0, or distil.targets=crop"
        )
    counts = [frames_CT.shape[1] for frames_CT in frames_of_each]
    tensors = {
        "frames": frames_FC,
        "num_frames": np.array(counts, dtype=np.int64),
        "embeddings": emb_UD,
    }
    content = save(tensors, metadata={FACTS: json.dumps(facts)})
    # Not `save_file`, whose error on a full disk is no OSError.
    with replacing(path) as partial:
        partial.write_bytes(content)


@dataclass(frozen=True)
class FrameFile:
    """What a file of frames holds, but for the frames themselves."""

    path: Path
    facts: dict[str, Any]
    num_frames_U: np.ndarray  # int64
    emb_UD: np.ndarray  # float32


def open_frames(path: Path) -> FrameFile | None:
    """Return what a file holds; None if it is missing or damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            facts = json.loads(file.metadata()[FACTS])
            return FrameFile(
                path=path,
                facts=facts,
                num_frames_U=file.get_tensor("num_frames"),
                emb_UD=file.get_tensor("embeddings"),
            )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


@dataclass(frozen=True)
class TargetFrames:
    """Where the frames of each utterance are stored."""

    num_samples_N: np.ndarray  # of the utterances
    paths: Sequence[Path]  # the files
    file_N: np.ndarray  # index into `paths`
    first_N: np.ndarray  # first frame of an utterance in its file
    num_frames_N: np.ndarray
    crop_frames: int  # frames to read for a crop

    def read(self, row: int, first_sample: int) -> np.ndarray:
        """Return frames_CT, float16, of a crop that begins at a sample of an utterance.

        A crop of an utterance that is shorter gets its frames again from the first one on, as it
        gets its samples again.
        """
        num_frames = int(self.num_frames_N[row])
        # Frames and samples are spread evenly over the utterance, so a crop begins after the same
        # share of both. Rounded up, it could end behind the last frame.
        share = first_sample / int(self.num_samples_N[row])
        last_start = max(num_frames - self.crop_frames, 0)
        start = min(round(share * num_frames), last_start)
        end = min(start + self.crop_frames, num_frames)

        path = self.paths[self.file_N[row]]
        first_in_file = int(self.first_N[row])
        with safe_open(path, framework="numpy") as file:
            frames = file.get_slice("frames")
            frames_TC: np.ndarray = frames[first_in_file + start : first_in_file + end]
        if len(frames_TC) < self.crop_frames:
            repeated_T = np.arange(self.crop_frames) % len(frames_TC)
            frames_TC = frames_TC[repeated_T]
        return frames_TC.T


def join_frames(
    files: Sequence[FrameFile],
    rows_of_files: Sequence[Sequence[int]],
    *,
    num_samples_N: np.ndarray,
    crop_frames: int,
) -> TargetFrames:
    """Return the frames of all utterances; rows_of_files: the utterances of each file, in order."""
    num_utterances = len(num_samples_N)
    file_N = np.zeros(num_utterances, dtype=np.int32)
    first_N = np.zeros(num_utterances, dtype=np.int64)
    num_frames_N = np.zeros(num_utterances, dtype=np.int64)
    for number, (file, rows) in enumerate(zip(files, rows_of_files, strict=True)):
        ends_U = np.cumsum(file.num_frames_U)
        file_N[rows] = number
        first_N[rows] = ends_U - file.num_frames_U
        num_frames_N[rows] = file.num_frames_U
    return TargetFrames(
        num_samples_N=num_samples_N,
        paths=[file.path for file in files],
        file_N=file_N,
        first_N=first_N,
        num_frames_N=num_frames_N,
        crop_frames=crop_frames,
    )
