"""Results of split heads on one or several ranks, for test_sharded.py.

shard_ranks.py OUT RANK PORT PORT: run `everything` as rank RANK of 3 and, for ranks 0 and 1, as one
of 2. The results of rank R of W ranks are written to OUT/W_R.pt.

Letters: B rows of a rank, C classes, D embedding, G rows of all ranks.
"""

import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from speakerlab.losses import HEADS
from speakerlab.losses.head import Head
from speakerlab.losses.sharded import ShardedHead
from speakerlab.training.distributed import Ranks, start_ranks

IN_DIM = 6
EMBED_DIM = 5
NUM_ROWS = 12
SOFTMAX = "softmax"
AM = "am_softmax"
AAM = "aam_softmax"
MARGINS = (0.0, 0.2, 0.5)
# Name, classes, margin, arguments of the head; over 3 ranks 5 classes are 2, 2, 1 and 4: 2, 2, 0.
CASES: list[tuple[str, int, float, dict]] = []
for num_classes in (1, 4, 5, 13):
    CASES.append((SOFTMAX, num_classes, 0.0, {}))
for num_classes in (4, 5):
    for margin in MARGINS:
        CASES.append((AM, num_classes, margin, {}))
for num_classes in (4, 5, 13):
    for margin in MARGINS:
        CASES.append((AAM, num_classes, margin, {}))
CASES += [
    (AAM, 13, 0.5, {"easy_margin": True}),
    # exp underflows unless it is taken relative to the largest.
    (AAM, 13, 0.5, {"scale": 3000.0}),
    # More than a block of rows.
    (AAM, 20_000, 0.2, {}),
]
BEGINNINGS = [  # name, classes
    (SOFTMAX, 4),
    (SOFTMAX, 5),
    (SOFTMAX, 20_000),
    (AAM, 4),
    (AAM, 5),
    (AAM, 20_000),
]
KEYS = (0, 1, 2**63 + 5)
SHARE = 0.3


class Net(nn.Module):
    """A backbone and a head in float64, the head outside DDP where it is split."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.backbone = nn.Sequential(
            nn.Linear(IN_DIM, 8),
            nn.Tanh(),
            nn.Linear(8, EMBED_DIM),
        )
        self.backbone.double()
        self.head = head
        if head.is_split:
            # Each rank has its own rows of the head, which DDP would average.
            head_names = [f"head.{name}" for name in head.state_dict()]
            self._ddp_params_and_buffers_to_ignore = head_names

    def forward(
        self, x_BI: Tensor, label_B: Tensor, margin: float
    ) -> tuple[Tensor, Tensor]:
        emb_BD = self.backbone(x_BI)
        loss, decided = self.head(emb_BD, label_B, margin)
        return loss, self.head.count_correct(decided, label_B)


def make_head(
    ranks: Ranks | None,
    name: str,
    num_classes: int,
    share: float = 1.0,
    **args,
) -> Head:
    """Build a head in fp32 from a fixed seed, split over `ranks` or whole (None)."""
    make = partial(
        HEADS[name],
        embed_dim=EMBED_DIM,
        num_classes=num_classes,
        **args,
    )
    torch.manual_seed(3)
    if ranks is None:
        return make()
    return ShardedHead(make, shards=ranks, sampled_share=share)


def batch_of(
    ranks: Ranks | None,
    num_classes: int,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return this rank's part of 12 rows and their labels."""
    generator = torch.Generator().manual_seed(seed)
    x_GI = torch.randn(
        NUM_ROWS,
        IN_DIM,
        dtype=torch.float64,
        generator=generator,
    )
    label_G = torch.randint(num_classes, (NUM_ROWS,), generator=generator)
    if ranks is None:
        return x_GI, label_G
    x_of_ranks = x_GI.chunk(ranks.world_size)
    label_of_ranks = label_G.chunk(ranks.world_size)
    return x_of_ranks[ranks.rank], label_of_ranks[ranks.rank]


def wrapped(ranks: Ranks | None, net: Net) -> nn.Module:
    return net if ranks is None else ranks.wrap(net)


def total(ranks: Ranks | None, value: Tensor) -> Tensor:
    """Return the sum over the ranks."""
    return value if ranks is None else ranks.sum(value)


def one_pass(
    ranks: Ranks | None,
    head: Head,
    num_classes: int,
    margin: float,
) -> dict[str, Tensor]:
    """Return the loss, the number of correct rows of all ranks, and the gradients."""
    net = Net(head.double())
    module = wrapped(ranks, net)
    x_BI, label_B = batch_of(ranks, num_classes)
    loss, num_correct = module(x_BI, label_B, margin)
    loss.backward()
    results = {
        "loss": loss.detach(),
        "num_correct": total(ranks, num_correct),
    }
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            results[name] = parameter.grad
    return results


