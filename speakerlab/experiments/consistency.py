"""Check that a run may start or resume, and that all ranks agree.

An experiment is trained by one run at a time. A resumed run must keep its configuration, initial
model, speakers and training data, and every rank must read the same training data.
"""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from speakerlab.checkpoints.model_files import (
    find_model,
    read_card,
    read_classes,
    weights_name,
)
from speakerlab.config.layers import merge_layers
from speakerlab.config.schema import Config, differences, load_config
from speakerlab.core.atomic import file_sha256, write_text
from speakerlab.core.huggingface import origin_of
from speakerlab.core.locks import try_lock
from speakerlab.core.reading import read_json
from speakerlab.experiments.corpus import Corpus, read_corpus, row_names
from speakerlab.experiments.teachers import check_frames, digests_of, dims_of
from speakerlab.frontend.pretrained_files import (
    HUB,
    describe,
    find_folder,
    weights_sha256,
)
from speakerlab.training.checkpoint import list_checkpoints, read_step, was_begun
from speakerlab.training.distributed import Ranks

MOUNT_SECONDS = 60.0  # maximum age of NFS attribute caches


def load_same_config(
    exp_dir: Path,
    layers: Sequence[Path],
    overrides: Sequence[str],
    *,
    init: Path | None = None,
) -> Config:
    """Load the configuration; raise ValueError if it differs from the experiment's.

    init: the model to start from.
    """
    config = load_config(layers, overrides)
    check_teachers(config, exp_dir)
    teachers = config.distil.teachers
    if config.task == "distil" and teachers and config.distil.keeps_projection:
        num_dims = dims_of(teachers)
        config = load_config(layers, [*overrides, f"distil.target_dim={num_dims}"])
    if config.is_pretrained:
        config = with_description(config, exp_dir, init)
    recorded = exp_dir / "config.yaml"
    if not recorded.exists() or not was_begun(exp_dir):
        return config

    begun = load_config([recorded])
    changed = differences(begun, config)
    if changed:
        raise ValueError(
            f"{recorded}: a resumed run must keep its configuration:"
            f" {'; '.join(changed)}; use the old values, or"
            f" {new_run(exp_dir, changed)}"
        )
    _check_num_epochs(begun, config, overrides, exp_dir)
    return config


def _check_num_epochs(
    begun: Config,
    config: Config,
    overrides: Sequence[str],
    exp_dir: Path,
) -> None:
    """Raise ValueError if a file changed the number of epochs of a run since its start.

    A run may be extended, but only by `overrides`, not by accident.
    """
    key = "training.num_epochs"
    old_num_epochs = begun.training.num_epochs
    num_epochs = config.training.num_epochs
    _, origin = merge_layers([], overrides)
    if num_epochs != old_num_epochs and key not in origin:
        raise ValueError(
            f"{key}: {exp_dir} has {old_num_epochs}, the configuration {num_epochs};"
            f" use --set {key}={old_num_epochs} again, or {num_epochs} to change the"
            " length of this run"
        )


def with_description(config: Config, exp_dir: Path, init: Path | None) -> Config:
    """Return the configuration with the description of its pretrained model.

    A model that is published from this training can then be loaded without the folder of the
    pretrained model. A training with --init takes all weights from there, and saves all.
    """
    model: str = config.frontend["model"]
    description: dict[str, Any] | None = None
    if was_begun(exp_dir):
        earlier = load_config([exp_dir / "config.yaml"])
        description = _earlier_description(earlier)
        # The branch of a hub may have moved since the training began: keep its commit.
        earlier_model = str(earlier.frontend.get("model"))
        if description is not None and earlier_model.startswith(f"{model}@"):
            description["model"] = earlier_model
    elif init is not None:
        initial = load_config([find_model(init) / "config.yaml"])
        description = _earlier_description(initial)
        # The weights are those of the initial model, not of the base that the user names.
        if description is not None:
            description |= {"weights": "whole", "model": initial.frontend["model"]}
    if description is None:
        description = _new_description(model)

    pinned = config.frontend["sha256"]
    sha256 = description["sha256"]
    if pinned not in (None, sha256):
        raise ValueError(
            f"frontend.sha256: {model} has {str(sha256)[:12]}, not {pinned[:12]}; give the"
            " folder of the right model, or leave it out"
        )
    frontend = {**config.frontend, **description}
    return config.model_copy(update={"frontend": frontend})


