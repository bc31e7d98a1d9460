"""The files of a published model that can be read without torch: card, settings, calibration.

In: the path of an experiment or of a model folder. Out: paths and plain values.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from speakerlab.checkpoints.catalogue import PREFIX, near_miss
from speakerlab.config.layers import flatten, merge_layers
from speakerlab.core import huggingface
from speakerlab.core.atomic import copy_files, replacing, write_json
from speakerlab.core.reading import AGAIN, keys, read_json, read_text
from speakerlab.core.tuning import Tuning
from speakerlab.scoring.calibration import Calibration
from speakerlab.scoring.plda import Plda

# The first bytes of a pointer of Git LFS, and of web pages in lower case.
GIT_LFS = b"version https://git-lfs.github.com/spec/"
PAGES = (b"<!doctype", b"<html", b"<?xml", b"<head", b"<body", b"<error")
# The weights of a model folder: of an embedder, or of a segmentation network.
EMBEDDER = "embedder.safetensors"
SEGMENTER = "segmenter.safetensors"
CALIBRATION = "calibration.json"
TUNING = "diarization.json"
PLDA = "plda.safetensors"  # of the clustering vbx; TUNING has its digest
LEARN_PLDA = "run `speakerlab calibrate --for diarization --development DIR --force`"
# All files of model folders; the first two are in each of them.
FILES = (
    "config.yaml",
    "card.json",
    EMBEDDER,
    SEGMENTER,
    "head.safetensors",
    "speakers.txt",
    CALIBRATION,
    TUNING,
    PLDA,
)
# Keys that a config.yaml needs to be read without building the model.
SETTINGS = {
    "model.name": str,
    "frontend.sample_rate": int,
    "data.dir": str,
    "data.train": list,
}
# The keys of card.json that are read: first the optional keys, then the required ones.
OPTIONAL_FACTS = {
    "train_utterances": int,
    "train_hours": float,
    "train_sha256": str,
    "source": dict[str, Any] | None,
    "init_source": dict[str, Any] | None,
    "train_corpus": list[str],
    "train_page": list[str],
    "train_licence": list[str],
    "train_languages": list[str],
    "space": str | None,
    "teachers": list[dict[str, Any]],
    "licence": str,
}
CARD = keys(OPTIONAL_FACTS, sha256=str, embed_dim=int, parameters=int)
SEGMENTER_CARD = keys(OPTIONAL_FACTS, sha256=str, parameters=int)


def weights_name(task: str) -> str:
    """Return the name of the file with the weights that a task publishes."""
    return SEGMENTER if task == "segmentation" else EMBEDDER


def find_model(path: Path, weights: str = EMBEDDER) -> Path:
    """Return the model folder: the path itself, or `model/` inside an experiment.

    weights: EMBEDDER or SEGMENTER, the kind of model. Raises FileNotFoundError if there is none, or
    if a file that every model has is missing, and ValueError for a model of the other kind.
    """
    for folder in (path, path / "model"):
        if not (folder / weights).exists():
            _refuse_other_kind(folder, weights)
            continue
        for name in ("config.yaml", "card.json"):
            if not (folder / name).exists():
                raise FileNotFoundError(
                    f"{folder}: is incomplete, {name} is missing; copy the model again"
                )
        return folder
    raise FileNotFoundError(_describe_no_model(path, weights))


def _describe_no_model(path: Path, weights: str) -> str:
    """Return one line about a path without a model: the likeliest mistake, and what to do."""
    problem = "is a file" if path.is_file() else f"has no {weights}"
    fix = (
        "give an experiment or a model folder: `speakerlab train` writes one, and "
        "`speakerlab import` converts a checkpoint"
    )
    if (path / "checkpoints").exists():
        problem = "has no model yet"
        fix = (
            "its training has not ended: wait for it, or run its command again, which"
            " continues it"
        )
    if path.suffix == ".onnx":
        fix = (
            "this command needs the folder of the model that it was exported from;"
            " `speakerlab embed`, `verify`, `enroll`, `identify` and `diarize` take"
            " .onnx files"
        )
    if str(path).startswith((PREFIX, huggingface.PREFIX)):
        problem = "is not a folder"
        fix = (
            f"run `speakerlab import {path} --out DIR`, and give this folder to the"
            " command"
        )
    elif not path.exists():
        problem = "does not exist"
        # The user may have left out "hub:".
        fix = near_miss(str(path)) or fix
    return f"{path}: {problem}; {fix}"


def has_segmenter(path: Path) -> bool:
    """Return whether a model folder or an experiment has a segmentation network."""
    return any((folder / SEGMENTER).exists() for folder in (path, path / "model"))


def _refuse_other_kind(folder: Path, weights: str) -> None:
    """Raise ValueError if a folder has a model of the other kind."""
    if weights == EMBEDDER and (folder / SEGMENTER).exists():
        raise ValueError(
            f"{folder}: is a segmentation model, which embeds no speakers; give it to"
            " `speakerlab diarize --segmentation`"
        )
    if weights == SEGMENTER and (folder / EMBEDDER).exists():
        raise ValueError(
            f"{folder}: is a model of speaker embeddings, not of segmentation; give one"
            " that was trained with task segmentation"
        )


def refuse_substitute(path: Path) -> None:
    """Raise ValueError if another file lies in the place of a model's file.

    Such are the pointers of Git LFS in a clone that was made without it, error pages of a download,
    and empty files.
    """
    with path.open("rb") as file:
        head = file.read(200).lstrip()
    if head.startswith(GIT_LFS):
        raise ValueError(
            f"{path}: is a pointer of Git LFS, not the file itself; run `git lfs pull`"
            " in its repository"
        )
    if head.lower().startswith(PAGES):
        raise ValueError(
            f"{path}: is a web page, such as an error page of a download, not a model;"
            " download the file again"
        )
    if not head:
        raise ValueError(f"{path}: is empty; copy or download it again")


def read_card(path: Path, weights: str = EMBEDDER) -> dict[str, Any]:
    """Read the facts about a model of a kind, its sha256 among them."""
    file = find_model(path, weights) / "card.json"
    card_keys = CARD if weights == EMBEDDER else SEGMENTER_CARD
    return read_json(file, like=card_keys)


def read_source(path: Path, weights: str = EMBEDDER) -> dict[str, Any] | None:
    """Read the origin of an imported model or a model fine-tuned from one; None for others.

    A model in the cache of huggingface.co has an origin, too: its page and commit.
    """
    card = read_card(path, weights)
    source: dict[str, Any] | None = card.get("source")
    # A fine-tuned model inherits features and licence from its initial model.
    if not source:
        source = card.get("init_source")

    folder = find_model(path, weights)
    origin = huggingface.origin_of(folder)
    if origin is None:
        return source
    facts_of_hub = {"hub": origin, "page": huggingface.page_of(origin)}
    if "licence" in card:
        facts_of_hub["licence"] = card["licence"]
    return {**(source or {}), **facts_of_hub}


def weights_in(path: Path) -> str:
    """Return the name of the file with the weights of a model folder or an experiment."""
    return SEGMENTER if has_segmenter(path) else EMBEDDER


def copy_model(source: Path, folder: Path, *, leave_out: Collection[str] = ()) -> None:
    """Copy the files of a model folder into another, without files of the names `leave_out`.

    A copy of a model from huggingface.co records its page and commit in its card.
    """
    copy_files(source, folder, leave_out=leave_out)
    if huggingface.origin_of(source) is None:
        return
    weights = weights_in(source)
    card = read_card(source, weights)
    origin = read_source(source, weights)
    write_json(folder / "card.json", {**card, "source": origin})


def space_of(card: Mapping[str, Any]) -> str:
    """Return the sha256 that names the space of a model's embeddings, given its card.

    Embeddings of one space can be compared. A model has its own; a student of one teacher whose
    projection is kept shares its teacher's.
    """
    return card.get("space") or card["sha256"]


def read_settings(path: Path, weights: str = EMBEDDER) -> dict[str, Any]:
    """Read the configuration of a model of a kind as plain values."""
    file = find_model(path, weights) / "config.yaml"
    values, _ = merge_layers([file])
    flat = flatten(values)
    # Callers read these keys without further checks.
    for key, kind in SETTINGS.items():
        value = flat.get(key)
        if not isinstance(value, kind):
            raise ValueError(
                f"{file}: {key} is missing, or no {kind.__name__}; {AGAIN}"
            )
    return values


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Write the calibration of a model folder, with the sha256 of the model."""
    model_sha256 = read_card(folder)["sha256"]
    stored = replace(calibration, model_sha256=model_sha256)
    write_json(folder / CALIBRATION, asdict(stored))


