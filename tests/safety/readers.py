"""Readers of files of a user as functions of one path, which is that of the damaged file."""

import contextlib
import importlib
import io
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import valid_files as valid
from damage import tree
from voices import RATE

from egs.common.corpus.official import read_official
from speakerlab.bin import command
from speakerlab.checkpoints import foreign_files, toolkit_config
from speakerlab.config.layers import CONF
from speakerlab.config.schema import load_config
from speakerlab.core.atomic import file_sha256, write_json
from speakerlab.core.faults import Faults
from speakerlab.core.trial_lines import LABELS
from speakerlab.data import audio, banks, convert
from speakerlab.data.manifest import read_manifest
from speakerlab.data.shards import open_shard
from speakerlab.diarization import regions, scoring
from speakerlab.experiments import curves, results
from speakerlab.inference.speaker_model import SpeakerModel
from speakerlab.scoring.trials import Trials, read_trials
from speakerlab.training.checkpoint import load_state, read_latest


def read_manifest_of(path: Path) -> list[Any]:
    manifest = read_manifest([path.parent], sample_rate=RATE)
    return [manifest.sha256(), *manifest.paths, *manifest.num_samples_N]


def read_every_wave(path: Path) -> list[Any]:
    open_shard.cache_clear()  # the file is another one
    data = next(parent for parent in path.parents if parent.name == "data")
    manifest = read_manifest([data], sample_rate=RATE)
    lengths = map(int, manifest.num_samples_N)
    return [
        (manifest.paths[n], manifest.read(n, 0, size)) for n, size in enumerate(lengths)
    ]


def read_bank(path: Path) -> Any:
    return [
        recording[:]
        for recording in banks.find_recordings(path.parent, sample_rate=RATE)
    ]


def read_official_list(path: Path) -> Any:
    faults = Faults()
    names = set("abcd")
    with contextlib.redirect_stdout(io.StringIO()):
        rows = read_official(path, faults, recordings=names)
    faults.raise_if_any()
    return rows


def read_trial_file(path: Path) -> Trials:
    trials = read_trials(path)
    if any(name in ("0", "1") or name[0] == "\ufeff" for name in trials.enrol_ids):
        raise ValueError(
            f"{path}: as `write_trials` writes it, it would be read otherwise"
        )
    return trials


def write_trials(path: Path, trials: Trials) -> None:
    """Write a list as `write_data_dir` does."""
    rows = zip(trials.enrol_N, trials.test_N, trials.is_target_N)
    lines = [
        f"{trials.enrol_ids[e]} {trials.test_ids[t]} {LABELS[int(y)]}\n"
        for e, t, y in rows
    ]
    path.write_text("".join(lines), encoding="utf-8")


def score_turns(path: Path) -> Any:
    folder = path.parent
    ref, hyp = (regions.read_rttm(folder / f"{side}.rttm") for side in ("ref", "hyp"))
    scored = regions.read_uem(folder / "all.uem")
    with contextlib.suppress(
        ValueError
    ):  # names recordings, of which the files have others
        return scoring.score_recordings(ref, hyp, regions=scored, collar=0.25)


def read_set(path: Path) -> Any:
    lines = os.fsdecode(path.read_bytes().replace(b"\0", b"")).split("\n")
    return load_config([CONF / "campplus_tiny.yaml"], lines)


def forge_card(path: Path) -> None:
    """Correct the digest of the weights."""
    card = path.with_name("card.json")
    card_facts = json.loads(card.read_text())
    card_facts["sha256"] = file_sha256(path.with_name("embedder.safetensors"))
    card.write_text(json.dumps(card_facts))


def write_for_model(path: Path, section: Any) -> None:
    """Write what was learned for a model into the folder of a model of this sha256."""
    card = {"sha256": section.model_sha256 or "", "embed_dim": 1, "parameters": 1}
    write_json(path.parent / "card.json", card)
    for name in ("config.yaml", "embedder.safetensors"):
        (path.parent / name).touch()
    write_json(path, asdict(section))


def read_results(path: Path) -> list[str]:
    rows = results.update_results(path, [valid.row(trials="new")])
    return [results.format_table(rows), results.format_conditions(rows, ["device"])]


def read_reference(path: Path) -> Any:
    folder = path.parent
    reference = curves.find_reference(folder / "reference.json", folder / "exp")
    return curves.read_curves(folder / "metrics.jsonl"), reference


def forge_note(path: Path) -> None:
    """Correct the digest of the state."""
    note = path.with_name("note.json")
    note_facts = json.loads(note.read_text())
    note.write_text(
        json.dumps({**note_facts, "sha256": {"state.pt": file_sha256(path)}})
    )


def read_checkpoint(path: Path) -> Any:
    latest = read_latest(path.parent.parent)
    return latest and load_state(latest[1], where=latest[0])


def read_foreign_config(path: Path) -> Any:
    config = toolkit_config.read_config(path)
    return (
        config.feat_dim,
        config.pooling,
        config.frontend("wespeaker"),
        config.head(),
    )


def read_archive(path: Path) -> None:
    with foreign_files.opened(path) as (checkpoint, *_):
        checkpoint.read_bytes()


def onnx_texts(data: bytes, rng: Any) -> bytes:
    """Change the metadata of a model."""
    from onnx import ModelProto, helper

    model = ModelProto()
    model.ParseFromString(data)
    texts = {entry.key: entry.value for entry in model.metadata_props}
    changed = json.loads(tree(json.dumps(texts).encode(), rng))
    helper.set_model_props(
        model, {str(key): str(value) for key, value in changed.items()}
    )
    return model.SerializeToString()


def load_speakers(path: Path) -> SpeakerModel:
    model = valid.enrolled()
    model.load_speakers(path)
    for name in model.speakers:
        model.rank(model.speakers[name])
    return model


def read_audio(path: Path) -> Any:
    info = audio.read_info(path)
    return info, audio.read(path, whole=True), convert.read_wave(path, sample_rate=RATE)


class Parsed(Exception):
    """Raised where the options of a command are right."""


def read_command(path: Path) -> None:
    """Parse the words of a command as its `main` does, and go no further."""
    arguments = os.fsdecode(path.read_bytes().replace(b"\0", b"")).split("\n")
    name = path.name + "_" * (path.name == "import")
    module = importlib.import_module(f"speakerlab.bin.{name}")
    whole = command.Parser.parse_args

    def parse(self: Any, given: Any = None) -> Any:
        whole(self, given)
        raise Parsed

    shown = io.StringIO()
    # Set back by hand, the attribute would stay on the class and hide that of its parent, which
    # tests of the documents patch.
    with (
        mock.patch.object(command.Parser, "parse_args", parse),
        contextlib.redirect_stderr(shown),
        contextlib.redirect_stdout(shown),
    ):
        try:
            module.main(arguments)
        except Parsed:
            pass
        except SystemExit as error:
            if error.code:
                raise ValueError(shown.getvalue()) from None