def _earlier_description(config: Config) -> dict[str, Any] | None:
    """Return the description of the pretrained model of another training; None without one."""
    if not config.is_pretrained:
        return None
    keys = ("architecture", "preprocessing", "sha256", "weights")
    return {key: config.frontend[key] for key in keys}


def _new_description(model: str) -> dict[str, Any]:
    """Return the description of a pretrained model that a training begins with."""
    folder = find_folder(model)
    # A published model may be used from any current folder, so the path is absolute. A model of a
    # hub is pinned to the commit that was found.
    place = origin_of(folder) if model.startswith(HUB) else str(folder.resolve())
    return {
        **describe(model)._asdict(),
        "sha256": weights_sha256(folder),
        "weights": "base",
        "model": place,
    }


def lock_experiment(exp_dir: Path) -> TextIO:
    """Take `exp/.lock`, or raise ValueError naming its holder; keep the returned file open.

    The kernel releases the lock when the process ends, even by a kill; forked workers do not
    inherit it.
    """
    exp_dir.mkdir(parents=True, exist_ok=True)
    # "a+" keeps the holder's text, which the message below shows.
    file = (exp_dir / ".lock").open("a+", encoding="utf-8")
    try:
        is_free = try_lock(file)
    except OSError:  # a file system without locks
        is_free = False
    if not is_free:
        holder = _read_holder(file)
        file.close()
        raise ValueError(
            f"{exp_dir}: is being trained by {holder}; wait for it or use another --exp"
        ) from None
    file.truncate(0)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = f"process {os.getpid()} on {socket.gethostname()} since {started}"
    print(holder, file=file, flush=True)
    return file


def _read_holder(file: TextIO) -> str:
    """Return what the holder of a lock has written, or "another process"."""
    # A holder writes its text only after it has taken the lock, so wait up to a second.
    for _ in range(10):
        file.seek(0)
        holder = file.read().strip()
        if holder:
            return holder
        time.sleep(0.1)
    return "another process"


class RankCorpus(NamedTuple):
    """Outcome of reading the corpus on one rank."""

    outcome: str  # sha256 of the training data, or the error
    host: str
    is_late: bool  # whether the time to wait for a network mount is over


def agreed_corpus(config: Config, ranks: Ranks) -> Corpus:
    """Read the corpus through this rank's own mount; ValueError if it differs from rank 0's.

    A file may become visible later on other hosts than on its writer, so wait for MOUNT_SECONDS.
    """
    # Ranks of one host share a mount, so waiting would change nothing.
    is_one_host = ranks.local_size == ranks.world_size
    wait_seconds = 0.0 if is_one_host else MOUNT_SECONDS
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            corpus = read_corpus(config)
            outcome = f"sha256 {corpus.train_sha256()[:12]}"
        except (ValueError, OSError) as error:
            corpus = None
            outcome = str(error)
            # Other errors include a fix; the text of a system error does not.
            if isinstance(error, PermissionError):
                outcome = f"{error.filename}: {error.strerror}; correct the permissions"

        # The list is equal on all ranks, so all leave the loop together.
        rank_corpora: list[RankCorpus] = ranks.gather_objects(
            RankCorpus(
                outcome=outcome,
                host=socket.gethostname(),
                is_late=time.monotonic() > deadline,
            )
        )
        outcomes = {rank_corpus.outcome for rank_corpus in rank_corpora}
        is_late = any(rank_corpus.is_late for rank_corpus in rank_corpora)
        if is_late or len(outcomes) == 1:
            break
        time.sleep(1.0)

    first = rank_corpora[0]
    for rank, rank_corpus in enumerate(rank_corpora):
        if rank_corpus.outcome != first.outcome:
            raise ValueError(
                f"rank {rank} on {rank_corpus.host}: its training data differ from"
                f" those of rank 0 on {first.host}: {rank_corpus.outcome} and"
                f" {first.outcome}; let every host see the same data directories"
            )
    if corpus is None:
        raise ValueError(outcome)
    return corpus


