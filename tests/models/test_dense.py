"""The CPU code of a dense block against the plain code: values, gradients, statistics, memory.

Letters: B batch, T frames, C channels, K channels of the bottleneck, G channels that come out,
J taps.
"""

import copy
import math

import pytest
import torch
from test_campplus import TINY
from torch import Tensor, nn
from torch.nn import functional as F

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
    for norm in block.modules():
        if not isinstance(norm, nn.BatchNorm1d):
            continue
        norm.weight.data.uniform_(-1, 2)
        norm.bias.data.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return block.to(dtype)


def make_input(batch: int, frames: int, dtype=torch.float64) -> Tensor:
    """x_BCT, the input of a block."""
    return torch.randn(batch, 6, frames, dtype=dtype)


def run_plain(block: DenseBlock, x_BCT: Tensor) -> Tensor:
    with cpu.plain_code():
        return block(x_BCT)


def run_rows(block: DenseBlock, x_BCT: Tensor) -> Tensor:
    layers = list(block.values())
    y_BCT = dense.run_block(layers, x_BCT, segment_frames=100)
    assert y_BCT is not None
    return y_BCT


def takes_plain_code(block: DenseBlock, x_BCT: Tensor) -> bool:
    layers = list(block.values())
    y_BCT = dense.run_block(layers, x_BCT, segment_frames=100)
    return y_BCT is None


def everything(run, block, x_BCT, steps=2):
    """Outputs, gradients and buffers after some steps, by name."""
    x_BCT = x_BCT.clone().requires_grad_()
    for _ in range(steps):
        y_BCT = run(block, x_BCT)
        # A different weight for each value: the sum alone would hide errors that cancel.
        weight = torch.linspace(
            start=-1,
            end=2,
            steps=y_BCT.numel(),
            dtype=y_BCT.dtype,
        )
        weighted_BCT = y_BCT * weight.view_as(y_BCT)
        weighted_BCT.sum().backward()

    values = {
        "output": y_BCT.detach(),
        "gradient of the input": x_BCT.grad,
    }
    for name, parameter in block.named_parameters():
        values[f"gradient of {name}"] = parameter.grad
    return values | dict(block.named_buffers())


def require_close(rows, plain, allowed):
    for name, expected in plain.items():
        if expected is None:
            assert rows[name] is None, name
            continue
        difference = (rows[name] - expected).abs()
        largest = expected.abs().max().clamp_min(1e-12)
        error = difference.max() / largest
        assert error < allowed, (name, float(error))


def freeze(block: DenseBlock) -> None:
    block["tdnnd1"].linear1.weight.requires_grad_(False)
    block["tdnnd2"].nonlinear1.requires_grad_(False)


def accumulate_steps(block: DenseBlock) -> None:
    """Change the momentum to the one of accumulated steps."""
    slow_batchnorm(block, 4)


WIDE = {"kernel_size": 5, "dilation": 3}
NARROW = {"kernel_size": 1, "dilation": 1}
CASES = [  # frames, arguments of make_block, change of the block, error allowed
    (2, {}, None, 1e-9),
    (3, {}, None, 1e-9),
    (100, {}, None, 1e-9),
    (149, {}, None, 1e-9),
    (230, {}, None, 1e-9),
    (2, WIDE, None, 1e-9),
    (40, WIDE, None, 1e-9),
    (40, NARROW, None, 1e-9),
    (50, {}, accumulate_steps, 1e-9),
    (50, {}, freeze, 1e-9),
    (50, {"dtype": torch.float32}, freeze, 1e-3),
]


@pytest.mark.parametrize(("frames", "args", "change", "allowed"), CASES)
def test_training_is_the_plain_code(frames, args, change, allowed):
    block = make_block(**args)
    if change is not None:
        change(block)
    dtype = args.get("dtype", torch.float64)
    x_BCT = make_input(3, frames, dtype)
    plain_block = copy.deepcopy(block)
    rows = everything(run_rows, block, x_BCT)
    plain = everything(run_plain, plain_block, x_BCT)
    require_close(rows, plain, allowed)
    has_no_gradient = rows["gradient of tdnnd1.linear1.weight"] is None
    assert has_no_gradient == (change is freeze)


