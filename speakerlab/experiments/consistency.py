"""Check that a resumed run matches its earlier part and every rank rank 0; one run at a time."""

import fcntl
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from speakerlab.checkpoints.model_files import find_model, read_card, read_classes
from speakerlab.config.layers import merge_layers
from speakerlab.config.schema import Config, differences, load_config
from speakerlab.core.atomic import file_sha256, write_text
from speakerlab.core.reading import read_json
from speakerlab.experiments.corpus import Corpus, read_corpus, row_names
from speakerlab.training.checkpoint import list_checkpoints, was_begun
from speakerlab.training.distributed import Ranks

MOUNT_SECONDS = 60.0  # attribute caches of NFS last as long


def load_same_config(exp_dir: Path, layers: Sequence[Path], overrides: Sequence[str]) -> Config:
    """Load the configuration; raise ValueError if the experiment was begun with another."""
    config = load_config(layers, overrides)
    recorded = exp_dir / "config.yaml"
    if recorded.exists() and was_begun(exp_dir):
        begun = load_config([recorded])
        before, now = begun.training.num_epochs, config.training.num_epochs
        key = "training.num_epochs"
        if now != before and key not in merge_layers([], overrides)[1]:
            fix = f"--set {key}={before} again, or {now} to change the length of this run"
            raise ValueError(f"{key}: {exp_dir} has {before}, the configuration {now}; use {fix}")
        changed = differences(begun, config)
        if changed:
            raise ValueError(
                f"{recorded}: a resumed run must keep its configuration: {'; '.join(changed)}; "
                f"use the old values, or {new_run(exp_dir, changed)}"
            )
    return config


def lock_experiment(exp_dir: Path) -> TextIO:
    """Take `exp/.lock`, or raise ValueError naming its holder; keep the returned file open.

    The kernel releases it when the process ends, however it ends; forked workers do not inherit it.
    """
    exp_dir.mkdir(parents=True, exist_ok=True)
    file = (exp_dir / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"{exp_dir}: is being trained by {holder}; wait for it or use another --exp"
        ) from None
    file.truncate(0)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"process {os.getpid()} on {socket.gethostname()} since {started}", file=file, flush=True)
    return file


def agreed_corpus(config: Config, ranks: Ranks) -> Corpus:
    """Read the corpus through this rank's own mount; ValueError if it differs from rank 0's.

    Another host may see a file later than the one that wrote it, so this waits for a while.
    """
    is_one_host = ranks.local_size == ranks.world_size
    deadline = time.monotonic() + (0.0 if is_one_host else MOUNT_SECONDS)
    while True:
        try:
            corpus = read_corpus(config)
            found = f"sha256 {corpus.train.sha256()[:12]}"
        except (ValueError, OSError) as error:
            corpus, found = None, str(error)
            if isinstance(error, PermissionError):
                found = f"{error.filename}: {error.strerror}; correct the permissions"
        every = ranks.every((found, socket.gethostname(), time.monotonic() > deadline))
        if len({one[0] for one in every}) == 1 or any(is_late for *_, is_late in every):
            break
        time.sleep(1.0)
    for rank, (other, host, _) in enumerate(every):
        if other != every[0][0]:
            raise ValueError(
                f"rank {rank} on {host}: its training data differ from those of rank 0 on "
                f"{every[0][1]}: {other} and {every[0][0]}; let every host see the same data "
                "directories"
            )
    if corpus is None:
        raise ValueError(found)
    return corpus


def record_classes(
    config: Config, corpus: Corpus, init: Path | None, exp_dir: Path, ranks: Ranks
) -> list[str]:
    """Write the name of each row of the head; return the names.

    Raises ValueError if a resumed experiment has other names. With training.init_head "keep", all
    rows of the initial model come first.
    """
    names = row_names(config, corpus)
    if init is not None and config.training.init_head == "keep":
        names = list(dict.fromkeys([*read_classes(init), *names]))
    recorded = exp_dir / "speakers.txt"

    def record() -> None:
        text = "".join(f"{name}\n" for name in names)
        begun = recorded.read_text(encoding="utf-8") if was_begun(exp_dir) else text
        if begun != text:
            example = min(set(begun.splitlines()) ^ set(names), default="their order")
            data = config.data
            tables = ", ".join(f"{data.dir}/{name}/{data.labels}" for name in data.train)
            raise ValueError(
                f"{recorded}: a resumed run must keep its speakers, but {tables} changed, e.g. "
                f"{example}; restore the data, or {new_run(exp_dir)}"
            )
        write_text(recorded, text)

    ranks.on_first(record)
    return names


def record_config(config: Config, steps_per_epoch: int, exp_dir: Path, ranks: Ranks) -> Config:
    """Write the configuration; return it with all changes of its number of epochs so far."""
    recorded = exp_dir / "config.yaml"

    def record() -> Config:
        found, training = list_checkpoints(exp_dir / "checkpoints"), config.training
        if recorded.exists() and found:
            step, old = int(found[-1].name.split("_")[1]), load_config([recorded]).training
            extended, before = list(old.extended), old.num_epochs
            while extended and extended[-1][0] == step:  # no step was saved since that change
                before = extended.pop()[1]
            if training.num_epochs != before:
                if training.num_epochs * steps_per_epoch <= step:
                    raise ValueError(
                        f"training.num_epochs: {training.num_epochs}, but {exp_dir} has "
                        f"{step / steps_per_epoch:g} epochs; use --set training.num_epochs={before}"
                        f", a larger number, or {new_run(exp_dir)}"
                    )
                extended.append((step, before))
            training = training.model_copy(update={"extended": tuple(extended)})
        new = config.model_copy(update={"training": training})
        new.write(recorded)
        return new

    return ranks.on_first(record)


def is_published(exp_dir: Path, step: int) -> bool:
    return (exp_dir / "model").exists() and read_card(exp_dir).get("steps") == step


def new_run(exp_dir: Path, changed: Sequence[str] = ()) -> str:
    """Return the end of a message: how to train with changed settings."""
    is_other_model = any(line.startswith(("model.", "frontend.")) for line in changed)
    if is_other_model or not (exp_dir / "model").exists():
        return "another --exp"
    return f"start from its model: repeat the command with --exp {exp_dir}-2 --init {exp_dir}"


def check_initial_model(config: Config, init: Path | None, exp_dir: Path) -> str | None:
    """Return the sha256 of the --init model; ValueError if a resumed run began with another."""
    if init is None and config.training.freeze_epochs:
        raise ValueError(
            f"training.freeze_epochs: {config.training.freeze_epochs:g} freezes the model given by "
            "--init, which is missing; set it to 0, or add --init"
        )
    digest = None if init is None else file_sha256(find_model(init) / "embedder.safetensors")
    recorded = exp_dir / "run.json"
    if recorded.exists() and was_begun(exp_dir):
        begun = read_json(recorded).get("init_sha256")
        if begun != digest:
            raise ValueError(
                f"{recorded}: a resumed run must keep its initial model: {begun} -> {digest}; "
                f"remove {exp_dir} to start again, or use another --exp"
            )
    return digest
