"""Training from files: utterances a second, beside 3D-Speaker's own training.

    python benchmarks/end_to_end.py --peer DIR --json FILE      # DIR: a checkout of 3D-Speaker

In: recordings as wav files that both read (corpus.py). Out: a row for each model and precision.

A step is all of this: read, speed, room, noise, fbank, forward, backward, update and the log. Ours
is what `speakerlab train` builds from `conf/<model>.yaml`; 3D-Speaker's is the loop of its train.py
over what its builder makes of its recipe's YAML. Both take the same number of crops of the same
length, as many loader workers and threads, and change speeds and augment as often (data.py). Before
anything is timed, both must have as many parameters and classes; that both compute the same from
the same input is tested by data.py and models.py.

`end_to_end.<model>` is ours with runtime.precision=bf16, `.fp32` in fp32, each beside 3D-Speaker as
it ships, in fp32. `.data_wait` is the share of the time in which ours had no batch to compute on.
`peak_mib` is the most memory that a side's first process held; on a GPU, that torch took there.
Settings of ours that --set changes, for example training.global_batch=256 beside --micro-batch 64,
are at the end of the row's name.

Replaced in 3D-Speaker, besides what data.py replaces, each by something cheaper: `Tensor.cuda`
returns the tensor itself if there is no GPU; DistributedDataParallel, which one process does not
need, is left out; its list is drawn from without end, so that its workers are not restarted every
epoch.
"""

import argparse
import logging
import statistics
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import data
import torch
from sides import (
    Process,
    Side,
    add_seconds,
    close_sides,
    die_with_parent,
    import_peer,
    peaks_of,
    peer_tree,
    report,
    require_same_facts,
    run_case,
    run_of,
    say,
    start_sides,
    take_turns,
    timed,
    wants,
)
from torch import nn
from torch.utils.data import RandomSampler

PEERS = ("3dspeaker",)
QUICK = ("--seconds=3", "--model=campplus", "--precision=bf16")
# Least steps of a turn: fewer may find their crops read.
MODELS = {"campplus": 4, "eres2net": 2}
PRECISIONS = ("fp32", "bf16")
ENDLESS = 1 << 40  # crops
RECIPES = {
    "campplus": "egs/3dspeaker/sv-cam++/conf/cam++.yaml",
    "eres2net": "egs/3dspeaker/sv-eres2net/conf/eres2net.yaml",
}


class Ours(Side):
    """A training as `speakerlab train` builds it, step by step."""

    def __init__(self, device: str, **training_options: Any) -> None:
        self.device = device
        self.training = data.start_training(device=device, **training_options)
        trainer = self.trainer = self.training.trainer
        trainer.start()
        trainer.open()
        self.take_wait, self.waited = trainer.inputs.take_wait_seconds, 0.0
        trainer.inputs.take_wait_seconds = self.note_wait  # the log takes it, too
        self.shares: list[float] = []

    def note_wait(self) -> float:
        """Return the seconds in which the device waited for data since the last call."""
        seconds = self.take_wait()
        self.waited += seconds
        return seconds

    def run(self, steps: int) -> float:
        """Return the seconds of so many steps."""
        self.note_wait()
        self.waited = 0.0
        seconds = timed(self.trainer.take_step, self.device, steps=steps)
        self.note_wait()
        self.shares.append(self.waited / seconds)
        return seconds

    def data_wait(self) -> float:
        """Return the median share of the time of a run that was spent waiting for data."""
        # Before the first run no batch was there.
        return statistics.median(self.shares[1:])

    def facts(self) -> dict[str, int]:
        """Return what the other side must have, too."""
        backbone = self.training.embedder.get_submodule("backbone")
        return facts_of(
            backbone, len(self.training.classes), self.trainer.plan.global_batch
        )