def test_statistics_are_measured_again_without_gradient():
    """As when the checkpoints of a run are averaged."""
    block = make_block()
    plain_block = copy.deepcopy(block)
    x_BCT = make_input(3, frames=50)
    with torch.no_grad():
        rows_BCT = run_rows(block, x_BCT)
        plain_BCT = run_plain(plain_block, x_BCT)
    torch.testing.assert_close(rows_BCT, plain_BCT)
    plain_buffers = dict(plain_block.named_buffers())
    for name, buffer in block.named_buffers():
        torch.testing.assert_close(buffer, plain_buffers[name], msg=name)


def relative_error(value: Tensor, exact: Tensor) -> float:
    error = (value - exact).norm()
    return float(error / exact.norm())


@pytest.mark.parametrize("frames", [1, 2, 100, 149, 230])
def test_inference_is_the_plain_code(frames):
    block = make_block().eval()
    x_BCT = make_input(3, frames)
    before = {}
    for name, buffer in block.named_buffers():
        before[name] = buffer.clone()
    with torch.inference_mode():
        rows_BCT = run_rows(block, x_BCT)
        plain_BCT = run_plain(block, x_BCT)
        torch.testing.assert_close(rows_BCT, plain_BCT)
    for name, buffer in block.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_inference_in_16_bits_is_no_rougher_than_the_plain_code():
    block = make_block(dtype=torch.float32).eval()
    exact_block = copy.deepcopy(block).double()
    x_BCT = make_input(3, 149, torch.float32).bfloat16()
    with torch.inference_mode():
        exact = run_plain(exact_block, x_BCT.double())
        with torch.autocast("cpu", torch.bfloat16):
            by_rows = run_rows(block, x_BCT)
            plain = run_plain(block, x_BCT)
    assert by_rows.dtype == torch.bfloat16
    error_of_rows = relative_error(by_rows, exact)
    error_of_plain = relative_error(plain, exact)
    assert error_of_rows < 1.1 * error_of_plain


def test_bfloat16_autocast_in_training_is_no_rougher_than_the_plain_code():
    """In the median of nine inputs: in any one, a unit may round to the other side of its ReLU."""
    # Name of a value -> (error of the rows, error of the plain code) of each input.
    errors: dict[str, list[list[float]]] = {}
    for seed in range(9):
        block = make_block(dtype=torch.float32)
        plain_block = copy.deepcopy(block)
        exact_block = copy.deepcopy(block).double()
        torch.manual_seed(seed)
        x_BCT = make_input(4, 150, torch.float32).bfloat16()
        exact_x_BCT = x_BCT.double()
        exact = everything(run_plain, exact_block, exact_x_BCT, steps=1)
        with torch.autocast("cpu", torch.bfloat16):
            rows = everything(run_rows, block, x_BCT, steps=1)
            plain = everything(run_plain, plain_block, x_BCT, steps=1)
        assert rows["output"].dtype == torch.bfloat16
        assert plain["output"].dtype == torch.bfloat16

        # Relative to the size of the exact value, unless that is nearly zero.
        for name, value in exact.items():
            size = value.double().norm().clamp_min(1e-6)
            pair = []
            for result in (rows, plain):
                difference = result[name] - value
                error = difference.double().norm() / size
                pair.append(float(error))
            errors.setdefault(name, []).append(pair)

    for name, pairs in errors.items():
        median_2 = torch.tensor(pairs).median(0).values
        ours, theirs = median_2.tolist()
        allowed = 1.2 * theirs + 0.01
        assert ours < allowed, (name, ours, theirs)


