"""3D-Speaker's side of extract.py: the main function of its bin/extract.py, again and again.

In: lines of JSON, {"do": "extract" | "values" | "peak", ...}, a data directory of data_corpus.py
and the checkpoint that our side wrote. Out: a line of JSON for each. PYTHONPATH is its checkout.

`torchaudio.load`, which needs FFmpeg now, is replaced by something cheaper (data_peer.py). Needs
kaldiio, which its script writes with.
"""

import argparse
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import data_peer  # noqa: F401  it replaces what torchaudio lacks
import kaldiio
import numpy as np
import yaml
from sides import Answer, Order, import_from_root, serve

EPOCH = 1
RECIPES = {
    "campplus": "egs/3dspeaker/sv-cam++/conf/cam++.yaml",
    "eres2net": "egs/3dspeaker/sv-eres2net/conf/eres2net.yaml",
}
os.environ |= {"LOCAL_RANK": "0", "WORLD_SIZE": "1"}
its_extract = import_from_root("speakerlab.bin.extract")


class Side:
    """An experiment of its own kind, and what is to be embedded."""

    def __init__(self, options: argparse.Namespace) -> None:
        folder = Path(options.folder)
        self.exp, self.scp = folder / f"peer_{options.model}", folder / "wav/wav.scp"
        recipe = Path(its_extract.__file__).parents[2] / RECIPES[options.model]
        config = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        config |= {"num_epoch": EPOCH, "exp_dir": str(self.exp)}
        (self.exp / "config.yaml").write_text(yaml.dump(config), encoding="utf-8")

    def extract(self) -> None:
        """The whole command."""
        shutil.rmtree(self.exp / "embeddings", ignore_errors=True)
        sys.argv = ["extract.py", "--exp_dir", str(self.exp), "--data", str(self.scp)]
        its_extract.main()

    def values(self, path: str) -> None:
        """Write emb_D of each recording."""
        self.extract()
        table = kaldiio.load_scp(str(self.exp / "embeddings/xvector_00.scp"))
        found = {name: emb.reshape(-1) for name, emb in table.items()}
        np.savez(path, **found)  # pyright: ignore[reportArgumentType]


def start() -> Callable[[Order], Answer]:
    parser = argparse.ArgumentParser()
    for name in ("folder", "model"):
        parser.add_argument(f"--{name}", required=True)
    side = Side(parser.parse_args())

    def answer(order: Order) -> Answer:
        if order["do"] == "values":
            side.values(order["path"])
            return {"written": True}
        if order["do"] == "peak":
            return {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
        began = time.perf_counter()
        for _ in range(order["steps"]):
            side.extract()
        return {"seconds": time.perf_counter() - began}

    return answer


if __name__ == "__main__":
    serve(start)
