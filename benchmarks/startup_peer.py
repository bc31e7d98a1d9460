"""3D-Speaker's train.py, started on a CPU: what startup.py times. Run by torchrun.

In: the words of its train.py, but for --data, which is a data directory of data_corpus.py. Out: its
log. PYTHONPATH is its checkout.

It wants NVIDIA cards; where there is none, `cuda` leaves modules and tensors where they are and the
ranks talk by gloo, which starts sooner. What torchaudio lacks is replaced in data_peer.py. It dies
with torchrun: by itself it would go on when that is killed.
"""

import sys
from pathlib import Path

import data_peer
import resting
import torch
from sides import import_from_root
from torch import distributed

CROP_SECONDS = 3.0


def start_ranks(**_asked: str) -> None:
    start(backend="gloo")


if not torch.cuda.is_available():
    start = distributed.init_process_group
    distributed.init_process_group = start_ranks
    torch.cuda.set_device = lambda _index: None  # pyright: ignore[reportAttributeAccessIssue]
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_args, **_more: self  # pyright: ignore[reportAttributeAccessIssue]

resting.tie_to_parent()
data_dir = next(word for word in sys.argv if word.startswith("--data=")).partition("=")[2]
rows = data_peer.write_list(Path(data_dir), CROP_SECONDS)
sys.argv = [f"--data={rows}" if word.startswith("--data=") else word for word in sys.argv]
import_from_root("speakerlab.bin.train").main()
