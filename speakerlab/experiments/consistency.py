"""What a run must have in common with its earlier part, and every rank with rank 0.

In: the experiment's folder, what is asked for, the ranks. Out: the same, or a line on what differs.
"""

import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from speakerlab.checkpoints.model_files import find_model, read_classes
from speakerlab.checkpoints.published import file_sha256
from speakerlab.config.schema import Config, differences, load_config
from speakerlab.core.atomic import write_text
from speakerlab.experiments.corpus import Corpus, read_corpus, row_names
from speakerlab.training.checkpoint import was_begun
from speakerlab.training.distributed import Ranks

MOUNT_SECONDS = 60.0  # attribute caches of NFS last as long


def load(exp_dir: Path, layers: Sequence[Path], overrides: Sequence[str]) -> Config:
    """The configuration; refused if the experiment was begun with another."""
    config = load_config(layers, overrides)
    recorded = exp_dir / "config.yaml"
    if recorded.exists() and was_begun(exp_dir):
        changed = differences(load_config([recorded]), config)
        if changed:
            raise ValueError(
                f"{recorded}: a resumed run must keep its configuration, got {'; '.join(changed)}; "
                "use the old values, or another --exp"
            )
    return config


def agreed_corpus(config: Config, ranks: Ranks) -> Corpus:
    """The corpus, read through this rank's own mount; ValueError where it is not that of rank 0.

    Another host may see a file later than the one that wrote it, so that is waited for.
    """
    patience = 0.0 if ranks.local_size == ranks.world_size else MOUNT_SECONDS
    deadline = time.monotonic() + patience
    while True:
        corpus, fault = None, ""
        try:
            corpus = read_corpus(config)
        except (ValueError, OSError) as error:
            fault = f"{error}"
        digest = corpus.train.sha256() if corpus else ""
        told = ranks.every((socket.gethostname(), digest, fault))
        if corpus is not None and {each[1] for each in told} == {digest}:
            return corpus
        is_same_fault = len({each[2] for each in told}) == 1 and not digest
        if is_same_fault or time.monotonic() > deadline:
            break
        time.sleep(1.0)
    raise ValueError(_disagreement(told))


def _disagreement(told: Sequence[tuple[str, str, str]]) -> str:
    """What the ranks' (host, sha256, fault) have that is not alike, in one line."""
    first_host, first, first_fault = told[0]
    if first_fault:
        return first_fault
    rank, (host, digest, fault) = next((r, t) for r, t in enumerate(told) if t[1] != first)
    got = f"'{fault}'" if fault else f"sha256 {digest[:12]} for {first[:12]}"
    return (
        f"rank {rank} on {host}: its training data and that of rank 0 on {first_host} differ, got "
        f"{got}; let every host see the same data directories"
    )


def classes(
    config: Config, corpus: Corpus, init: Path | None, exp_dir: Path, ranks: Ranks
) -> list[str]:
    """The name of each row of the head; those of an experiment that goes on must be the same.

    With training.init_head "keep", the rows of the initial model come first, all of them.
    """
    names = row_names(config, corpus)
    if init is not None and config.training.init_head == "keep":
        names = list(dict.fromkeys([*read_classes(init), *names]))
    recorded = exp_dir / "speakers.txt"

    def record() -> None:
        text = "".join(f"{name}\n" for name in names)
        if was_begun(exp_dir) and recorded.read_text(encoding="utf-8") != text:
            raise ValueError(
                f"{recorded}: a resumed run must keep its speakers, got other training data; "
                "restore the data, or use another --exp"
            )
        write_text(recorded, text)
        config.write(exp_dir / "config.yaml")

    ranks.on_first(record)
    return names


def initial_model(config: Config, init: Path | None, exp_dir: Path) -> str | None:
    """sha256 of the model that --init names; a run that goes on must keep its own."""
    if init is None and config.training.freeze_epochs:
        raise ValueError(
            f"training.freeze_epochs: only a model given by --init may be frozen, got "
            f"{config.training.freeze_epochs:g} without one; set it to 0, or add --init"
        )
    digest = None if init is None else file_sha256(find_model(init) / "embedder.safetensors")
    recorded = exp_dir / "run.json"
    if recorded.exists() and was_begun(exp_dir):
        begun = json.loads(recorded.read_text(encoding="utf-8")).get("init_sha256")
        if begun != digest:
            raise ValueError(
                f"{recorded}: a resumed run must keep its initial model, got {digest} for {begun}; "
                f"remove {exp_dir} to begin anew, or use another --exp"
            )
    return digest
