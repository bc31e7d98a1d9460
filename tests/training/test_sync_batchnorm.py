"""BatchNorm over two ranks equals BatchNorm of one process with all rows."""

import os
import socket
from multiprocessing import get_context

import pytest
import torch
from torch import nn

from speakerlab.core import process
from speakerlab.models.campplus import CAMPPlus
from speakerlab.training.distributed import start_ranks
from speakerlab.training.sync_batchnorm import JoinedBatchNorm, join_batchnorms

SMALL = {"head_channels": 4, "init_channels": 16, "growth_rate": 4, "blocks": (1, 1, 1)}
# Module, shape of one row, rows of each rank.
CASES = {
    "3-D": (lambda: nn.Sequential(nn.BatchNorm1d(5)), (5, 7), (4, 4)),
    "4-D": (lambda: nn.Sequential(nn.BatchNorm2d(3, momentum=0.3)), (3, 4, 5), (4, 4)),
    "plain": (lambda: nn.Sequential(nn.BatchNorm1d(6, affine=False)), (6,), (4, 4)),
    "mean of all": (lambda: nn.Sequential(nn.BatchNorm1d(6, momentum=None)), (6,), (4, 4)),
    "uneven": (lambda: nn.Sequential(nn.BatchNorm1d(5)), (5, 7), (3, 5)),
    "CAM++": (lambda: CAMPPlus(embed_dim=8, **SMALL), (40, 80), (4, 4)),
    "bf16": (lambda: nn.Sequential(nn.BatchNorm2d(3)), (3, 4, 5), (4, 4)),
}


def run_case(name, rank=None, group=None):
    """Return output, gradients and state after two passes over a rank's rows, or all rows."""
    make, shape, rows = CASES[name]
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name == "bf16" else torch.float64  # of the rows
    module = make().to(torch.promote_types(dtype, torch.float32)).train()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    if group is not None:
        join_batchnorms(module, group)
    mine = slice(None) if rank is None else slice(rank * rows[0], rank * rows[0] + rows[rank])
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        x = 3 + torch.randn(sum(rows), *shape, dtype=torch.float64, generator=generator)
        x = x[mine].to(dtype, copy=True).requires_grad_()
        module.zero_grad()
        y = module(x)
        weights = torch.randn(sum(rows), *y.shape[1:], dtype=torch.float64, generator=generator)
        (y * weights[mine]).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "of": gradients, "state": module.state_dict()}


def work(rank, port, path):
    """Run every case as one of two ranks, and save the results."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", **address)
    torch.set_num_threads(1)
    ranks = start_ranks(timeout_minutes=1)
    group = ranks.neighbours(2)
    found = {name: run_case(name, rank, group) for name in CASES}
    module = nn.Sequential(nn.BatchNorm1d(2))
    join_batchnorms(module, group)
    module.eval()
    if rank == 0:  # alone: validation must not wait for the others
        module(torch.randn(4, 2, 5))
    found["alone"] = ranks.neighbours(1).gather(torch.tensor([rank])).tolist()
    torch.save(found, f"{path}/{rank}.pt")
    ranks.barrier("saved")
    process.leave(0)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    workers = [context.Process(target=work, args=(rank, port, folder)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def close(a, b):
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-2}.get(a.dtype, 1e-10)
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process_with_all_rows(name, found):
    expected, parts = run_case(name), [ranks[name] for ranks in found]
    for key in ("y", "x"):
        close(torch.cat([part[key] for part in parts]), expected[key])
    for parameter, gradient in expected["of"].items():
        close(sum(part["of"][parameter] for part in parts), gradient)
    for part in parts:
        assert list(part["state"]) == list(expected["state"])
        for entry, value in expected["state"].items():
            close(part["state"][entry], value)


def test_a_group_is_of_neighbours(found):
    assert [rank["alone"] for rank in found] == [[0], [1]]


def test_joined_norms_keep_parameters_buffers_momentum_and_mode():
    model = CAMPPlus(embed_dim=8, **SMALL)
    model.head.bn1.momentum = 0.05
    model.head.eval()
    before = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    join_batchnorms(model, start_ranks(timeout_minutes=1))
    after = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert after == before
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert norms and all(type(norm) is JoinedBatchNorm for norm in norms)
    assert model.head.bn1.momentum == 0.05
    assert not model.head.bn1.training and model.xvector.tdnn.nonlinear.batchnorm.training
