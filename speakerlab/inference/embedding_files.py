"""Writers of embeddings for other programs. In: an `EmbeddingTable`. Out: files `<stem>.*`.

npy          the table of `speakerlab extract`, which scoring reads: .npy, .ids, .json
ark          binary vectors of Kaldi: .ark, and .scp with its absolute path and the offset of each
safetensors  one tensor `emb_ND`; the ids (a JSON list) and the model's sha256 as metadata
jsonl        one line {"id": ..., "embedding": [...]} per utterance, with the fewest digits that
             read back as the same float32

Embeddings of windows also have the recording, the start and the end of each, in seconds: npy and
ark in a file .segments, as Kaldi has it (id recording start end); safetensors as a tensor
`times_N2` and the metadata `recordings` (a JSON list); jsonl as fields of each line.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save

from speakerlab.core.atomic import replacing, write_text
from speakerlab.scoring.embeddings import EmbeddingTable

# Marker of a binary float vector, whose size follows as an int of four bytes.
KALDI_FLOAT_VECTOR = b"\0BFV \4"


class Window(NamedTuple):
    """Part of a recording whose embedding is written; times in seconds."""

    recording: str
    start: float
    end: float

    def shown_times(self) -> tuple[float, float]:
        """Return the times to the microsecond, less than a tenth of a sample."""
        return round(self.start, 6), round(self.end, 6)


# Of the rows of a table; None: they are whole recordings.
Windows = Sequence[Window] | None


def _write_segments(stem: Path, table: EmbeddingTable, windows: Windows) -> None:
    path = Path(f"{stem}.segments")
    if windows is None:
        # Windows of an earlier run.
        path.unlink(missing_ok=True)
        return
    lines: list[str] = []
    for utterance, window in zip(table.ids, windows):
        start, end = window.shown_times()
        lines.append(f"{utterance} {window.recording} {start} {end}\n")
    write_text(path, "".join(lines))


def _write_npy(stem: Path, table: EmbeddingTable, windows: Windows = None) -> Path:
    # The JSON, which is written last, must not describe a new file beside it.
    Path(f"{stem}.json").unlink(missing_ok=True)
    _write_segments(stem, table, windows)
    table.save(stem)
    return Path(f"{stem}.npy")


def _write_ark(stem: Path, table: EmbeddingTable, windows: Windows = None) -> Path:
    ark = Path(f"{stem}.ark")
    scp = Path(f"{stem}.scp")
    _write_segments(stem, table, windows)
    lines: list[str] = []
    with replacing(ark) as partial, partial.open("wb") as file:
        for utterance, emb_D in zip(table.ids, table.emb_ND):
            file.write(f"{utterance} ".encode())
            # The offset points to the vector, after the id.
            lines.append(f"{utterance} {ark.resolve()}:{file.tell()}\n")
            num_values = struct.pack("<i", len(emb_D))
            values_D = emb_D.astype("<f4")
            file.write(KALDI_FLOAT_VECTOR)
            file.write(num_values)
            file.write(values_D.tobytes())
    # The .scp is written last, so that it never refers to missing vectors.
    write_text(scp, "".join(lines))
    return scp


def _write_safetensors(
    stem: Path, table: EmbeddingTable, windows: Windows = None
) -> Path:
    path = Path(f"{stem}.safetensors")
    metadata = {
        "ids": json.dumps(table.ids),
        "model_sha256": table.model_sha256,
    }
    tensors: dict[str, np.ndarray] = {"emb_ND": table.emb_ND}
    if windows is not None:
        times = [(window.start, window.end) for window in windows]
        tensors["times_N2"] = np.array(times, dtype=np.float64)
        recordings = [window.recording for window in windows]
        metadata["recordings"] = json.dumps(recordings)
    content = save(tensors, metadata)
    # Not `save_file`, whose error on a full disk is no OSError.
    with replacing(path) as partial:
        partial.write_bytes(content)
    return path


def _write_jsonl(stem: Path, table: EmbeddingTable, windows: Windows = None) -> Path:
    path = Path(f"{stem}.jsonl")
    with (
        replacing(path) as partial,
        partial.open("w", encoding="utf-8", newline="\n") as file,
    ):
        for row, (utterance, emb_D) in enumerate(zip(table.ids, table.emb_ND)):
            fields: dict[str, Any] = {"id": utterance}
            if windows is not None:
                fields["recording"] = windows[row].recording
                fields["start"], fields["end"] = windows[row].shown_times()
            # The embedding by hand: `json` would write the digits of a float64.
            numbers = ", ".join(str(number) for number in emb_D)
            first_fields = json.dumps(fields).removesuffix("}")
            file.write(f'{first_fields}, "embedding": [{numbers}]}}\n')
    return path


# Format -> the endings of its files; the one that is written last is removed first.
ENDINGS: Mapping[str, Sequence[str]] = {
    "npy": ("json", "ids", "npy", "segments"),
    "ark": ("scp", "ark", "segments"),
    "safetensors": ("safetensors",),
    "jsonl": ("jsonl",),
}
WRITERS: Mapping[str, Callable[..., Path]] = {
    "npy": _write_npy,
    "ark": _write_ark,
    "safetensors": _write_safetensors,
    "jsonl": _write_jsonl,
}


def remove_embeddings(stem: Path, file_format: str) -> None:
    """Remove the files of a format that an earlier run wrote to the same stem."""
    for ending in ENDINGS[file_format]:
        Path(f"{stem}.{ending}").unlink(missing_ok=True)