def record_classes(
    config: Config,
    corpus: Corpus,
    init: Path | None,
    exp_dir: Path,
    ranks: Ranks,
) -> list[str]:
    """Write the name of each row of the head; return the names.

    Raises ValueError if a resumed experiment has other names. With training.init_head "keep", all
    rows of the initial model come first.
    """
    names = row_names(config, corpus)
    if init is not None and config.training.init_head == "keep":
        # Each name once: a speaker of both trainings keeps the row of the initial model.
        all_names = [*read_classes(init), *names]
        names = list(dict.fromkeys(all_names))
    recorded = exp_dir / "speakers.txt"

    def record() -> None:
        # Line k names row k of the head.
        text = "".join(f"{name}\n" for name in names)
        begun_text = text
        if was_begun(exp_dir):
            begun_text = recorded.read_text(encoding="utf-8")
        # With other names, the rows of the head would belong to other speakers.
        if begun_text != text:
            changed_names = set(begun_text.splitlines()) ^ set(names)
            example = min(changed_names, default="their order")
            data = config.data
            tables = [f"{folder}/{data.labels}" for folder in data.train_folders()]
            raise ValueError(
                f"{recorded}: a resumed run must keep its speakers, but"
                f" {', '.join(tables)} changed, e.g. {example}; restore the data, or"
                f" {new_run(exp_dir)}"
            )
        write_text(recorded, text)

    ranks.on_first(record)
    return names


def record_config(
    config: Config,
    steps_per_epoch: int,
    exp_dir: Path,
    ranks: Ranks,
) -> Config:
    """Write the configuration; return it with all changes of the number of epochs so far.

    The learning rate of an extended run depends on the steps at which it was extended, so they are
    recorded in `training.extended`.
    """
    recorded = exp_dir / "config.yaml"

    def record() -> Config:
        # The layers of a new run may include the configuration of another one (egs/own with
        # --init), whose extensions are not of this run.
        extended: list[tuple[int, int]] = []
        # Before the first checkpoint, the number of epochs may change freely.
        checkpoints = list_checkpoints(exp_dir / "checkpoints")
        if recorded.exists() and checkpoints:
            extended = _changes_of_epochs(
                load_config([recorded]),
                num_epochs=config.training.num_epochs,
                step=read_step(checkpoints[-1]),
                steps_per_epoch=steps_per_epoch,
                exp_dir=exp_dir,
            )
        training = config.training.model_copy(update={"extended": tuple(extended)})
        new_config = config.model_copy(update={"training": training})
        new_config.write(recorded)
        return new_config

    return ranks.on_first(record)


def _changes_of_epochs(
    begun: Config,
    *,
    num_epochs: int,
    step: int,
    steps_per_epoch: int,
    exp_dir: Path,
) -> list[tuple[int, int]]:
    """Return (step, number of epochs before it) of each change of the number of epochs of a run.

    begun: its recorded configuration; num_epochs: the number from now on; step: of the newest
    checkpoint. Raises ValueError if the run is already longer.
    """
    extended = list(begun.training.extended)
    num_epochs_before = begun.training.num_epochs
    # Drop changes after which no step was saved: they had no effect.
    while extended and extended[-1][0] == step:
        _, num_epochs_before = extended.pop()

    if num_epochs == num_epochs_before:
        return extended
    if num_epochs * steps_per_epoch <= step:
        raise ValueError(
            f"training.num_epochs: {num_epochs}, but {exp_dir} has"
            f" {step / steps_per_epoch:g} epochs; use --set"
            f" training.num_epochs={num_epochs_before}, a larger number, or"
            f" {new_run(exp_dir)}"
        )
    return [*extended, (step, num_epochs_before)]


def is_published(exp_dir: Path, config: Config, step: int) -> bool:
    """Return whether the published model is from this step, not from before an extension."""
    if not (exp_dir / "model").exists():
        return False
    card = read_card(exp_dir, weights_name(config.task))
    return card.get("steps") == step


def is_choice_published(exp_dir: Path, config: Config) -> bool:
    """Return whether training.keep_better would choose the weights that are published.

    The choice is between the initial and the trained weights, after --init.
    """
    card = read_card(exp_dir, weights_name(config.task))
    metric = "der" if config.task == "segmentation" else "eer"
    initial = card.get(f"valid_{metric}_initial")
    # Without --init or validation speakers, the trained weights are published in any case.
    if card.get("init_sha256") is None or initial is None:
        return True
    is_trained_better = card[f"valid_{metric}_trained"] < initial
    would_keep_initial = config.training.keep_better and not is_trained_better
    return card.get("kept_initial", False) == would_keep_initial


