"""The memory that `speakerlab plan` predicts, over the memory that a training then takes.

    python benchmarks/memory.py --json FILE

In: recordings (corpus.py). Out: a row for each model and micro-batch,
`memory.<model>.bf16.<crops>`, with the measured memory as its peak; below 1 the plan promises too
much.

The training is that of end_to_end.py, in a process of its own for each row, after some steps. On a
GPU its memory is all that is in use on the device, with the context of CUDA: nothing else may run
there. On a CPU it is the most that the process has held, of which the plan does not count Python
and its libraries.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import data
import torch
from end_to_end import MODELS, Ours, config_of
from sides import Process, peak_mib, run_case, say, wants

PEERS = ()
QUICK = ("--micro-batches", "2", "--crop-seconds=1")
CROPS = {"cpu": (2, 8), "cuda": (16, 32, 64, 128)}  # of a micro-batch
PRECISION = "bf16"
STEPS = 5  # memory grows until momentum is there and kernels are chosen


class Measured(Ours):
    """A training whose memory is measured."""

    def memory(self) -> dict[str, float]:
        """Return the MiB that it takes after some steps, and the bytes of noise and rooms."""
        self.run(STEPS)
        used = peak_mib()
        if self.device != "cpu":
            free, total = torch.cuda.mem_get_info(self.device)
            used = (total - free) / 2**20
        banks = sum(buffer.nbytes for buffer in self.trainer.task.augment.buffers())
        return {"used": used, "banks": banks, "classes": len(self.training.classes)}


SIDES = {"ours": Measured}


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the rows of every model and micro-batch."""
    import corpus
    from rows import Row

    say(corpus.make(options, crop_seconds=options.crop_seconds))
    how = {"source": "wav", "precision": PRECISION, "device": options.device, "workers": 1}
    how |= {"folder": options.folder, "crop_seconds": options.crop_seconds}
    sizes = options.micro_batches or CROPS[torch.device(options.device).type]
    for model in options.model:
        for crops in sizes:
            name = f"memory.{model}.{PRECISION}.{crops}"
            if not wants(options, name):
                continue
            words = {**how, "model": model, "micro_batch": crops}
            side = Process("memory", "ours", threads=options.threads, **words)
            found = side.ask("memory")
            side.close()
            ratio = planned_mib(crops, found, **words) / found["used"]
            row = Row(name=name, ours=ratio, unit="planned / measured", peak_mib=found["used"])
            say(row.line())
            yield row


def planned_mib(crops: int, found: dict[str, float], **how: Any) -> float:
    """Return the MiB that the plan of the same training predicts."""
    from speakerlab.experiments.planning import Memory, footprint

    config, on_gpu = config_of(**how), how["device"] != "cpu"
    parts = footprint(
        config, num_classes=int(found["classes"]), precision=PRECISION, with_data=not on_gpu
    )
    banks = found["banks"] if on_gpu else 0.0
    memory = Memory(config, parts, free=0.0, on_gpu=on_gpu, bank_bytes=banks)
    return (memory.fixed + crops * memory.crop) / 2**20


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--micro-batches", type=int, nargs="+", metavar="N", help="crops")
    data.add_audio_options(parser)


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