def square_norm(module: nn.Module) -> Tensor:
    """Return the sum of squares of the gradients."""
    squares = [parameter.grad.square().sum() for parameter in module.parameters()]
    return torch.stack(squares).sum()


def clip(ranks: Ranks | None, net: Net, max_norm: float) -> Tensor:
    """Clip the gradients by their norm over the backbone and all rows; return the norm."""
    # The backbone has the same gradients on all ranks, the head's rows are of one rank each.
    square = total(ranks, square_norm(net.head))
    square = square + square_norm(net.backbone)
    norm = square.sqrt()
    scale = (max_norm / norm).clamp(max=1)
    for parameter in net.parameters():
        parameter.grad *= scale
    return norm


def ten_steps(ranks: Ranks | None) -> dict[str, Tensor]:
    """Return the parameters and norms of ten clipped steps of two micro-batches."""
    net = Net(make_head(ranks, AAM, 5).double())
    module = wrapped(ranks, net)
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=0.05,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-3,
    )
    norms = []
    for step in range(10):
        for micro_batch in range(2):
            # DDP averages the gradients once a step, in the last micro-batch.
            if hasattr(module, "require_backward_grad_sync"):
                module.require_backward_grad_sync = micro_batch == 1
            seed = 2 * step + micro_batch
            x_BI, label_B = batch_of(ranks, 5, seed=seed)
            loss, _ = module(x_BI, label_B, 0.2)
            (loss / 2).backward()
        norms.append(clip(ranks, net, 3.0))
        optimizer.step()
        optimizer.zero_grad()
    results = {"norms": torch.stack(norms).detach()}
    for name, parameter in net.named_parameters():
        results[name] = parameter.detach()
    return results


def poisoned(ranks: Ranks | None) -> dict[str, Tensor]:
    """Return norm and loss of a pass in which the last rank's last row is NaN."""
    net = Net(make_head(ranks, AAM, 4).double())
    x_BI, label_B = batch_of(ranks, 4)
    is_last_rank = ranks is None or ranks.rank == ranks.world_size - 1
    if is_last_rank:
        x_BI[-1] = torch.nan
    module = wrapped(ranks, net)
    loss, num_correct = module(x_BI, label_B, 0.2)
    loss.backward()
    return {
        "norm": clip(ranks, net, 3.0),
        "loss": loss.detach(),
        "num_correct": num_correct,
    }


def sampled(ranks: Ranks | None, key: int) -> dict[str, Tensor]:
    """Return the results of a pass over the classes drawn by a key out of 400."""
    head = make_head(ranks, AAM, 400, share=SHARE)
    head.begin_step(key)
    return one_pass(ranks, head, 400, 0.2)


def equal_classes(ranks: Ranks | None) -> dict[str, Tensor]:
    """Return the number of correct rows of 12 where all 4 classes are equally near."""
    head = make_head(ranks, AAM, 4)
    nn.init.ones_(head.weight_CD)
    _, label_B = batch_of(ranks, 4)
    emb_BD = torch.ones(len(label_B), EMBED_DIM)
    _, decided = head(emb_BD, label_B, 0.2)
    num_correct = head.count_correct(decided, label_B)
    return {"num_correct": total(ranks, num_correct)}


def beginning(
    ranks: Ranks | None, name: str, num_classes: int
) -> dict[str, dict[str, Tensor]]:
    """Return a new head's rows, the draw that follows, and the rows of all ranks."""
    head = make_head(ranks, name, num_classes)
    rows = dict(head.state_dict())
    rows["next"] = torch.rand(3)
    return {"own": rows, "all": head.gather_state()}


def everything(ranks: Ranks) -> dict[str, object]:
    cases = []
    for name, num_classes, margin, args in CASES:
        head = make_head(ranks, name, num_classes, **args)
        cases.append(one_pass(ranks, head, num_classes, margin))
    return {
        "cases": cases,
        "steps": ten_steps(ranks),
        "poisoned": poisoned(ranks),
        "equal": equal_classes(ranks),
        "sampled": [sampled(ranks, key) for key in KEYS],
        "beginning": [beginning(ranks, *case) for case in BEGINNINGS],
    }


def main() -> None:
    out, rank, *ports = sys.argv[1:]
    torch.set_num_threads(1)
    for world_size, port in zip((3, 2), ports):
        if int(rank) < world_size:
            os.environ["RANK"] = rank
            os.environ["LOCAL_RANK"] = rank
            os.environ["WORLD_SIZE"] = str(world_size)
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            os.environ["MASTER_PORT"] = port
            ranks = start_ranks(timeout_minutes=1)
            path = Path(out) / f"{world_size}_{rank}.pt"
            torch.save(everything(ranks), path)
            ranks.barrier("saved")
            dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