class Peer(Side):
    """A training as 3D-Speaker's train.py sets it up from its recipe's YAML."""

    def __init__(self, device: str, **options: Any) -> None:
        data.replace_torchaudio()
        if not torch.cuda.is_available():
            data.replace_cuda()
        self.train = import_peer("speakerlab.bin.train").train
        build = import_peer("speakerlab.utils.builder").build
        config = self.config = self._config(**options)
        self.device = device
        dataset = build("dataset", config)
        sampler = RandomSampler(dataset, replacement=True, num_samples=ENDLESS)
        config.dataloader["args"] |= {
            "sampler": sampler,
            "worker_init_fn": die_with_parent,
        }
        loader = build("dataloader", config)
        self.backbone = build("embedding_model", config)
        # Each speed is a speaker of its own.
        num_speeds = 3 if config.speed_pertub else 1
        config.num_classes = len(config.label_encoder) * num_speeds
        classifier = build("classifier", config)
        self.model = nn.Sequential(self.backbone, classifier).to(device)
        config.optimizer["args"]["params"] = self.model.parameters()
        self.optimizer = build("optimizer", config)
        self.criterion = build("loss", config)
        self.schedulers = []
        for name in ("lr_scheduler", "margin_scheduler"):
            getattr(config, name)["args"]["step_per_epoch"] = len(loader)
            self.schedulers.append(build(name, config))
        torch.backends.cudnn.benchmark = True
        self.batches = iter(loader)

    def _config(
        self,
        model: str,
        folder: str,
        micro_batch: int,
        crop_seconds: float,
        workers: int,
        **_of_ours: Any,
    ) -> Any:
        """Return its recipe's configuration, with what both sides must have alike."""
        values = {
            "data": data.write_list(Path(folder, "wav"), crop_seconds),
            "noise": Path(folder, "noise/wav.scp"),
            "reverb": Path(folder, "rirs/wav.scp"),
            "exp_dir": Path(folder, "peer_exp"),
            "wav_len": crop_seconds,
            "aug_prob": data.AUGMENTED,
            "batch_size": micro_batch,
            "num_workers": workers,
        }
        arguments = [f"--{key}={value}" for key, value in values.items()]
        build_config = import_peer("speakerlab.utils.config").build_config
        return build_config(str(peer_tree() / RECIPES[model]), arguments)

    def run(self, steps: int) -> float:
        """Return the seconds that its training loop takes for so many steps."""
        log = logging.getLogger("3D-Speaker")

        def work() -> None:
            self.train(
                Batches(self.batches, steps),
                self.model,
                self.criterion,
                self.optimizer,
                1,  # epoch
                *self.schedulers,
                log,
                self.config,
                0,  # rank
            )

        return timed(work, self.device)

    def facts(self) -> dict[str, int]:
        """Return what the other side must have, too."""
        return facts_of(self.backbone, self.config.num_classes, self.config.batch_size)


SIDES = {"ours": Ours, "3dspeaker": Peer}


class Batches:
    """The next batches of an endless loader, as a separate loader."""

    def __init__(self, batches: Iterator[Any], count: int) -> None:
        self.batches, self.count = batches, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return islice(self.batches, self.count)


def facts_of(backbone: nn.Module, num_classes: int, num_crops: int) -> dict[str, int]:
    """Return the sizes of a training; num_crops: of a step."""
    parameters = sum(p.numel() for p in backbone.parameters())
    return {"parameters": parameters, "classes": num_classes, "crops": num_crops}


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the rows of every model and precision."""
    import corpus

    pack = options.source == "shard"
    say(corpus.make(options, crop_seconds=options.crop_seconds, pack=pack))
    for model, precision in product(options.model, options.precision):
        ending = [] if precision == "bf16" else [precision]
        name = ".".join(["end_to_end", model, *ending, *options.set])
        if not wants(options, name) and not wants(options, f"{name}.data_wait"):
            continue
        sides = start_sides(
            "end_to_end",
            options.threads,
            options.peers,
            model=model,
            device=options.device,
            precision=precision,
            folder=options.folder,
            source=options.source,
            micro_batch=options.micro_batch,
            workers=options.workers,
            crop_seconds=options.crop_seconds,
            settings=options.set,
        )
        yield from compare_with(name, sides, MODELS[model], options.seconds)
        close_sides(sides)


def compare_with(
    name: str, sides: Sequence[Process], least_steps: int, seconds: float
) -> Iterator[Any]:
    """Yield the rows of two trainings, which must be of one size, or of ours."""
    facts = require_same_facts(name, sides)
    runs = [run_of(side) for side in sides]
    turns = take_turns(
        runs, amount=facts["crops"], seconds=seconds, least_steps=least_steps
    )
    yield report(name, turns, **peaks_of(sides))
    share = sides[0].ask("data_wait")
    yield report(f"{name}.data_wait", [[share]], unit="share of the time")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", nargs="+", default=list(MODELS), choices=MODELS)
    add("--precision", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    add("--source", default="wav", choices=data.SOURCES, help="what ours reads")
    data.add_audio_options(parser)
    add("--micro-batch", type=int, default=16, help="crops of a step")
    add("--workers", type=int, default=1, help="of each side's loader")
    add("--set", nargs="+", default=[], help="KEY=VALUE: settings of ours")
    add_seconds(parser, 60.0)


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
