"""Small valid files of every format, written by what writes them in the package."""

import io
import json
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from models_on_disk import CALIBRATION, XVECTOR
from voices import RATE, make_wave

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from result_rows import identified, row

from speakerlab.checkpoints import model_files, published
from speakerlab.config import build
from speakerlab.config.layers import CONF
from speakerlab.config.schema import load_config
from speakerlab.core.atomic import file_sha256, write_json
from speakerlab.core.tuning import Tuning
from speakerlab.data import audio, banks, tables
from speakerlab.data.check import check_data_dirs
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.shards import READERS, Layout
from speakerlab.diarization import regions
from speakerlab.experiments import curves, results
from speakerlab.frontend.vad import EnergyVad
from speakerlab.inference.embedding_files import WRITERS
from speakerlab.inference.onnx_model import INPUT, OUTPUT, Facts
from speakerlab.inference.speaker_model import SpeakerModel
from speakerlab.models import MODELS
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.pair_scores import unit_rows
from speakerlab.scoring.score_files import write_scores
from speakerlab.scoring.trials import Trials
from speakerlab.training.writer import CheckpointWriter


def write_data(folder: Path) -> None:
    """Write a checked data directory, `data`, that has every table."""
    wavs = {f"rec{n}": folder / f"{n}.wav" for n in range(4)}
    for n, path in enumerate(wavs.values()):
        audio.write(path, make_wave(n % 2, n, 0.06), RATE)
    pairs = [
        ("anna", "u1", False),
        ("anna", "u2", True),
        ("u1", "u3", True),
        ("u3", "u2", False),
    ]
    tables.write_data_dir(
        folder / "data",
        wavs=wavs,
        speakers={f"u{n}": f"spk{n % 2}" for n in range(4)},
        segments={f"u{n}": (f"rec{n}", 0.01, 0.05) for n in range(4)},
        trials={"trials": pairs},
        nameless={folder / "a b.wav": "its id must be one word"},
        columns={"utt2device": {"u0": "a", "u1": "b"}, "spk2gender": {"spk0": "f"}},
        enroll={"anna": ["u0", "u2"]},
        about={"corpus": "mini", "licence": "CC BY"},
    )
    check_data_dirs([folder / "data"], allow_rejected=1.0)


