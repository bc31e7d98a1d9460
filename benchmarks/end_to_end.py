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
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import data
import torch
from sides import (
    ROOT,
    Process,
    Side,
    add_seconds,
    die_with_parent,
    import_peer,
    peaks_of,
    report,
    run_case,
    run_of,
    say,
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

    def __init__(self, **config_options: Any) -> None:
        """Take `how`, arguments of `config_of`."""
        from speakerlab.core import process
        from speakerlab.experiments.hardware import start_rank
        from speakerlab.experiments.train import start_training
        from speakerlab.training.signals import Signals

        config, self.device = config_of(**config_options), config_options["device"]
        exp = Path(tempfile.mkdtemp(prefix="exp", dir=config_options["folder"]))
        signals = Signals(process.leave)
        self.training = start_training(exp, None, config, start_rank(config), signals)
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


def config_of(
    *,
    model: str,
    source: str,
    precision: str,
    device: str,
    folder: str,
    micro_batch: int,
    crop_seconds: float,
    workers: int,
    settings: Sequence[str] = (),
) -> Any:
    """Return conf/<model>.yaml, of which only what both sides must have alike is changed."""
    from speakerlab.config.schema import load_config

    values = {
        "data.dir": folder,
        "data.train": f"[{source}]",
        "data.valid_speakers": 0,
        "data.crop_seconds": crop_seconds,
        "augment.speed_classes": "on",
        "augment.room_prob": data.PROB,
        "augment.noise_prob": data.PROB,
        "training.global_batch": micro_batch,
        "training.bn_batch": "null",
        "training.num_epochs": 10000,  # never done
        "runtime.device": torch.device(device).type,
        "runtime.micro_batch": micro_batch,
        "runtime.num_workers": workers,
        "runtime.precision": precision,
    }
    overrides = [f"{key}={value}" for key, value in values.items()]
    return load_config([ROOT / "conf" / f"{model}.yaml"], [*overrides, *settings])


class Peer(Side):
    """A training as 3D-Speaker's train.py sets it up from its recipe's YAML."""

    def __init__(self, device: str, **alike: Any) -> None:
        data.replace_torchaudio()
        if not torch.cuda.is_available():
            torch.Tensor.cuda = lambda self, *_args, **_more: self
        self.train = import_peer("speakerlab.bin.train").train
        build = import_peer("speakerlab.utils.builder").build
        config = self.config = self._config(**alike)
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
        its_config = import_peer("speakerlab.utils.config")
        recipe = Path(its_config.__file__).parents[2] / RECIPES[model]
        arguments = [f"--{key}={value}" for key, value in values.items()]
        return its_config.build_config(str(recipe), arguments)

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
    for model in options.model:
        side_options = {
            "model": model,
            "device": options.device,
            "folder": options.folder,
            "micro_batch": options.micro_batch,
            "workers": options.workers,
            "crop_seconds": options.crop_seconds,
        }
        peer, threads = None, options.threads
        if options.peers:
            root = options.peers["3dspeaker"]
            peer = Process(
                "end_to_end", "3dspeaker", root, threads=threads, **side_options
            )
        for precision in options.precision:
            ending = [] if precision == "bf16" else [precision]
            name = ".".join(["end_to_end", model, *ending, *options.set])
            if wants(options, name) or wants(options, f"{name}.data_wait"):
                our_options = {
                    **side_options,
                    "source": options.source,
                    "precision": precision,
                    "settings": options.set,
                }
                ours = Process("end_to_end", "ours", threads=threads, **our_options)
                yield from compare_with(name, ours, peer, MODELS[model], options)
                ours.close()
        if peer is not None:
            peer.close()


def compare_with(
    name: str,
    ours: Process,
    peer: Process | None,
    least: int,
    options: argparse.Namespace,
) -> Iterator[Any]:
    """Yield the rows of two trainings, which must be of one size, or of ours."""
    from rows import Row

    sides = [ours] if peer is None else [ours, peer]
    facts = [side.ask("facts") for side in sides]
    if facts[0] != facts[-1]:
        raise SystemExit(f"{name}: the trainings differ: {facts}; nothing was timed")
    runs = [run_of(side) for side in sides]
    amount = facts[0]["crops"]
    turns = take_turns(runs, amount=amount, seconds=options.seconds, least_steps=least)
    yield report(name, turns, **peaks_of(sides))
    share = ours.ask("data_wait")
    row = Row(name=f"{name}.data_wait", ours=share, unit="share of the time")
    say(row.line())
    yield row


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
