"""Embeddings written by `speakerlab extract`, verified against the model and the data.

In: an experiment and a data directory. Out: a table, or a development set for back ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakerlab.checkpoints import model_files
from speakerlab.core import done
from speakerlab.core.counting import count_of
from speakerlab.data.manifest import Manifest, is_other_audio, read_manifest
from speakerlab.data.tables import list_tables, read_durations, read_table
from speakerlab.data.treatments import UNTREATED, Treatment
from speakerlab.experiments.trial_list import TrialList
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.minima import REGRESSION_SPEAKERS
from speakerlab.scoring.transforms import Development
from speakerlab.scoring.trials import Trials

MAX_UTTERANCES = 10  # of a held-out speaker
# Endings of the files of a model beside its tensors.
MODEL_TEXTS = (".json", ".yaml", ".txt")


def model_inputs(exp_dir: Path) -> dict[str, str]:
    """Return digests of the model and code that results and their report depend on."""
    folder = model_files.find_model(exp_dir)
    texts = [path for path in folder.iterdir() if path.suffix in MODEL_TEXTS]
    names = sorted(path.name for path in texts)
    tensors = sorted(folder.glob("*.safetensors"))
    return {
        "system": exp_dir.absolute().name,
        "model": done.files_digest(folder, names),
        # Tensors are large: compare their time and size instead of their bytes.
        "tensors": done.digest(done.stamps(tensors)),
        # The report shows the curves of the training.
        "training": done.file_digest(exp_dir / "metrics.jsonl"),
        "code": done.code_digest(),
    }


def set_inputs(exp_dir: Path, data_dir: Path) -> dict[str, str]:
    """Return digests of the data directory and embeddings that results depend on."""
    # `speakerlab check` writes the last two, which determine the valid utterances.
    tables = [*list_tables(data_dir), "utt2dur", "rejected.tsv"]
    return {
        "folder": str(data_dir.absolute()),
        "tables": done.files_digest(data_dir, tables),
        "trained": embeddings_inputs(exp_dir, data_dir),
        "untrained": embeddings_inputs(exp_dir, data_dir, untrained=True),
    }


def embeddings_inputs(
    exp_dir: Path,
    data_dir: Path,
    *,
    untrained: bool = False,
    treatment: Treatment = UNTREATED,
) -> str:
    """Return the digest of a table of embeddings: its model, its data and its file stamps."""
    stem = model_files.embeddings_stem(
        exp_dir,
        data_dir.name,
        untrained=untrained,
        treatment=treatment.name,
    )
    facts = done.file_digest(Path(f"{stem}.json"))
    return done.digest([facts, done.stamp(f"{stem}.npy")])


@dataclass(frozen=True)
class DevelopmentSet:
    """Embeddings of speakers outside the trial lists: training speakers and held-out speakers."""

    cohort: Development  # of the model's training speakers
    table: EmbeddingTable  # of all speakers
    # All pairs of utterances of the held-out speakers; None: too few speakers.
    held_out: TrialList | None


def are_embedded(exp_dir: Path, data_dir: Path, *, untrained: bool = False) -> bool:
    stem = model_files.embeddings_stem(exp_dir, data_dir.name, untrained=untrained)
    return Path(f"{stem}.json").exists()


def extract_command(exp_dir: Path, data_dir: Path, *, untrained: bool = False) -> str:
    """Return the command that extracts the embeddings of a directory."""
    command = f"speakerlab extract --exp {exp_dir} --data {data_dir}"
    return f"{command} --untrained" if untrained else command


def read_embedded(
    exp_dir: Path,
    data_dir: Path,
    *,
    untrained: bool = False,
    treatment: Treatment = UNTREATED,
) -> EmbeddingTable:
    """Read the embeddings of a directory; ValueError if they are of another model or other data.

    The data are compared only if the directory was checked and has audio.
    """
    stem = model_files.embeddings_stem(
        exp_dir,
        data_dir.name,
        untrained=untrained,
        treatment=treatment.name,
    )
    command = extract_command(exp_dir, data_dir, untrained=untrained)
    again = f"run `{command}`"
    if not Path(f"{stem}.json").exists():
        raise FileNotFoundError(f"{stem}: no embeddings of {data_dir}; {again}")
    table = EmbeddingTable.load(stem)
    wanted = model_files.read_card(exp_dir)["sha256"]
    if table.model_sha256 != wanted:
        raise ValueError(
            f"{stem}: embeddings are of model {table.model_sha256[:12]}, but {exp_dir}"
            f" has model {wanted[:12]}; {again}"
        )
    # Tables of earlier versions do not state their data.
    states_data = table.facts.get("data_sha256") is not None
    is_checked = all((data_dir / name).exists() for name in ("utt2dur", "wav.scp"))
    if states_data and is_checked:
        settings = model_files.read_settings(exp_dir)
        sample_rate = settings["frontend"]["sample_rate"]
        manifest = read_manifest([data_dir], sample_rate=sample_rate)
        _refuse_other_data(table, manifest, data_dir, stem=stem, again=again)
    return table


def _refuse_other_data(
    table: EmbeddingTable,
    manifest: Manifest,
    data_dir: Path,
    *,
    stem: Path,
    again: str,
) -> None:
    """Raise ValueError if embeddings are not of the present utterances of a directory.

    stem: where they are stored. again: how to extract them, for errors.
    """
    if set(table.ids).isdisjoint(manifest.ids):
        raise ValueError(
            f"{stem}: these embeddings are of another directory named"
            f" {data_dir.name}, without any utterance of {data_dir}; rename one of"
            f" the two directories, or remove {stem}.* and {again}"
        )
    old_digest = table.facts["data_sha256"]
    digest = manifest.sha256()
    if digest != old_digest:
        raise ValueError(
            f"{stem}: {data_dir} has changed since these embeddings were extracted,"
            f" sha256 {old_digest[:12]} then, {digest[:12]} now; {again}"
        )
    if is_other_audio(table.facts.get("audio"), manifest.audio_digest()):
        raise ValueError(
            f"{stem}: these embeddings are of other recordings than those of"
            f" {data_dir}, with the same ids; {again}"
        )


def read_development(exp_dir: Path, data_dir: Path) -> DevelopmentSet | None:
    """Read the embeddings of `data_dir` as a development set; None if there are none.

    The cohort is the speakers with a class in the model; all speakers if it has no classes.
    """
    if not are_embedded(exp_dir, data_dir):
        return None
    table = read_embedded(exp_dir, data_dir)
    speaker_of = read_table(data_dir / "utt2spk")
    unknown = [name for name in table.ids if name not in speaker_of]
    if unknown:
        raise ValueError(
            f"{data_dir}/utt2spk: lacks the embedded utterance {unknown[0]}; run "
            f"`speakerlab check {data_dir}` and `{extract_command(exp_dir, data_dir)}`"
        )
    # A class is a speaker at a speed; at speed 1 it has the name of the speaker. Trials between
    # training speakers are too easy to learn a calibration from.
    classes = set(model_files.read_classes(exp_dir))
    trained: list[str] = []
    held_out_speaker_of: dict[str, str] = {}
    for name in table.ids:
        speaker = speaker_of[name]
        if not classes or speaker in classes:
            trained.append(name)
        else:
            held_out_speaker_of[name] = speaker
    if not trained:
        raise ValueError(
            f"{data_dir}: has no speaker that the model was trained on, among"
            f" {count_of(len(table.ids), 'utterance')}; give the training set with"
            " --development"
        )
    speakers = [speaker_of[name] for name in trained]
    cohort = Development(table.select(trained), speakers)
    held_out = _pairs(held_out_speaker_of, data_dir)
    return DevelopmentSet(cohort, table, held_out)


def _pairs(speaker_of: Mapping[str, str], data_dir: Path) -> TrialList | None:
    """Return all pairs of at most ten utterances of each speaker; None for too few speakers.

    Letters: N pairs, I utterances.
    """
    utterances_of: dict[str, list[str]] = {}
    for utterance, speaker in speaker_of.items():
        utterances_of.setdefault(speaker, []).append(utterance)

    # Only a speaker with two utterances has target trials.
    num_with_targets = 0
    for utterances in utterances_of.values():
        num_with_targets += len(utterances) > 1
    if num_with_targets < REGRESSION_SPEAKERS:
        return None

    ids: list[str] = []
    # The number of pairs grows with the square of the utterances.
    for utterances in utterances_of.values():
        ids += utterances[:MAX_UTTERANCES]
    # Each pair once, without pairs of an utterance with itself.
    first_N, second_N = np.triu_indices(len(ids), k=1)
    enrol_N = first_N.astype(np.int32)
    test_N = second_N.astype(np.int32)

    speakers_of_ids = [speaker_of[utterance] for utterance in ids]
    _, speaker_I = np.unique(speakers_of_ids, return_inverse=True)
    enrol_speaker_N = speaker_I[enrol_N]
    test_speaker_N = speaker_I[test_N]
    is_target_N = enrol_speaker_N == test_speaker_N
    return TrialList(
        f"{data_dir.name}: {count_of(len(utterances_of), 'held-out speaker')}",
        data_dir,
        Trials(ids, ids, enrol_N, test_N, is_target_N),
        (enrol_speaker_N, test_speaker_N),
        models={},
        columns={},
        seconds=read_durations(data_dir),
    )