def write_packed(codec: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        write_data(folder)
        pack_data_dir(folder / "data", layout=Layout.of_waves(codec, sample_rate=RATE))
        (folder / "data" / READERS).touch()  # as a reader does

    return make


def write_bank(folder: Path) -> None:
    write_data(folder)
    data = folder / "data"
    (data / "segments").unlink()
    tables.write_table(data / "utt2dur", {f"rec{n}": "0.060000" for n in range(4)})
    tables.write_table(
        data / "utt2kind", {f"rec{n}": banks.KINDS[n % 3] for n in range(4)}
    )


TRIALS = {
    "kaldi": "a b target\na c nontarget\nd b nontarget\n",
    "voxceleb": "1 a/1.wav b/2.wav\n0 a/1.wav c.wav\n",
    "cnceleb": "a b 1\na c 0\n",
    "table.csv": "enrol,test,label,more\na,b,1,x\na,c,0,y\n",
    "table.tsv": "modelid\tsegmentid\ttargettype\na\tb\ttarget\na\tc\tnontarget\n",
}
PAIRS = Trials(
    ["a", "d"],
    ["b", "c"],
    np.int32([0, 0, 1]),
    np.int32([0, 1, 0]),
    np.bool_([1, 0, 0]),
)


PAIR_LISTS = {
    "pairs": "a b\nc d\n",
    "kaldi": "a b target\n",
    "table": 'enrol,test\na,"b c"\nc,d\n',
}


def write_texts(**contents: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name, content in contents.items():
            (folder / name).write_text(content, encoding="utf-8")

    return make


def write_score_files(folder: Path) -> None:
    write_scores(folder / "ours", PAIRS, np.array([0.5, -1.25, 3e-6]))
    (folder / "other").write_text("a b target 0.5\na c nontarget -1\nd b nontarget 2\n")


def write_turns(folder: Path) -> None:
    turn = regions.Turn
    turns = {
        "r1": [turn(0.0, 1.5, "s1"), turn(1.0, 2.0, "s2")],
        "r2": [turn(0.5, 1.0, "s1")],
    }
    regions.write_rttm(folder / "ref.rttm", turns)
    regions.write_rttm(folder / "hyp.rttm", {**turns, "r1": turns["r1"][:1]})
    regions.write_uem(folder / "all.uem", {"r1": [(0.0, 2.0)], "r2": [(0.0, 1.0)]})


def write_configs(folder: Path) -> None:
    shutil.copytree(CONF / "hardware", folder / "hardware")
    shutil.copy(CONF / "campplus_tiny.yaml", folder)
    config = load_config([CONF / "campplus_tiny.yaml"], ["runtime.micro_batch={a: 3}"])
    config.write(folder / "written.yaml")
    write_json(folder / "json.yaml", config.to_dict())


def write_model(folder: Path) -> None:
    """Write a model trained for identification, with all that may be beside it."""
    config = load_config([], [XVECTOR, "task=identification"])
    embedder = build.build_embedder(config)
    head = build.build_head(config, embed_dim=16, num_classes=3)
    facts: dict[str, Any] = {
        "train_utterances": 7,
        "train_hours": 0.5,
        "train_sha256": "ab" * 32,
    }
    facts |= {
        "train_corpus": ["mini"],
        "train_page": ["http://a"],
        "train_licence": ["CC BY"],
    }
    published.publish(
        folder / "exp" / "model",
        embedder=embedder,
        config=config,
        facts=facts,
        head=head.state_dict(),
        speakers=["a", "b", "c"],
        calibration=CALIBRATION,
    )
    tuning = Tuning("ahc", 0.25, {"ahc": 0.125}, "made up")
    write_json(folder / "exp/model" / model_files.TUNING, asdict(tuning))
    digest = file_sha256(folder / "exp/model/embedder.safetensors")
    rows = [row(model_sha256=digest), row(trials="b", model_sha256=digest)]
    results.update_results(folder / "exp" / "results.json", rows)
    results.update_results(
        folder / "exp" / "results.json", [identified([0, 1], [0, 0], "ab")]
    )


def write_curves(folder: Path) -> None:
    write_model(folder)
    rows = [
        {"kind": "train", "step": n, "loss": 9.5 - n, "lr": 0.1} for n in range(1, 9)
    ]
    rows += [{"kind": "valid", "step": n, "eer": 0.5} for n in (4, 8)]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(reference) + "\n" for reference in rows)
    )
    reference = {
        "settings": curves.settings_of(folder / "exp"),
        "seeds": [0],
        "curves": {},
    }
    (folder / "reference.json").write_text(json.dumps([reference]))


def write_checkpoint(folder: Path) -> None:
    writer = CheckpointWriter(folder, keep=2)
    state = {
        "step": 10,
        "attempt": 0,
        "task": {"w": torch.zeros(3)},
        "sums": [1.0],
        "best": None,
    }
    writer.save(state, valid={"eer": 0.25})
    writer.wait()


def write_foreign(folder: Path) -> None:
    """Write a small x-vector of WeSpeaker with its head, configuration and speakers."""
    args = {"embed_dim": 16, "hidden_channels": 16, "stats_channels": 24}
    state = MODELS["xvector"](**args).state_dict()
    torch.save(
        {**state, "projection.weight": torch.zeros(2, 16)}, folder / "avg_model.pt"
    )
    config = {
        "model": "XVEC",
        "model_args": {"feat_dim": 80, "embed_dim": 16, "pooling_func": "TSTP"},
        "dataset_args": {"resample_rate": 16000, "fbank_args": {"num_mel_bins": 80}},
        "projection_args": {
            "project_type": "arc_margin",
            "scale": 32.0,
            "easy_margin": False,
        },
        "train_label": "utt2spk",
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "plain.yaml").write_text(yaml.dump(config))
    (folder / "utt2spk").write_text("u1 a\nu2 b\n")
    (folder / "train.csv").write_text('ID,dur,spk\nu1,1.0,a\nu2,2.0,"b"\n')


