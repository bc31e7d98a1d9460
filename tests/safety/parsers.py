"""Every parser of files of a user: what writes valid ones, and how they are damaged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import readers
import valid_files as valid
from damage import (
    Damage,
    either,
    header,
    of_another_version,
    plain,
    raw,
    rezipped,
    tarred,
    text,
)
from toy_segmentation import write_segmentation

from speakerlab.bin.verify import read_pairs
from speakerlab.checkpoints import foreign_files, model_files, toolkit_config
from speakerlab.checkpoints.foreign import import_checkpoint
from speakerlab.config.layers import CONF
from speakerlab.config.schema import load_config
from speakerlab.core import done
from speakerlab.core.reading import read_json
from speakerlab.data import tables
from speakerlab.data.check import check_data_dirs
from speakerlab.diarization import regions
from speakerlab.experiments import model_card
from speakerlab.experiments.trial_list import read_trial_list
from speakerlab.inference.onnx_model import OnnxModel
from speakerlab.inference.segmentation import Segmentation
from speakerlab.inference.torch_model import TorchModel
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.score_files import read_scores, write_scores


class Parser(NamedTuple):
    """One row of the table."""

    make: Callable[[Path], Any]  # writes valid files into a folder
    files: tuple[str, ...]  # patterns of those that are damaged
    read: Callable[[Path], Any]  # path of the damaged file -> value
    damage: Damage = text
    write: Callable[[Path, Any], Any] | None = None  # writes a value to a path
    share: float = 1.0  # of the inputs; less for what takes longer
    forge: Callable[[Path], Any] = lambda path: (
        None
    )  # corrects digests of the damaged file
    named: str = ""  # what an error must name, if not the folder of the files


any_text = either(text, raw)
any_json = either(plain, raw)
arrays = either(raw, header, of_another_version)
TABLES = ("wav.scp", "utt2spk", "utt2dur", "segments", "rejected.tsv")
PARSERS: dict[str, Parser] = {
    "table": Parser(
        valid.write_data, ("wav.scp",), tables.read_table, write=tables.write_table
    ),
    "segments": Parser(valid.write_data, ("segments",), tables.read_segments),
    "enroll": Parser(valid.write_data, ("enroll.map",), tables.read_enroll),
    "about": Parser(
        valid.write_data,
        ("about",),
        lambda path: tables.read_about(path.parent),
        write=tables.write_table,
    ),
    "rejected": Parser(
        valid.write_data,
        ("rejected.tsv",),
        lambda path: tables.read_rejected(path.parent),
        write=lambda path, rows: tables.write_rejected(path.parent, rows),
    ),
    "manifest": Parser(valid.write_data, TABLES, readers.read_manifest_of, share=0.2),
    "check": Parser(
        valid.write_data,
        (*TABLES, "trials", "utt2device", "spk2gender", "enroll.map"),
        lambda path: check_data_dirs([path.parent], allow_rejected=1.0),
        share=0.1,
    ),
    "record": Parser(
        lambda folder: done.record(
            folder / "record", {"a": 1, "b c": "d\ne"}, ["record"]
        ),
        ("record",),
        done.read_record,
        any_text,
    ),
    "diarized": Parser(
        valid.write_texts(talk='{"inputs": "0", "segments": []}'),
        ("talk",),
        read_json,
        any_json,
    ),
    "bank": Parser(
        valid.write_bank,
        ("utt2kind", "rejected.tsv"),
        readers.read_bank,
        share=0.2,
    ),
    "index": Parser(
        valid.write_packed("flac"),
        ("index.*",),
        readers.read_every_wave,
        arrays,
        share=0.2,
    ),
    "shard": Parser(
        valid.write_packed("pcm"), ("*.tar",), readers.read_every_wave, raw, share=0.1
    ),
    "shard of flac": Parser(
        valid.write_packed("flac"), ("*.tar",), readers.read_every_wave, raw, share=0.1
    ),
    "trials": Parser(
        valid.write_texts(**valid.TRIALS),
        ("*",),
        readers.read_trial_file,
        write=readers.write_trials,
    ),
    "pairs": Parser(valid.write_texts(**valid.PAIR_LISTS), ("*",), read_pairs),
    "official": Parser(
        valid.write_texts(kaldi=valid.TRIALS["kaldi"]),
        ("*",),
        readers.read_official_list,
    ),
    "trial list": Parser(
        valid.write_data,
        ("trials", "utt2spk", "utt2dur", "utt2device", "spk2gender", "enroll.map"),
        lambda path: read_trial_list(path.with_name("trials")).side_seconds(),
        share=0.5,
    ),
    "scores": Parser(
        valid.write_score_files,
        ("*",),
        lambda path: read_scores(path, valid.PAIRS),
        write=lambda path, scores_N: write_scores(path, valid.PAIRS, scores_N),
    ),
    "rttm": Parser(
        valid.write_turns, ("*.rttm",), regions.read_rttm, write=regions.write_rttm
    ),
    "uem": Parser(
        valid.write_turns, ("*.uem",), regions.read_uem, write=regions.write_uem
    ),
    "lab": Parser(
        valid.write_texts(lab="0.000 1.500 speech\n2.000 3.250 speech\n"),
        ("lab",),
        regions.read_lab,
    ),
    "der": Parser(valid.write_turns, ("*",), readers.score_turns, share=0.5),
    "layers": Parser(
        valid.write_configs,
        ("campplus_tiny.yaml", "written.yaml", "json.yaml"),
        lambda path: load_config([path]),
        plain,
        write=lambda path, config: config.write(path),
        share=0.03,
    ),
    "hardware": Parser(
        valid.write_configs,
        ("hardware/*",),
        lambda path: load_config([CONF / "campplus_tiny.yaml", path]),
        share=0.1,
    ),
    "set": Parser(
        valid.write_texts(
            a="training.lr=0.1\nmodel={name: xvector}", b="augment.speeds=[1.0]"
        ),
        ("*",),
        readers.read_set,
        share=0.1,
        named="--set",
    ),
    "card": Parser(
        valid.write_model,
        ("card.json", "config.yaml", "results.json"),
        lambda path: model_card.describe(
            path.parent if path.name == "results.json" else path.parent.parent
        ),
        plain,
        share=0.1,
    ),
    "results": Parser(
        valid.write_model, ("results.json",), readers.read_results, plain
    ),
    "curves": Parser(
        valid.write_curves,
        ("metrics.jsonl", "reference.json"),
        readers.read_reference,
        plain,
        share=0.1,
    ),
    "calibration": Parser(
        valid.write_model,
        ("calibration.json",),
        lambda path: model_files.read_calibration(path.parent),
        plain,
        write=readers.write_for_model,
    ),
    "tuning": Parser(
        valid.write_model,
        ("diarization.json",),
        lambda path: model_files.read_tuning(path.parent),
        plain,
        write=readers.write_for_model,
    ),
    "weights": Parser(
        valid.write_model,
        ("*.safetensors",),
        lambda path: TorchModel(path.parent, device="cpu"),
        either(raw, header),
        share=0.02,
        forge=readers.forge_card,
    ),
    "model": Parser(
        valid.write_model,
        ("model/*.json", "model/*.yaml", "model/*.txt"),
        lambda path: TorchModel(path.parent, device="cpu"),
        plain,
        share=0.02,
    ),
    "note": Parser(
        valid.write_checkpoint,
        ("note.json",),
        readers.read_checkpoint,
        plain,
        share=0.5,
    ),
    "state": Parser(
        valid.write_checkpoint,
        ("state.pt",),
        readers.read_checkpoint,
        rezipped("data.pkl", raw),
        share=0.5,
        forge=readers.forge_note,
    ),
    "foreign tensors": Parser(
        valid.write_foreign,
        ("avg_model.pt",),
        foreign_files.read_tensors,
        rezipped("data.pkl", raw),
        share=0.2,
    ),
    "foreign config": Parser(
        valid.write_foreign, ("*.yaml",), readers.read_foreign_config, plain, share=0.3
    ),
    "foreign speakers": Parser(
        valid.write_foreign,
        ("utt2spk", "train.csv"),
        lambda path: toolkit_config.read_speakers(path, num_rows=2),
    ),
    "import": Parser(
        valid.write_foreign,
        ("config.yaml", "utt2spk"),
        lambda path: import_checkpoint(
            path.with_name("avg_model.pt"), path.with_name("out")
        ),
        plain,
        share=0.005,
    ),
    "import tensors": Parser(
        valid.write_foreign,
        ("avg_model.pt",),
        lambda path: import_checkpoint(path, path.with_name("out")),
        rezipped("data.pkl", raw),
        share=0.005,
    ),
    "tar": Parser(valid.write_archives, ("a.tar",), readers.read_archive, tarred),
    "zip": Parser(
        valid.write_archives, ("a.zip", "a.tar.gz"), readers.read_archive, raw
    ),
    "onnx": Parser(
        valid.write_onnx,
        ("a.onnx",),
        OnnxModel,
        either(raw, readers.onnx_texts),
        share=0.1,
    ),
    "segmentation": Parser(
        lambda folder: write_segmentation(folder / "a.onnx", sample_rate=16000),
        ("a.onnx",),
        Segmentation,
        raw,
        share=0.1,
    ),
    "embeddings": Parser(
        valid.write_table,
        ("emb.npy", "emb.ids", "emb.json"),
        lambda path: EmbeddingTable.load(path.with_suffix("")),
        any_json,
        write=lambda path, table: table.save(path.with_suffix("")),
    ),
    "speakers": Parser(
        valid.write_table,
        ("speakers.*",),
        readers.load_speakers,
        either(raw, header),
    ),
    "audio": Parser(valid.write_audio, ("a.*",), readers.read_audio, raw, share=0.3),
    "commands": Parser(
        valid.write_commands,
        ("*",),
        readers.read_command,
        share=0.3,
        named="speakerlab ",
    ),
}
