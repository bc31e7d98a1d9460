"""The CPU code of a dense block against the plain code: values, gradients, statistics, memory.

Letters: B batch, T frames, C channels.
"""

import copy

import pytest
import torch
from test_campplus import TINY
from torch import Tensor, nn

from speakerlab.models import cpu
from speakerlab.models.campplus import CAMPPlus, DenseBlock, DenseLayer
from speakerlab.models.cpu import dense
from speakerlab.training.batch_size import slow_batchnorm


def make_block(kernel_size=3, dilation=2, dtype=torch.float64):
    """Four layers on six channels; no parameter or statistic is the initial one."""
    torch.manual_seed(0)
    block = DenseBlock()
    for i in range(4):
        block[f"tdnnd{i}"] = DenseLayer(
            6 + 4 * i,
            growth_rate=4,
            bottleneck=8,
            kernel_size=kernel_size,
            dilation=dilation,
        )
    for norm in (m for m in block.modules() if isinstance(m, nn.BatchNorm1d)):
        norm.weight.data.uniform_(-1, 2)
        norm.bias.data.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return block.to(dtype)


def run_plain(block: DenseBlock, x_BCT: Tensor) -> Tensor:
    with cpu.plain_code():
        return block(x_BCT)


def run_rows(block: DenseBlock, x_BCT: Tensor) -> Tensor:
    y_BCT = dense.run_block(list(block.values()), x_BCT, segment_frames=100)
    assert y_BCT is not None
    return y_BCT


def takes_plain_code(block: DenseBlock, x_BCT: Tensor) -> bool:
    return dense.run_block(list(block.values()), x_BCT, segment_frames=100) is None


def everything(run, block, x_BCT, steps=2):
    """Outputs, gradients and buffers after some steps, by name."""
    x_BCT = x_BCT.clone().requires_grad_()
    for _ in range(steps):
        y_BCT = run(block, x_BCT)
        (
            y_BCT * torch.linspace(-1, 2, y_BCT.numel(), dtype=y_BCT.dtype).view_as(y_BCT)
        ).sum().backward()
    found = {"output": y_BCT.detach(), "gradient of the input": x_BCT.grad}
    found |= {f"gradient of {name}": p.grad for name, p in block.named_parameters()}
    return found | dict(block.named_buffers())


def require_close(rows, plain, allowed):
    for name, value in plain.items():
        if value is None:
            assert rows[name] is None, name
        else:
            error = (rows[name] - value).abs().max() / value.abs().max().clamp_min(1e-12)
            assert error < allowed, (name, float(error))


def freeze(block: DenseBlock) -> None:
    block["tdnnd1"].linear1.weight.requires_grad_(False)
    block["tdnnd2"].nonlinear1.requires_grad_(False)


CASES = [  # frames, arguments of make_block, change of the block, error allowed
    *((frames, {}, None, 1e-9) for frames in (2, 3, 100, 149, 230)),
    *((frames, {"kernel_size": 5, "dilation": 3}, None, 1e-9) for frames in (2, 40)),
    (40, {"kernel_size": 1, "dilation": 1}, None, 1e-9),
    (50, {}, lambda block: slow_batchnorm(block, 4), 1e-9),  # momentum of accumulated steps
    (50, {}, freeze, 1e-9),
    (50, {"dtype": torch.float32}, freeze, 1e-3),
]


@pytest.mark.parametrize(("frames", "args", "change", "allowed"), CASES)
def test_training_is_the_plain_code(frames, args, change, allowed):
    block = make_block(**args)
    if change is not None:
        change(block)
    x_BCT = torch.randn(3, 6, frames, dtype=args.get("dtype", torch.float64))
    plain = copy.deepcopy(block)
    found = everything(run_rows, block, x_BCT)
    require_close(found, everything(run_plain, plain, x_BCT), allowed)
    assert (found["gradient of tdnnd1.linear1.weight"] is None) == (change is freeze)