def write_archives(folder: Path) -> None:
    content = {
        "m/avg_model.pt": b"0123456789" * 100,
        "m/config.yaml": b"model_args: {}\n",
    }
    for name, mode in (("a.tar", "w"), ("a.tar.gz", "w:gz")):
        with tarfile.open(folder / name, mode) as tar:
            for member, data in content.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as bundle:
        for member, data in content.items():
            bundle.writestr(member, data)


def write_onnx(folder: Path) -> None:
    """Write a graph that returns its input, with the facts of a model."""
    from onnx import TensorProto, helper, save_model

    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4])
        for n in (INPUT, OUTPUT)
    ]
    node = helper.make_node("Identity", [INPUT], [OUTPUT])
    model = helper.make_model(
        helper.make_graph([node], "g", ends[:1], ends[1:]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    vad = EnergyVad(range_db=30.0, frame_ms=20.0)
    facts = Facts(
        16000, 4, 4, 4, "ab" * 32, "xvector", {"dither": 0.0}, CALIBRATION, vad=vad
    )
    helper.set_model_props(model, facts.to_texts())
    save_model(model, folder / "a.onnx")


def write_table(folder: Path) -> None:
    emb_ND = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    table = EmbeddingTable(["a", "b", "c"], emb_ND, "ab" * 32, {"precision": "fp32"})
    for write in WRITERS.values():
        write(folder / "emb", table)
    model = enrolled()
    unit_ND = unit_rows(emb_ND, table.ids)
    model.speakers = {"anna": unit_ND[0], "b o": unit_ND[1]}
    model.save_speakers(folder / "speakers.safetensors")


def enrolled() -> SpeakerModel:
    facts = {
        "sample_rate": RATE,
        "embed_dim": 4,
        "sha256": "ab" * 32,
        "space": "ab" * 32,
        "calibration": None,
        "tuning": Tuning(),
    }
    return SpeakerModel(SimpleNamespace(**facts, precision="fp32"))  # pyright: ignore


def write_audio(folder: Path) -> None:
    wave_S = make_wave(0, 0, 0.1)
    for name in ("a.wav", "a.flac"):
        audio.write(folder / name, wave_S, RATE)
    for name in ("OGG", "AIFF", "AU", "CAF", "W64", "MP3"):
        (folder / f"a.{name.lower()}").write_bytes(audio.encode(wave_S, RATE, name))


COMMAND_LINES = [
    "check data --sample-rate 16000 --num-workers 2 --allow-rejected 0.1",
    "pack data --num-workers 2 --codec flac --job 1/2",
    "plan --model eres2net --gpu-mem 11 --gpus 4",
    "train --exp exp --config campplus --set training.lr=0.1 data.dir=data",
    (
        "score --exp exp --trials trials --backend lda+plda --top-n 9 --p-target 0.01"
        " --durations full"
    ),
    "fuse --trials trials --scores a b --out c",
    "compare --trials trials a b --far 0.01",
    "plot det x=a b --trials trials --out a.pdf --width 8.5 --p-target 0.01 0.05",
    "table x=a b --trials y=trials --format latex --out a.tex",
    "der ref hyp --collar 0.25 --skip-overlap --json out.json",
    "embed a.wav b.wav --model exp --out emb --format ark --device cpu",
    "verify a.wav b.wav --model exp --far 0.01 --precision auto",
    "enroll anna a.wav --model exp --speakers s",
    "diarize a.wav --model exp --out out",
    "import a.zip --out model --frontend wespeaker",
    "export exp --out model.onnx --format onnx",
    "average exp --last 3 --out model",
]


def write_commands(folder: Path) -> None:
    for line in COMMAND_LINES:
        (folder / line.split()[0]).write_text("\n".join(line.split()[1:]))
