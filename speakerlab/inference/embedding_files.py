"""Writers of embeddings for other programs. In: an `EmbeddingTable`. Out: files `<stem>.*`.

npy          the table of stage 5, which scoring reads: .npy, .ids, .json
ark          binary vectors of Kaldi: .ark, and .scp with its absolute path and the offset of each
safetensors  one tensor `emb_ND`; the ids (a JSON list) and the model's sha256 as metadata
jsonl        one line {"id": ..., "embedding": [...]} per utterance, with the fewest digits that
             read back as the same float32
"""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.numpy import save_file

from speakerlab.core.atomic import replacing, write_text
from speakerlab.scoring.embeddings import EmbeddingTable

KALDI_FLOAT_VECTOR = b"\0BFV \4"  # binary, float vector, followed by an int of four bytes


def _write_npy(stem: Path, table: EmbeddingTable) -> Path:
    table.save(stem)
    return Path(f"{stem}.npy")


def _write_ark(stem: Path, table: EmbeddingTable) -> Path:
    ark, scp = Path(f"{stem}.ark"), Path(f"{stem}.scp")
    lines: list[str] = []
    with replacing(ark) as partial, partial.open("wb") as file:
        for utterance, emb_D in zip(table.ids, table.emb_ND):
            file.write(f"{utterance} ".encode())
            lines.append(f"{utterance} {ark.resolve()}:{file.tell()}\n")
            file.write(KALDI_FLOAT_VECTOR + struct.pack("<i", len(emb_D)))
            file.write(emb_D.astype("<f4").tobytes())
    write_text(scp, "".join(lines))
    return scp


def _write_safetensors(stem: Path, table: EmbeddingTable) -> Path:
    metadata = {"ids": json.dumps(table.ids), "model_sha256": table.model_sha256}
    with replacing(path := Path(f"{stem}.safetensors")) as partial:
        save_file({"emb_ND": table.emb_ND}, partial, metadata)
    return path


def _write_jsonl(stem: Path, table: EmbeddingTable) -> Path:
    with replacing(path := Path(f"{stem}.jsonl")) as partial, partial.open("w") as file:
        for utterance, emb_D in zip(table.ids, table.emb_ND):
            numbers = ", ".join(str(value) for value in emb_D)
            file.write(f'{{"id": {json.dumps(utterance)}, "embedding": [{numbers}]}}\n')
    return path


WRITERS: Mapping[str, Callable[[Path, EmbeddingTable], Path]] = {
    "npy": _write_npy,
    "ark": _write_ark,
    "safetensors": _write_safetensors,
    "jsonl": _write_jsonl,
}
