"""Embeddings of a data directory, held to the model and to the data. In: folders. Out: a table."""

from pathlib import Path

from speakerlab.checkpoints.model_files import embeddings_stem, read_card, read_settings
from speakerlab.data.manifest import read_manifest
from speakerlab.scoring.embeddings import EmbeddingTable


def are_embedded(exp_dir: Path, data_dir: Path, *, untrained: bool = False) -> bool:
    """Whether stage 5 has made embeddings of a directory of this name."""
    return Path(f"{embeddings_stem(exp_dir, data_dir.name, untrained=untrained)}.json").exists()


def read_embedded(exp_dir: Path, data_dir: Path, *, untrained: bool = False) -> EmbeddingTable:
    """What stage 5 made of a directory; ValueError where it was another model or another directory.

    The directory is compared where it is a checked one, with audio.
    """
    stem = embeddings_stem(exp_dir, data_dir.name, untrained=untrained)
    table, wanted = EmbeddingTable.load(stem), read_card(exp_dir)["sha256"]
    if table.model_sha256 != wanted:
        raise ValueError(
            f"{stem}: embeddings must be of the model in {exp_dir}, sha256 {wanted[:12]}, got "
            f"{table.model_sha256[:12]}; run the extraction (stage 5) again"
        )
    made_from = table.facts.get("data_sha256")
    is_checked = all((data_dir / name).exists() for name in ("utt2dur", "wav.scp"))
    if made_from is not None and is_checked:
        sample_rate = read_settings(exp_dir)["frontend"]["sample_rate"]
        found = read_manifest([data_dir], sample_rate=sample_rate).sha256()
        if found != made_from:
            raise ValueError(
                f"{stem}: embeddings were made from other data than {data_dir} has now, got "
                f"sha256 {made_from[:12]} for {found[:12]}; run the extraction (stage 5) again"
            )
    return table
