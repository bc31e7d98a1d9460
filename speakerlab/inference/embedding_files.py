"""Writers of embeddings for other programs. In: an `EmbeddingTable`. Out: files `<stem>.*`.

npy          the table of `speakerlab extract`, which scoring reads: .npy, .ids, .json
ark          binary vectors of Kaldi: .ark, and .scp with its absolute path and the offset of each
safetensors  one tensor `emb_ND`; the ids (a JSON list) and the model's sha256 as metadata
jsonl        one line {"id": ..., "embedding": [...]} per utterance, with the fewest digits that
             read back as the same float32
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors.numpy import save

from speakerlab.core.atomic import replacing, write_text
from speakerlab.scoring.embeddings import EmbeddingTable

# Marker of a binary float vector, whose size follows as an int of four bytes.
KALDI_FLOAT_VECTOR = b"\0BFV \4"


def _write_npy(stem: Path, table: EmbeddingTable) -> Path:
    table.save(stem)
    return Path(f"{stem}.npy")


def _write_ark(stem: Path, table: EmbeddingTable) -> Path:
    ark = Path(f"{stem}.ark")
    scp = Path(f"{stem}.scp")
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


def _write_safetensors(stem: Path, table: EmbeddingTable) -> Path:
    path = Path(f"{stem}.safetensors")
    metadata = {
        "ids": json.dumps(table.ids),
        "model_sha256": table.model_sha256,
    }
    content = save({"emb_ND": table.emb_ND}, metadata)
    # Not `save_file`, whose error on a full disk is no OSError.
    with replacing(path) as partial:
        partial.write_bytes(content)
    return path


def _write_jsonl(stem: Path, table: EmbeddingTable) -> Path:
    path = Path(f"{stem}.jsonl")
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        for utterance, emb_D in zip(table.ids, table.emb_ND):
            # Formatted by hand: `json` would write the digits of a float64.
            digits = [str(value) for value in emb_D]
            numbers = ", ".join(digits)
            quoted_id = json.dumps(utterance)
            file.write(f'{{"id": {quoted_id}, "embedding": [{numbers}]}}\n')
    return path


# Format -> the endings of its files; the one that is written last is removed first.
ENDINGS: Mapping[str, Sequence[str]] = {
    "npy": ("json", "ids", "npy"),
    "ark": ("scp", "ark"),
    "safetensors": ("safetensors",),
    "jsonl": ("jsonl",),
}
WRITERS: Mapping[str, Callable[[Path, EmbeddingTable], Path]] = {
    "npy": _write_npy,
    "ark": _write_ark,
    "safetensors": _write_safetensors,
    "jsonl": _write_jsonl,
}


def remove_embeddings(stem: Path, file_format: str) -> None:
    """Remove the files of a format that an earlier run wrote to the same stem."""
    for ending in ENDINGS[file_format]:
        Path(f"{stem}.{ending}").unlink(missing_ok=True)
