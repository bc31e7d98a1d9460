"""Stores both toolkits' embeddings of real recordings, in figures.npz beside this file.

    python tests/checkpoints/toolkits/make.py --shared DIR --3dspeaker CHECKOUT --wespeaker CHECKOUT

The recordings are those of toolkit_cases.py; their names are stored beside the embeddings.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from toolkit_cases import CASES, STORED, real_files, run_peer, write_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shared", type=Path, required=True)
    for toolkit in ("3dspeaker", "wespeaker"):
        parser.add_argument(f"--{toolkit}", type=Path, required=True, metavar="CHECKOUT")
    options = vars(parser.parse_args())
    files = real_files(options["shared"])
    figures: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for toolkit in ("3dspeaker", "wespeaker"):
            names = [name for name, case in CASES.items() if case.toolkit == toolkit]
            checkpoints = {name: write_checkpoint(name, scratch) for name in names}
            figures |= run_peer(toolkit, options[toolkit], checkpoints, files, scratch)
    np.savez_compressed(STORED, files=np.array([file.name for file in files]), **figures)
    for name, emb_ND in figures.items():
        print(f"{name}: {len(emb_ND)} embeddings of {emb_ND.shape[1]}")


if __name__ == "__main__":
    main()
