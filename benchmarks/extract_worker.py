"""Our side of extract.py: `speakerlab extract` over a data directory, again and again.

In: lines of JSON, {"do": "extract" | "values" | "peak", ...}, and a data directory of
data_corpus.py. Out: a line of JSON for each. Below --folder it first writes a published model,
`<model>/`, and the same weights as a checkpoint of 3D-Speaker's, `peer_<model>/`.
"""

import argparse
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import yaml
from sides import ROOT, Answer, Order, serve

from speakerlab.bin import extract
from speakerlab.checkpoints.model_files import embeddings_stem
from speakerlab.checkpoints.published import publish
from speakerlab.config import build
from speakerlab.config.schema import load_config
from speakerlab.scoring.embeddings import EmbeddingTable

EPOCH = 1


class Side:
    """A published model and what is to be embedded."""

    def __init__(self, options: argparse.Namespace) -> None:
        folder = Path(options.folder)
        self.exp, self.data = folder / options.model, folder / "wav"
        self.num_threads = torch.get_num_threads()
        config = load_config([ROOT / "conf" / f"{options.model}.yaml"])
        embedder = build.build_embedder(config)
        backbone = embedder.get_submodule("backbone").train()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _ in range(2):
                backbone(2 * torch.randn(8, 200, 80, generator=generator))
        publish(self.exp / "model", embedder=embedder.eval(), config=config, facts={})
        write_checkpoint(folder / f"peer_{options.model}", backbone)

    def extract(self, precision: str) -> None:
        """The whole command."""
        torch.set_num_threads(self.num_threads)  # of which the command takes one a batch
        shutil.rmtree(self.exp / "embeddings", ignore_errors=True)
        words = ["--exp", self.exp, "--data", self.data, "--precision", precision]
        extract.main([str(word) for word in words])

    def values(self, path: str, precision: str) -> None:
        """Write emb_D of each recording."""
        self.extract(precision)
        table = EmbeddingTable.load(embeddings_stem(self.exp, self.data.name))
        np.savez(path, **dict(zip(table.ids, table.emb_ND)))  # pyright: ignore[reportArgumentType]


def write_checkpoint(folder: Path, backbone: torch.nn.Module) -> None:
    """As 3D-Speaker's Checkpointer leaves the weights of an epoch."""
    inner = folder / f"models/CKPT-EPOCH-{EPOCH}-00"
    inner.mkdir(parents=True)
    torch.save(backbone.state_dict(), inner / "embedding_model.ckpt")
    (inner / "CKPT.yaml").write_text(yaml.dump({"unixtime": time.time(), "epoch": EPOCH}))


def start() -> Callable[[Order], Answer]:
    parser = argparse.ArgumentParser()
    for name in ("folder", "model"):
        parser.add_argument(f"--{name}", required=True)
    side = Side(parser.parse_args())

    def answer(order: Order) -> Answer:
        if order["do"] == "values":
            side.values(order["path"], order["precision"])
            return {"written": True}
        if order["do"] == "peak":
            return {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
        began = time.perf_counter()
        for _ in range(order["steps"]):
            side.extract(order["precision"])
        return {"seconds": time.perf_counter() - began}

    return answer


if __name__ == "__main__":
    serve(start)
