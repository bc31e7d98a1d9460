"""A data directory to embeddings: utterances a second, beside 3D-Speaker's extraction.

    python benchmarks/extract.py --peer DIR --json FILE      # DIR: a checkout of 3D-Speaker

In: recordings of mixed lengths as wav files (corpus.py). Out: a row for each model and precision,
`extract.<model>.<precision>`. Needs kaldiio, which 3D-Speaker's script writes with.

A turn is the whole command in a process that has been started before: the model read, every
recording read and embedded whole, the table written. Ours is `speakerlab extract`; 3D-Speaker's is
the main function of its bin/extract.py, which takes one recording at a time, unpadded, in fp32.
Both have the same weights: random, with the BatchNorm statistics that two batches of noise leave.
Before anything is timed, both must give the same embeddings; in bf16 ours may differ by as much as
that format rounds.
"""

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data
import numpy as np
import torch
import yaml
from end_to_end import RECIPES
from sides import (
    ROOT,
    Side,
    add_seconds,
    close_sides,
    import_peer,
    peaks_of,
    peer_tree,
    report,
    require_equal,
    run_case,
    run_of,
    say,
    start_sides,
    take_turns,
    timed,
    wants,
)

PEERS = ("3dspeaker",)
QUICK = ("--seconds=10", "--model=campplus")
MODELS = ("campplus", "eres2net")
ALLOWED = {"fp32": 1e-4, "bf16": 3e-2}  # 1 - cosine, of the worst recording
MIXED = {"audio": "librispeech-mini/test-other"}
EPOCH = 1


class Ours(Side):
    """A published model; its weights are also written as a checkpoint of 3D-Speaker."""

    def __init__(self, folder: str, model: str, device: str) -> None:
        from speakerlab.checkpoints.published import publish
        from speakerlab.config import build
        from speakerlab.config.schema import load_config

        self.exp, self.data = Path(folder) / model, Path(folder) / "wav"
        self.num_threads, self.device = torch.get_num_threads(), device
        config = load_config([ROOT / "conf" / f"{model}.yaml"])
        embedder = build.build_embedder(config)
        backbone = embedder.get_submodule("backbone").train()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _ in range(2):
                backbone(2 * torch.randn(8, 200, 80, generator=generator))
        publish(self.exp / "model", embedder=embedder.eval(), config=config, facts={})
        inner = Path(folder) / f"peer_{model}/models/CKPT-EPOCH-{EPOCH}-00"
        inner.mkdir(parents=True)
        torch.save(backbone.state_dict(), inner / "embedding_model.ckpt")
        (inner / "CKPT.yaml").write_text(
            yaml.dump({"unixtime": time.time(), "epoch": EPOCH})
        )

    def extract(self, precision: str) -> None:
        """Run the whole command."""
        from speakerlab.bin import extract

        # The command takes one of them for its batches.
        torch.set_num_threads(self.num_threads)
        shutil.rmtree(self.exp / "embeddings", ignore_errors=True)
        arguments = ["--exp", self.exp, "--data", self.data, "--precision", precision]
        extract.main([str(word) for word in arguments])

    def values(self, path: str, precision: str) -> None:
        """Write emb_D of each recording."""
        from speakerlab.checkpoints.model_files import embeddings_stem
        from speakerlab.scoring.embeddings import EmbeddingTable

        self.extract(precision)
        table = EmbeddingTable.load(embeddings_stem(self.exp, self.data.name))
        np.savez(path, **dict(zip(table.ids, table.emb_ND)))

    def run(self, precision: str, steps: int) -> float:
        return timed(lambda: self.extract(precision), self.device, steps=steps)


class Peer(Side):
    """3D-Speaker's bin/extract.py over its own kind of experiment."""

    def __init__(self, folder: str, model: str, device: str) -> None:
        data.replace_torchaudio()
        os.environ |= {"LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        self.script = import_peer("speakerlab.bin.extract")
        self.exp = Path(folder) / f"peer_{model}"
        self.scp = Path(folder) / "wav/wav.scp"
        self.device = device
        recipe = peer_tree() / RECIPES[model]
        config = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        config |= {"num_epoch": EPOCH, "exp_dir": str(self.exp)}
        (self.exp / "config.yaml").write_text(yaml.dump(config), encoding="utf-8")

    def extract(self) -> None:
        """Run the whole command."""
        shutil.rmtree(self.exp / "embeddings", ignore_errors=True)
        sys.argv = ["extract.py", "--exp_dir", str(self.exp), "--data", str(self.scp)]
        sys.argv += ["--use_gpu", "--gpu", "0"] if self.device != "cpu" else []
        self.script.main()

    def values(self, path: str, precision: str) -> None:
        """Write emb_D of each recording."""
        import kaldiio

        self.extract()
        table = kaldiio.load_scp(str(self.exp / "embeddings/xvector_00.scp"))
        np.savez(path, **{name: emb.reshape(-1) for name, emb in table.items()})

    def run(self, precision: str, steps: int) -> float:
        return timed(self.extract, self.device, steps=steps)


SIDES = {"ours": Ours, "3dspeaker": Peer}


def one_less_cosine(a_D: np.ndarray, b_D: np.ndarray) -> float:
    a_D, b_D = a_D.astype(np.float64), b_D.astype(np.float64)
    return 1 - float(a_D @ b_D / np.sqrt((a_D @ a_D) * (b_D @ b_D)))


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the rows of every model and precision."""
    import corpus

    recordings = corpus.make(options, crop_seconds=1.0, defaults=MIXED)
    num_utterances = thin_out(options.folder / "wav", options.utterances)
    say(f"{recordings}; {num_utterances} of them in a turn")
    for model in options.model:
        sides = start_sides(
            "extract",
            options.threads,
            options.peers,
            folder=options.folder,
            model=model,
            device=options.device,
        )
        for precision in options.precision:
            name = f"extract.{model}.{precision}"
            if not wants(options, name):
                continue
            if options.peers:
                require_equal(
                    f"{name}: directions of embeddings",
                    sides,
                    options.folder,
                    allowed=ALLOWED[precision],
                    distance=one_less_cosine,
                    precision=precision,
                )
            runs = [run_of(side, precision=precision) for side in sides]
            turns = take_turns(runs, amount=num_utterances, seconds=options.seconds)
            yield report(name, turns, **peaks_of(sides))
        close_sides(sides)


def thin_out(data_dir: Path, most: int) -> int:
    """Keep at most so many recordings of a data directory, spread over it; return how many."""
    ids = list(data.read_pairs(data_dir / "wav.scp"))
    step = math.ceil(len(ids) / most)
    chosen_ids = set(ids[::step])
    for name in ("wav.scp", "utt2spk", "utt2dur"):
        lines = (data_dir / name).read_text().splitlines()
        text = "".join(f"{line}\n" for line in lines if line.split()[0] in chosen_ids)
        (data_dir / name).write_text(text, encoding="utf-8")
    return len(chosen_ids)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument(
        "--precision", nargs="+", default=list(ALLOWED), choices=list(ALLOWED)
    )
    data.add_audio_options(parser)
    parser.add_argument("--utterances", type=int, default=70, help="at most (70)")
    add_seconds(parser, 20.0)


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