def new_run(exp_dir: Path, changed: Sequence[str] = ()) -> str:
    """Return the end of a message: the commands to train with changed settings or data."""
    # A run with another model or other features cannot load these weights.
    fixed = ("model.", "frontend.")
    is_other_model = any(line.startswith(fixed) for line in changed)
    new = unused_name(exp_dir)
    if is_other_model or not (exp_dir / "model").exists():
        return f"another --exp, such as {new}"
    return (
        f"repeat the command with --exp {new} to train again from the start, or"
        f" --exp {new} --init {exp_dir} to start from these weights"
    )


def unused_name(exp_dir: Path) -> Path:
    """Return the first of EXP-2, EXP-3, ... that does not exist."""
    number = 2
    while exp_dir.with_name(f"{exp_dir.name}-{number}").exists():
        number += 1
    return exp_dir.with_name(f"{exp_dir.name}-{number}")


def check_initial_model(config: Config, init: Path | None, exp_dir: Path) -> str | None:
    """Return the sha256 of the --init model, None without one.

    Raises ValueError if a setting needs --init, and if a resumed run began with another model.
    """
    if init is None:
        _refuse_settings_of_init(config)
        digest = None
    else:
        weights = weights_name(config.task)
        digest = file_sha256(find_model(init, weights) / weights)
    # A resumed run does not load the --init model again, so another model would have no effect.
    recorded = exp_dir / "run.json"
    if recorded.exists() and was_begun(exp_dir):
        begun = read_json(recorded).get("init_sha256")
        if begun != digest:
            raise ValueError(
                f"{recorded}: a resumed run must keep its initial model: {begun} ->"
                f" {digest}; remove {exp_dir} to start again, or use another --exp,"
                f" such as {unused_name(exp_dir)}"
            )
    return digest


def _refuse_settings_of_init(config: Config) -> None:
    """Raise ValueError for settings that have a meaning only with --init."""
    training = config.training
    if training.freeze_epochs:
        raise ValueError(
            f"training.freeze_epochs: {training.freeze_epochs:g} freezes the"
            " model given by --init, which is missing; set it to 0, or add --init"
        )
    if training.initial_share:
        raise ValueError(
            f"training.initial_share: {training.initial_share:g} is of the weights"
            " of --init, which is missing; set it to 0, or add --init"
        )


def check_teachers(config: Config, exp_dir: Path) -> None:
    """Raise ValueError if teachers are missing, or a resumed run began with others."""
    if config.task != "distil":
        return
    if not config.distil.teachers:
        raise ValueError(
            "distil.teachers: is missing; add --teacher MODEL (an experiment, a model"
            " folder, hub:NAME or an .onnx file)"
        )
    digests = digests_of(config.distil.teachers)
    check_frames(config)
    recorded = exp_dir / "run.json"
    if not recorded.exists() or not was_begun(exp_dir):
        return
    begun = [teacher["sha256"] for teacher in read_json(recorded)["teachers"]]
    if begun != digests:
        raise ValueError(
            f"{recorded}: a resumed run must keep its teachers: sha256"
            f" {shown_digests(begun)} -> {shown_digests(digests)}; use the old --teacher,"
            f" or {new_run(exp_dir)}"
        )


def shown_digests(digests: Sequence[str]) -> str:
    """Return the first characters of each digest, which tell models apart."""
    return " ".join(digest[:12] for digest in digests)


def check_training_data(config: Config, corpus: Corpus, exp_dir: Path) -> None:
    """Raise ValueError if a resumed run began with other utterances, also of the same speakers."""
    recorded = exp_dir / "run.json"
    if not recorded.exists() or not was_begun(exp_dir):
        return
    digest = corpus.train_sha256()
    # Older runs recorded no digest.
    begun = read_json(recorded).get("train_sha256", digest)
    if begun == digest:
        return
    folders = [str(folder) for folder in config.data.train_folders()]
    raise ValueError(
        f"{recorded}: a resumed run must keep its training data, but the utterances of"
        f" {', '.join(folders)} changed: sha256 {begun[:12]} -> {digest[:12]}; restore"
        f" the data, or {new_run(exp_dir)}"
    )
