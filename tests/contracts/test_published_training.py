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

# epochs, a crop per so many seconds, rate, of a batch of, final rate, decay, warm-up, global batch,
# crop, final margin, its ramp, share with a room, and what BatchNorm sees: the batch of a GPU
COS = "cosine"
EXP = "exponential"
ONE = "utterance"
ERES2NET = (70, 4.0, 0.2, 256, 5e-5, COS, 5, 256, 3.0, 0.3, (20, 50), 0.53, 64)
ERES2NETV2 = (
    70,
    4.0,
    0.2,
    168,
    5e-5,
    COS,
    5,
    160,
    3.0,
    0.3,
    (20, 50),
    0.53,
    40,
)  # 168, 42
WESPEAKER = (
    150,
    ONE,
    0.1,
    64,
    5e-5,
    EXP,
    6,
    256,
    2.0,
    0.2,
    (19, 39),
    0.3,
    128,
)  # from 1: 20, 40
REDIMNET = (120, ONE, 0.1, 64, 5e-5, EXP, 6, 512, 2.0, 0.2, (19, 39), 0.3, 256)
REDIMNET2 = (120, ONE, 0.1, 64, 6e-5, EXP, 6, 1024, 2.0, 0.2, (19, 39), 0.3, 512)
GEMINI = (165, ONE, 1.25e-4, 64, 1e-6, EXP, 6, 256, 2.0, 0.2, (0, 0), 0.3, 128)
CAMPPLUS = {
    "3dspeaker": (60, 3.0, 0.1, 256, 1e-4, COS, 5, 256, 3.0, 0.2, (15, 25), 0.53, 64),
    "voxceleb": (60, 3.0, 0.1, 256, 1e-4, COS, 5, 256, 3.0, 0.2, (15, 25), 0.13, 64),
    "cnceleb": (70, 4.0, 0.2, 256, 5e-5, COS, 5, 256, 3.0, 0.3, (20, 50), 0.53, 64),
}
ERES2NET_LM = (7, 4.0, 1e-4, 128, 2e-5, COS, 1, 128, 6.0, 0.5, (0, 0), 0.53, 32)
ERES2NETV2_LM = (
    7,
    4.0,
    1e-4,
    108,
    2e-5,
    COS,
    1,
    112,
    6.0,
    0.5,
    (0, 0),
    0.53,
    28,
)  # 108, 27
WESPEAKER_LM = (5, ONE, 1e-4, 64, 2.5e-5, EXP, 1, 128, 6.0, 0.5, (0, 0), 0.3, 64)
FRONTENDS = {
    COS: ("povey", 1.0, 0.0),
    EXP: ("hamming", 32768.0, 0.0),
}  # WeSpeaker dithers by 1


TFMEL = ("hamming", 1.0, 0.0)  # which scales the wave itself


def changed(row, *, room=None, per=None):
    """A row for another probability of a room, or other crops of an utterance."""
    return (row[0], per or row[1], *row[2:11], room or row[11], row[12])


def of_campplus(recipe):
    """CAM++ with the fine-tuning of ERes2Net: its crops and rooms are those of its training."""
    row = CAMPPLUS[recipe]
    return ("campplus", recipe, row, changed(ERES2NET_LM, per=row[1], room=row[11]))


PUBLISHED = [
    *map(of_campplus, RECIPES),
    *(("eres2net", recipe, ERES2NET, ERES2NET_LM) for recipe in RECIPES),
    *(("eres2net_large", recipe, ERES2NET, ERES2NET_LM) for recipe in RECIPES),
    *(("eres2netv2", recipe, ERES2NETV2, ERES2NETV2_LM) for recipe in RECIPES),
    *(("ecapa_tdnn", r, ERES2NET, changed(WESPEAKER_LM, room=0.53)) for r in RECIPES),
    *(
        ("ecapa_tdnn_1024", r, ERES2NET, changed(WESPEAKER_LM, room=0.53))
        for r in RECIPES
    ),
    *(
        ("ecapa_tdnn_wespeaker", r, WESPEAKER, WESPEAKER_LM)
        for r in ("voxceleb", "cnceleb")
    ),
    *(("resnet34", r, WESPEAKER, WESPEAKER_LM) for r in ("voxceleb", "cnceleb")),
    ("resnet34", "3dspeaker", ERES2NET, changed(WESPEAKER_LM, room=0.53)),
]


