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

SMALL = {
    "head_channels": 4,
    "init_channels": 16,
    "growth_rate": 4,
    "blocks": (1, 1, 1),
}
# Module, shape of one row, rows of each rank.
CASES = {
    "3-D": (lambda: nn.Sequential(nn.BatchNorm1d(5)), (5, 7), (4, 4)),
    "4-D": (lambda: nn.Sequential(nn.BatchNorm2d(3, momentum=0.3)), (3, 4, 5), (4, 4)),
    "plain": (lambda: nn.Sequential(nn.BatchNorm1d(6, affine=False)), (6,), (4, 4)),
    "mean of all": (
        lambda: nn.Sequential(nn.BatchNorm1d(6, momentum=None)),
        (6,),
        (4, 4),
    ),
    # A rank's own rows alone would have no variance.
    "a row each": (lambda: nn.Sequential(nn.BatchNorm1d(6)), (6,), (1, 1)),
    "uneven": (lambda: nn.Sequential(nn.BatchNorm1d(5)), (5, 7), (3, 5)),
    "CAM++": (lambda: CAMPPlus(embed_dim=8, **SMALL), (40, 80), (4, 4)),
    "bf16": (lambda: nn.Sequential(nn.BatchNorm2d(3)), (3, 4, 5), (4, 4)),
}


def run_case(name, rank=None, group=None):
    """Return output, gradients and state after two passes over a rank's rows, or all rows."""
    make, shape, rows = CASES[name]
    torch.manual_seed(0)
    # of the rows
    dtype = torch.bfloat16 if name == "bf16" else torch.float64
    dtype_of_module = torch.promote_types(dtype, torch.float32)
    module = make().to(dtype_of_module).train()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    if group is not None:
        join_batchnorms(module, group)
    num_rows = sum(rows)
    mine = slice(None)
    if rank is not None:
        first = rank * rows[0]
        mine = slice(first, first + rows[rank])
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        x = 3 + torch.randn(
            num_rows,
            *shape,
            dtype=torch.float64,
            generator=generator,
        )
        x = x[mine].to(dtype, copy=True)
        x.requires_grad_()
        module.zero_grad()
        y = module(x)
        weights = torch.randn(
            num_rows,
            *y.shape[1:],
            dtype=torch.float64,
            generator=generator,
        )
        loss = (y * weights[mine]).sum()
        loss.backward()
    gradients = {}
    for parameter_name, parameter in module.named_parameters():
        gradients[parameter_name] = parameter.grad
    return {
        "y": y.detach(),
        "x": x.grad,
        "of": gradients,
        "state": module.state_dict(),
    }


def work(rank, port, path):
    """Run every case as one of two ranks, and save the results."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    ranks = start_ranks(timeout_minutes=1)
    group = ranks.neighbours(2)
    result_of_case = {}
    for name in CASES:
        result_of_case[name] = run_case(name, rank, group)
    module = nn.Sequential(nn.BatchNorm1d(2))
    join_batchnorms(module, group)
    module.eval()
    # alone: validation must not wait for the others
    if rank == 0:
        module(torch.randn(4, 2, 5))
    alone = ranks.neighbours(1)
    gathered = alone.gather(torch.tensor([rank]))
    result_of_case["alone"] = gathered.tolist()
    torch.save(result_of_case, f"{path}/{rank}.pt")
    ranks.barrier("saved")
    process.leave(0)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    workers = []
    for rank in (0, 1):
        arguments = (rank, port, folder)
        workers.append(context.Process(target=work, args=arguments))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    for worker in workers:
        assert worker.exitcode == 0
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def close(a, b):
    tolerances = {torch.bfloat16: 2e-2, torch.float32: 1e-2}
    tolerance = tolerances.get(a.dtype, 1e-10)
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process_with_all_rows(name, results):
    expected = run_case(name)
    first, second = (ranks[name] for ranks in results)
    for key in ("y", "x"):
        both = torch.cat([first[key], second[key]])
        close(both, expected[key])
    for parameter, gradient in expected["of"].items():
        both = first["of"][parameter] + second["of"][parameter]
        close(both, gradient)
    for part in (first, second):
        assert list(part["state"]) == list(expected["state"])
        for entry, value in expected["state"].items():
            close(part["state"][entry], value)


def test_a_group_is_of_neighbours(results):
    first, second = results
    assert first["alone"] == [0]
    assert second["alone"] == [1]


def ids_of_tensors(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: id(tensor) for name, tensor in tensors}


def test_joined_norms_keep_parameters_buffers_momentum_and_mode():
    model = CAMPPlus(embed_dim=8, **SMALL)
    model.head.bn1.momentum = 0.05
    model.head.eval()
    before = ids_of_tensors(model)
    join_batchnorms(model, start_ranks(timeout_minutes=1))
    assert ids_of_tensors(model) == before
    norms = []
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            norms.append(module)
    assert norms
    for norm in norms:
        assert type(norm) is JoinedBatchNorm
    assert model.head.bn1.momentum == 0.05
    assert not model.head.bn1.training
    assert model.xvector.tdnn.nonlinear.batchnorm.training
