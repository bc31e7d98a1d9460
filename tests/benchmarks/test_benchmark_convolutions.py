"""The layers of every registered model: none is missed, and each is timed as what it is.

Letters: B batch, T frames, F mel bins.
"""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from speakerlab.models import MODELS
from speakerlab.models.folding import fold_batchnorm

sys.path.append(str(Path(__file__).parents[1] / "models"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from convolutions import find_layers
from members import SMALL

BATCH, FRAMES = 2, 60
GROUPED = {
    "gemini_dfresnet",
    *("redimnet", "redimnet2"),
}  # grouped convolutions, whose backward pass torch counts as if not
CPU = torch.device("cpu")


def products(model, feats_BTF, *, train):
    """The operations of all products that torch counts."""
    with FlopCounterMode(display=False) as counter:
        embedded_BD = model(feats_BTF)
        if train:
            embedded_BD.sum().backward()
    return counter.get_total_flops()


def found(model, *, train):
    """The operations of the layers that are found."""
    layers = find_layers(model, (BATCH, FRAMES, model.feat_dim))
    return sum(count * layer.flop(train=train) for layer, count in layers.items())


def of_no_segment(model):
    """The operations of CAM++'s masks for the empty segment, which training on a CPU leaves out."""
    layers = [m for m in model.modules() if type(m).__name__ == "ContextAwareMasking"]
    weights = [mix.weight.numel() for m in layers for mix in (m.linear1, m.linear2)]
    return 2 * BATCH * sum(weights)


def of_contexts(model):
    """The operations that turn sums of CAM++'s one segment into contexts, forward and backward."""
    layers = [m for m in model.modules() if type(m).__name__ == "ContextAwareMasking"]
    return 2 * 2 * BATCH * sum(m.linear1.in_channels for m in layers)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_layers_are_all_that_is_computed(name):
    model = MODELS[name](**SMALL[name]).train()
    feats_BTF = torch.randn(BATCH, FRAMES, model.feat_dim)
    train = name not in GROUPED
    less = (3 if train else 1) * of_no_segment(model)
    less -= of_contexts(model)
    assert found(model, train=train) - less == products(model, feats_BTF, train=train)


def test_folding_takes_no_layer_away():
    model = MODELS["eres2net"](**SMALL["eres2net"])
    assert found(fold_batchnorm(copy.deepcopy(model)), train=False) == found(model, train=False) > 0


def test_a_quick_formulation_hides_no_layer_and_the_model_stays_as_it_was():
    model = MODELS["campplus"](**SMALL["campplus"]).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = find_layers(model, (BATCH, FRAMES, 80))
    modules = [m for m in model.modules() if isinstance(m, torch.nn.Conv1d | torch.nn.Conv2d)]
    assert sum(layers.values()) == len(modules) > 40
    assert len(layers) < len(modules) / 2  # of one shape: timed once
    assert model.training and all(m.momentum for m in model.modules() if hasattr(m, "momentum"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["campplus", "xvector", "gemini_dfresnet"])
def test_a_layer_does_the_same_in_every_layout(name):
    """Also its shapes are right: a wrong one would be refused, or give another output."""
    model = MODELS[name](**SMALL[name]).train()
    for layer in find_layers(model, (BATCH, FRAMES, model.feat_dim)):
        outputs = []
        for one in layer.layouts():
            torch.manual_seed(0)
            output = one.prepare(CPU, torch.float64, train=False)()
            outputs.append(output.flatten(2) if layer.function is F.conv1d else output)
            grads = one.prepare(CPU, torch.float64, train=True)()
            assert len(grads) == 1 + layer.learns_below + layer.has_bias
        assert len(outputs) == 1 + (layer.function is not F.linear)
        assert all(torch.allclose(output, outputs[0]) for output in outputs)
        each = torch.Size(layer.weight_shape[1:]).numel()
        assert layer.macs == outputs[0].numel() * each