def test_statistics_are_measured_again_without_gradient():
    """As when the checkpoints of a run are averaged."""
    block = make_block()
    plain = copy.deepcopy(block)
    x_BCT = torch.randn(3, 6, 50, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(run_rows(block, x_BCT), run_plain(plain, x_BCT))
    for (name, ours), theirs in zip(block.named_buffers(), plain.buffers()):
        torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.parametrize("frames", [1, 2, 100, 149, 230])
def test_inference_is_the_plain_code(frames):
    block = make_block().eval()
    x_BCT = torch.randn(3, 6, frames, dtype=torch.float64)
    before = {name: buffer.clone() for name, buffer in block.named_buffers()}
    with torch.inference_mode():
        torch.testing.assert_close(run_rows(block, x_BCT), run_plain(block, x_BCT))
    assert all(torch.equal(buffer, before[name]) for name, buffer in block.named_buffers())


def test_inference_in_16_bits_is_no_rougher_than_the_plain_code():
    block = make_block(dtype=torch.float32).eval()
    x_BCT = torch.randn(3, 6, 149).bfloat16()
    with torch.inference_mode():
        exact = run_plain(copy.deepcopy(block).double(), x_BCT.double())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, plain = run_rows(block, x_BCT), run_plain(block, x_BCT)
    ours, theirs = (float((y - exact).norm() / exact.norm()) for y in (found, plain))
    assert found.dtype == torch.bfloat16 and ours < 1.1 * theirs


def test_bfloat16_autocast_in_training_is_no_rougher_than_the_plain_code():
    """In the median of nine inputs: in any one, a unit may round to the other side of its ReLU."""
    errors: dict[str, list[list[float]]] = {}
    for seed in range(9):
        block = make_block(dtype=torch.float32)
        plain, exact = copy.deepcopy(block), copy.deepcopy(block).double()
        torch.manual_seed(seed)
        x_BCT = torch.randn(4, 6, 150).bfloat16()
        truth = everything(run_plain, exact, x_BCT.double(), steps=1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = everything(run_rows, block, x_BCT, steps=1)
            expected = everything(run_plain, plain, x_BCT, steps=1)
        assert rows["output"].dtype == expected["output"].dtype == torch.bfloat16
        for name, value in truth.items():
            size = value.double().norm().clamp_min(1e-6)
            off = [
                float((found[name] - value).double().norm() / size) for found in (rows, expected)
            ]
            errors.setdefault(name, []).append(off)
    for name, found in errors.items():
        ours, theirs = torch.tensor(found).median(0).values.tolist()
        assert ours < 1.2 * theirs + 0.01, (name, ours, theirs)


@pytest.mark.parametrize("value", [float("nan"), -float("nan")], ids=["nan", "-nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_reaches_the_gradients(value, dtype):
    """So that the step is skipped. In 16 bits a ReLU's gradient goes by its output's sign."""
    block = make_block(dtype=torch.float32).train()
    with torch.no_grad():
        block["tdnnd1"].linear1.weight[0] = value
    x_BCT = torch.randn(2, 6, 120)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        y_BCT = run_rows(block, x_BCT)
    y_BCT.float().square().mean().backward()
    assert y_BCT.isnan().any()
    layer_before = block["tdnnd0"].parameters()
    assert not sum(parameter.grad.abs().sum() for parameter in layer_before).isfinite()


def test_no_layer_copies_what_it_reads():
    """All that the layers keep of their common input is one store of 22 channels."""
    block = make_block(dtype=torch.float32)
    x_BCT = torch.randn(5, 6, 200)
    rows = 4 * 5 * 200  # bytes of one channel
    saved = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y_BCT = run_rows(block, x_BCT)
    assert y_BCT.untyped_storage().nbytes() == (6 + 4 * 4) * rows
    assert y_BCT.untyped_storage().data_ptr() in saved
    sizes = [storage.nbytes() // rows for storage in saved.values()]
    # Each layer also keeps its rectified input, which is as large as the input.
    assert [sizes.count(6 + 4 * i) for i in range(5)] == [1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda block: nn.SyncBatchNorm.convert_sync_batchnorm(block),
        lambda block: setattr(block["tdnnd0"].nonlinear1[0], "momentum", 0.2),
        lambda block: [setattr(m, "momentum", None) for m in block.modules()],
        lambda block: setattr(block["tdnnd3"].nonlinear2, "batchnorm", nn.InstanceNorm1d(8)),
        lambda block: block["tdnnd1"].eval(),
        lambda block: block.eval(),  # with gradients
        lambda block: block.bfloat16(),
        lambda block: block.to("meta"),
    ],
)
def test_everything_unusual_takes_the_plain_code(change):
    x_BCT = torch.randn(2, 6, 30, dtype=torch.float64)
    block = make_block()
    assert not takes_plain_code(block, x_BCT)
    change(block)
    assert takes_plain_code(block, x_BCT.to(next(block.parameters()).device))


def test_rounding_shapes_up_in_16_bits_changes_no_bit(monkeypatch):
    """Of the products over the 2 x 69 frames that the TDNN layer leaves."""
    torch.manual_seed(0)
    model = CAMPPlus(**TINY).eval()
    feats_BTF = torch.randn(2, 137, model.feat_dim)
    found: list[Tensor] = []
    for columns in (1, 64):
        monkeypatch.setattr(dense, "COLUMN_MULTIPLE", columns)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found.append(model(feats_BTF))
    assert torch.equal(*found)
