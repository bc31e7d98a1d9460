"""Training settings of the recipes against the published ones.

Sources: egs/<recipe>/sv-*/conf/*.yaml of github.com/modelscope/3D-Speaker at 09e7806, and of
github.com/wenet-e2e/wespeaker at dfa7419 examples/{voxceleb,cnceleb}/v2/conf/*.yaml, whose rates
are per batch of 64 and whose batches are those of two GPUs.
"""

import pytest
from test_configs import ROOT, layers_of

from speakerlab.config.schema import load_config

LARGE_MARGIN = ROOT / "conf/finetune/large_margin.yaml"
RECIPES = ("3dspeaker", "voxceleb", "cnceleb")

# epochs, rate, of a batch of, final rate, warm-up, global batch, crop, final margin, its ramp,
# share with a room, and what BatchNorm sees: a GPU's part of the batch
ERES2NET = (70, 0.2, 256, 5e-5, 5, 256, 3.0, 0.3, (20, 50), 0.53, 64)
ERES2NETV2 = (70, 0.2, 168, 5e-5, 5, 160, 3.0, 0.3, (20, 50), 0.53, 40)  # published: 168, 42
WESPEAKER = (150, 0.1, 64, 5e-5, 6, 256, 2.0, 0.2, (20, 40), 0.3, 128)
CAMPPLUS = {
    "3dspeaker": (60, 0.1, 256, 1e-4, 5, 256, 3.0, 0.2, (15, 25), 0.53, 64),
    "voxceleb": (60, 0.1, 256, 1e-4, 5, 256, 3.0, 0.2, (15, 25), 0.13, 64),
    "cnceleb": (70, 0.2, 256, 5e-5, 5, 256, 3.0, 0.3, (20, 50), 0.53, 64),
}
ERES2NET_LM = (7, 1e-4, 128, 2e-5, 1, 128, 6.0, 0.5, (0, 0), 0.53, 32)
ERES2NETV2_LM = (7, 1e-4, 108, 2e-5, 1, 112, 6.0, 0.5, (0, 0), 0.53, 28)  # published: 108, 27
WESPEAKER_LM = (5, 1e-4, 64, 2.5e-5, 1, 128, 6.0, 0.5, (0, 0), 0.3, 64)


def with_room(row, room_prob):
    """A row for another probability of a room."""
    return (*row[:9], room_prob, row[10])


PUBLISHED = [
    *(("campplus", recipe, CAMPPLUS[recipe], ERES2NET_LM) for recipe in ("3dspeaker", "cnceleb")),
    ("campplus", "voxceleb", CAMPPLUS["voxceleb"], with_room(ERES2NET_LM, 0.13)),
    *(("eres2net", recipe, ERES2NET, ERES2NET_LM) for recipe in RECIPES),
    *(("eres2net_large", recipe, ERES2NET, ERES2NET_LM) for recipe in RECIPES),
    *(("eres2netv2", recipe, ERES2NETV2, ERES2NETV2_LM) for recipe in RECIPES),
    *(("ecapa_tdnn", r, ERES2NET, with_room(WESPEAKER_LM, 0.53)) for r in RECIPES),
    *(("ecapa_tdnn_1024", r, ERES2NET, with_room(WESPEAKER_LM, 0.53)) for r in RECIPES),
    *(("ecapa_tdnn_wespeaker", r, WESPEAKER, WESPEAKER_LM) for r in ("voxceleb", "cnceleb")),
    *(("resnet34", r, WESPEAKER, WESPEAKER_LM) for r in ("voxceleb", "cnceleb")),
    ("resnet34", "3dspeaker", ERES2NET, with_room(WESPEAKER_LM, 0.53)),
]


def row_of(config):
    training, margin = config.training, config.training.margin
    assert config.augment.room_prob == config.augment.noise_prob
    return (
        *(training.num_epochs, training.lr, training.lr_base_batch, training.final_lr),
        *(training.warmup_epochs, training.global_batch, config.data.crop_seconds),
        *(margin.final, (margin.start_epoch, margin.end_epoch), config.augment.room_prob),
        training.bn_batch,
    )


@pytest.mark.parametrize(("model", "recipe", "train", "fine_tuned"), PUBLISHED)
def test_a_training_is_the_published_one(model, recipe, train, fine_tuned):
    paths = ROOT / f"conf/{model}.yaml", ROOT / f"egs/{recipe}/conf.yaml"
    first = load_config(layers_of(*paths, None))
    assert row_of(first) == train
    assert (first.training.margin.initial, first.augment.speeds) == (0.0, (1.0, 0.9, 1.1))
    second = load_config(layers_of(*paths, LARGE_MARGIN))
    assert row_of(second) == fine_tuned
    assert (second.training.margin.initial, second.augment.speeds) == (0.5, (1.0,))
    assert second.training.init_head == "keep"
    for config in (first, second):
        assert config.optimizer.args == {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
        assert config.augment.snr_db == (0.0, 15.0)
        assert config.head.args == {"scale": 32.0, "easy_margin": False}
        assert config.training.average_checkpoints == (
            10 if config is first and train is WESPEAKER else 1
        )


def test_every_size_is_the_published_one():
    sizes = {
        "campplus": 512,
        "eres2net": 192,
        "eres2netv2": 192,
        "ecapa_tdnn_1024": 192,
        "resnet34": 256,
    }
    for model, embed_dim in sizes.items():
        config = load_config([ROOT / f"conf/{model}.yaml"])
        assert config.model.args["embed_dim"] == embed_dim
    paths = ROOT / "conf/resnet34.yaml", ROOT / "egs/3dspeaker/conf.yaml"
    assert load_config(layers_of(*paths, None)).model.args["embed_dim"] == 192
