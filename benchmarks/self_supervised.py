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

import torch
from sides import ROOT, Process, import_peer, peak_mib, report, run_case, take_turns, timed, wants

PEERS = ("3dspeaker",)
QUICK = ("--seconds=3", "--methods=sdpn")
RECIPES = {"dino": ("rdino", 2), "sdpn": ("sdpn", 1)}  # method -> the peer's name, long views
FRAMES = 398  # of a long view, 4 s
ROWS = {"bf16": False, "bf16.peer_bf16": True}  # row -> whether the peer is in bf16, too


class Ours:
    """A training as `speakerlab train` builds it, whose batches are always the same one."""

    def __init__(self, method: str, device: str, micro_batch: int, folder: str) -> None:
        from speakerlab.bench.training import open_training
        from speakerlab.config.schema import load_config
        from speakerlab.experiments.setup import start_rank

        files = [ROOT / "conf" / "ecapa_tdnn_1024.yaml", ROOT / "conf" / "ssl" / f"{method}.yaml"]
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
        self.opened = open_training(config, start_rank(config), exp_dir=exp, has_data=False)
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

    def peak(self) -> float:
        return peak_mib(self.device)


class Peer:
    """A training as 3D-Speaker's train_rdino.py or train_sdpn.py sets it up on one process."""

    def __init__(self, method: str, device: str, micro_batch: int, folder: str) -> None:
        name, num_long = RECIPES[method]
        if device == "cpu":
            torch.Tensor.cuda = lambda self, *_args, **_more: self
            torch.cuda.synchronize = lambda *_args: None
        self.module, self.device = import_peer(f"speakerlab.bin.train_{name}"), device
        build = import_peer("speakerlab.utils.builder").build
        utils = import_peer("speakerlab.utils.utils_rdino")
        utils.MetricLogger.synchronize_between_processes = lambda self: None  # once an epoch
        its_config = import_peer("speakerlab.utils.config")
        recipe = Path(its_config.__file__).parents[2] / f"egs/voxceleb/sv-{name}/conf/{name}.yaml"
        words = [f"--batch_size_per_gpu={micro_batch}", f"--max_frames={FRAMES}"]
        self.config = config = its_config.build_config(str(recipe), words)
        store = Path(tempfile.mkdtemp(dir=folder), "store")
        backend = "gloo" if device == "cpu" else "nccl"
        torch.distributed.init_process_group(backend, f"file://{store}", rank=0, world_size=1)
        student = build("student_model", config).to(device)
        teacher = build("teacher_model", config).to(device)
        teacher.load_state_dict(student.state_dict())
        teacher.requires_grad_(False)
        self.optimizer = torch.optim.SGD(utils.get_params_groups(student), lr=0, momentum=0.9)
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

    def peak(self) -> float:
        return peak_mib(self.device)


SIDES = {"ours": Ours, "3dspeaker": Peer}


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the rows of every method."""
    for method in options.methods:
        names = {f"self_supervised.{method}.{end}": half for end, half in ROWS.items()}
        wanted = {name: half for name, half in names.items() if wants(options, name)}
        if not options.peers:
            wanted = {name: half for name, half in wanted.items() if not half}
        if not wanted:
            continue
        words = {key: getattr(options, key) for key in ("device", "micro_batch", "folder")}
        words["method"] = method
        sides = [Process("self_supervised", "ours", threads=options.threads, **words)]
        if options.peers:
            root = options.peers["3dspeaker"]
            one = Process("self_supervised", "3dspeaker", root, threads=options.threads, **words)
            sides.append(one)
        facts = [side.ask("facts") for side in sides]
        if facts[0] != facts[-1]:
            raise SystemExit(f"{method}: learned values differ: {facts}; nothing was timed")
        for name, half in wanted.items():
            runs = [lambda n, s=side, h=half: s.ask("run", steps=n, is_bf16=h) for side in sides]
            turns = take_turns(runs, amount=options.micro_batch, seconds=options.seconds)
            peaks = [side.ask("peak") for side in sides]
            yield report(name, turns, **dict(zip(("peak_mib", "peer_peak_mib"), peaks)))
        for side in sides:
            side.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--micro-batch", type=int, default=8, help="utterances of a step")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each side of each row")


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