def read_calibration(folder: Path) -> Calibration | None:
    """Read the calibration of a model folder, None if it has none.

    Raises ValueError if it is damaged, or of another model.
    """
    path = folder / CALIBRATION
    if not path.exists():
        return None
    fix = "run `speakerlab calibrate --force`"
    calibration: Calibration = read_json(path, Calibration, fix=fix)
    _refuse_other_model(path, calibration.model_sha256, fix=fix)
    return calibration


def write_tuning(folder: Path, tuning: Tuning) -> None:
    """Write the clustering tuned for a model folder, with the sha256 of the model."""
    model_sha256 = read_card(folder)["sha256"]
    stored = replace(tuning, model_sha256=model_sha256)
    write_json(folder / TUNING, asdict(stored))


def read_tuning(folder: Path) -> Tuning:
    """Read the clustering tuned for a model folder, the default if there is none.

    Raises ValueError if it is damaged, or of another model.
    """
    path = folder / TUNING
    if not path.exists():
        return Tuning()
    # Loading the model reads the file, also for `calibrate`.
    fix = "remove it, and run `speakerlab calibrate --for diarization`"
    tuning: Tuning = read_json(path, Tuning, fix=fix)
    _refuse_other_model(path, tuning.model_sha256, fix=fix)
    return tuning


