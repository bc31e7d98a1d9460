"""Model folders for others: without anything about the machine and the speakers of the training.

In: an experiment or a model folder. Out: a folder with the model's files and a README.md, which is
its page on huggingface.co. Weights, settings and calibration are those of the model. Left out are
the head and the names of its rows where the classes are speakers, paths, and facts about the host.
"""

import getpass
import logging
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from speakerlab.checkpoints.model_files import (
    CALIBRATION,
    EMBEDDER,
    FILES,
    PLDA,
    TUNING,
    read_card,
    read_plda_bytes,
    weights_in,
)
from speakerlab.checkpoints.published import (
    Published,
    PublishedSegmenter,
    load_published,
    load_segmenter,
)
from speakerlab.config.layers import merge_layers
from speakerlab.config.schema import Config, DataConfig, RuntimeConfig
from speakerlab.core import huggingface
from speakerlab.core.atomic import (
    check_writable,
    file_sha256,
    replacing_folder,
    write_json,
    write_text,
)
from speakerlab.core.reading import read_json, read_text
from speakerlab.experiments.model_card import rows_of_model
from speakerlab.experiments.model_page import (
    README,
    UNKNOWN_LICENCE,
    page_of,
    terms_of,
)
from speakerlab.frontend.pretrained import PretrainedFrontEnd

log = logging.getLogger(__name__)
# The keys of a card that are published, and how the names of others begin: counts, digests and
# rates of the training, and what the folders of the corpora state. Others describe the host.
PUBLIC = {
    "sha256",
    "embed_dim",
    "parameters",
    "speakerlab",
    "commit",
    "torch",
    "precision",
    "seed",
    "bn_batch",
    "classes",
    "objective",
    "rooms",
    "noises",
    "init_sha256",
    "init_source",
    "source",
    "teachers",
    "space",
    "steps",
    "averaged",
    "kept_initial",
}
PUBLIC_PREFIXES = ("train_", "valid_", "best_valid_")
# A path of a machine, at the start of a text or after a blank, a quote or a bracket.
PATH = re.compile(r"(?:(?<=[\s\"'(\[=,])|^)(?:/\w|~|\.\.?/|[A-Za-z]:\\|\\\\|file:)\S*")
# The name of a model on the hub may have the name of its owner, who made it public.
NAME_ON_HUB = re.compile(rf"\b{huggingface.PREFIX}[\w.-]+/\S+")
# Names of users and hosts that say nothing about a person.
COMMON_NAMES = {"root", "user", "ubuntu", "debian", "admin", "vm", "localhost"}


def write_model_folder(
    source: Path, folder: Path, *, name: str, licence: str | None, force: bool
) -> Path:
    """Write the folder to publish, in place of one that was published before; return it.

    name: of the model on its page. licence: an identifier such as cc-by-4.0; None: that of the
    models that it came from. force: also replace another model. Raises ValueError with one line
    for a model that nobody else could use, and for a folder with other files.
    """
    published: Published | PublishedSegmenter
    if weights_in(source) == EMBEDDER:
        published = load_published(source)
        refuse_unusable(published)
    else:
        published = load_segmenter(source)
    refuse_foreign_folder(folder, published, force=force)
    with replacing_folder(folder) as fresh:
        write_files(published, fresh, name=name, licence=licence)
    return folder


def write_files(
    published: Published | PublishedSegmenter,
    folder: Path,
    *,
    name: str,
    licence: str | None,
) -> None:
    """Write the files of a model and its page to an empty folder."""
    config = published.config
    source = published.folder
    weights = weights_in(source)
    card = public_card(read_card(source, weights))
    terms = terms_of(card, licence)
    if terms.licence != UNKNOWN_LICENCE:
        card["licence"] = terms.licence
    for warning in terms.warnings:
        log.warning("%s: %s", source, warning)

    shutil.copyfile(source / weights, folder / weights)
    if has_public_classes(config):
        for file in ("head.safetensors", "speakers.txt"):
            if (source / file).exists():
                shutil.copyfile(source / file, folder / file)
    elif config.task == "identification":
        log.warning(
            "%s: its classes are speakers, whose names are not published; the published"
            " model compares recordings, but identifies none of them",
            source,
        )
    public_config(config).write(folder / "config.yaml")
    write_json(folder / "card.json", card)
    if isinstance(published, Published):
        write_decisions(published, folder)

    results = source.parent / "results.json"
    rows = cleaned(rows_of_model(results, published.sha256))
    # The page has sentences of its own, any word of which may be the name of a user, and values:
    # those of the files and of the rows.
    refuse_private(source, [rows, *read_files(folder)])
    page = page_of(folder, rows, terms, name=name)
    write_text(folder / README, page)


def write_decisions(published: Published, folder: Path) -> None:
    """Write calibration and clustering of a model, as far as it has them."""
    calibration = published.calibration
    if calibration is not None:
        text = without_paths(calibration.source)
        write_json(folder / CALIBRATION, asdict(replace(calibration, source=text)))
    tuning = published.tuning
    # Without a source, these are the defaults.
    if tuning.source:
        plda_source: str | None = None
        if tuning.plda_sha256 is not None:
            plda_source = without_paths(tuning.plda_source or "")
            plda = read_plda_bytes(published.folder, tuning)
            (folder / PLDA).write_bytes(plda)
        text = without_paths(tuning.source)
        public = replace(tuning, source=text, plda_source=plda_source)
        write_json(folder / TUNING, asdict(public))


