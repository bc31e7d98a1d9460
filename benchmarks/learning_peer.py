"""3D-Speaker's CAM++ recipe, trained on a CPU in the given minutes: the peer's side of learning.py.

It runs the main functions of its bin/train.py, bin/extract.py and bin/compute_score_metrics.py with
egs/3dspeaker/sv-cam++: data set, augmentation, model, loop, loss, optimizer, schedulers and
hyper-parameters are its own.

Replaced, besides the functions of torchaudio that data.py replaces: nccl by gloo, with one rank;
`cuda` and `cuda.set_device`, which do nothing; its four GPUs with 64 crops each by as many batches,
one after the other, so that BatchNorm still sees 64 crops and an update 256 (`Turns`).

Set: the epochs that fit into the minutes, the last one being finished, as a short epoch of a few
batches predicts; warm-up and margin, which its configuration counts in epochs, in proportion; one
loader worker (of 16); only the last epoch is saved. Its list has a row for each 3 s of a recording,
as its prepare_data_csv.py writes.
"""

import math
import os
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import data
import torch
import torch.distributed as dist
import yaml
from end_to_end import RECIPES, Batches
from sides import die_with_parent, import_peer, peer_tree

CROPS_OF_A_GPU = 64  # 256 on the four of its run.sh
PROBED = 3  # batches
SCHEDULED = {
    "lr_scheduler": ("warmup_epoch",),
    "margin_scheduler": ("increase_start_epoch", "fix_epoch"),
}


class Turns(torch.optim.SGD):
    """SGD that updates with the mean gradient of `num_turns` batches, as that many ranks do."""

    def __init__(self, params: Any, *, num_turns: int, **sgd_options: Any) -> None:
        super().__init__(params, **sgd_options)
        self.num_turns, self.num_taken = num_turns, 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.num_taken % self.num_turns == 0:
            super().zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:
        """Count a batch; update after the last one of an update."""
        self.num_taken += 1
        if self.num_taken % self.num_turns == 0:
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.grad /= self.num_turns
            super().step()


def use_cpu() -> None:
    """Have a script for GPUs train on the CPU, where its rank communicates by gloo."""
    start = dist.init_process_group
    store = dist.HashStore()
    dist.init_process_group = lambda **_asked: start(
        backend="gloo", store=store, rank=0, world_size=1
    )
    torch.cuda.set_device = lambda _index: None
    data.replace_cuda()


class Peer:
    """One training; `probe` and `run` are called in processes of their own."""

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        """Prepare a training on our data directories in `folder`; `settings` replace its values."""
        die_with_parent()
        data.replace_torchaudio()
        use_cpu()
        self.script = import_peer("speakerlab.bin.train")
        self.folder = Path(folder)
        recipe = peer_tree() / RECIPES["campplus"]
        self.config = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        if unknown := settings.keys() - self.config.keys():
            raise SystemExit(f"--peer-set: {', '.join(unknown)}: not in {recipe}")
        self.config |= {
            "data": str(data.write_list(self.folder / "train", self.config["wav_len"])),
            "noise": str(self.folder / "noise/wav.scp"),
            "reverb": str(self.folder / "rirs/wav.scp"),
            "num_workers": 1,
            **settings,
        }

    def _train(self, exp: str, *, seed: int, epochs: int) -> dict[str, Any]:
        """Run its train.py; return the seconds it took and the crops it used."""
        scale = epochs / self.config["num_epoch"]
        for name, keys in SCHEDULED.items():
            for key in keys:
                self.config[name]["args"][key] *= scale
        num_ranks = max(1, self.config["batch_size"] // CROPS_OF_A_GPU)
        self.config["optimizer"]["obj"] = "learning_peer.Turns"
        self.config["optimizer"]["args"]["num_turns"] = num_ranks
        self.config |= {"num_epoch": epochs, "exp_dir": exp}
        Path(exp).mkdir(parents=True, exist_ok=True)
        given = Path(exp, "given.yaml")
        given.write_text(yaml.dump(self.config), encoding="utf-8")
        its_epoch, used = self.script.train, 0

        def epoch(loader: Any, *parts: Any) -> Any:
            nonlocal used
            if not len(loader):
                raise SystemExit(
                    f"{self.config['data']}: less than a batch; use a larger corpus"
                )
            used += len(loader) * loader.batch_size
            return its_epoch(loader, *parts)

        self.script.train = epoch
        began = time.perf_counter()
        arguments = [
            "--config",
            str(given),
            "--gpu",
            *"0" * num_ranks,
            "--seed",
            str(seed),
        ]
        self._call(
            self.script,
            *arguments,
            "--save_epoch_freq",
            str(epochs),
            world_size=num_ranks,
        )
        return {"seconds": time.perf_counter() - began, "crops": used}

    def _call(self, script: Any, *arguments: str, world_size: int = 1) -> None:
        os.environ |= {"LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
        sys.argv = ["", *arguments]
        script.main()

    def probe(self, exp: str, minutes: float) -> int:
        """Return how many epochs fit into the minutes, the last one being finished."""
        its_epoch, seconds = self.script.train, math.inf

        def few(loader: Any, *parts: Any) -> Any:
            nonlocal seconds
            count = min(PROBED, len(loader))
            began = time.perf_counter()
            result = its_epoch(Batches(islice(loader, count), count), *parts)
            seconds = (time.perf_counter() - began) / count * len(loader)
            return result

        self.script.train = few
        self._train(exp, seed=0, epochs=1)
        return math.ceil(60 * minutes / seconds)

    def run(
        self, exp: str, seed: int, epochs: int, trials: list[str]
    ) -> dict[str, Any]:
        """Train, extract and score by its three scripts; return minutes and crops."""
        training = self._train(exp, seed=seed, epochs=epochs)
        scp, emb = str(self.folder / "test/wav.scp"), f"{exp}/embeddings"
        self._call(
            import_peer("speakerlab.bin.extract"), "--exp_dir", exp, "--data", scp
        )
        scoring = import_peer("speakerlab.bin.compute_score_metrics")
        arguments = [
            "--enrol_data",
            emb,
            "--test_data",
            emb,
            "--scores_dir",
            f"{exp}/scores",
        ]
        self._call(scoring, *arguments, "--trials", *trials)
        return {"minutes": training["seconds"] / 60, "crops": training["crops"]}


SIDES = {"3dspeaker": Peer}