@pytest.mark.parametrize("value", [math.nan, -math.nan], ids=["nan", "-nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_reaches_the_gradients(value, dtype):
    """So that the step is skipped. In 16 bits a ReLU's gradient goes by its output's sign."""
    block = make_block(dtype=torch.float32).train()
    with torch.no_grad():
        block["tdnnd1"].linear1.weight[0] = value
    x_BCT = torch.randn(2, 6, 120)
    is_narrow = dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
        y_BCT = run_rows(block, x_BCT)
    loss = y_BCT.float().square().mean()
    loss.backward()
    assert y_BCT.isnan().any()
    # The NaN also reaches the gradients of the layer before its own.
    layer_before = block["tdnnd0"]
    gradients = [p.grad.flatten() for p in layer_before.parameters()]
    assert torch.cat(gradients).isnan().any()


def test_no_layer_copies_what_it_reads():
    """All that the layers keep of their common input is one store of 22 channels."""
    block = make_block(dtype=torch.float32)
    x_BCT = torch.randn(5, 6, 200)
    bytes_of_channel = 4 * 5 * 200
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y_BCT = run_rows(block, x_BCT)
    output_storage = y_BCT.untyped_storage()
    assert output_storage.nbytes() == 22 * bytes_of_channel
    assert output_storage.data_ptr() in storages

    # Each layer also keeps its rectified input, which is as large as the input.
    num_channels = []
    for storage in storages.values():
        num_channels.append(storage.nbytes() // bytes_of_channel)
    for channels in (6, 10, 14, 18, 22):
        assert num_channels.count(channels) == 1


def set_momentum(block: DenseBlock) -> None:
    block["tdnnd0"].nonlinear1[0].momentum = 0.2


def average_all_steps(block: DenseBlock) -> None:
    for module in block.modules():
        module.momentum = None


def norm_each_utterance(block: DenseBlock) -> None:
    block["tdnnd3"].nonlinear2.batchnorm = nn.InstanceNorm1d(8)


@pytest.mark.parametrize(
    "change",
    [
        nn.SyncBatchNorm.convert_sync_batchnorm,
        set_momentum,
        average_all_steps,
        norm_each_utterance,
        lambda block: block["tdnnd1"].eval(),
        lambda block: block.eval(),  # with gradients
        lambda block: block.bfloat16(),
        lambda block: block.to("meta"),
    ],
)
def test_everything_unusual_takes_the_plain_code(change):
    x_BCT = make_input(2, frames=30)
    block = make_block()
    assert not takes_plain_code(block, x_BCT)
    change(block)
    device = next(block.parameters()).device
    assert takes_plain_code(block, x_BCT.to(device))


def test_rounding_shapes_up_in_16_bits_changes_no_bit(monkeypatch):
    """Of the products over the 2 x 69 frames that the TDNN layer leaves."""
    torch.manual_seed(0)
    model = CAMPPlus(**TINY).eval()
    feats_BTF = torch.randn(2, 137, model.feat_dim)
    outputs: list[Tensor] = []
    # With a multiple of 1, nothing is rounded up.
    for columns in (1, 64):
        monkeypatch.setattr(dense, "COLUMN_MULTIPLE", columns)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            outputs.append(model(feats_BTF))
    assert torch.equal(*outputs)


def conv_by_torch(x_KBT, weight_GKJ, dilation):
    _, _, num_taps = weight_GKJ.shape
    x_BKT = x_KBT.transpose(0, 1)
    y_BGT = F.conv1d(
        x_BKT,
        weight_GKJ,
        padding=num_taps // 2 * dilation,
        dilation=dilation,
    )
    return y_BGT.transpose(0, 1)


def test_in_16_bits_each_sum_is_rounded_once():
    torch.manual_seed(0)
    x_KBT = torch.randn(64, 2, 149, dtype=torch.bfloat16)
    weight_GKJ = torch.randn(8, 64, 3) / 14
    weight_GKJ = weight_GKJ.bfloat16()
    output = dense.convolve(x_KBT, weight_GKJ, dilation=2)
    exact = conv_by_torch(x_KBT.double(), weight_GKJ.double(), dilation=2)
    difference = (output.double() - exact).abs()
    # One rounding to bfloat16 is an error of at most 2**-8.
    size = exact.abs().clamp_min(2**-6)
    error = difference / size
    assert error.max() <= 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moments_are_fp32_and_a_large_mean_costs_no_digits(dtype):
    """The mean of squares minus the square of the mean would be off by more than the variance."""
    large_mean = 5000 if dtype == torch.float32 else 0
    x_KBT = torch.randn(3, 8, 1000) + large_mean
    x_KBT = x_KBT.to(dtype)
    mean_K, var_K = dense.moments_of(x_KBT)
    assert mean_K.dtype == torch.float32
    assert var_K.dtype == torch.float32
    exact_KBT = x_KBT.double()
    exact_mean_K = exact_KBT.mean((1, 2))
    exact_var_K = exact_KBT.var((1, 2), correction=0)
    error_K = var_K / exact_var_K - 1
    assert error_K.abs().max() < 1e-4
    torch.testing.assert_close(mean_K.double(), exact_mean_K, rtol=1e-5, atol=1e-5)