def has_public_classes(config: Config) -> bool:
    """Return whether the rows of the head are, for example, languages, and no persons."""
    return config.task == "identification" and not config.data.has_speaker_labels


def refuse_unusable(published: Published) -> None:
    """Raise ValueError for a model that others cannot load."""
    frontend = published.embedder.frontend
    needs_base = isinstance(frontend, PretrainedFrontEnd) and frontend.weights == "base"
    if needs_base and not published.config.frontend["model"].startswith("hf:"):
        raise ValueError(
            f"{published.folder}: has only adapters, and its pretrained model is a folder"
            f" of this machine ({published.config.frontend['model']}); train with"
            " frontend.publish=whole, or with frontend.model=hf:owner/name"
        )


def refuse_foreign_folder(
    folder: Path,
    published: Published | PublishedSegmenter,
    *,
    force: bool,
) -> None:
    """Raise ValueError unless a folder is new, empty, or was written by this module."""
    place = folder.resolve()
    written_folder = folder
    if place.exists():
        # It is replaced by a folder that is written beside it.
        written_folder = place.with_name(f".{place.name}")
    check_writable(written_folder)
    if not folder.exists():
        return
    # A file in its place is not ours either.
    names = {""}
    if folder.is_dir():
        names = {path.name for path in folder.iterdir()}
    if not names:
        return
    is_ours = {README, "card.json"} <= names <= {README, *FILES}
    if not is_ours:
        raise ValueError(
            f"--to: {folder} already exists and is not a folder that `speakerlab publish`"
            " wrote; choose another one"
        )
    weights = folder / weights_in(published.folder)
    is_same = weights.exists() and file_sha256(weights) == published.sha256
    if not (is_same or force):
        raise ValueError(
            f"--to: {folder} holds another model; use --force to replace it"
        )


def public_config(config: Config) -> Config:
    """Return the settings of a model without folders and settings of the machine.

    Everything that determines the embeddings, and how they were trained, stays.
    """
    data = config.data
    fresh_data = DataConfig()
    public_data = fresh_data.model_copy(
        update={
            "labels": data.tables[0],
            "noise": None if data.noise is None else fresh_data.noise,
            "rirs": None if data.rirs is None else fresh_data.rirs,
            "features": data.features,
            "crop_seconds": data.crop_seconds,
            "valid_speakers": data.valid_speakers,
        }
    )
    distil = config.distil.model_copy(
        update={"teachers": tuple(map(name_of_model, config.distil.teachers))}
    )
    frontend = cleaned(config.frontend)
    if "model" in frontend:
        frontend["model"] = name_of_model(config.frontend["model"])
    changed: dict[str, Any] = {
        name: _rebuilt(getattr(config, name)) for name in type(config).model_fields
    }
    changed |= {
        "data": public_data,
        "runtime": RuntimeConfig(),
        "distil": distil,
        "frontend": frontend,
    }
    return config.model_copy(update=changed)


def _rebuilt(section: Any) -> Any:
    """Return a section of the settings, or a value, without paths of this machine."""
    if hasattr(section, "model_copy"):
        values = {
            name: _rebuilt(getattr(section, name))
            for name in type(section).model_fields
        }
        return section.model_copy(update=values)
    return cleaned(section)


def public_card(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about a model that may be published."""
    public: dict[str, Any] = {}
    for key, value in card.items():
        if key in PUBLIC or key.startswith(PUBLIC_PREFIXES):
            public[key] = cleaned(value)
    teachers: list[dict[str, Any]] = []
    for teacher in card.get("teachers") or ():
        name = name_of_model(teacher["name"])
        teachers.append({**cleaned(teacher), "name": name})
    if teachers:
        public["teachers"] = teachers
    return public


def name_of_model(name: str) -> str:
    """Return `hub:NAME` and `hf:owner/name` as they are, and the last part of any path."""
    if name.startswith(("hub:", huggingface.PREFIX)):
        return name
    return last_part(name)


def cleaned(value: Any) -> Any:
    """Return a value with the texts in it as `without_paths` returns them."""
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, Mapping):
        return {key: cleaned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(cleaned(item) for item in value)
    return value


def without_paths(text: str) -> str:
    """Return a text in which only the last part of each path of a machine is left."""
    # A text that begins as a path is one, also with blanks in it.
    match = PATH.match(text)
    if match:
        return last_part(text)
    return PATH.sub(lambda match: last_part(match[0]), text)


def last_part(path: str) -> str:
    return PurePosixPath(PureWindowsPath(path).as_posix()).name


def read_files(folder: Path) -> list[Any]:
    """Return the contents of the text files of a folder, without their escapes."""
    contents: list[Any] = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            contents.append(read_json(path))
        elif path.suffix == ".yaml":
            settings, _ = merge_layers([path])
            contents.append(settings)
        elif path.suffix != ".safetensors":
            contents += read_text(path).splitlines()
    return contents


def refuse_private(source: Path, values: Any) -> None:
    """Raise ValueError if a text names the user, the user's folder or the host."""
    names = {getpass.getuser(), Path.home().name, socket.gethostname()} - COMMON_NAMES
    for text in texts_in(values):
        checked_text = NAME_ON_HUB.sub("", text)
        for name in names:
            if name and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", checked_text):
                raise ValueError(
                    f"{source}: would publish the name '{name}', of this user or host, in"
                    f" '{text}'; rename what has this name (such as the folder of a teacher,"
                    " or what `about` of the training data states), or edit the file that"
                    " has it"
                )


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts within a value, without the keys of dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)