def row_of(config):
    training = config.training
    margin = config.training.margin
    assert config.augment.room_prob == config.augment.noise_prob
    return (
        *(
            training.num_epochs,
            training.one_crop_per,
            training.lr,
            training.lr_base_batch,
        ),
        *(
            training.final_lr,
            config.schedule.name,
            training.warmup_epochs,
            training.global_batch,
        ),
        config.data.crop_seconds,
        *(
            margin.final,
            (margin.start_epoch, margin.end_epoch),
            config.augment.room_prob,
        ),
        training.bn_batch,
    )


@pytest.mark.parametrize(("model", "recipe", "train", "fine_tuned"), PUBLISHED)
def test_a_training_is_the_published_one(model, recipe, train, fine_tuned):
    paths = ROOT / f"conf/{model}.yaml", ROOT / f"egs/{recipe}/conf.yaml"
    first = load_config(layers_of(*paths, None))
    assert row_of(first) == train
    assert (first.training.margin.initial, first.augment.speeds) == (
        0.0,
        (1.0, 0.9, 1.1),
    )
    second = load_config(layers_of(*paths, LARGE_MARGIN))
    assert row_of(second) == fine_tuned
    assert (second.training.margin.initial, second.augment.speeds) == (0.5, (1.0,))
    assert second.training.init_head == "keep"
    for config in (first, second):
        assert config.optimizer.args == {
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 1e-4,
        }
        front_end = tuple(config.frontend[key] for key in ("window", "scale", "dither"))
        assert front_end == FRONTENDS[first.schedule.name]
        assert config.augment.snr_db == (0.0, 15.0)
        assert config.head.args == {"scale": 32.0, "easy_margin": False}
        assert config.training.average_checkpoints == (
            10 if config is first and train is WESPEAKER else 1
        )


@pytest.mark.parametrize(
    ("train", "models"),
    [
        (ERES2NET, "res2net xvector"),
        (ERES2NETV2, "eres2netv2_w24s4ep4"),
        (WESPEAKER, "resnet50 resnet101 resnet152 resnet221 resnet293 simam_resnet34"),
        (REDIMNET, " ".join(f"redimnet_b{size}" for size in range(7))),
        (REDIMNET2, " ".join(f"redimnet2_b{size}" for size in range(7))),
        (GEMINI, "gemini_dfresnet114"),
    ],
)
def test_a_training_without_overlays_is_the_published_one(train, models):
    for model in models.split():
        config = load_config([ROOT / f"conf/{model}.yaml"])
        assert row_of(config) == train, model
        front_end = tuple(config.frontend[key] for key in ("window", "scale", "dither"))
        is_tfmel = config.frontend["kind"] == "tfmel"
        assert front_end == (TFMEL if is_tfmel else FRONTENDS[config.schedule.name])
        if config.schedule.name == EXP:
            speech = (config.augment.babble_voices, config.augment.babble_snr_db)
            assert speech == ((1, 1), (10.0, 30.0)), model


def test_every_size_is_the_published_one():
    sizes = {
        "campplus": 512,
        "eres2net": 192,
        "eres2net_large": 192,
        "eres2netv2": 192,
        "ecapa_tdnn_1024": 192,
        "resnet34": 256,
    }
    for model, embed_dim in sizes.items():
        config = load_config([ROOT / f"conf/{model}.yaml"])
        assert config.model.args["embed_dim"] == embed_dim
    paths = ROOT / "conf/resnet34.yaml", ROOT / "egs/3dspeaker/conf.yaml"
    args = load_config(layers_of(*paths, None)).model.args
    assert (args["embed_dim"], args["two_emb_layer"], args["pool_eps"]) == (
        192,
        True,
        1e-8,
    )