def write_plda(folder: Path, plda: Plda) -> str:
    """Write the PLDA of a model folder, in float64; return the sha256 for `Tuning`."""
    arrays: dict[str, np.ndarray] = {}
    for name, values in vars(plda).items():
        # safetensors would write the memory of a view in another order.
        arrays[name] = np.ascontiguousarray(values)
    data = save(arrays)
    with replacing(folder / PLDA) as partial:
        partial.write_bytes(data)
    return sha256(data).hexdigest()


def read_plda_bytes(folder: Path, tuning: Tuning) -> bytes:
    """Read the file of the PLDA of a model folder; tuning: of the same folder.

    Raises ValueError if the model has none, and if the file is missing, damaged or of another
    model.
    """
    path = folder / PLDA
    if tuning.plda_sha256 is None:
        raise ValueError(
            f"{folder}: has no PLDA, which vbx needs; give --development DIR, or"
            f" {LEARN_PLDA}"
        )
    if not path.is_file():
        raise ValueError(
            f"{path}: is missing, but {TUNING} names it; copy the model again, or"
            f" {LEARN_PLDA}"
        )
    data = path.read_bytes()
    digest = sha256(data).hexdigest()
    if digest != tuning.plda_sha256:
        raise ValueError(
            f"{path}: is damaged or of another model: its sha256 is {digest[:12]}"
            f" instead of {tuning.plda_sha256[:12]}; copy the model again, or"
            f" {LEARN_PLDA}"
        )
    return data


def parse_plda(data: bytes, *, embed_dim: int, where: str) -> Plda:
    """Return the PLDA of a file's bytes; ValueError if they are none of this dimension."""
    try:
        plda = Plda(**load(data))
    # Not only safetensors' own error: a header of unknown types raises others.
    except Exception as error:
        raise ValueError(f"{where}: is no PLDA ({error}); {LEARN_PLDA}") from error
    shapes = {
        "mean_D": (embed_dim,),
        "transform_DD": (embed_dim, embed_dim),
        "psi_D": (embed_dim,),
    }
    for name, shape in shapes.items():
        values = getattr(plda, name)
        if values.shape != shape or not np.isfinite(values).all():
            raise ValueError(
                f"{where}: {name} must be {shape} finite numbers, got {values.shape};"
                f" {LEARN_PLDA}"
            )
    return plda


def _refuse_other_model(path: Path, model_sha256: str | None, *, fix: str) -> None:
    """Raise ValueError if a file was learned for another model than that of its folder."""
    # Files of older versions do not name their model.
    if model_sha256 is None:
        return
    ours = read_card(path.parent)["sha256"]
    if model_sha256 != ours:
        raise ValueError(
            f"{path}: is of model {model_sha256[:12]}, not of {ours[:12]} (sha256); {fix}"
        )


def read_classes(path: Path) -> list[str]:
    """Read `speakers.txt` of a published model; empty if it has no head."""
    file = find_model(path) / "speakers.txt"
    if not file.exists():
        return []
    return read_text(file).splitlines()


def embeddings_stem(
    exp_dir: Path, data_name: str, *, untrained: bool = False, treatment: str = ""
) -> Path:
    """Return the path, without endings, of the embeddings of a data directory.

    treatment: name of the treatment of its utterances before extraction; "" for none.
    """
    name = "untrained" if untrained else "trained"
    if treatment:
        name += f"_{treatment}"
    return exp_dir / "embeddings" / data_name / name


def first_training_folder(settings: Mapping[str, Any]) -> Path:
    """Return the first training directory; settings: of an experiment's config.yaml."""
    data = settings["data"]
    corpus = data["train"][0]
    # A corpus of a mixture is a section.
    if not isinstance(corpus, str):
        corpus = corpus["dir"]
    return Path(data["dir"], corpus)
