"""The modes that a step begins with."""

import torch
from torch import nn

from speakerlab.models.campplus import CAMPPlus
from speakerlab.training.gradients import begin_training


def test_all_modules_train_as_after_train_whatever_was_done_to_some():
    model = nn.Sequential(
        CAMPPlus(embed_dim=8, head_channels=4, init_channels=16, growth_rate=4, blocks=(1, 1, 1)),
        nn.Dropout(0.5),
    )
    modules = list(model.modules())
    model[0].eval()  # as validation leaves an embedder
    assert model.training and not all(module.training for module in modules)
    begin_training(modules)
    assert all(module.training for module in modules) and len(modules) > 50
    dropped = model[1](torch.ones(1000)).eq(0).sum()
    assert 400 < dropped < 600
