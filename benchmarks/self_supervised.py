"""Steps of training without labels, beside 3D-Speaker's RDINO and SDPN.

    python benchmarks/self_supervised.py --peer DIR --json FILE

In: the same number of utterances, views and frames on both sides, from memory. Out: a row for each
method, in utterances a second; `...peer_bf16` runs the peer's loop under autocast and without its
anomaly detection, which its recipe leaves on.

Ours is a step as `speakerlab train` takes it with conf/ssl/<method>.yaml, from waves: features, two
networks, the loss, the gradient's check, the update and the teacher's. The peer is its own
`train_one_epoch` with the sizes of its YAML, from features. Both train 3D-Speaker's ECAPA-TDNN with
1024 channels and an embedding of 512. Before anything is timed, both must learn as many values.
"""

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import data
import torch
from sides import (
    ROOT,
    Side,
    add_seconds,
    close_sides,
    import_peer,
    peaks_of,
    peer_tree,
    report,
    require_same_facts,
    run_case,
    run_of,
    start_sides,
    take_turns,
    timed,
    wants,
)

PEERS = ("3dspeaker",)
QUICK = ("--seconds=3", "--methods=sdpn")
# Method -> the peer's name, long views.
RECIPES = {"dino": ("rdino", 2), "sdpn": ("sdpn", 1)}
FRAMES = 398  # of a long view, 4 s
# Row -> whether the peer is in bf16, too.
ROWS = {"bf16": False, "bf16.peer_bf16": True}


class Ours(Side):
    """A training as `speakerlab train` builds it, whose batches are always the same one."""

    def __init__(self, method: str, device: str, micro_batch: int, folder: str) -> None:
        from speakerlab.bench.training import open_training
        from speakerlab.config.schema import load_config
        from speakerlab.experiments.hardware import start_rank

        files = [
            ROOT / "conf" / "ecapa_tdnn_1024.yaml",
            ROOT / "conf" / "ssl" / f"{method}.yaml",
        ]
        values = {
            "model.args.embed_dim": 512,
            "runtime.device": torch.device(device).type,
            "runtime.precision": "bf16",
            "runtime.micro_batch": micro_batch,
            "training.global_batch": micro_batch,
            "augment.room_prob": 0,
            "augment.noise_prob": 0,
        }
        config = load_config(files, [f"{key}={value}" for key, value in values.items()])
        exp = Path(tempfile.mkdtemp(prefix="exp", dir=folder))
        self.opened = open_training(
            config, start_rank(config), exp_dir=exp, has_data=False
        )
        self.trainer, self.device = self.opened.__enter__().trainer, device
        self.trainer.open()
        batch = next(self.trainer.inputs.batches)
        self.trainer.inputs.close()
        self.trainer.inputs.batches = itertools.repeat(batch)

    def facts(self) -> int:
        return sum(p.numel() for p in self.trainer.task.parameters() if p.requires_grad)

    def run(self, steps: int, is_bf16: bool) -> float:
        """Return the seconds of so many steps; is_bf16: of the peer."""
        return timed(self.trainer.take_step, self.device, steps=steps)


class Peer(Side):
    """A training as 3D-Speaker's train_rdino.py or train_sdpn.py sets it up on one process."""

    def __init__(self, method: str, device: str, micro_batch: int, folder: str) -> None:
        name, num_long = RECIPES[method]
        if device == "cpu":
            data.replace_cuda()
            torch.cuda.synchronize = lambda *_args: None
        self.module, self.device = import_peer(f"speakerlab.bin.train_{name}"), device
        build = import_peer("speakerlab.utils.builder").build
        utils = import_peer("speakerlab.utils.utils_rdino")
        utils.MetricLogger.synchronize_between_processes = lambda self: (
            None
        )  # once an epoch
        recipe = peer_tree() / f"egs/voxceleb/sv-{name}/conf/{name}.yaml"
        overrides = [f"--batch_size_per_gpu={micro_batch}", f"--max_frames={FRAMES}"]
        build_config = import_peer("speakerlab.utils.config").build_config
        self.config = config = build_config(str(recipe), overrides)
        store = Path(tempfile.mkdtemp(dir=folder), "store")
        backend = "gloo" if device == "cpu" else "nccl"
        torch.distributed.init_process_group(
            backend, f"file://{store}", rank=0, world_size=1
        )
        student = build("student_model", config).to(device)
        teacher = build("teacher_model", config).to(device)
        teacher.load_state_dict(student.state_dict())
        teacher.requires_grad_(False)
        self.optimizer = torch.optim.SGD(
            utils.get_params_groups(student), lr=0, momentum=0.9
        )
        self.learned = list(student.parameters())
        if method == "dino":
            losses = [build("dino_loss", config), build("regularized_loss", config)]
        else:
            losses = [build("sdpn_loss", config), build("keleo_loss", config)]
            num, bound = config.num_proto, config.output_dim**-0.5
            prototypes = torch.empty(num, config.output_dim, device=device)
            prototypes.uniform_(-bound, bound).requires_grad_()
            labels = utils.one_hot(torch.arange(num), num).to(device)
            self.optimizer.add_param_group({"params": [prototypes], "weight_decay": 0})
            self.learned.append(prototypes)
            losses += [prototypes, labels]
        self.parts = student, teacher, *(part.to(device) for part in losses)
        # Energies: its backbone takes their logarithm.
        self.feats = torch.rand(micro_batch, num_long + 2, 80, FRAMES)

    def facts(self) -> int:
        return sum(p.numel() for p in self.learned if p.requires_grad)

    def run(self, steps: int, is_bf16: bool) -> float:
        """Return the seconds that its training loop takes for so many steps."""
        autocast = torch.autocast(self.device, torch.bfloat16, enabled=is_bf16)
        detect = torch.autograd.set_detect_anomaly
        schedules = [[value] * steps for value in (1e-4, 5e-5, 0.996)]

        def work() -> None:
            batches = [self.feats] * steps
            self.module.train_one_epoch(
                *self.parts, batches, self.optimizer, *schedules, 0, self.config
            )

        torch.autograd.set_detect_anomaly = nullcontext if is_bf16 else detect
        with autocast:
            seconds = timed(work, self.device)
        torch.autograd.set_detect_anomaly = detect
        return seconds


SIDES = {"ours": Ours, "3dspeaker": Peer}


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the rows of every method."""
    for method in options.methods:
        wanted_rows = {}
        for ending, is_bf16 in ROWS.items():
            name = f"self_supervised.{method}.{ending}"
            # Without a peer, there is one row: ours does not depend on the peer's format.
            if wants(options, name) and (options.peers or not is_bf16):
                wanted_rows[name] = is_bf16
        if not wanted_rows:
            continue
        sides = start_sides(
            "self_supervised",
            options.threads,
            options.peers,
            method=method,
            device=options.device,
            micro_batch=options.micro_batch,
            folder=options.folder,
        )
        require_same_facts(method, sides)
        for name, is_bf16 in wanted_rows.items():
            runs = [run_of(side, is_bf16=is_bf16) for side in sides]
            amount = options.micro_batch
            turns = take_turns(runs, amount=amount, seconds=options.seconds)
            yield report(name, turns, **peaks_of(sides))
        close_sides(sides)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--methods", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    add("--micro-batch", type=int, default=8, help="utterances of a step")
    add_seconds(parser, 60.0)


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
